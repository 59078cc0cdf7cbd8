"""Faults everywhere under mixed load: every failure is explained by one on its own request's path.

`make soak` sends 10,000 requests: `FAULT_REQUESTS` says how many.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos import API, ENGINE, WORKER, of_kind
from tests.support.faults import Faults
from tests.support.kv_servers import ValkeyServer
from tests.support.live_server import LiveServer, until
from tests.support.traffic import plans, working_set

NUM_REQUESTS = int(os.environ.get("FAULT_REQUESTS", "200"))
PATIENCE = 180.0

pytestmark = pytest.mark.soak


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="lookonce-valkey-") as folder:
        server = ValkeyServer(Path(folder))
        yield server
        server.close()


def test_every_failure_has_its_fault(valkey: ValkeyServer, tmp_path: Path) -> None:
    options = (
        "--api-processes", "2", "--mm-processor-cache-gb", "0.05",
        "--limit-mm-per-prompt", "image=4,audio=4", "--kv-load", "always",
        "--kv-tier", "host:16MB", "--kv-tier", f"disk:{tmp_path}:64MB",
        "--kv-tier", f"valkey://{valkey.socket}",
        "--log-format", "json", "--log-level", "debug",  # tells which process served a request
    )  # fmt: skip
    with LiveServer(*options) as live:
        until(lambda: len(of_kind(live, WORKER)) >= 2, 60, live.log)
        media = working_set(num_pictures=30, num_sounds=10)
        faults = Faults(
            server=live,
            plans=plans(media, 2000, seed=7),
            num_requests=NUM_REQUESTS,
            valkey=valkey,
        )
        faults.run(PATIENCE)
        sys.stdout.write(f"{faults.summary()}\n")
        told = [
            f"{seen.status} from {seen.began:.2f} to {seen.ended:.2f}: {seen.body[:300]!r}"
            for seen in faults.unexplained()
        ]
        assert not told, "\n".join([*told, *map(str, faults.injected[-20:]), live.log()[-3000:]])
        assert len(faults.kinds) == 10, faults.kinds
        until(lambda: len(of_kind(live, API)) == 2, PATIENCE, live.log)
        until(lambda: _is_quiet(live.metrics()), PATIENCE, live.log)
        counts = live.metrics()
        successes = _successes(counts)
        assert faults.num_successes <= successes <= faults.num_successes + faults.num_cut_off
        for status, seen in faults.statuses.items():
            counted = counts.get(f"http_responses_total:{status}", 0.0)
            assert seen <= counted <= seen + faults.num_cut_off, (status, seen, counted)
        assert counts["e2e_request_latency_seconds_count"] == successes
        assert counts["mm_cache_bytes"] == counts["mm_store_listed_bytes"]
        assert len(of_kind(live, ENGINE)) == 1


def _is_quiet(counts: dict[str, float]) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "mm_store_requests")
    return not any(counts.get(name, 1.0) for name in names)


def _successes(counts: dict[str, float]) -> float:
    return sum(n for name, n in counts.items() if name.startswith("request_success_total"))
