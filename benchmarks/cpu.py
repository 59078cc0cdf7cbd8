"""`lookonce bench cpu`: prefill and decode of a text model on the CPU, beside a plain read of its
weights, in float32, bfloat16 and int8.

weights    bytes of weights that a decode step reads, in MB
read       milliseconds that a plain read of as many bytes takes, on all cores
prefill    tokens/s of a prompt of 1,000 tokens, until its first token
decode B   tokens/s of B sequences together, after short prompts
of read    the time of that plain read over the time of a decode step of one sequence
load       the most memory of its own that loading took, over the weights that were loaded

Each type has an engine process of its own, as a server has, and a client of it in this process.
The times are those that the client sees. Where `llama_cpp` can be imported, it computes the same
weights (float32, bfloat16, q8_0) beside each, by as many threads; `gguf` writes its files.

Without --model a folder of the shape of SmolLM2-135M is written, with random weights whose numbers
are no bf16 numbers: else a float32 model is read as bf16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.engine import client_of_engine
from benchmarks.report import Report, median, publish
from lookonce.config import ModelConfig
from lookonce.engine.client.delta_stream import DeltaStream
from lookonce.engine.client.engine_client import EngineClient
from lookonce.engine.supervisor.engine_supervisor import ENGINE_COMMAND
from lookonce.model.loader import load_model
from lookonce.types.cpu import usable_cores
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams

TYPES = ("float32", "bfloat16", "int8")
BATCHES = (1, 8, 32)
PROMPT_TOKENS = 1000
SHORT_PROMPT = 16
STEPS = 48
TURNS = 3
FIRST_TOKEN = 20
"""Ids below may be special tokens."""
READS = 7
SCALE = "135m"
PEER = (sys.executable, "-m", "benchmarks.llama_cpp_peer")
LOADING = "import sys; from benchmarks.cpu import report_loading; report_loading(*sys.argv[1:])"


class Rates(NamedTuple):
    """Tokens per second."""

    prefill: float
    decode: dict[int, float]
    """By the number of sequences."""


class Loading(NamedTuple):
    """What loading a model took."""

    weight_bytes: int
    step_bytes: int
    """Of the weights that a decode step reads."""
    peak_bytes: int
    """The most memory of its own, beyond what the process had before."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lookonce bench cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="folder; default: one of random weights")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of the prefill")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each decode")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = options.model
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            write_folder(folder)
        peers = not options.no_peer and all(map(find_spec, ("llama_cpp", "gguf")))
        report = measure(
            folder,
            types=options.types,
            batches=options.batches,
            prompt=options.prompt,
            steps=options.steps,
            turns=options.turns,
            peers=peers,
        )
    publish([report], options.json)
    return 0


def write_folder(folder: Path, scale: str = SCALE) -> None:
    """A Llama of random weights."""
    from tests.support.model_folders.make import make_folder

    make_folder("llama", folder, scale=scale)


def measure(
    folder: Path,
    *,
    types: Sequence[str] = TYPES,
    batches: Sequence[int] = BATCHES,
    prompt: int = PROMPT_TOKENS,
    steps: int = STEPS,
    turns: int = TURNS,
    peers: bool = False,
) -> Report:
    """A row for each type, and one more for llama.cpp's, printed as they are measured."""
    decodes = [f"decode {batch}" for batch in batches]
    columns = ("weights", "MB", "read ms", "prefill", *decodes, "of read", "load")
    report = Report("cpu", columns)
    for kind in types:
        loading = _in_another_process(LOADING, str(folder), kind)
        rates = asyncio.run(_engine_rates(folder, kind, batches, prompt, steps, turns))
        read = read_seconds(loading.step_bytes)  # of the minutes in which the rates were measured
        step = 1 / rates.decode[batches[0]] * batches[0]
        report.add(
            kind,
            loading.step_bytes / 1e6,
            read * 1e3,
            rates.prefill,
            *(rates.decode[batch] for batch in batches),
            read / step,
            loading.peak_bytes / loading.weight_bytes,
        )
        report.print_last()
        if peers:
            theirs = _peer_rates(folder, kind, batches, prompt, steps, turns)
            cells = (theirs.decode[batch] for batch in batches)
            report.add(f"{kind}, llama.cpp", None, None, theirs.prefill, *cells, None, None)
            report.print_last()
    report.notes.append(
        f"tokens/s as a client of an engine process sees them; prompts of {prompt} tokens for "
        f"prefill, of {SHORT_PROMPT} before {steps} decode steps; medians of {turns} turns; "
        f"{usable_cores()} threads"
    )
    if not peers:
        report.notes.append(
            "llama.cpp is left out: llama_cpp or gguf is not installed, or not asked"
        )
    return report


def model_config(folder: Path, kind: str) -> ModelConfig:
    """`kind` is one of `TYPES`; activations beside int8 weights are float32."""
    quantize = kind if kind == "int8" else None
    dtype = "float32" if quantize else kind
    return ModelConfig(str(folder), "bench", dtype=dtype, quantize=quantize)


def read_seconds(num_bytes: int) -> float:
    """The shortest time of a plain read of so many bytes, by all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    numbers = torch.ones(num_bytes // 4)
    best = float("inf")
    try:
        for _ in range(READS):
            started = time.perf_counter()
            numbers.sum()
            best = min(best, time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return best


# --- Our side ------------------------------------------------------------------------------------


async def _engine_rates(
    folder: Path, kind: str, batches: Sequence[int], prompt: int, steps: int, turns: int
) -> Rates:
    async with client_of_engine(model_config(folder, kind), max(batches), ENGINE_COMMAND) as client:
        load = _Load(client)
        await load.decode(1, prompt, 1)  # buffers grow
        prefill = [await load.prefill(prompt) for _ in range(turns)]
        decode = {
            batch: median([await load.decode(batch, SHORT_PROMPT, steps) for _ in range(turns)])
            for batch in batches
        }
    return Rates(median(prefill), decode)


class _Load:
    """Prompts that are all different, so that none is found in a cache."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._count = 0

    async def prefill(self, prompt: int) -> float:
        """Prompt tokens per second until the first token is there."""
        started = time.perf_counter()
        answer = self._begin(prompt, 1)
        await _read(answer, 1)
        seconds = time.perf_counter() - started
        await answer.aclose()
        return prompt / seconds

    async def decode(self, batch: int, prompt: int, steps: int) -> float:
        """Tokens per second of all sequences, once all have their first token."""
        answers = [self._begin(prompt, None) for _ in range(batch)]
        # One sequence may be ahead of the last by the steps that prompts of others took.
        read = await asyncio.gather(*(_read(answer, 2) for answer in answers))
        started = time.perf_counter()
        more = await asyncio.gather(*(_read(answer, steps) for answer in answers))
        seconds = time.perf_counter() - started
        for answer in answers:
            await answer.aclose()
        await self._client.stats()  # answered once all have ended
        del read
        return sum(more) / seconds

    def _begin(self, prompt: int, max_tokens: int | None) -> DeltaStream:
        self._count += 1
        model = self._client.model
        generator = torch.Generator().manual_seed(self._count)
        ids = torch.randint(FIRST_TOKEN, model.vocab_size, (prompt,), generator=generator)
        limit = max_tokens or model.max_model_len - prompt
        sampling = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
        rendered = RenderedPrompt(token_ids=ids.tolist(), scope=bytes(32))
        return self._client.generate(rendered, sampling, f"bench-{self._count}")


async def _read(answer: DeltaStream, num_tokens: int) -> int:
    """Read at least so many tokens; how many were read."""
    read = 0
    async for delta in answer:
        read += len(delta.token_ids)
        if read >= num_tokens:
            break
    return read


# --- Memory --------------------------------------------------------------------------------------


def _in_another_process(code: str, *arguments: str) -> Loading:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Loading(**json.loads(done.stdout.splitlines()[-1]))


def report_loading(folder: str, kind: str) -> None:
    """Load the model, and print what it took as JSON."""
    print(json.dumps(loading_of(Path(folder), kind)._asdict()))


def loading_of(folder: Path, kind: str) -> Loading:
    """Load the model in this process and watch its memory meanwhile."""
    with OwnMemory() as memory:
        family = load_model(model_config(folder, kind)).family
    weights = set(family.model.parameters())
    read = {
        weight
        for module in (family.decoder, family.lm_head)
        for weight in module.parameters()
        if weight is not family.embed_tokens.weight or weight is family.lm_head.weight
    }
    return Loading(
        sum(weight.nbytes for weight in weights),
        sum(weight.nbytes for weight in read),
        memory.peak,
    )


class OwnMemory:
    """The most memory that this process has of its own while the block runs, beyond what it has
    before. Pages of files that are mapped do not count: Linux drops them when memory is short."""

    def __enter__(self) -> OwnMemory:
        self.peak = 0
        self._before = _own_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, _own_bytes() - self._before)
            if self._ended.wait(0.001):
                return


def _own_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


# --- llama.cpp -----------------------------------------------------------------------------------


def _peer_rates(
    folder: Path, kind: str, batches: Sequence[int], prompt: int, steps: int, turns: int
) -> Rates:
    """In a process of its own, which ends before ours is measured again."""
    numbers = (prompt, SHORT_PROMPT, steps, turns, usable_cores(), *batches)
    command = [*PEER, str(folder), kind, *map(str, numbers)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return Rates(found["prefill"], {int(batch): rate for batch, rate in found["decode"].items()})
