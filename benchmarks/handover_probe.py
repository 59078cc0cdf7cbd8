"""The processes of the part of `lookonce bench link` that hands items over.

    python handover_probe.py api CACHE_TYPE BYTES    one JSON object of figures on stdout
    python handover_probe.py engine ADDRESS SLABS    the engine process, which the first one starts
    python handover_probe.py worker DESCRIPTOR       a media worker, which the pool starts
    python handover_probe.py floor                   the same hand-overs by plain sockets
    python handover_probe.py plain WORKER ENGINE     their other process, on these descriptors

Worker, pool, event loop, channel, input thread, store and the conversion to a tensor are real; the
processor copies a picture that is decoded already, and the encoder is a sum over the tensor. It is
run as a file, with the `lookonce` of any checkout on PYTHONPATH, so it uses only what earlier
versions have too, or asks first.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from lookonce.types.media import Expansion, ProcessedItem
from lookonce.types.model import ModelInfo

WARM_UP, ITEMS = 12, 15
"""Items before those that are timed: until the cache is full and its memory is used again."""
CACHED_ITEMS = 4
MODEL = ModelInfo("m", "fake", 100, 64, (2,), ("image",), "float32", 16)
READ = struct.Struct("<d")
CLOCK_MS = 60_000.0
"""The worker tells when it had decoded as if that were a duration, which is bounded: modulo this.
"""


def address_of(path: str) -> str:
    """The channel's address in this version of LookOnce."""
    try:
        import_module("lookonce.ipc.socket_engine_link")
    except ImportError:
        return f"ipc://{path}"
    return path


def engine_link(address: str) -> Any:
    if address.startswith("ipc://"):
        return import_module("lookonce.ipc.zmq_engine_link").ZmqEngineLink(address)
    return import_module("lookonce.ipc.socket_engine_link").SocketEngineLink(address)


# --- the worker ----------------------------------------------------------------------------------


class CopyingProcessing:
    """Copies numbers that are there already: a processor at the speed of memory."""

    def __init__(self, settings: Any) -> None:
        memory = import_module("lookonce.render.families.arrays")
        own = memory.ArrayMemory() if hasattr(memory, "ArrayMemory") else None
        self.family = SimpleNamespace(modalities=(), memory=own, needs_torch=False)
        self._stored_array = memory.stored_array
        self._source = self._target = np.zeros(0, np.float32)

    def run(self, job: Any) -> Any:
        processed = import_module("lookonce.render.media.processing").Processed
        count = int(bytes(job.data)) // 4
        if self._source.size != count:
            self._source = np.arange(count, dtype=np.float32)  # no import: the worker is confined
        self._copy_ms = self._copied(count)
        decoded = time.monotonic()
        memory = self.family.memory
        out = np.empty(count, np.float32) if memory is None else memory.empty((count,), "float32")
        np.copyto(out, self._source)
        arrays = {"pixel_values": self._stored_array(out, "float32")}
        item = ProcessedItem("image", arrays, Expansion(((7, 4),), 7))
        return processed(item, decoded * 1e3 % CLOCK_MS, self._copy_ms)

    def _copied(self, count: int) -> float:
        """Milliseconds of one copy in this process, whose memory is warm."""
        if self._target.size != count:
            self._target = np.ones(count, np.float32)
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return (time.perf_counter() - started) * 1e3


def run_worker() -> None:
    worker: Any = import_module("lookonce.render.media.worker")
    worker.Processing = CopyingProcessing
    worker.warm_up = lambda *given: None
    sys.argv = sys.argv[:1] + sys.argv[-1:]
    worker.main()


# --- the engine ----------------------------------------------------------------------------------


def run_engine(address: str, slab_bytes: int) -> None:
    """Reads every item that comes, and says when it has, until the parent closes stdin."""
    build = import_module("lookonce.engine.process.build")
    torch = import_module("torch")
    item_tensors = import_module("lookonce.model.encoder_runner").item_tensors
    torch.set_num_threads(1)
    takes_slabs = "slab_bytes" in inspect.signature(build.EngineThreads).parameters
    more = {"slab_bytes": slab_bytes} if takes_slabs else {}
    threads = build.EngineThreads(engine_link(address), num_senders=1, max_queue=64, **more)
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    store = threads.receiver_cache.store
    add = store.add

    def add_and_encode(sender: str, key: bytes, item: Any) -> bool:
        items.put(item)
        return bool(add(sender, key, item))

    store.add = add_and_encode
    threads.start_input()
    threads.open(SimpleNamespace(model=MODEL))
    cpu = torch.device("cpu")

    def encode() -> None:
        while True:
            tensors = item_tensors(items.get(), dtype=torch.float32, device=cpu)
            tensors["pixel_values"].sum()
            os.write(1, READ.pack(time.monotonic()))
            del tensors

    threading.Thread(target=encode, daemon=True).start()
    while os.read(0, 4096):
        pass
    os._exit(0)


# --- the API process -----------------------------------------------------------------------------


async def run_api(cache_type: str, num_bytes: int) -> dict[str, float]:
    config = import_module("lookonce.config")
    cache_bytes = CACHED_ITEMS * (num_bytes + num_bytes // 8 + (1 << 18))
    slabs = cache_bytes + min(cache_bytes, 256 << 20) if cache_type == "shm" else 0
    with tempfile.TemporaryDirectory(prefix="lookonce-bench-") as scratch:
        address = address_of(f"{scratch}/engine")
        command = [sys.executable, __file__, "engine", address, str(slabs)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as engine:  # type: ignore[call-overload]  # noqa: ASYNC220
            try:
                channel = config.ChannelConfig(address)
                return await hand_over(channel, cache_bytes, num_bytes, slabs, engine.stdout)
            finally:
                engine.kill()


async def hand_over(
    channel: Any, cache_bytes: int, num_bytes: int, slabs: int, answers: Any
) -> dict[str, float]:
    client_module = import_module("lookonce.engine.client.engine_client")
    pool_module = import_module("lookonce.render.media.pool")
    processing = import_module("lookonce.render.media.processing")
    keyed_item = import_module("lookonce.ipc.messages").KeyedItem
    loop = asyncio.get_running_loop()
    cpu = 0.0
    took: list[float] = []
    copies: list[float] = []
    async with client_module.EngineClient(channel, processor_cache_bytes=cache_bytes) as client:
        await client.wait_ready()
        settings = processing.ProcessingSettings("", "float32", 1_000_000, 1.0)
        command = [sys.executable, __file__, "worker"]
        more: dict[str, Any] = {"num_workers": 1}
        if slabs:
            more["slabs"] = client.slabs
        if hasattr(pool_module, "ServerShare"):
            share = pool_module.ServerShare(**more, shared_cache_bytes=cache_bytes if slabs else 0)
            more = {"share": share}
        elif slabs:
            more["slab_bytes"] = slabs
        pool = pool_module.MediaPool(settings, command=command, **more)
        await pool.start()
        try:
            for number in range(WARM_UP + ITEMS):
                if number == WARM_UP:
                    cpu = 0.0
                before = time.process_time()
                job = processing.MediaJob("image", str(num_bytes).encode(), {})
                made = await pool.run(job)
                decoded, copied = made.decode_ms, made.process_ms
                await client.inject([keyed_item(number.to_bytes(32, "little"), made.item)])
                del made
                read = await loop.run_in_executor(None, answers.read, READ.size)
                cpu += time.process_time() - before
                if number >= WARM_UP:
                    took.append((READ.unpack(read)[0] * 1e3 - decoded) % CLOCK_MS)
                    copies.append(copied)
            fallbacks = client.slabs.num_fallbacks if slabs else 0
        finally:
            await pool.aclose()
    if fallbacks:
        raise SystemExit(f"{fallbacks} items found no slab")
    return {
        "handover_ms": sorted(took)[len(took) // 4],
        "copy_ms": sorted(copies)[len(copies) // 4],
        "api_cpu_ms": cpu / ITEMS * 1e3,
    }


# --- the floor -----------------------------------------------------------------------------------


async def plain_hand_overs() -> dict[str, float]:
    """Milliseconds of the six wake-ups by which an item is handed over, without the item and
    without any of our code: a worker asks a thread for memory and is answered, it says where the
    item is, the thread tells the event loop, which tells a thread of the engine, which tells
    another one."""
    loop = asyncio.get_running_loop()
    to_worker, worker = socket.socketpair()
    to_engine, engine = socket.socketpair()
    fds = (worker.fileno(), engine.fileno())
    command = [sys.executable, __file__, "plain", *map(str, fds)]
    took = []
    pipes = {"stdout": subprocess.PIPE, "pass_fds": fds}
    with subprocess.Popen(command, **pipes) as other:  # type: ignore[call-overload]  # noqa: ASYNC220

        def answer() -> None:
            to_worker.recv(READ.size)
            to_worker.send(bytes(READ.size))
            placed = to_worker.recv(READ.size)
            loop.call_soon_threadsafe(to_engine.send, placed)

        try:
            for _ in range(WARM_UP + 10 * ITEMS):
                answered = loop.run_in_executor(None, answer)
                read = loop.run_in_executor(None, other.stdout.read, READ.size)
                await asyncio.sleep(0.002)  # they wait
                to_worker.send(bytes(READ.size))
                await answered
                took.append(READ.unpack(await read)[0])
        finally:
            other.kill()
    took = sorted(took[WARM_UP:])
    return {"floor_ms": took[len(took) // 4]}


def run_plain(worker_fd: int, engine_fd: int) -> None:
    worker, engine = socket.socket(fileno=worker_fd), socket.socket(fileno=engine_fd)
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        while data := engine.recv(READ.size):
            arrived.put(data)

    def encode() -> None:
        while True:
            (decoded,) = READ.unpack(arrived.get())
            os.write(1, READ.pack((time.monotonic() - decoded) * 1e3))

    for each in (receive, encode):
        threading.Thread(target=each, daemon=True).start()
    while worker.recv(READ.size):
        decoded = time.monotonic()
        worker.send(bytes(READ.size))
        worker.recv(READ.size)
        worker.send(READ.pack(decoded))


def main() -> None:
    if sys.argv[1] == "worker":
        run_worker()
    elif sys.argv[1] == "engine":
        run_engine(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "plain":
        run_plain(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "floor":
        print(json.dumps(import_module("uvloop").run(plain_hand_overs())))
    else:
        uvloop = import_module("uvloop")
        print(json.dumps(uvloop.run(run_api(sys.argv[2], int(sys.argv[3])))))


if __name__ == "__main__":
    main()
