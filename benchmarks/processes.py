"""`lookonce bench processes`: 1, 2 and 4 API processes beside each other.

    rates       requests/s of text, known pictures and new pictures, each with as many clients; CPU
                seconds per 1,000 requests by process: API processes, media workers, the engine
    memory      PSS of all processes together (shared pages once) with a full processor cache, when
                nothing was asked for so long that idle memory is given back

A server of each size is started in turn; every figure is also given as a ratio to one API process.
KV cache and encoder cache have 0.5 and 0.1 GiB unless the options say otherwise: both fill as
requests come, and would be taken for what API processes hold.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load_generator import Arrivals, run_load
from benchmarks.pictures import SIZES, data_url, encoded_picture, variant
from benchmarks.report import Report, publish
from benchmarks.running_server import (
    RunningServer,
    cpu_seconds,
    memory_bytes,
    running_server,
    set_environment,
)
from benchmarks.workloads import RequestShape, Workload, new, same, text

NUM_PROCESSES = (1, 2, 4)
KINDS = {
    "API": "lookonce.server.process",
    "workers": "lookonce.render.media.worker",
    "engine": "lookonce.engine.process",
    "fork server": "lookonce.ipc.fork_server",
}
GIB = 1 << 30
BATCH = 16
REST_SECONDS = 75.0
"""Free slabs are given back after a minute."""
SMALL_CACHES = {"--kv-cache-gb": "0.5", "--encoder-cache-gb": "0.1"}
FULL = 0.9
"""Share of the cache's bytes that counts as full: slabs leased ahead are part of its budget."""


@dataclass(frozen=True, slots=True)
class Rates:
    """One workload on one server."""

    requests_per_second: float
    cpu: dict[str, float]
    """Kind of process → CPU seconds per 1,000 requests."""


def pss(pid: int) -> int:
    """Bytes of memory of a process; pages that several share are divided among them."""
    return memory_bytes(pid, "Pss")


def memory(server: RunningServer) -> dict[str, int]:
    """Kind of process → bytes of all its processes."""
    found = {kind: sum(map(pss, server.processes(name))) for kind, name in KINDS.items()}
    return {**found, "supervisor": pss(server.pid)}


def _cpu(server: RunningServer) -> dict[str, float]:
    return {kind: sum(map(cpu_seconds, server.processes(name))) for kind, name in KINDS.items()}


def rates(server: RunningServer, work: Workload, clients: int) -> Rates:
    arrivals = Arrivals(concurrency=clients)
    run_load(server.url, work.warm_up, [], arrivals)
    before = _cpu(server)
    result = run_load(server.url, [], work.bodies, arrivals)
    after = _cpu(server)
    thousands = len(work.bodies) / 1000
    cpu = {kind: (after[kind] - before[kind]) / thousands for kind in KINDS}
    return Rates(len(work.bodies) / result.seconds, cpu)


def workloads(count: int, num_pictures: int, size: str) -> list[Workload]:
    body: dict[str, object] = {"model": None}
    shape = RequestShape("", output_tokens=4, picture=f"{size} JPEG", body=body)
    return [
        text(shape, count, BATCH),
        same(shape, count, BATCH),
        new(shape, num_pictures, BATCH),
    ]


def fill(server: RunningServer, nbytes: int, size: str, clients: int) -> float:
    """Ask about new pictures until the processor cache is full, or takes no more; its bytes."""
    encoded = encoded_picture(size, "JPEG")
    shape = RequestShape("", output_tokens=1, body={"model": None})
    held, unchanged, number = 0.0, 0, 0
    while held < FULL * nbytes and unchanged < 3:
        bodies = [_about(shape, variant(encoded, number + each)) for each in range(4 * BATCH)]
        number += len(bodies)
        run_load(server.url, [], bodies, Arrivals(concurrency=clients))
        before, held = held, server.metrics()["mm_cache_bytes"]
        unchanged = unchanged + 1 if held <= before else 0
    return held


def _about(shape: RequestShape, picture: bytes) -> bytes:
    image = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    return shape.request([image, {"type": "text", "text": "What?"}])


def reports(given: argparse.Namespace) -> list[Report]:
    cpu = tuple(f"{kind} CPU s/1,000" for kind in KINDS)
    rate = Report("processes", ("API processes", "requests", "requests/s", "ratio", *cpu))
    rate.notes.append(f"{given.clients} clients; new pictures: {given.size} JPEGs")
    held = Report(
        "processes (memory)",
        (
            "API processes",
            "cache MiB",
            "slabs MiB",
            *(f"{kind} MiB" for kind in KINDS),
            "all MiB",
            "ratio",
        ),
        notes=[f"PSS of all processes with a full processor cache, {REST_SECONDS:.0f} s at rest"],
    )
    first: dict[str, float] = {}
    for count in given.processes:
        options = [*given.options, "--api-processes", str(count)]
        options += ["--mm-processor-cache-gb", str(given.cache_gb)]
        for name, gib in SMALL_CACHES.items():
            options += [] if name in options else [name, gib]
        with running_server(options) as server:
            for work in workloads(given.requests, given.pictures, given.size):
                found = rates(server, work, given.clients)
                base = first.setdefault(work.name, found.requests_per_second)
                ratio = found.requests_per_second / base
                rate.add(count, work.name, found.requests_per_second, ratio, *found.cpu.values())
            cached = fill(server, int(given.cache_gb * GIB), given.size, given.clients)
            time.sleep(REST_SECONDS)
            slabs = server.metrics()["mm_slab_bytes"]
            by_kind = memory(server)
            total = sum(by_kind.values())
            base = first.setdefault("memory", total)
            kinds = (by_kind[kind] / 2**20 for kind in KINDS)
            held.add(count, cached / 2**20, slabs / 2**20, *kinds, total / 2**20, total / base)
    return [rate, held]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lookonce bench processes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=NUM_PROCESSES, help="API processes [1 2 4]"
    )
    parser.add_argument(
        "--requests", type=int, default=400, help="each of text and of known pictures"
    )
    parser.add_argument("--pictures", type=int, default=100, help="requests about new pictures")
    parser.add_argument("--clients", type=int, default=16, help="that ask at once")
    parser.add_argument("--size", choices=SIZES, default="512", help="of the pictures")
    parser.add_argument("--cache-gb", type=float, default=1.0, help="GiB of the processor cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("options", nargs="*", help="of `lookonce serve`, MODEL first, after --")
    given = parser.parse_args(arguments)
    set_environment()
    publish(reports(given), given.json)
    return 0
