"""`lookonce bench lora`: what LoRA adapters cost a step.

Eight sequences decode in steps of an engine core, without server and processes:

none       no adapters are served
idle       eight are loaded and no sequence has one
one        all sequences have the same
each       each sequence has another one
half       four sequences have one each, four have none

and a prompt is computed, with an adapter and without. The engines take turns; each ratio is of two
neighbouring turns. Adapters are random and change every linear layer of the decoder.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.bench_engine import BenchEngine, load_bench_model
from benchmarks.report import Report, median, publish
from lookonce.config import SchedulerConfig
from lookonce.model.loader import LoadedModel
from lookonce.model.lora import LoRAAdapter, LoRALayer, linear_sizes
from lookonce.model.lora_files import adaptable_layers
from lookonce.types.lora import LoRAIdentity
from lookonce.types.media import Array
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.model_folders.make import make_folder

BATCH = 8
PROMPT_TOKENS = 64
LONG_PROMPT = 512
STEPS = 16
FIRST_TOKEN = 20
"""Ids below may be special tokens."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench lora", description=__doc__)
    parser.add_argument("--model", help="folder; default: random weights, 8 M parameters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or str(make_folder("qwen3", Path(scratch), scale="8m"))
        report = measure(folder, rank=options.rank, turns=options.turns)
    publish([report], options.json)
    return 0


def measure(folder: str, *, rank: int, turns: int) -> Report:
    torch.set_num_threads(1)
    loaded = load_bench_model(folder)
    adapters = [random_adapter(loaded, rank=rank, seed=seed) for seed in range(BATCH)]
    each: list[LoRAIdentity | None] = [adapter.identity for adapter in adapters]
    nobody: list[LoRAIdentity | None] = [None] * BATCH
    kinds = {"none": nobody, "idle": nobody, "one": each[:1] * BATCH, "each": each}
    kinds["half"] = each[: BATCH // 2] + nobody[: BATCH // 2]
    with AdapterEngine(loaded, ()) as plain, AdapterEngine(loaded, adapters) as serving:
        decodes: dict[str, list[float]] = {name: [] for name in kinds}
        prompts: dict[str, list[float]] = {"none": [], "idle": [], "one": []}
        for turn in range(turns + 1):
            for name, identities in kinds.items():
                engine = plain if name == "none" else serving
                seconds = engine.decode(identities)
                if turn:  # the first one warms up
                    decodes[name].append(seconds)
            for name in prompts:
                engine = plain if name == "none" else serving
                seconds = engine.prefill(each[0] if name == "one" else None)
                if turn:
                    prompts[name].append(seconds)
    report = Report("lora", ("adapters", "work", "CPU ms", "of none"))
    for work, measured in ((f"a step of {BATCH}", decodes), (f"{LONG_PROMPT} tokens", prompts)):
        for name, times in measured.items():
            ratio = median([a / b for a, b in zip(times, measured["none"], strict=True)])
            report.add(name, work, median(times) * 1e3, ratio)
    report.notes.append(
        f"rank {rank}, {BATCH} adapters; {STEPS} decode steps after {PROMPT_TOKENS} prompt tokens; "
        f"medians of {turns} turns, {loaded.info.dtype}, one torch thread"
    )
    return report


def random_adapter(loaded: LoadedModel, *, rank: int, seed: int) -> LoRAAdapter:
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, module in adaptable_layers(loaded.family).decoder.items():
        sizes = linear_sizes(module)
        assert sizes is not None
        a, b = (torch.randn(rank, size, generator=generator) / size for size in sizes)
        layers[name] = LoRALayer(a.to(loaded.dtype), b.to(loaded.dtype), 1.0)
    return LoRAAdapter(LoRAIdentity(bytes([seed]) * 32), rank, layers)


class AdapterEngine(BenchEngine):
    """An engine core with adapters; without any it serves none."""

    def __init__(self, loaded: LoadedModel, adapters: Sequence[LoRAAdapter]) -> None:
        scheduler = SchedulerConfig(max_num_seqs=BATCH)
        super().__init__(loaded, scheduler=scheduler, adapters=adapters)
        self._vocab_size = loaded.info.vocab_size
        self._count = 0

    def decode(self, identities: Sequence[LoRAIdentity | None]) -> float:
        """CPU seconds of a decode step of sequences with these adapters."""
        names = [self._begin(PROMPT_TOKENS, identity) for identity in identities]
        begun: set[str] = set()
        while len(begun) < len(names):
            begun |= self._step()
        started = time.process_time()
        for _ in range(STEPS):
            self._step()
        seconds = (time.process_time() - started) / STEPS
        for name in names:
            self.core.abort(name)
        while self.core.has_work:
            self._step()
        return seconds

    def prefill(self, identity: LoRAIdentity | None) -> float:
        """CPU seconds until the first token after a long prompt."""
        name = self._begin(LONG_PROMPT, identity)
        started = time.process_time()
        while name not in self._step():
            pass
        seconds = time.process_time() - started
        self.core.abort(name)
        while self.core.has_work:
            self._step()
        return seconds

    def _step(self) -> set[str]:
        """The requests that got a token."""
        output = self.core.step()
        return {delta.request_id for delta in output.deltas if delta.token_ids} if output else set()

    def _begin(self, num_tokens: int, identity: LoRAIdentity | None) -> str:
        self._count += 1
        rng = np.random.default_rng(self._count)
        tokens = rng.integers(FIRST_TOKEN, self._vocab_size, num_tokens, dtype=np.int32)
        sampling = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
        request = GenerateRequest(
            request_id=str(self._count),
            scope=bytes(32),
            prompt=Array("int32", (num_tokens,), tokens.data),
            features=(),
            sampling=sampling,
            arrival=time.monotonic(),
        )
        self.core.add(msgspec.structs.replace(request, adapter=identity), {})
        return request.request_id
