"""A worker that does what its job's bytes say: `crash`, `hang`, `nonsense`, or answer who it is."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lookonce.cache.slabs import map_memory
from lookonce.errors import ModelLoadError, UnprocessableMediaError
from lookonce.ipc.codec import MessageDecoder
from lookonce.ipc.framing import MessageSocket
from lookonce.render.media.pdf import Page, RenderedPages
from lookonce.render.media.processing import Processed
from lookonce.render.media.sandbox import SandboxReport
from lookonce.render.media.worker import (
    ConfigureWorker,
    DropSlabs,
    JobBegun,
    JobDone,
    JobRequest,
    LinkClosedError,
    MemoryTrimmed,
    PagesDone,
    PagesRequest,
    SlabGranted,
    SlabWanted,
    TrimMemory,
    WorkerReady,
    WorkerRequest,
    pool_socket,
    receive,
    request_decoder,
    send,
    send_error,
)
from lookonce.types.media import ITEM_SIZE, Array, Expansion, ProcessedItem

Requests = MessageDecoder[WorkerRequest]
SLAB_BYTES = 1 << 20
KEPT: list[NDArray[np.uint8]] = []
"""What jobs have left behind."""
FREED: list[NDArray[np.uint8]] = []
"""What jobs leave until the worker is asked to give it back."""
NONSENSE = [b"\xc1"]
"""A frame that holds no msgpack."""
EXPANSIONS = {
    b"expansion without end": Expansion(((7, 1 << 40),), 7),
    b"expansion of less than nothing": Expansion(((7, 3), (8, -2)), 7),
    b"expansion without rows": Expansion(((8, 3),), 7),
    b"expansion of nothing": Expansion((), 7),
    b"expansion of no token": Expansion(((1 << 31, 3),), 1 << 31),
    b"expansion on a grid without end": Expansion(((7, 3),), 7, (1, 1, 1 << 63)),
    b"expansion on a grid of less than nothing": Expansion(((7, 3),), 7, (1, -1, -3)),
    b"expansion in too many runs": Expansion(((7, 1), (8, 1)) * (1 << 20), 7),
}
"""What no prompt can have in the place of an item."""
TIMES = {b"no time": math.nan, b"time without end": math.inf, b"time before it began": -1.0}
"""Milliseconds that no job takes."""
PAGES = {
    b"pages": RenderedPages(1, (Page("text"),)),
    b"pages without end": RenderedPages(1 << 40, tuple(Page("text") for _ in range(4))),
    b"pictures that nobody asked for": RenderedPages(1, (Page("", Array("uint8", (1,), b"x")),)),
}
"""What becomes of a file; all but the first is what no worker answers for its text alone."""


class Hostile:
    """What a worker that was taken over may try with the memory that it shares."""

    def __init__(self, link: MessageSocket, requests: Requests) -> None:
        self.link = link
        self.requests = requests
        self.slab: tuple[int, NDArray[np.uint8]] | None = None

    def grant(self, num_bytes: int) -> tuple[int, int]:
        """The number of a slab, and its descriptor (-1: not the first time)."""
        send(self.link, SlabWanted(num_bytes))
        granted, fds = receive(self.link, self.requests)
        assert isinstance(granted, SlabGranted)
        if fds:
            self.slab = granted.number, map_memory(fds[0], granted.num_bytes, writable=True)
        return granted.number, fds[0] if fds else -1

    def answer(self, job: JobRequest, number: int, offset: int, dtype: str, count: int) -> None:
        """Say that the item's array lies there."""
        array = Array(dtype, (count,), bytes(count * ITEM_SIZE[dtype]), Somewhere(number, offset))
        send(self.link, JobDone(done(job, {"pixels": array})))

    def work(self, job: JobRequest, how: str) -> None:
        if how == "endless":
            while True:
                self.grant(1000)
        if how == "refused without end":
            while True:
                self.grant(1 << 50)
        if how == "begun without end":
            while True:
                send(self.link, JobBegun())
        if how in ("none", "negative", "huge"):
            number, _ = self.grant({"none": 0, "negative": -5, "huge": 1 << 50}[how])
            self.answer(job, number, 0, "float32", 16)
            return
        number, fd = self.grant(SLAB_BYTES)
        match how:
            case "cut short":
                try:
                    os.ftruncate(fd, 0)
                except PermissionError:
                    send_error(self.link, UnprocessableMediaError("it cannot be cut short"))
            case "pipe":
                reader, _ = os.pipe()
                self.link.send(NONSENSE, [reader])
            case "foreign":
                self.answer(job, number + 1, 0, "float32", 16)
            case "beyond":
                self.answer(job, number, 0, "float32", SLAB_BYTES)
            case "unaligned":
                self.answer(job, number, 2, "float32", 16)
            case "integers":
                self.answer(job, number, 0, "int64", 16)
            case "deaf":
                self.scribble(1.0)
                self.answer(job, number, 0, "float32", 16)
                time.sleep(1000)
            case "write":
                self.scribble(1.0)
                self.answer(job, number, 0, "float32", 16)

    def scribble(self, value: float) -> None:
        """Write a slab whenever one likes."""
        assert self.slab is not None
        self.slab[1].view(np.float32)[:] = value


class Somewhere:
    """A place that a worker invents."""

    is_leased = True
    nbytes = 0

    def __init__(self, number: int, offset: int) -> None:
        self.slab = self
        self.number = number
        self.offset = offset

    def next_use(self) -> int:
        return 0


def done(job: JobRequest, arrays: dict[str, Array]) -> Processed:
    arrays["pid"] = Array("int64", (1,), os.getpid().to_bytes(8, "little"))
    return Processed(ProcessedItem(job.modality, arrays, Expansion(((7, 3),), 7)), 1.5, 2.5)


def work(link: MessageSocket, job: JobRequest, data: bytes, hostile: Hostile) -> None:
    if data.startswith(b"hostile "):
        hostile.work(job, data[8:].decode())
        return
    if data == b"scribble":
        hostile.scribble(2.0)
    if data == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if data == b"hang":
        time.sleep(1000)
    if data == b"burn":
        while True:
            pass
    if data == b"nonsense":
        link.send(NONSENSE)
        return
    if data == b"refuse":
        send_error(link, UnprocessableMediaError("refused"))
        return
    if data.startswith(b"keep "):
        KEPT.append(np.ones(int(data[5:]), np.uint8))
    if data.startswith(b"free "):
        FREED.append(np.ones(int(data[5:]), np.uint8))
    if data.startswith(b"mark "):
        Path(os.fsdecode(data[5:])).touch()
    if data.startswith(b"wait "):
        while not os.path.exists(data[5:]):
            time.sleep(0.001)
    if data in EXPANSIONS:
        item = ProcessedItem(job.modality, {}, EXPANSIONS[data])
        send(link, JobDone(Processed(item, 1.5, 2.5)))
        return
    if data in TIMES:
        send(link, JobDone(replace(done(job, {}), decode_ms=TIMES[data])))
        return
    if data == b"arrays without end":
        one = Array("float32", (1,), bytes(4))
        send(link, JobDone(done(job, {f"a{number}": one for number in range(1000)})))
        return
    arrays = {
        "data": Array("uint8", (len(data),), data),
        "nothing": Array("float32", (0, 3), b""),
    }
    send(link, JobDone(done(job, arrays)))


def main() -> None:
    with contextlib.closing(pool_socket()) as link:
        requests = request_decoder()
        try:
            configure, _ = receive(link, requests)
            assert isinstance(configure, ConfigureWorker)
            if configure.settings.folder == "bad":
                send_error(link, ModelLoadError("bad folder"))
                return
            if configure.settings.folder == "dead":
                return
            if configure.settings.folder == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if configure.settings.folder == "nonsense":
                link.send(NONSENSE)
            if configure.settings.folder == "mute":
                time.sleep(1000)
            send(link, WorkerReady(SandboxReport()))
            hostile = Hostile(link, requests)
            while True:
                job, _ = receive(link, requests)
                if isinstance(job, DropSlabs):
                    continue  # it keeps them mapped
                if isinstance(job, TrimMemory):
                    FREED.clear()
                    send(link, MemoryTrimmed())
                    continue
                assert isinstance(job, JobRequest | PagesRequest)
                data = bytes(job.data.data)
                if isinstance(job, PagesRequest):
                    send(link, JobBegun())
                    send(link, PagesDone(PAGES[data]))
                    continue
                if data.startswith(b"die before ") and not os.path.exists(data[11:]):
                    with contextlib.suppress(OSError):
                        Path(os.fsdecode(data[11:])).touch()
                    return
                send(link, JobBegun())
                work(link, job, data, hostile)
        except LinkClosedError:
            return


if __name__ == "__main__":
    main()
