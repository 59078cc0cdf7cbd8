"""Shared memory of a real server whose processes are killed: nothing of it is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.chaos import of_kind, processes, zombies
from tests.support.live_server import LiveServer, until
from tests.support.traffic import drawn

NAME = "memfd:lookonce-slab"
PICTURES, OTHERS = range(500, 504), range(600, 604)
"""Other tests ask the same server about others."""


def mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(NAME)


def descriptors(pid: int) -> int:
    links = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return sum(NAME in link for link in links)


def ask(server: LiveServer, number: int) -> str:
    body = {
        "messages": [{"role": "user", "content": [drawn(number).part]}],
        "temperature": 0,
        "max_tokens": 4,
    }
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("cache_server", ["shm"], indirect=True)
def test_killed_workers_and_engines_leave_no_mapping_and_no_descriptor(cache_server):
    """The last test of this server: it ends here, too."""
    server = cache_server
    answers = [ask(server, number) for number in PICTURES]
    workers = of_kind(server, "lookonce.render.media.worker")
    assert sum(map(mappings, workers)) >= 4
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    server.post("/reset_mm_cache")
    for number in OTHERS:  # a new worker, and new slabs
        ask(server, number)
    engine = server.engine_pid()
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    until(lambda: server.get("/ready").status_code != 200, 100, server.log)
    until(lambda: server.get("/ready").status_code == 200, 100, server.log)
    assert [ask(server, number) for number in PICTURES] == answers
    found = server.metrics()
    (engine,) = of_kind(server, "lookonce.engine.process")
    assert mappings(engine) == found["mm_slabs"]

    workers = of_kind(server, "lookonce.render.media.worker")

    def settled() -> bool:
        """Idle workers are told what to unmap; only spare slabs have a descriptor, in the API
        process."""
        return sum(map(mappings, workers)) <= found["mm_slabs"]

    until(settled, 60, lambda: str([mappings(pid) for pid in workers]))
    assert [descriptors(pid) for pid in (engine, *workers)] == [0] * (1 + len(workers))
    others = set(processes(server)) - {engine, *workers}
    assert sum(map(descriptors, others)) <= found["mm_slabs"] - 4, "of spare slabs"
    assert all(mappings(pid) <= found["mm_slabs"] for pid in others)
    assert server.stop() == 0
    assert (processes(server), zombies(server)) == ({}, [])
