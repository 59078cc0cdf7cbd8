"""`lookonce bench engine`: what a decode step costs beside the bare model, and beside transformers.

own CPU    scheduling, building inputs, sampling, messages and detokenizing: everything of a
           step but the calls of the text model and its head
ratio      our decode tokens/s over those of a plain loop with transformers' dense KV cache,
           same model, batch and context, the two in turn, median of pairs
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DynamicCache,
)

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

_P = ParamSpec("_P")
_R = TypeVar("_R")

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 64
SEGMENT_STEPS = 8
SEGMENTS = 24


class _Stopwatch:
    """Adds up the CPU seconds spent inside calls."""

    def __init__(self) -> None:
        self.cpu = 0.0

    def around(self, inner: Callable[_P, _R]) -> Callable[_P, _R]:
        """`inner`, counted; counted calls must not nest."""

        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            cpu = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.cpu += time.thread_time() - cpu

        return timed


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
        self.vocab_size = loaded.info.vocab_size
        self.model = _Stopwatch()
        head = loaded.family.lm_head
        head.forward = self.model.around(head.forward)  # type: ignore[method-assign]
        self.core, runner = _engine_core(loaded, settings)
        runner.decoder = self.model.around(runner.decoder)
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


def _engine_core(loaded: LoadedModel, settings: EngineSettings) -> tuple[EngineCore, Runner]:
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
    return core, runner


class _Theirs:
    """Transformers' text model in a loop over its dense cache: the least such a loop can do.

    It skips what `generate` and the multimodal wrapper do around the text model.
    """

    def __init__(self, folder: str) -> None:
        config = AutoConfig.from_pretrained(folder)
        composite = config.get_text_config(decoder=True) is not config
        auto = AutoModelForMultimodalLM if composite else AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._model = model.eval()
        text = config.get_text_config(decoder=True)
        rope = getattr(text, "rope_parameters", None) or {}
        self._axes = 3 if "mrope_section" in rope else 1
        self._vocab_size = text.vocab_size
        self._cache = DynamicCache(config=text)
        self._token = torch.zeros(0)
        self._length = 0

    @torch.inference_mode()
    def prefill(self, batch: int) -> None:
        self._cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        ids = torch.randint(20, self._vocab_size, (batch, PROMPT_TOKENS))
        self._length = 0
        self._token = self._forward(ids)

    @torch.inference_mode()
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._token = self._forward(self._token)
            self._token.tolist()  # a server reads every token

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        end = self._length + ids.shape[1]
        positions = torch.arange(self._length, end).expand(ids.shape[0], -1)
        self._length = end
        if self._axes > 1:
            positions = positions.expand(self._axes, -1, -1)
        output = self._model.get_decoder()(
            inputs_embeds=self._model.get_input_embeddings()(ids),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        logits = self._model.get_output_embeddings()(output.last_hidden_state[:, -1])
        token: torch.Tensor = logits.argmax(-1, keepdim=True)
        return token


def measure(folder: str, batches: Sequence[int], segments: int) -> Report:
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
            f"CPU time of the one thread; {SEGMENT_STEPS} decode steps of ours and of theirs in "
            f"turn after {PROMPT_TOKENS} prompt tokens, medians of {segments} turns, fp32",
        ],
    )
    ours, theirs = _Ours(folder), _Theirs(folder)
    for batch in batches:
        _segments(ours, theirs, batch, 2)
        rows = _segments(ours, theirs, batch, segments)
        columns = list(zip(*rows, strict=True))
        model, own, travel, our_rate, their_rate = (median(column) for column in columns)
        ratio = median([row[3] / row[4] for row in rows])
        report.add(batch, model, own, travel, our_rate, their_rate, ratio)
    return report


_Row = tuple[float, float, float, float, float]


def _segments(ours: _Ours, theirs: _Theirs, batch: int, segments: int) -> list[_Row]:
    """Both loops at the same context, a few steps each in turn, so that noise hits both alike."""
    ours.prefill(batch, segments * SEGMENT_STEPS)
    theirs.prefill(batch)
    return [_segment(ours, theirs, batch) for _ in range(segments)]


def _segment(ours: _Ours, theirs: _Theirs, batch: int) -> _Row:
    """Model ms, own ms, of it messages and text (per step), our and their tokens per second."""
    model = ours.model.cpu
    cpu = time.thread_time()
    deltas = ours.decode(SEGMENT_STEPS)
    cpu = time.thread_time() - cpu
    travel = ours.travel(deltas)
    model = ours.model.cpu - model
    their_cpu = time.thread_time()
    theirs.decode(SEGMENT_STEPS)
    their_cpu = time.thread_time() - their_cpu
    tokens = batch * SEGMENT_STEPS
    step_ms = 1e3 / SEGMENT_STEPS
    return (
        model * step_ms,
        (cpu - model + travel) * step_ms,
        travel * step_ms,
        tokens / (cpu + travel),
        tokens / their_cpu,
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench engine", description=__doc__)
    parser.add_argument("--model", default=str(NANO_FOLDER), help="folder; default: nano")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--turns", type=int, default=SEGMENTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    report = measure(options.model, options.batches, options.turns)
    report.show()
    if options.json is not None:
        report.write_json(options.json)
    return 0
