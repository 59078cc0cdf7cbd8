"""What tests of KV tiers ask a live server, and what they read of its answers."""

from __future__ import annotations

from typing import Any

from tests.support.drawing import ask, picture
from tests.support.live_server import LiveServer, until

SHAPES = picture(("red", "circle"), ("blue", "square"))
QUESTION = "What is in the picture?"
TRUTH = "a red circle to the left of a blue square"


def look(server: LiveServer, *, scope: str = "") -> dict[str, Any]:
    """One answer; it is the right one whatever the tiers do, and its figures agree."""
    body = {
        "model": "nano",
        "messages": ask(SHAPES, QUESTION),
        "reuse_receipt": True,
        "kv_transfer_params": {"num_lmcache_extra_cached_tokens": 0},
        "cache_salt": scope or None,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["choices"][0]["message"]["content"] == TRUTH
    receipt, told = answer["reuse_receipt"], answer["kv_transfer_params"]
    loaded = told["num_external_cached_tokens"]
    assert loaded <= told["num_lmcache_extra_cached_tokens"]
    assert receipt["external_cached_tokens"] == loaded == sum(by_tier(answer).values())
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == receipt["prefix_cached_tokens"] + loaded < answer["usage"]["prompt_tokens"]
    return answer


def by_tier(answer: dict[str, Any]) -> dict[str, int]:
    tiers: dict[str, int] = answer["kv_transfer_params"]["external_cache"]["by_tier"]
    return tiers


def status(answer: dict[str, Any]) -> str:
    return str(answer["kv_transfer_params"]["external_cache"]["status"])


def stored(server: LiveServer, tier: str, *, scope: str = "") -> dict[str, Any]:
    """`look`, and wait until the tier has what was computed for it."""
    name = f"kv_tier_stored_tokens_total:{tier}"
    before = server.metrics().get(name, 0)
    answer = look(server, scope=scope)
    until(lambda: server.metrics().get(name, 0) > before, 60, server.log)
    until(lambda: server.metrics()[f"kv_tier_queue_bytes:{tier}"] == 0, 60, server.log)
    return answer
