"""A real server with two tenants, one of which attacks while the other asks what has known answers.

Canaries are requests whose answers were asked for before the attack: the same must come during it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.live_server import LiveServer, until

ATTACKER, OTHER = "mallory", "alice"
"""Tenants; their keys are their names."""
PROMPTS = ("a red", "The picture shows", "1 2 3 4", "hello")
MIB = 1 << 20
SLOWEST = 2.0
"""Seconds a canary may take on a machine that does nothing else."""
REQUEST_SECONDS = 120.0
GROWTH = 0.1
REST_SECONDS = 20.0
SETTLED_SECONDS = 3.0
SMALL_CACHES = (
    "--mm-processor-cache-gb", "0.03", "--encoder-cache-gb", "0.02", "--kv-cache-gb", "0.05",
)  # fmt: skip
"""A first attack of each kind fills them: what a second one adds is kept by mistake."""
FIGURES: list[str] = []
"""What the tests have measured, for the end of the report."""


def note_figure(figure: str) -> None:
    """Let the report end with what the test that runs has measured."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].removesuffix(" (call)")
    FIGURES.append(f"{test}: {figure}")


def note_canaries(asked: int, wrong: int, slowest: float) -> None:
    note_figure(f"{asked} canaries, {wrong} wrong, the slowest {slowest:.2f} s")


def key_options() -> list[str]:
    return [word for name in (ATTACKER, OTHER) for word in ("--api-key", f"{name}:{name}")]


@dataclass(frozen=True)
class Memory:
    """Bytes that a process uses."""

    resident: int
    own: int
    """Of these, neither files nor shared memory: those of slabs are a cache, which is bounded."""


def memory_used(pid: int) -> Memory:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, value in (row.split(":") for row in rows)}
    return Memory(1024 * kib["Rss"], 1024 * kib["Anonymous"])


def memory_of(live: LiveServer) -> dict[int, Memory]:
    """The same of every process of a server."""
    found = {}
    for pid in live.pids(b"lookonce"):
        with suppress(OSError):  # it has just ended
            found[pid] = memory_used(pid)
    return found


def settled_memory(live: LiveServer) -> dict[int, Memory]:
    """The same, once no process has given anything back for `SETTLED_SECONDS`."""
    now, since = memory_of(live), time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        time.sleep(0.2)
        before, now = now, memory_of(live)
        if any(pid in before and now[pid].own < before[pid].own for pid in now):
            since = time.monotonic()
    return now


def check_memory(live: LiveServer, before: dict[int, Memory]) -> None:
    """No process has more of its own than before, but for a tenth of all it had; those that were
    replaced are not compared. An API process gives memory back a moment after it has come to rest.

    `before` is of after an attack of the same kind, which has filled caches and touched for the
    first time what is used again.
    """

    def grown() -> list[tuple[str, Memory, Memory]]:
        now = memory_of(live)
        return [
            (command_of(pid), had, now[pid])
            for pid, had in before.items()
            if pid in now and growth_of(had, now[pid]) > GROWTH
        ]

    until(lambda: not grown(), REST_SECONDS, lambda: f"(process, before, after): {grown()}")
    now = memory_of(live)
    compared = before.keys() & now.keys()
    growth, pid = max((growth_of(before[pid], now[pid]), pid) for pid in compared)
    had, has = before[pid], now[pid]
    note_figure(
        f"of {len(compared)} processes one has {growth:+.1%} at most: {had.own // MIB} MiB of its "
        f"own of {had.resident // MIB} in use, then {has.own // MIB}: {command_of(pid)[:60]}"
    )


def growth_of(before: Memory, after: Memory) -> float:
    """What a process has gained of its own, over all it had."""
    return (after.own - before.own) / before.resident


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


@dataclass
class Canaries:
    """What the other tenant saw meanwhile."""

    num_asked: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds."""

    def check(self) -> None:
        note_canaries(self.num_asked, len(self.wrong), self.slowest)
        assert self.num_asked > 0
        assert self.wrong == []


class AttackedServer:
    def __init__(self, live: LiveServer) -> None:
        self.live = live
        self._expected = {prompt: self._complete(prompt) for prompt in PROMPTS}

    def client(self, tenant: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.live.url,
            headers={"Authorization": f"Bearer {tenant}"},
            timeout=REQUEST_SECONDS,
        )

    def complete(self, tenant: str, **fields: object) -> httpx.Response:
        """A short greedy completion with these fields."""
        body = {"prompt": "a", "max_tokens": 4, "temperature": 0, **fields}
        with self.client(tenant) as client:
            return client.post("/v1/completions", json=body)

    def engine_memory(self) -> int:
        pid = self.live.engine_pid()
        assert pid is not None
        return memory_used(pid).own

    @contextmanager
    def canaries(self) -> Iterator[Canaries]:
        """The other tenant asks on and on while the block runs."""
        seen, stop = Canaries(), threading.Event()
        thread = threading.Thread(target=self._ask_on, args=(seen, stop))
        thread.start()
        try:
            yield seen
        finally:
            stop.set()
            thread.join()

    def _ask_on(self, seen: Canaries, stop: threading.Event) -> None:
        while not stop.is_set():
            for prompt in PROMPTS:
                began = time.monotonic()
                try:
                    answer = self._complete(prompt)
                except (httpx.HTTPError, AssertionError) as error:
                    seen.wrong.append(f"{prompt}: {error!r}")
                else:
                    if answer != self._expected[prompt]:
                        seen.wrong.append(f"{prompt}: {answer!r}")
                seen.slowest = max(seen.slowest, time.monotonic() - began)
                seen.num_asked += 1

    def _complete(self, prompt: str) -> str:
        response = self.complete(OTHER, prompt=prompt, max_tokens=8)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text
