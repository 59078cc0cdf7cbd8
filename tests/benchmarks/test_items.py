"""The items benchmark drives a session as a client would, and what it times really happens."""

from __future__ import annotations

import weakref

import numpy as np

from benchmarks import engine_without_model as items_world
from benchmarks.engine_without_model import EngineWithoutModel, LiveSession, Times, items_in_a_row
from benchmarks.engine_without_model import request as prompt_of
from benchmarks.items import deep_size, kept_bytes
from lookonce.types.media import Array, Expansion, ProcessedItem


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
    engine = EngineWithoutModel(max_tokens=200, chunk=32, rows_cached=64, longest_item=4)
    engine.scheduler.add(prompt_of(features, num_tokens=81, max_tokens=1), items)
    times = Times()
    while engine.step(times):
        pass
    assert len(times.plan) == 4, "three chunks, and the step that forgets the request"
    assert engine.scheduler.stats()["encoder_runs_total"] == 20


def test_raw_data_is_gone_once_its_kv_is_computed(monkeypatch):
    raw = []

    def item(rows: int) -> ProcessedItem:
        values = np.zeros(items_world.RAW_BYTES, np.uint8)
        raw.append(weakref.ref(values))
        arrays = {
            "num_rows": Array("int64", (), rows.to_bytes(8, "little")),
            "features": Array("uint8", values.shape, values.data),
        }
        expansion = Expansion(((items_world.PLACEHOLDER, rows),), items_world.PLACEHOLDER)
        return ProcessedItem("audio", arrays, expansion)

    monkeypatch.setattr(items_world, "_item", item)
    session = LiveSession(40)
    for _ in range(40):
        session.run(1)
        assert not any(ref() is not None for ref in raw[:-1])
    assert session.stats()["encoder_runs_total"] == len(raw) == 40


def test_what_a_session_keeps_of_an_item_is_small_and_the_same_for_each():
    kept = kept_bytes([250, 500, 1000, 2000])
    first, second = (kept[500] - kept[250]) / 250, (kept[2000] - kept[1000]) / 1000
    assert 0 < second < 40
    assert first < 60


def test_a_deep_size_counts_everything_once():
    data = bytes(1000)
    shared = [data, data, memoryview(data)]
    array = np.zeros(500, np.uint8)
    assert 1000 < deep_size(shared) < 1500
    assert 500 < deep_size([array[10:20], {"a": array}]) < 1500
    runs = ((7, 12345),)
    assert deep_size(Expansion(runs, 7)) > deep_size(runs)
