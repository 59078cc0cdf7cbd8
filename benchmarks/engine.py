"""`lookonce bench engine`: what a decode step costs beside the bare model, and beside transformers.

model      CPU time in the text model, its embedding and its head
own        CPU time of all threads of both processes in everything else, which is the sum of
  engine   in the engine process: scheduling, building inputs, sampling, sending messages
  client   in the process that asked, as in an API process: receiving messages, handing tokens to
           their readers, detokenizing; only HTTP is left out
ratio      our decode tokens/s over those of a plain loop with transformers' dense KV cache,
           same model, batch and context, the two in turn, median of pairs

Our side is what a server has: an engine process and a client of it in this process, with msgpack
over a unix socket between them. The client's caller turns tokens into text at once, where a
server would also write HTTP.

With `--device` the table is of the clock instead, on that device, beside transformers there:

step ms    of a decode step
span ms    of it, from its first operation on the device to the end of its last (on a CPU: the
           runner); where the host launches them one by one and is late, the device waits within
between    the rest: the share of the time in which the device has no step; it is all that the host
           costs where a step is one graph, and less than that elsewhere
bandwidth  bytes of weights, keys and values that a step reads, over what a copy on the device moves
arithmetic operations of a step, over those of a product of large matrices

Without --model a folder of random weights is written then, of the shape of Llama 3.2 1B.

With `--against FOLDER` another table has the own CPU time beside that of another checkout (an
earlier commit with its compiled kernels), each pair of runs in turn in processes of their own. The
least of all runs stands beside the median: other work of the machine only adds to CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DynamicCache,
)
from transformers.utils.logging import disable_progress_bar

from benchmarks.engine_process import (
    MODEL_SECONDS,
    PROCESS_SECONDS,
    SPAN_SECONDS,
    WALL_SECONDS,
)
from benchmarks.report import Report, median, publish
from lookonce.config import (
    NANO_FOLDER,
    ChannelConfig,
    EncoderConfig,
    KVConfig,
    ModelConfig,
    SchedulerConfig,
)
from lookonce.engine.client.delta_stream import DeltaStream
from lookonce.engine.client.engine_client import EngineClient
from lookonce.engine.process_io import EngineSettings
from lookonce.engine.supervisor.engine_supervisor import EngineSupervisor
from lookonce.model.device import current_device
from lookonce.render.prompt.detokenizer import Detokenizer
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams
from tests.support.model_folders.make import make_folder

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 64
STEPS = 48
TURNS = 9
PAIRS = 5
SCALE = "1b"
GRAPH_BYTES = 2 << 30
PEAK_RUNS = 7
ROOT = Path(__file__).resolve().parents[1]
RUN = "import sys; from benchmarks.engine import main; main(sys.argv[1:])"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench engine", description=__doc__)
    parser.add_argument("--model", help="folder; default: nano")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--device", help="the clock's figures, on cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="bfloat16", help="with --device; default: bfloat16")
    parser.add_argument("--scale", default=SCALE, help=f"of random weights; default: {SCALE}")
    parser.add_argument("--temperature", type=float, default=0.0, help="of our side; default: 0")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of runs, with --against")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.device is not None:
        report = on_device(options)
        publish([report], options.json)
        return 0
    options.model = options.model or str(NANO_FOLDER)
    if options.against is not None:
        if not (options.against / "benchmarks" / "engine.py").is_file():
            parser.error(f"--against {options.against} is no folder of a checkout")
        run = ["--model", options.model, "--turns", str(options.turns)]
        run += ["--temperature", str(options.temperature), "--batches"]
        run += map(str, options.batches)
        report = beside(options.against.resolve(), run, options.pairs)
    else:
        run_of = measure(options.model, options.batches, options.turns, options.temperature)
        report = asyncio.run(run_of)
    publish([report], options.json)
    return 0


def on_device(options: argparse.Namespace) -> Report:
    """The table of `--device`."""
    with ExitStack() as stack:
        folder = options.model
        if folder is None:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            target = Path(scratch) / "model"
            folder = str(make_folder("llama", target, scale=options.scale, dtype=options.dtype))
        model = ModelConfig(
            folder,
            "bench",
            device=options.device,
            dtype=options.dtype,
            cuda_graph_bytes=0 if options.device == "cpu" else GRAPH_BYTES,
        )
        return asyncio.run(measure_device(model, options.batches, options.turns))


async def measure_device(model: ModelConfig, batches: Sequence[int], turns: int) -> Report:
    """One row per batch size."""
    torch.set_num_threads(1)
    current_device(model.device)
    columns = ("batch", "step ms", "span ms", "between", "our tok/s", "HF tok/s", "ratio")
    report = Report("engine, on a device", (*columns, "bandwidth", "arithmetic"))
    theirs = _TransformersLoop(model.folder, model.device, model.dtype)
    peak = _Peaks.of(torch.device(model.device), theirs.dtype)
    report.notes += [
        f"{model.device}, {model.dtype}; {STEPS} decode steps after {PROMPT_TOKENS} prompt tokens, "
        f"medians of {turns} turns; one CPU thread",
        f"a copy moves {peak.bandwidth / 1e9:.1f} GB/s, a product of matrices computes "
        f"{peak.arithmetic / 1e12:.2f} TFLOP/s",
    ]
    async with open_engine(model, max(batches), overlapped=model.device != "cpu") as ours:
        for batch in batches:
            await ours.decode(batch, PROMPT_TOKENS, STEPS)
            theirs.decode(batch, PROMPT_TOKENS, STEPS, time.perf_counter)
            turned = [await ours.decode(batch, PROMPT_TOKENS, STEPS) for _ in range(turns)]
            wall, span = (median([getattr(t, n) for t in turned]) for n in ("wall", "span"))
            their_wall = median(
                [
                    theirs.decode(batch, PROMPT_TOKENS, STEPS, time.perf_counter)
                    for _ in range(turns)
                ]
            )
            moved = theirs.step_bytes(batch, PROMPT_TOKENS + STEPS // 2)
            report.add(
                batch,
                wall * 1e3,
                span * 1e3,
                max(0.0, 1 - span / wall),
                batch / wall,
                batch / their_wall,
                their_wall / wall,
                moved / wall / peak.bandwidth,
                2 * theirs.num_weights * batch / wall / peak.arithmetic,
            )
            report.print_last()
    return report


class _Peaks(NamedTuple):
    """What a device reaches at most, measured on it."""

    bandwidth: float
    """Bytes a second, read and written, of a large copy."""
    arithmetic: float
    """Operations a second of a product of large matrices."""

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> _Peaks:
        count, side = (1 << 24, 512) if device.type == "cpu" else (1 << 30, 8192)
        source = torch.ones(count, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        matrix = torch.ones(side, side, dtype=dtype, device=device)
        moved = _least_seconds(lambda: target.copy_(source), device)
        multiplied = _least_seconds(lambda: matrix @ matrix, device)
        return cls(2 * count / moved, 2 * side**3 / multiplied)


def _least_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of several runs, each waited for."""
    module = torch.get_device_module(device)
    best = float("inf")
    for _ in range(PEAK_RUNS):
        module.synchronize()
        started = time.perf_counter()
        work()
        module.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def beside(other: Path, run: Sequence[str], pairs: int) -> Report:
    """Own CPU time of this checkout and of another one, in turn; one row per batch size."""
    columns = ("batch", "own CPU ms", "the other", "ratio", "least ms", "the other's", "of least")
    report = Report("engine, beside another checkout", columns)
    found = [(_own_cpu(ROOT, run), _own_cpu(other, run)) for _ in range(pairs)]
    for batch in found[0][0]:
        ours, theirs = ([own[batch] for own in side] for side in zip(*found, strict=True))
        ratio = median([a / b for a, b in zip(ours, theirs, strict=True)])
        least = min(ours), min(theirs), min(ours) / min(theirs)
        report.add(batch, median(ours), median(theirs), ratio, *least)
    report.notes.append(f"medians of {pairs} pairs of runs, in turn; the least of all runs")
    return report


def _own_cpu(checkout: Path, run: Sequence[str]) -> dict[int, float]:
    """Batch size → own CPU ms of a step, by the benchmark of that checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch) / "figures.json"
        subprocess.run(
            [sys.executable, "-c", RUN, *run, "--json", str(figures)],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            cwd=checkout,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        rows = json.loads(figures.read_text())["rows"]
    return {row["batch"]: row["own CPU ms"] for row in rows}


async def measure(
    folder: str, batches: Sequence[int], turns: int, temperature: float = 0.0
) -> Report:
    """One row per batch size."""
    torch.set_num_threads(1)
    times = ("model ms", "own CPU ms", "engine ms", "client ms")
    columns = ("batch", *times, "our tok/s", "HF tok/s", "ratio")
    report = Report(
        "engine",
        columns,
        notes=[
            f"CPU time of all threads; {STEPS} decode steps of ours and of theirs in turn after "
            f"{PROMPT_TOKENS} prompt tokens, medians of {turns} turns, fp32, one torch thread",
            "own: all but the model, in the engine process and in its client",
            f"our temperature: {temperature}; theirs: 0",
        ],
    )
    theirs = _TransformersLoop(folder)
    async with open_engine(ModelConfig(folder, "bench"), max(batches), temperature) as ours:
        for batch in batches:
            await _turn(ours, theirs, batch)
            rows = [await _turn(ours, theirs, batch) for _ in range(turns)]
            report.add(batch, *(median(column) for column in zip(*rows, strict=True)))
    return report


_Row = tuple[float, float, float, float, float, float, float]


async def _turn(ours: EngineUnderTest, theirs: _TransformersLoop, batch: int) -> _Row:
    """Model, own, engine and client ms, our and their tokens per second, and their ratio."""
    turn = await ours.decode(batch, PROMPT_TOKENS, STEPS)
    their_seconds = theirs.decode(batch, PROMPT_TOKENS, STEPS)
    own = turn.engine + turn.client
    ours_rate, their_rate = batch / (turn.model + own), batch / their_seconds
    ms = (turn.model * 1e3, own * 1e3, turn.engine * 1e3, turn.client * 1e3)
    return (*ms, ours_rate, their_rate, ours_rate / their_rate)


# --- Our side ------------------------------------------------------------------------------------

COMMAND = (sys.executable, "-m", "benchmarks.engine_process")
FIRST_TOKEN = 20
"""Ids below may be special tokens."""


class EngineUnderTest:
    """Decodes batches through client, channel, scheduler and runner of a real engine process."""

    def __init__(self, folder: str, client: EngineClient, temperature: float) -> None:
        self._client = client
        self._temperature = temperature
        self._tokenizer = Tokenizer.load(folder)
        self._count = 0

    async def decode(self, batch: int, prompt_tokens: int, steps: int) -> StepCost:
        """Prefill `batch` prompts, then time `steps` decode steps of all of them.

        No sequence ends before the clocks are read. The engine may be some steps ahead of the
        client, so the time of each process is divided by the steps that this process has done.
        """
        answers = [self._begin(prompt_tokens) for _ in range(batch)]
        await asyncio.gather(*(answer.read(1) for answer in answers))
        before, read = await self._clocks(), sum(answer.num_tokens for answer in answers)
        await asyncio.gather(*(answer.read(steps) for answer in answers))
        after = await self._clocks()
        read = sum(answer.num_tokens for answer in answers) - read
        for answer in answers:
            await answer.leave()
        await self._client.stats()  # answered once all have ended
        used = _Clocks(*(end - start for start, end in zip(before, after, strict=True)))
        made = used.tokens / batch
        return StepCost(
            used.model / made,
            used.engine / made,
            used.client * batch / read,
            used.wall / made,
            used.span / made,
        )

    async def _clocks(self) -> _Clocks:
        """Reads both processes' clocks; the engine answers between two steps."""
        stats = await self._client.stats()
        return _Clocks(
            model=stats[MODEL_SECONDS],
            engine=stats[PROCESS_SECONDS] - stats[MODEL_SECONDS],
            client=time.process_time(),
            wall=stats[WALL_SECONDS],
            span=stats[SPAN_SECONDS],
            tokens=stats["generation_tokens_total"],
        )

    def _begin(self, prompt_tokens: int) -> _Sequence:
        self._count += 1
        rng = np.random.default_rng(self._count)
        model = self._client.model
        ids = rng.integers(FIRST_TOKEN, model.vocab_size, prompt_tokens).tolist()
        prompt = RenderedPrompt(token_ids=ids, scope=bytes(32))
        endless = model.max_model_len - prompt_tokens
        sampling = SamplingParams(
            temperature=self._temperature, max_tokens=endless, ignore_eos=True
        )
        generation = self._client.generate(prompt, sampling, f"bench-{self._count}")
        return _Sequence(generation, Detokenizer(self._tokenizer))


class StepCost(NamedTuple):
    """Seconds of one decode step of the whole batch, on average over a turn."""

    model: float
    """CPU seconds in the text model, its embedding and its head."""
    engine: float
    """CPU seconds in the rest of the engine process."""
    client: float
    """CPU seconds in the client's process."""
    wall: float
    """Seconds of the clock."""
    span: float
    """Seconds from a step's first operation on the device to the end of its last; on a CPU, of the
    runner."""


class _Clocks(NamedTuple):
    """Seconds used, of CPUs and others, and tokens generated since the start."""

    model: float
    engine: float
    client: float
    wall: float
    span: float
    tokens: float


class _Sequence:
    """One sequence, read and detokenized as its tokens come."""

    def __init__(self, generation: DeltaStream, detokenizer: Detokenizer) -> None:
        self._generation = generation
        self._detokenizer = detokenizer
        self.num_tokens = 0

    async def read(self, num_tokens: int) -> None:
        end = self.num_tokens + num_tokens
        async for delta in self._generation:
            self.num_tokens += len(delta.token_ids)
            self._detokenizer.push(delta.token_ids)
            if self.num_tokens >= end:
                return

    async def leave(self) -> None:
        await self._generation.aclose()


@asynccontextmanager
async def open_engine(
    model: ModelConfig, batch: int, temperature: float = 0.0, *, overlapped: bool = False
) -> AsyncIterator[EngineUnderTest]:
    """Starts an engine process and a client of it, for batches of up to `batch` sequences."""
    async with client_of_engine(model, batch, COMMAND, overlapped=overlapped) as client:
        yield EngineUnderTest(model.folder, client, temperature)


@asynccontextmanager
async def client_of_engine(
    model: ModelConfig, batch: int, command: Sequence[str], *, overlapped: bool = False
) -> AsyncIterator[EngineClient]:
    """Starts an engine process by `command`, and a client of it that is ready."""
    with tempfile.TemporaryDirectory(prefix="lookonce-bench-") as scratch:
        settings = EngineSettings(
            model=model,
            scheduler=SchedulerConfig(max_num_seqs=batch, async_scheduling=overlapped),
            kv=KVConfig(),
            encoder=EncoderConfig(),
            address=f"{scratch}/engine",
        )
        channel = ChannelConfig(address=settings.address)
        supervisor = EngineSupervisor(settings, stall_timeout=60.0, command=command)
        client = EngineClient(channel, processor_cache_bytes=0)
        async with _running(supervisor) as end, client:
            await _unless(end, client.wait_ready())
            yield client


@asynccontextmanager
async def _running(supervisor: EngineSupervisor) -> AsyncIterator[asyncio.Task[None]]:
    """Runs the engine process in a task, which ends before the block only with an error."""
    running = asyncio.create_task(supervisor.run())
    try:
        yield running
    finally:
        await supervisor.stop()
        await asyncio.gather(running, return_exceptions=True)


async def _unless(end: asyncio.Task[None], awaited: Coroutine[Any, Any, None]) -> None:
    """Waits for `awaited`. Raises the engine's error if the engine ends first."""
    waiting = asyncio.create_task(awaited)
    await asyncio.wait([end, waiting], return_when=asyncio.FIRST_COMPLETED)
    if end.done():
        waiting.cancel()
        end.result()


# --- transformers --------------------------------------------------------------------------------


class _TransformersLoop:
    """transformers' text model in a loop over its dense cache.

    The loop skips what `generate` and the multimodal wrapper do around the text model.
    """

    def __init__(self, folder: str, device: str = "cpu", dtype: str = "float32") -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._device = torch.device(device)
        config = AutoConfig.from_pretrained(folder)
        disable_progress_bar()
        composite = config.get_text_config(decoder=True) is not config
        auto = AutoModelForMultimodalLM if composite else AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=self.dtype, attn_implementation="sdpa")
        self._model = model.eval().to(self._device)
        text = config.get_text_config(decoder=True)
        rope = getattr(text, "rope_parameters", None) or {}
        self._axes = 3 if "mrope_section" in rope else 1
        self._vocab_size = text.vocab_size
        self._cache = DynamicCache(config=text)
        self._length = 0

    @property
    def num_weights(self) -> int:
        """That each token is multiplied by."""
        modules = (self._model.get_decoder().layers, self._model.get_output_embeddings())
        return sum(weight.numel() for module in modules for weight in module.parameters())

    def step_bytes(self, batch: int, length: int) -> int:
        """Bytes that a decode step of so many sequences of so many tokens has to read."""
        text = self._model.config.get_text_config(decoder=True)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        of_token: int = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim
        return self.dtype.itemsize * (self.num_weights + batch * length * of_token)

    @torch.inference_mode()
    def decode(
        self,
        batch: int,
        prompt_tokens: int,
        steps: int,
        clock: Callable[[], float] = time.process_time,
    ) -> float:
        """Seconds of one decode step by `clock`, on average over `steps` after a prefill."""
        self._cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        self._length = 0
        shape = (batch, prompt_tokens)
        token = self._forward(torch.randint(20, self._vocab_size, shape, device=self._device))
        token.tolist()  # a device has computed the prompts
        started = clock()
        for _ in range(steps):
            token = self._forward(token)
            token.tolist()  # a server reads every token
        return (clock() - started) / steps

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        end = self._length + ids.shape[1]
        positions = torch.arange(self._length, end, device=self._device).expand(ids.shape[0], -1)
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
