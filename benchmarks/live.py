"""`lookonce bench live`: live sessions that run for a day, and many side by side.

A frame is one token of a model whose layers all attend in a window, as audio of 80 ms is; the
session answers each with one token. The frames of 24 hours are 1,080,000. The model is a tiny
random Mistral with a window of 256 and 4,096 positions, so positions begin again every thousand
frames or so. Frames are sent as fast as they are computed: credits slow the sender. Engine process
and sender process are real.

day      one session, all frames. Memory of both processes (anonymous and shared, MiB) after the
         first part and at the end; milliseconds a frame in the second thousand and in the last one
side     sessions side by side, one frame of each at a time: sequences in a step, and from the
         sending of a frame to its token
resent   what clients do elsewhere: a request for each frame, with all frames so far; prefixes are
         cached. Beside a session in the same engine, frame by frame in turn
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report, median, percentile, publish
from benchmarks.running_server import cpu_seconds, memory_bytes, one_descendant
from lookonce.config import Options, resolve
from lookonce.engine.client.engine_client import EngineClient
from lookonce.engine.client.session import EngineSession
from lookonce.engine.process_io import engine_settings
from lookonce.engine.supervisor.engine_supervisor import EngineSupervisor
from lookonce.engine.supervisor.socket_folder import socket_folder
from lookonce.frontend.frontend import engine_client
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams
from tests.support.model_folders.make import make_folder

ENGINE_MODULE = "lookonce.engine.process"
DAY = 1_080_000
"""Frames of 80 ms in 24 hours."""
WINDOW, POSITIONS = 256, 4_096
FIRST_PART = 7_500
"""Frames of ten minutes, after which memory is to be constant."""
SAMPLES = 200
"""Times that memory is looked at."""
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
MIB = 1 << 20


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lookonce bench live",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--frames", type=int, default=DAY, help="of the long session")
    parser.add_argument("--sessions", type=int, default=64, help="side by side")
    parser.add_argument("--side-frames", type=int, default=1_000, help="of each of them")
    parser.add_argument("--resent", type=int, default=2_000, help="frames sent again and again")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    publish(asyncio.run(measure(options)), options.json)
    return 0


async def measure(options: argparse.Namespace) -> list[Report]:
    with tempfile.TemporaryDirectory() as folder:
        model = sliding_model(Path(folder) / "model")
        return [
            await with_engine(model, lambda e: day(e, options.frames)),
            await with_engine(model, lambda e: side(e, options.sessions, options.side_frames)),
            await with_engine(model, lambda e: resent(e, options.resent)),
        ]


def sliding_model(folder: Path) -> Path:
    make_folder("mistral", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": WINDOW, "max_position_embeddings": POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Engine:
    client: EngineClient
    pid: int
    """Of the engine process."""

    async def open(self, name: str, prompt: Sequence[int] = (5,)) -> EngineSession:
        return await self.client.open_session(rendered(prompt), ONE, name)


async def with_engine(model: Path, work: Callable[[Engine], Awaitable[Report]]) -> Report:
    config = resolve(Options(model=str(model), kv_cache_gb=0.05, max_num_seqs=64, max_sessions=64))
    with socket_folder(config.channel.address):
        supervisor = EngineSupervisor(
            engine_settings(config), stall_timeout=config.channel.stall_timeout
        )
        running = asyncio.create_task(supervisor.run())
        try:
            async with engine_client(config) as client:
                await client.wait_ready()
                return await work(Engine(client, one_descendant(os.getpid(), ENGINE_MODULE)))
        finally:
            await supervisor.stop()
            await asyncio.gather(running, return_exceptions=True)


def own_memory(pid: int) -> int:
    """Bytes of a process, files left out: their pages are shared with whatever else runs."""
    return memory_bytes(pid, "Pss_Anon", "Pss_Shmem")


def rendered(token_ids: Sequence[int] | NDArray[np.int32]) -> RenderedPrompt:
    return RenderedPrompt(np.asarray(token_ids, np.int32), scope=bytes(32))


def frames(count: int) -> NDArray[np.int32]:
    """Tokens that no special one is among, the same at every call."""
    return np.random.default_rng(1).integers(10, 250, count).astype(np.int32)


# --- one session, a day ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    frames: int
    """Answered by then."""
    engine: int
    sender: int
    """Bytes of the two processes."""


async def day(engine: Engine, count: int) -> Report:
    session = await engine.open("day")
    given = frames(count)
    second, last = Thousand(1_000, engine.pid), Thousand(count - 1_000, engine.pid)
    memory: list[Memory] = []
    every = max(1, count // SAMPLES)

    async def send() -> None:
        for token in given:
            await session.extend(rendered((token,)))

    sending = asyncio.create_task(send())
    started, answered = time.monotonic(), -1  # the opening is answered, too
    async for delta in session:
        answered += len(delta.token_ids)
        now = time.monotonic()
        second.note(answered, now)
        last.note(answered, now)
        if answered % every == 0 and (answered == 0 or memory[-1].frames != answered):
            memory.append(Memory(answered, own_memory(engine.pid), own_memory(os.getpid())))
        if answered == count:
            break
    seconds = time.monotonic() - started
    await sending
    stats = await engine.client.stats()
    session.close()
    return day_report(count, seconds, memory, second, last, stats)


class Thousand:
    """The time that a thousand frames took, by the clock and of the engine's CPU."""

    def __init__(self, first: int, pid: int) -> None:
        self._first, self._pid = first, pid
        self.milliseconds = self.cpu_milliseconds = 0.0
        """Of one frame."""

    def note(self, answered: int, now: float) -> None:
        if answered == self._first:
            self.milliseconds, self.cpu_milliseconds = -now, -cpu_seconds(self._pid)
        elif answered == self._first + 1_000:
            self.milliseconds += now
            self.cpu_milliseconds += cpu_seconds(self._pid)


def day_report(
    count: int,
    seconds: float,
    memory: Sequence[Memory],
    second: Thousand,
    last: Thousand,
    stats: dict[str, float],
) -> Report:
    report = Report("live: one session", ("what", "value"))
    later = [taken for taken in memory if taken.frames >= min(FIRST_PART, count // 10)]
    sizes_of = {
        "engine process": [taken.engine for taken in later],
        "sender": [taken.sender for taken in later],
    }
    for name, sizes in sizes_of.items():
        report.add(f"{name}: MiB after the first part", sizes[0] / MIB)
        report.add(f"{name}: MiB at the end", sizes[-1] / MIB)
        report.add(f"{name}: most over least since", max(sizes) / min(sizes))
    report.add("frames", count)
    report.add("seconds", seconds)
    report.add("frames per second", count / seconds)
    report.add("times real time", count / seconds / 12.5)
    report.add("ms a frame, second thousand", second.milliseconds)
    report.add("ms a frame, last thousand", last.milliseconds)
    report.add("last over second thousand", last.milliseconds / second.milliseconds)
    report.add("engine CPU ms a frame, second thousand", second.cpu_milliseconds)
    report.add("engine CPU ms a frame, last thousand", last.cpu_milliseconds)
    report.add("CPU, last over second", last.cpu_milliseconds / second.cpu_milliseconds)
    report.add("times that positions began again", int(stats["session_reanchors_total"]))
    report.add("tokens dropped", int(stats["session_tokens_dropped_total"]))
    report.notes.append(f"a window of {WINDOW} tokens, {POSITIONS} positions")
    return report


# --- side by side ---------------------------------------------------------------------------------


async def side(engine: Engine, sessions: int, count: int) -> Report:
    report = Report(
        "live: sessions side by side",
        ("sessions", "frames per second", "tokens per step", "p50 ms", "p99 ms"),
    )
    for number in sorted({1, 8, sessions}):
        delays: list[float] = []
        before, started = await engine.client.stats(), time.monotonic()
        await asyncio.gather(*(talk(engine, f"{number}-{n}", count, delays) for n in range(number)))
        seconds, after = time.monotonic() - started, await engine.client.stats()
        steps = after["engine_steps_total"] - before["engine_steps_total"]
        milliseconds = [1000 * delay for delay in delays]
        report.add(
            number,
            number * count / seconds,
            number * (count + 1) / steps,
            percentile(milliseconds, 50),
            percentile(milliseconds, 99),
        )
    report.notes.append("each session sends its next frame when the last one is answered")
    return report


async def talk(engine: Engine, name: str, count: int, delays: list[float]) -> None:
    async with await engine.open(name) as session:
        await anext(session)
        for token in frames(count):
            sent = time.monotonic()
            await session.extend(rendered((token,)))
            await anext(session)
            delays.append(time.monotonic() - sent)


# --- the same frames, resent ----------------------------------------------------------------------


async def resent(engine: Engine, count: int) -> Report:
    """Both get a frame in turn, so that what else the machine does weighs on both alike."""
    count = min(count, POSITIONS // 2 - 2)
    by_session: list[float] = []
    by_request: list[float] = []
    session = await engine.open("session")
    await anext(session)
    tokens = [5]
    for number, token in enumerate(frames(count).tolist()):
        began = time.monotonic()
        await session.extend(rendered((token,)))
        await anext(session)
        by_session.append(time.monotonic() - began)
        tokens.append(token)
        began = time.monotonic()
        async for delta in engine.client.generate(rendered(tokens), ONE, f"resent {number}"):
            tokens += delta.token_ids
        by_request.append(time.monotonic() - began)
    session.close()
    report = Report(
        "live: the same frames, resent", ("ms a frame", "first 100", "last 100", "last over first")
    )
    for name, taken in (("session", by_session), ("growing requests", by_request)):
        first, last = (1000 * median(part) for part in (taken[:100], taken[-100:]))
        report.add(name, first, last, last / first)
    first = median(by_request[:100]) / median(by_session[:100])
    last = median(by_request[-100:]) / median(by_session[-100:])
    report.add("requests over session", first, last, last / first)
    sent = 4 * sum(range(2, 2 * count + 2, 2))
    report.notes.append(
        f"{count} frames; the requests sent {sent / MIB:.0f} MiB of tokens, the session "
        f"{4 * count / MIB:.3f} MiB; medians"
    )
    return report
