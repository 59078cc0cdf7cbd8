"""Kills processes of a live server at random under mixed load, and judges what its clients saw.

A request has failed by right if one of its own processes was killed: the API process that held its
connection, the engine, or the media worker that decoded one of its items. All others are
bystanders.

A worker decodes one item at a time, for the requests of one API process. So a killed worker excuses
requests about one item, of that process, that ran at that moment and were told so; and that only
once, however many other workers were killed beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.live_server import LiveServer
from tests.support.traffic import PlannedRequest

ENGINE, API, WORKER = "lookonce.engine.process", "lookonce.server.process", "lookonce.render.media"
FORK_SERVER = "lookonce.ipc.fork_server"
KINDS = (ENGINE, API, WORKER, FORK_SERVER)
SLAB = "memfd:lookonce-slab"
OF_A_WORKER = "its decoder crashed"
"""What a request is told whose media worker was killed while it worked."""
OF_NOBODY = "no process is there to answer"
"""What the supervisor answers while no API process serves."""
DRAWN = (API, API, API, WORKER, WORKER, WORKER, WORKER, ENGINE, ENGINE, FORK_SERVER)
"""Kinds to draw the next victim's from."""
PAUSE_SECONDS = 0.05
"""Of a client whose request has failed: eight that ask on and on would slow an engine's restart."""


# --- processes ------------------------------------------------------------------------------------


def processes(server: LiveServer) -> dict[int, str]:
    """pid → command line of every living process of the server, zombies left out."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, session = _stat(int(folder.name))
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if session == server.process.pid and state != "Z":
                found[int(folder.name)] = command
    return found


def of_kind(server: LiveServer, kind: str) -> list[int]:
    return sorted(pid for pid, command in processes(server).items() if kind in command)


def descendants(pid: int) -> set[int]:
    """Living processes that this one, or one of these, has started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            state, parent, _, _ = _stat(int(folder.name))
            if state != "Z":
                parents[int(folder.name)] = parent
    found: set[int] = set()
    more = {pid}
    while more := {each for each, parent in parents.items() if parent in more}:
        found |= more
    return found


def _stat(pid: int) -> tuple[str, int, int, int]:
    """State, parent, process group and session."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[2]), int(fields[3])


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_mappings(pid: int) -> int:
    """Mappings of shared memory without a name, and of files in the server's socket folder."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:" in line or "/lookonce-" in line for line in lines)


def mapped_slabs(pid: int) -> list[str]:
    """The inode of each mapping of a slab: one that is mapped twice is there twice."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if SLAB in line]


def shared_memory() -> int:
    """Bytes of shared memory on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")


def slabs_of(pids: Iterable[int]) -> set[str]:
    """The inodes of all slabs that these processes have mapped or open."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it ends just now
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if SLAB in line:
                    found.add(line.split()[4])
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if SLAB in os.readlink(fd):
                        found.add(str(fd.stat().st_ino))
    return found


def zombies(server: LiveServer) -> list[int]:
    """Processes of the server that have ended and that nobody has waited for."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                state, _, _, session = _stat(int(folder.name))
                if session == server.process.pid and state == "Z":
                    found.append(int(folder.name))
    return found


def client_ports(pid: int) -> set[int]:
    """The ports of the clients whose connections this process holds."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except OSError:
            continue
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, *rest = line.split()
        if f"socket:[{rest[6]}]" in inodes:
            ports.add(int(remote.partition(":")[2], 16))
    return ports


# --- load -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What one client saw."""

    plan: PlannedRequest
    began: float
    port: int = 0
    ended: float = 0.0
    request_id: str = ""
    """As the server's log names it."""
    status: int = 0
    """0: the connection ended before a whole answer had come."""
    body: str = ""

    @property
    def succeeded(self) -> bool:
        return self.status == 200 and '"error"' not in self.body

    @property
    def as_planned(self) -> bool:
        if self.plan.refused:
            return self.status == 400
        return self.succeeded and self.plan.answer in (None, said(self.body))


def said(body: str) -> str:
    """The answer of a response, streamed or not."""
    if not body.startswith("data:"):
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def ask(host: str, port: int, plan: PlannedRequest) -> Seen:
    """One request on a connection of its own."""
    seen = Seen(plan, time.monotonic(), request_id=os.urandom(8).hex())
    reader, writer = await asyncio.open_connection(host, port)
    seen.port = writer.get_extra_info("sockname")[1]
    body = json.dumps(plan.body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"X-Request-Id: {seen.request_id}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        answer = await reader.read()
        seen.status, seen.body = _parse(answer)
    except OSError:
        pass
    finally:
        seen.ended = time.monotonic()
        writer.close()
    return seen


def _parse(answer: bytes) -> tuple[int, str]:
    """Status and body; status 0 for an answer that was cut off."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    if not head or len(lines[0].split()) < 2:
        return 0, ""
    status = int(lines[0].split()[1])
    headers = dict(line.split(": ", 1) for line in lines[1:])
    if "content-length" in headers:
        return (status if len(body) == int(headers["content-length"]) else 0), body.decode()
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16) if size else -1
        if length == 0:
            return status, whole.decode()
        if length < 0 or len(rest) < length + 2:
            break
        whole, body = whole + rest[:length], rest[length + 2 :]
    return 0, whole.decode(errors="replace")


@dataclass(kw_only=True)
class Load:
    """Requests to a server by `concurrency` clients, without end, while something is done to it."""

    server: LiveServer
    plans: Sequence[PlannedRequest]
    concurrency: int = 8
    seed: int = 0
    seen: list[Seen] = field(default_factory=list)

    async def during(
        self,
        disturb: Callable[[random.Random], Awaitable[None]],
        patience: float,
        *,
        rest_seconds: float,
    ) -> None:
        """Load the server until `disturb` has ended, and `rest_seconds` longer; let every request
        end. `patience`: seconds that the last requests may take."""
        rng, stopped = random.Random(self.seed), asyncio.Event()
        plans = itertools.cycle(self.plans)
        clients = [
            asyncio.create_task(self._client(plans, stopped)) for _ in range(self.concurrency)
        ]
        try:
            await disturb(rng)
            await asyncio.sleep(rest_seconds)
        finally:
            stopped.set()
            async with asyncio.timeout(patience):
                await asyncio.gather(*clients)

    async def _client(self, plans: Iterator[PlannedRequest], stopped: asyncio.Event) -> None:
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        while not stopped.is_set():
            await self._take(await ask(host, int(port), next(plans)))

    async def _take(self, seen: Seen) -> None:
        self.seen.append(seen)

    async def until_ready(self) -> bool:
        """Until many connections in a row, to whatever processes, are told so; whether any was told
        before that no API process serves."""
        await asyncio.sleep(0.5)
        in_a_row, nobody_served = 0, False
        while in_a_row < 12:
            is_ready = False
            with suppress(httpx.HTTPError):  # of a process that was killed just now
                answer = await asyncio.to_thread(self.server.get, "/ready")
                is_ready = answer.status_code == 200
                nobody_served |= OF_NOBODY in answer.text
            in_a_row = in_a_row + 1 if is_ready else 0
            if not in_a_row:
                await asyncio.sleep(0.1)
        return nobody_served

    @property
    def num_successes(self) -> int:
        return sum(seen.succeeded for seen in self.seen)

    @property
    def num_cut_off(self) -> int:
        """Requests that the server may have answered completely although nobody saw it."""
        return sum(seen.status == 0 for seen in self.seen)


# --- kills ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Chaos(Load):
    """What was killed under a load."""

    kills: list[str] = field(default_factory=list)
    _lost_ports: dict[int, list[float]] = field(default_factory=dict)
    """Port → when the API process that held its connection was killed."""
    _killed_workers: list[tuple[set[int], float]] = field(default_factory=list)
    """Ports of an API process, and when one of its workers was killed."""
    _outages: list[tuple[float, float]] = field(default_factory=list)
    """From the kill of an engine until all answer that they are ready again."""
    _nobody_served: list[tuple[float, float]] = field(default_factory=list)
    """From the kill of the last API process that served until all answer that they are ready."""

    def run(self, num_kills: int, patience: float) -> None:
        """Load the server, kill `num_kills` times, and let every request end."""

        async def kill(rng: random.Random) -> None:
            for number in range(num_kills):
                await asyncio.sleep(rng.uniform(0.2, 1.5))
                kind = KINDS[number] if number < len(KINDS) else rng.choice(DRAWN)
                async with asyncio.timeout(patience):
                    await self._kill(kind, rng)

        asyncio.run(self.during(kill, patience, rest_seconds=1.0))

    async def _take(self, seen: Seen) -> None:
        await super()._take(seen)
        if not seen.as_planned:
            await asyncio.sleep(PAUSE_SECONDS)

    async def _kill(self, kind: str, rng: random.Random) -> None:
        while not (candidates := of_kind(self.server, kind)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        pid = rng.choice(candidates)
        try:
            os.kill(pid, signal.SIGSTOP)  # so that it takes no connection while we look
            while _stat(pid)[0] not in "TZ":  # noqa: ASYNC110  it may be about to take one
                await asyncio.sleep(0.001)
            _, _, group, _ = _stat(pid)  # of a worker: that of its API process
            now = time.monotonic()
            if kind == API:
                for port in client_ports(pid):
                    self._lost_ports.setdefault(port, []).append(now)
            elif kind == WORKER:
                self._killed_workers.append((client_ports(group), now))
            os.kill(pid, signal.SIGKILL)
        except OSError:  # it ends by itself: a worker of a process killed before
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # it may have been stopped
            return
        self.kills.append(kind)
        if kind == ENGINE:
            await self.until_ready()
            self._outages.append((now, time.monotonic()))
        elif kind == API and await self.until_ready():
            self._nobody_served.append((now, time.monotonic()))

    # --- judging ------------------------------------------------------------------------------

    def failed_bystanders(self) -> list[Seen]:
        failed = [seen for seen in self.seen if not seen.as_planned and not self._cut_off(seen)]
        told = [seen for seen in failed if seen.status == 422 and OF_A_WORKER in seen.body]
        excused = self._excused(told)
        return [seen for seen in failed if id(seen) not in excused]

    def _excused(self, told: Sequence[Seen]) -> set[int]:
        """Which of the requests that were told of a crashed decoder had a killed worker."""
        excused: set[int] = set()
        for ports, at in self._killed_workers:
            by_item: dict[str, set[int]] = {}
            for seen in told:
                if id(seen) in excused or not seen.began <= at <= seen.ended:
                    continue
                if seen.port in ports:
                    for item in seen.plan.media:
                        by_item.setdefault(item, set()).add(id(seen))
            excused |= max(by_item.values(), key=len, default=set())
        return excused

    def _cut_off(self, seen: Seen) -> bool:
        """Its API process or its engine was killed."""
        lost = any(
            at <= seen.ended for at in self._lost_ports.get(seen.port, ()) if at >= seen.began
        )
        out = any(seen.began < end and begin < seen.ended for begin, end in self._outages)
        return lost or out or self._refused(seen)

    def _refused(self, seen: Seen) -> bool:
        """It was answered by the supervisor, while it had no process that could have answered."""
        return OF_NOBODY in seen.body and any(
            begin <= seen.ended <= end for begin, end in self._nobody_served
        )
