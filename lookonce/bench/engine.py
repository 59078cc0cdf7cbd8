"""`lookonce bench engine`: what a decode step costs beside the bare model, and beside transformers.

own CPU    scheduling, building inputs, sampling, messages and detokenizing: everything of a
           step but the calls of the text model and its head
ratio      our decode tokens/s over those of a plain loop with transformers' dense KV cache,
           same model, batch and context, the two in turn, median of pairs
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from lookonce.bench.report import Report, median
from lookonce.config import NANO_FOLDER, EncoderConfig, KVConfig, ModelConfig, SchedulerConfig
from lookonce.core.blocks import BlockPool
from lookonce.engine.build import assemble
from lookonce.engine.core import EngineCore
from lookonce.engine.settings import EngineSettings
from lookonce.ipc.codec import Decoder, Encoder
from lookonce.ipc.messages import Deltas, EngineMessage
from lookonce.model.attention.select import resolve_block_size, select_backend
from lookonce.model.loader import LoadedModel, load_model
from lookonce.model.runner import Runner
from lookonce.render.detokenize import Detokenizer
from lookonce.render.tokenizer import Tokenizer
from lookonce.types.media import Array
from lookonce.types.request import GenerateRequest, TokenDelta
from lookonce.types.sampling import SamplingParams

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 64
STEPS = 64
PAIRS = 5


class _Stopwatch:
    """Adds up the wall and CPU seconds spent inside modules."""

    def __init__(self) -> None:
        self.cpu = 0.0
        self.wall = 0.0

    def watch(self, module: nn.Module) -> None:
        """Count every call of `module` from now on; its calls must not nest in others watched."""
        inner = module.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.cpu += time.thread_time() - cpu
                self.wall += time.perf_counter() - wall

        module.forward = timed


class _Ours:
    """The engine without its processes: core, runner, and both ends of a delta's journey."""

    def __init__(self, folder: str) -> None:
        settings = EngineSettings(
            model=ModelConfig(folder=folder, served_name="bench"),
            scheduler=SchedulerConfig(),
            kv=KVConfig(cache_bytes=1 << 28, prefix_caching=False),
            encoder=EncoderConfig(),
            address="",
        )
        loaded = load_model(settings.model)
        self.core = _engine_core(loaded, settings)
        self.vocab_size = loaded.info.vocab_size
        self.model = _Stopwatch()
        self.model.watch(loaded.family.decoder)
        self.model.watch(loaded.family.lm_head)
        self._tokenizer = Tokenizer.load(folder)
        self._encoder = Encoder()
        self._messages: Decoder[EngineMessage] = Decoder(EngineMessage)
        self._count = 0

    def prefill(self, batch: int, steps: int) -> None:
        """Bring `batch` sequences to where each further step is one decode of all of them."""
        rng = np.random.default_rng(self._count)
        for _ in range(batch):
            self._count += 1
            prompt = rng.integers(20, self.vocab_size, PROMPT_TOKENS, dtype=np.int32)
            request = GenerateRequest(
                request_id=f"bench-{self._count}",
                scope=bytes(32),
                prompt=Array("int32", (PROMPT_TOKENS,), prompt.data),
                features=(),
                sampling=SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True),
                arrival=time.monotonic(),
            )
            self.core.add(request, {})
        first = 0
        while first < batch:
            first += len(self._step())

    def decode(self, steps: int) -> list[list[TokenDelta]]:
        return [self._step() for _ in range(steps)]

    def _step(self) -> list[TokenDelta]:
        output = self.core.step()
        return [] if output is None else output.deltas

    def travel(self, steps: Sequence[list[TokenDelta]]) -> float:
        """CPU seconds to send every step's deltas to the API process and turn them into text."""
        texts = {delta.request_id: Detokenizer(self._tokenizer) for delta in steps[0]}
        started = time.thread_time()
        for deltas in steps:
            message = self._messages.decode(self._encoder.encode(Deltas(deltas)))
            if isinstance(message, Deltas):
                for delta in message.deltas:
                    texts[delta.request_id].push(delta.token_ids)
        return time.thread_time() - started


def _engine_core(loaded: LoadedModel, settings: EngineSettings) -> EngineCore:
    backend = select_backend(loaded.device, loaded.family.attention_features(loaded.dtype))
    block_size = resolve_block_size(backend, settings.kv.block_size)
    num_blocks = 2048
    runner = Runner(
        loaded,
        num_blocks=num_blocks,
        block_size=block_size,
        backend=backend,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
    )
    core, _ = assemble(loaded.info, runner, settings, BlockPool(num_blocks, block_size))
    return core


class _Theirs:
    """Transformers' text model in a loop over a dense cache: the least such a loop can do."""

    def __init__(self, folder: str) -> None:
        loaded = load_model(ModelConfig(folder=folder, served_name="bench"))
        model = loaded.model
        composite = model.config.get_text_config(decoder=True) is not model.config
        model.set_attn_implementation({"text_config": "sdpa"} if composite else "sdpa")
        self._model = model
        self._axes = loaded.family.position_axes
        self._vocab_size = loaded.info.vocab_size

    @torch.inference_mode()
    def decode(self, batch: int, steps: int) -> float:
        """Wall seconds of `steps` decode steps after the prompt."""
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        ids = torch.randint(20, self._vocab_size, (batch, PROMPT_TOKENS))
        token = self._forward(ids, 0, cache)
        started = time.perf_counter()
        for step in range(steps):
            token = self._forward(token, PROMPT_TOKENS + step, cache)
            token.tolist()  # a server reads every token
        return time.perf_counter() - started

    def _forward(self, ids: torch.Tensor, start: int, cache: DynamicCache) -> torch.Tensor:
        positions = torch.arange(start, start + ids.shape[1]).expand(ids.shape[0], -1)
        if self._axes > 1:
            positions = positions.expand(self._axes, -1, -1)
        output = self._model.get_decoder()(
            inputs_embeds=self._model.get_input_embeddings()(ids),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits = self._model.get_output_embeddings()(output.last_hidden_state[:, -1])
        token: torch.Tensor = logits.argmax(-1, keepdim=True)
        return token


def measure(folder: str, batches: Sequence[int], steps: int, pairs: int) -> Report:
    """One row per batch size."""
    torch.set_num_threads(1)
    report = Report(
        "engine",
        (
            "batch",
            "model ms",
            "own CPU ms",
            "of it messages+text",
            "our tok/s",
            "HF tok/s",
            "ratio",
        ),
        notes=[
            f"milliseconds per decode step; {steps} steps after {PROMPT_TOKENS} prompt tokens, "
            f"median of {pairs} pairs, fp32, one thread",
        ],
    )
    ours, theirs = _Ours(folder), _Theirs(folder)
    for batch in batches:
        runs = [_pair(ours, theirs, batch, steps) for _ in range(pairs + 1)][1:]
        model, own, travel, our_rate, their_rate = (
            median(column) for column in zip(*runs, strict=True)
        )
        ratio = median([run[3] / run[4] for run in runs])
        report.add(batch, model, own, travel, our_rate, their_rate, ratio)
    return report


def _pair(
    ours: _Ours, theirs: _Theirs, batch: int, steps: int
) -> tuple[float, float, float, float, float]:
    ours.prefill(batch, steps)
    model_cpu, model_wall = ours.model.cpu, ours.model.wall
    cpu, wall = time.thread_time(), time.perf_counter()
    deltas = ours.decode(steps)
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    travel = ours.travel(deltas)
    own = cpu - (ours.model.cpu - model_cpu) + travel
    tokens = sum(len(delta.token_ids) for step in deltas for delta in step)
    their_seconds = theirs.decode(batch, steps)
    per_step = 1e3 / steps
    return (
        (ours.model.wall - model_wall) * per_step,
        own * per_step,
        travel * per_step,
        tokens / (wall + travel),
        batch * steps / their_seconds,
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench engine", description=__doc__)
    parser.add_argument("--model", default=str(NANO_FOLDER), help="folder; default: nano")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    report = measure(options.model, options.batches, options.steps, options.pairs)
    report.show()
    if options.json is not None:
        report.write_json(options.json)
    return 0
