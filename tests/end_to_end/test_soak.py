"""The processor cache under load between real processes: no failure, and both sides stay equal.

`make soak` sends more requests (`SOAK_REQUESTS` says how many), and has one and two API processes
use each type of cache; two of them are also in test_chaos.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import pytest

from tests.support.live_server import LiveServer, until
from tests.support.traffic import REFUSED, drive, plans, working_set

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "200"))
IN_SOAK = "SOAK_REQUESTS" in os.environ
CONCURRENCY = 12
PICTURE_BYTES, SOUND_BYTES = 170_000, 52_000
GIB = 2**30
ZERO_WHEN_QUIET = (
    "num_requests_running",
    "num_requests_waiting",
    "mm_store_requests",
    "encoder_cache_holders",
    "kv_cache_usage_ratio",
)


@pytest.fixture(scope="module")
def media():
    return working_set(num_pictures=45, num_sounds=15)


def quarter_bytes() -> float:
    return (45 * PICTURE_BYTES + 15 * SOUND_BYTES) / 4


def small_server(api_processes: int, cache_type: str) -> LiveServer:
    """A quarter of the working set fits the processor cache; little fits the other tiers."""
    quarter = quarter_bytes() / GIB
    return LiveServer(
        "--limit-mm-per-prompt", "image=4,audio=4",
        "--api-processes", str(api_processes),
        "--mm-processor-cache-gb", f"{quarter:.6f}",
        "--mm-processor-cache-type", cache_type,
        "--kv-cache-gb", "0.02",
        "--encoder-cache-gb", "0.0002",
    )  # fmt: skip


def quiet(found: Mapping[str, float]) -> bool:
    return not any(found[name] for name in ZERO_WHEN_QUIET)


def soak(server: LiveServer, requests) -> dict[str, float]:
    """Send the requests and check what holds for any number of API processes.

    Returns the final metrics.
    """
    tally = asyncio.run(drive(server.url, requests, concurrency=CONCURRENCY))
    assert tally.unexpected == []
    assert tally.wrong == []
    assert tally.statuses.total() + tally.left == len(requests)
    until(lambda: quiet(server.metrics()), 100, lambda: str(server.metrics()))
    found = server.metrics()
    assert found["mm_cache_bytes"] == found["mm_store_listed_bytes"], "the two sides differ"
    assert found["mm_cache_evictions_total"] > 0
    assert found["mm_cache_hits_total"] > 0
    return found


@pytest.mark.parametrize("cache_type", ["shm", "lru"] if IN_SOAK else ["shm"])
def test_nothing_fails_nothing_is_sent_again_and_both_sides_end_equal(media, cache_type):
    requests = plans(media, NUM_REQUESTS, seed=3)
    assert sum(plan.refused for plan in requests) > len(requests) * REFUSED / 2
    with small_server(1, cache_type) as server:
        found = soak(server, requests)
    assert found["mm_cache_resends_total"] == 0
    assert found["mm_store_bytes"] == found["mm_cache_bytes"]
    assert found["mm_cache_asks_total"] > 0, "no reference ever had to be made good"
    if cache_type == "shm":
        assert found["mm_slab_reuses_total"] > 0
        assert found["mm_slab_bytes"] <= 2 * quarter_bytes()


@pytest.mark.skipif(not IN_SOAK, reason="in `make soak`")
@pytest.mark.parametrize("cache_type", ["shm", "lru"])
def test_two_api_processes_share_one_store(media, cache_type):
    requests = plans(media, NUM_REQUESTS // 5, seed=4)
    with small_server(2, cache_type) as server:
        found = soak(server, requests)
    assert 0 < found["mm_store_bytes"] <= found["mm_cache_bytes"]
