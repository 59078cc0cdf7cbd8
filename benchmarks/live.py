"""`lookonce bench live`: live sessions that run for a day, and many side by side.

The model is a tiny random Voxtral Realtime: a frame is 80 ms of sound as mel levels, goes through
the encoder's convolutions and windowed attention, is added to a token, and is answered with one
token. The frames of 24 hours are 1,080,000. Text attends in a window of 128, within 4,096
positions, so positions begin again every two thousand frames or so. Frames are sent as fast as they
are computed: credits slow the sender. Engine process and sender process are real.

day      one session, all frames. Memory of both processes (anonymous and shared, MiB) after the
         first part and at the end; milliseconds a frame in the second thousand and in the last one;
         the last tokens beside those that plain transformers says after the same tokens and frames,
         from position 0
side     sessions side by side, one frame of each at a time: sequences in a step, and from the
         sending of a frame to its token
resent   what clients do elsewhere: a request for each frame, with all frames so far; prefixes are
         cached. Beside a session in the same engine, frame by frame in turn. Here a frame is a
         token of a tiny Mistral with a window, since no request takes frames
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
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
from lookonce.types.media import Array
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams
from tests.support.model_folders.make import make_folder

ENGINE_MODULE = "lookonce.engine.process"
DAY = 1_080_000
"""Frames of 80 ms in 24 hours."""
TEXT_WINDOW, SOUND_WINDOW, POSITIONS = 128, 80, 4_096
"""Of Voxtral Realtime: tokens, positions of the encoder (4 a frame), and tokens again."""
MISTRAL_WINDOW, MISTRAL_POSITIONS = 256, 4_096
FRAME_SHAPE = (32, 8)
"""Mel bins, and mel frames of 10 ms."""
NUM_FRAMES = 4_093
"""Different frames, which come again and again."""
AT_ONCE = 8
"""Frames in a message of the long session, 640 ms."""
NUM_COMPARED = 400
"""Last tokens beside transformers'."""
NUM_BEFORE = 400
"""Tokens and frames before them, which reach further back than any layer of the model does."""
FIRST_PART = 7_500
"""Frames of ten minutes, after which memory is to be constant."""
PARTS = ("day", "side", "resent")
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    publish(asyncio.run(measure(options)), options.json)
    return 0


async def measure(options: argparse.Namespace) -> list[Report]:
    with tempfile.TemporaryDirectory() as folder:
        sound, text = sound_model(Path(folder) / "sound"), text_model(Path(folder) / "text")
        measured = {
            "day": lambda: with_engine(sound, lambda e: day(e, sound, options.frames)),
            "side": lambda: with_engine(
                sound, lambda e: side(e, options.sessions, options.side_frames)
            ),
            "resent": lambda: with_engine(text, lambda e: resent(e, options.resent)),
        }
        return [await measured[name]() for name in measured if name in options.parts]


def sound_model(folder: Path) -> Path:
    """Two layers of text and one of sound: a day of frames takes many steps, not large ones."""
    make_folder("voxtral_realtime", folder, scale="live")
    config = json.loads((folder / "config.json").read_text())
    config["audio_config"]["sliding_window"] = SOUND_WINDOW
    config["text_config"] |= {"sliding_window": TEXT_WINDOW, "max_position_embeddings": POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def text_model(folder: Path) -> Path:
    make_folder("mistral", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": MISTRAL_WINDOW, "max_position_embeddings": MISTRAL_POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Engine:
    client: EngineClient
    pid: int
    """Of the engine process."""

    async def open(self, name: str, opening: RenderedPrompt) -> EngineSession:
        return await self.client.open_session(opening, ONE, name)


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


def words(count: int) -> NDArray[np.int32]:
    """Tokens that no special one is among, the same at every call."""
    return np.random.default_rng(1).integers(10, 250, count).astype(np.int32)


@cache
def frames() -> NDArray[np.float32]:
    """[NUM_FRAMES, *FRAME_SHAPE] levels like those of a sound."""
    levels = np.random.default_rng(1).normal(0.0, 1.0, (NUM_FRAMES, *FRAME_SHAPE))
    return levels.astype(np.float32)


def frame(number: int, prompt: Sequence[int] = (), count: int = 1) -> RenderedPrompt:
    """The frame of that number since the session began, and those after it."""
    sound = np.take(frames(), range(number, number + count), axis=0, mode="wrap")
    array = Array("float32", sound.shape, sound.tobytes())
    return RenderedPrompt(np.asarray(prompt, np.int32), scope=bytes(32), frames=array)


FIRST_TOKEN = 5


# --- one session, a day ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    frames: int
    """Answered by then."""
    engine: int
    sender: int
    """Bytes of the two processes."""


def tell_progress(taken: Memory, seconds: float, second: Thousand) -> None:
    """A line on stderr: a day takes long."""
    sizes = f"{taken.engine / MIB:.1f} and {taken.sender / MIB:.1f} MiB"
    early = f"{second.cpu_milliseconds:.3f} ms of CPU a frame in the second thousand"
    print(f"{taken.frames} frames, {seconds:.0f} s, {sizes}; {early}", file=sys.stderr, flush=True)


async def day(engine: Engine, model: Path, count: int) -> Report:
    """The opening is frame 0, and each frame after it extends the session."""
    session = await engine.open("day", frame(0, [FIRST_TOKEN]))
    second, last = Thousand(1_000, engine.pid), Thousand(count - 1_000, engine.pid)
    memory: list[Memory] = []
    newest: deque[int] = deque(maxlen=NUM_BEFORE + NUM_COMPARED + 1)
    every = max(1, count // SAMPLES)

    async def send() -> None:
        for number in range(1, count + 1, AT_ONCE):
            await session.extend(frame(number, count=min(AT_ONCE, count + 1 - number)))

    sending = asyncio.create_task(send())
    started, answered = time.monotonic(), -1  # the opening is answered, too
    async for delta in session:
        newest.extend(delta.token_ids)
        answered += len(delta.token_ids)
        now = time.monotonic()
        second.note(answered, now)
        last.note(answered, now)
        if answered % every == 0 and (answered == 0 or memory[-1].frames != answered):
            memory.append(Memory(answered, own_memory(engine.pid), own_memory(os.getpid())))
            tell_progress(memory[-1], now - started, second)
        if answered == count:
            break
    seconds = time.monotonic() - started
    await sending
    stats = await engine.client.stats()
    session.close()
    report = day_report(count, seconds, memory, second, last, stats)
    add_agreement(report, *await asyncio.to_thread(agreement, model, list(newest), count))
    return report


def agreement(model: Path, newest: Sequence[int], last: int) -> tuple[int, int, float]:
    """Of the last tokens, how many are those that transformers is surest of; how many there are;
    and the most by which another one's logit was larger.

    `newest` are answers up to that of frame `last`. Each is read together with the frame after it.
    transformers reads as many at once as all layers together reach back, from position 0.
    """
    import torch
    from transformers import AutoModelForMultimodalLM

    reference = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32).eval()
    given = torch.tensor([newest[:-1]])
    numbers = np.arange(last - given.shape[1] + 1, last + 1) % NUM_FRAMES
    mel = frames()[numbers].transpose(1, 0, 2).reshape(FRAME_SHAPE[0], -1)
    with torch.no_grad():
        found = reference(
            input_ids=given,
            input_features=torch.from_numpy(mel)[None],
            num_delay_tokens=reference.config.default_num_delay_tokens,
        )
    compared = min(NUM_COMPARED, max(1, len(newest) - 1 - NUM_BEFORE))
    logits = found.logits[0, -compared:].float()
    said = torch.tensor(newest[-compared:])
    behind = logits.max(-1).values - logits.gather(1, said[:, None])[:, 0]
    return int((behind == 0).sum()), compared, float(behind.max())


def add_agreement(report: Report, equal: int, compared: int, behind: float) -> None:
    report.add("last tokens compared with transformers'", compared)
    report.add("of them equal", equal)
    report.add("most by which another token's logit was larger", behind)


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
    report.notes.append(
        f"windows of {TEXT_WINDOW} tokens and {SOUND_WINDOW} positions of sound; "
        f"{POSITIONS} positions of text"
    )
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
    async with await engine.open(name, frame(0, [FIRST_TOKEN])) as session:
        await anext(session)
        for number in range(1, count + 1):
            sent = time.monotonic()
            await session.extend(frame(number))
            await anext(session)
            delays.append(time.monotonic() - sent)


# --- the same frames, resent ----------------------------------------------------------------------


async def resent(engine: Engine, count: int) -> Report:
    """Both get a frame in turn, so that what else the machine does weighs on both alike."""
    count = min(count, MISTRAL_POSITIONS // 2 - 2)
    by_session: list[float] = []
    by_request: list[float] = []
    session = await engine.open("session", rendered([FIRST_TOKEN]))
    await anext(session)
    tokens = [FIRST_TOKEN]
    for number, token in enumerate(words(count).tolist()):
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
