"""The items benchmark drives a session as a client would, and what it times really happens."""

from __future__ import annotations

from lookonce.bench.items_world import LiveSession, Times, World, items_in_a_row
from lookonce.bench.items_world import request as prompt_of


def test_a_live_session_computes_one_item_in_each_step():
    session = LiveSession(40)
    times = session.run(40)
    assert len(times.extend) == len(times.plan) == len(times.gather) == len(times.apply) == 40
    stats = session.stats()
    assert stats["encoder_runs_total"] == 40
    assert stats["generation_tokens_total"] == 41
    session.end()
    assert session.stats()["kv_cache_usage_ratio"] == 0.0


def test_a_prompt_of_items_is_computed_in_chunks():
    features, items = items_in_a_row(20, 4)
    world = World(max_tokens=200, chunk=32, rows_cached=64, longest_item=4)
    world.scheduler.add(prompt_of(features, num_tokens=81, max_tokens=1), items)
    times = Times()
    while world.step(times):
        pass
    assert len(times.plan) == 4, "three chunks, and the step that forgets the request"
    assert world.scheduler.stats()["encoder_runs_total"] == 20
