"""The two processes of `lookonce bench link`: an API process's end of the link, and an engine's.

    python link_probe.py api               one JSON object of figures on stdout
    python link_probe.py engine ADDRESS    the other process, which the first one starts
    python link_probe.py ask DESCRIPTOR    asks the first one's event loop for an answer

It is run as a file, with the `lookonce` of any checkout on PYTHONPATH, so it uses only what earlier
versions have too.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import uvloop

from lookonce.ipc.channel import ClientChannel, EngineChannel, EngineChannelWriter
from lookonce.ipc.messages import (
    CacheOps,
    Deltas,
    GetStats,
    Hello,
    KeyedItem,
    Received,
    Stats,
    UpdateCache,
    Welcome,
)
from lookonce.types.media import Array, Expansion, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import TokenDelta

STREAMS = 8
STEPS = 1500
STEP_SECONDS = 0.001
"""Between two steps: as long as a small model computes."""
ITEMS = 10
ITEM_BYTES = 100_000_000
IN_FLIGHT_BYTES = 256 * 1024 * 1024
PROBE_SECONDS = 0.0007
IDLE_SECONDS = 1.0
ASKED = struct.Struct("<dd")
CPUCLOCK_SCHED = 2
"""Linux: the clock number of a process's CPU time is its inverted id, shifted, and this."""
MODEL = ModelInfo("m", "fake", 100, 64, (2,), ("image",), "float32", 16)


def engine_link(address: str) -> Any:
    """The engine's end in this version of LookOnce."""
    try:
        return import_module("lookonce.ipc.socket_engine_link").SocketEngineLink(address)
    except ImportError:
        return import_module("lookonce.ipc.zmq_engine_link").ZmqEngineLink(f"ipc://{address}")


def client_link(address: str, name: str) -> Any:
    """The API process's end in this version of LookOnce."""
    try:
        return import_module("lookonce.ipc.socket_client_link").SocketClientLink(address, name)
    except ImportError:
        return import_module("lookonce.ipc.zmq_client_link").ZmqClientLink(f"ipc://{address}", name)


# --- the engine's side ---------------------------------------------------------------------------


def run_engine(address: str) -> None:
    """Answer until the parent closes stdin: `Received` for items, a stream of steps for stats."""
    channel = EngineChannel(engine_link(address))
    threading.Thread(target=_watch_parent, daemon=True).start()
    while True:
        for sender, message in channel.poll(1.0):
            if isinstance(message, UpdateCache):
                channel.send(sender, Received(message.seq))
            elif isinstance(message, Hello):
                channel.send(sender, Welcome(1, MODEL, 1, ready=True))
            elif isinstance(message, GetStats):
                steps = (sender, message.nonce, channel.writer())
                threading.Thread(target=stream_steps, args=steps).start()


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def stream_steps(sender: str, nonce: int, writer: EngineChannelWriter) -> None:
    """Send the tokens of `nonce` steps from this thread, then the process's CPU seconds."""
    names = [f"request-{number}" for number in range(STREAMS)]
    cpu = 0.0
    process = time.process_time()
    for step in range(nonce):
        deltas = Deltas([TokenDelta(name, 0, [step]) for name in names])
        before = time.thread_time()
        writer.send(sender, deltas)
        cpu += time.thread_time() - before
        time.sleep(STEP_SECONDS)
    whole = time.process_time() - process
    writer.send(sender, Stats(nonce, {"send": cpu, "process": whole}))


# --- the API process's side ----------------------------------------------------------------------


class Listener:
    """Counts tokens, and keeps the answers to `GetStats`."""

    def __init__(self) -> None:
        self.welcome = asyncio.Event()
        self.up = asyncio.Event()
        self.stats: asyncio.Queue[Stats] = asyncio.Queue()
        self.num_tokens = 0

    def connected(self) -> None:
        self.up.set()

    def disconnected(self) -> None:
        raise SystemExit("the engine's end is gone")

    def leased(self, message: object, fds: object) -> None:
        raise SystemExit("slabs came that nobody asked for")

    def received(self, message: object) -> None:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                self.num_tokens += len(delta.token_ids)
        elif isinstance(message, Stats):
            self.stats.put_nowait(message)
        elif isinstance(message, Welcome):
            self.welcome.set()


async def run_api(address: str) -> dict[str, float]:
    link = client_link(address, "api")
    channel = ClientChannel(link, max_bytes_in_flight=IN_FLIGHT_BYTES)
    listener = Listener()
    channel.open(listener)
    try:
        await listener.up.wait()
        channel.send_now(Hello("api"))
        await listener.welcome.wait()
        await stream(channel, listener, STEPS // 10)
        figures = await stream(channel, listener, STEPS)
        async with lateness() as idle:
            await asyncio.sleep(IDLE_SECONDS)
        figures["idle_p99_ms"] = percentile([wall for wall, _ in idle], 99)
        return figures | await send_items(channel)
    finally:
        channel.close()


async def stream(channel: ClientChannel, listener: Listener, steps: int) -> dict[str, float]:
    """CPU microseconds of a step at both ends, and of a token at this one."""
    tokens, client = listener.num_tokens, time.process_time()
    channel.send_now(GetStats(steps))
    engine = (await listener.stats.get()).counters
    client = time.process_time() - client
    tokens = listener.num_tokens - tokens
    if tokens != steps * STREAMS:
        raise SystemExit(f"{tokens} of {steps * STREAMS} tokens came")
    return {
        "send_us": engine["send"] / steps * 1e6,
        "engine_us": engine["process"] / steps * 1e6,
        "token_us": client / tokens * 1e6,
        "own_us": (engine["process"] + client) / steps * 1e6,
    }


@asynccontextmanager
async def lateness() -> AsyncIterator[list[tuple[float, float]]]:
    """How late the loop reads what another process writes, again and again while the block runs.

    Milliseconds from writing to reading, and the CPU time that this process used meanwhile: what
    the loop would be late on a machine that has nothing else to do. A thread of this process would
    hold its GIL now and then, and so make the loop late itself.
    """
    loop = asyncio.get_running_loop()
    late: list[tuple[float, float]] = []
    begun = asyncio.Event()
    out, into = os.pipe()
    os.set_blocking(out, False)

    def read() -> None:
        now, cpu = time.monotonic(), time.process_time()
        for asked, used in ASKED.iter_unpack(os.read(out, 100 * ASKED.size)):
            late.append(((now - asked) * 1e3, (cpu - used) * 1e3))
        begun.set()

    loop.add_reader(out, read)
    command = [sys.executable, __file__, "ask", str(into)]
    with subprocess.Popen(command, pass_fds=[into]) as asking:  # noqa: ASYNC220
        await begun.wait()
        late.clear()
        try:
            yield late
        finally:
            asking.kill()
    loop.remove_reader(out)
    os.close(out)
    os.close(into)


def ask(fd: int) -> None:
    """Write the time, and the parent's CPU time, until killed."""
    parents_cpu = (~os.getppid() << 3) | CPUCLOCK_SCHED
    while True:
        asked = time.monotonic(), time.clock_gettime(parents_cpu)
        os.write(fd, ASKED.pack(*asked))
        time.sleep(PROBE_SECONDS)


async def send_items(channel: ClientChannel) -> dict[str, float]:
    """How late the loop is while large items pass, and what they cost."""
    item = large_item()
    async with lateness() as late:
        started, cpu = time.perf_counter(), time.process_time()
        for seq in range(1, ITEMS + 1):
            async with channel.room(ITEM_BYTES):
                key = seq.to_bytes(32, "little")
                channel.send_now(UpdateCache(1, seq, CacheOps(adds=(KeyedItem(key, item),))))
        while channel.bytes_in_flight:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.005)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "late_p99_ms": percentile([wall for wall, _ in late], 99),
        "late_cpu_p99_ms": percentile([cpu for _, cpu in late], 99),
        "late_cpu_max_ms": max(cpu for _, cpu in late),
        "item_ms": seconds / ITEMS * 1e3,
        "item_cpu_ms": cpu / ITEMS * 1e3,
    }


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[int(percent / 100 * len(values))]


def large_item() -> ProcessedItem:
    data = bytearray(ITEM_BYTES)
    data[::4096] = b"\1" * len(data[::4096])  # its pages exist, as those of a processed picture do
    array = Array("float32", (ITEM_BYTES // 4,), memoryview(data))
    return ProcessedItem("image", {"pixel_values": array}, Expansion(((7, 4),), 7))


def main() -> None:
    if sys.argv[1] == "engine":
        run_engine(sys.argv[2])
    if sys.argv[1] == "ask":
        ask(int(sys.argv[2]))
    with tempfile.TemporaryDirectory(prefix="lookonce-bench-") as scratch:
        address = f"{scratch}/engine"
        command = [sys.executable, __file__, "engine", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as engine:
            try:
                print(json.dumps(uvloop.run(run_api(address))))
            finally:
                engine.kill()


if __name__ == "__main__":
    main()
