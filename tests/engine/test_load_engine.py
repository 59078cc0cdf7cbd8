"""From a model folder to a warm engine, and what start-up refuses."""

from __future__ import annotations

import os

import pytest
import torch

from lookonce.config import EventsConfig, KVConfig, SchedulerConfig
from lookonce.engine.process import load_engine as build_module
from lookonce.engine.process.load_engine import load_engine
from lookonce.errors import BadRequestError, ConfigError, ModelLoadError
from lookonce.types import cpu
from lookonce.types.kv import TierSpec
from tests.support.core.builders import request
from tests.support.engine.loading import build, settings


def test_an_engine_is_warm_and_its_counters_are_at_zero(folder):
    core, preprocessor = build(settings(folder("llama")))
    stats = core.stats()
    assert all(value == 0 for value in stats.values())
    preprocessor.preprocess(request("r", [1, 2, 3]), {})
    core.add(request("r", [1, 2, 3]), {})
    tokens = []
    while (output := core.step()) is not None:
        tokens += [token for delta in output.deltas for token in delta.token_ids]
    assert len(tokens) == 8
    core.check_integrity()


def test_engines_on_the_same_cores_tell_one_name_of_them_and_how_many_they_use(
    folder, tmp_path, monkeypatch
):
    """So that a router knows which engines share cores."""
    given = settings(folder("llama"), events=EventsConfig("ipc://events", "ipc://replay"))

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as by OMP_NUM_THREADS
    monkeypatch.setattr(cpu, "CGROUPS", tmp_path)

    def load_on(*cores):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
        core, _ = build(given)
        return core.load

    one, again, apart = load_on(0, 1), load_on(1, 0), load_on(2, 3)
    assert one.machine == again.machine > 0
    assert apart.machine not in (0, one.machine)
    assert (one.cores, one.threads) == (2, 1)
    monkeypatch.setattr(build_module, "BOOT_ID", tmp_path / "no such file")
    unnamed = load_on(0, 1)
    assert (unnamed.machine, unnamed.cores, unnamed.threads) == (0, 0, 0)


def test_engines_in_containers_with_quotas_have_these_cores_and_share_none(
    folder, tmp_path, monkeypatch
):
    """A router took all pods of a machine for engines that share all of its cores."""
    given = settings(folder("llama"), events=EventsConfig("ipc://events", "ipc://replay"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)

    def load_in(pod, quota):
        cgroups = tmp_path / pod
        cgroups.mkdir(exist_ok=True)
        (cgroups / "cpu.max").write_text(f"{quota} 100000\n")
        monkeypatch.setattr(cpu, "CGROUPS", cgroups)
        core, _ = build(given)
        return core.load

    one, beside, apart = load_in("a", 400_000), load_in("a", 400_000), load_in("b", 200_000)
    assert one.machine == beside.machine != apart.machine
    assert (one.cores, one.threads) == (4, 4)
    assert (apart.cores, apart.threads) == (2, 2)
    assert load_in("c", "max").cores == 64


def test_loading_is_reported_up_to_the_last_weight(folder):
    told = []
    load_engine(settings(folder("llama")), lambda done, total: told.append((done, total)))
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] > 0


def test_a_token_budget_below_the_largest_unsplittable_item_is_refused(folder):
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=1)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens must be at least"):
        build(settings(folder("gemma3"), scheduler=scheduler))


def test_a_kv_cache_without_room_for_a_block_is_refused(folder):
    with pytest.raises(ConfigError, match="--kv-cache-gb"):
        build(settings(folder("llama"), kv=KVConfig(cache_bytes=10)))


def test_a_kv_cache_larger_than_the_machine_is_refused(folder):
    with pytest.raises(ConfigError, match=r"--kv-cache-gb is 1048576\.0, but the cpu has"):
        build(settings(folder("llama"), kv=KVConfig(cache_bytes=1 << 50)))


def test_a_kv_cache_larger_than_the_container_may_take_is_refused(folder, tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(build_module, "CONTAINER_LIMITS", (tmp_path / "no such file", limit))
    limit.write_text(f"{1 << 20}\n")
    with pytest.raises(ConfigError, match="--kv-cache-gb"):
        build(settings(folder("llama"), kv=KVConfig(cache_bytes=1 << 21)))
    limit.write_text("max\n")
    build(settings(folder("llama"), kv=KVConfig(cache_bytes=1 << 21)))


def test_a_hybrid_model_keeps_its_states_in_tiers(folder, tmp_path):
    tier = TierSpec("disk", path=str(tmp_path), capacity_bytes=1 << 30)
    kv = KVConfig(tiers=(tier,), load_policy="always")
    for num_loaded in (0, 32):
        core, _ = build(settings(folder("text:lfm2"), kv=kv))
        core.add(request("r", list(range(10, 50))), {})
        told, pending = [], 1.0
        while core.has_work or core.num_waiting or pending:
            output = core.step()
            told += (
                [d.reuse_stats.external for d in output.deltas if d.reuse_stats] if output else []
            )
            stats = core.stats()
            waiting = ("queue_bytes", "blocks_held", "states_held")
            pending = sum(stats[name] for name in stats if any(word in name for word in waiting))
        core.close()
        assert told[0].loaded == num_loaded
    with pytest.raises(ConfigError, match="host: 4000 bytes are no room for this model's states"):
        build(settings(folder("text:lfm2"), kv=KVConfig(tiers=(TierSpec("host", 4000),))))


def test_no_sequence_is_longer_than_the_kv_cache(folder):
    _, preprocessor = build(settings(folder("llama"), kv=KVConfig(cache_bytes=1 << 14)))
    limit = preprocessor.model.max_model_len
    assert limit % 16 == 0
    with pytest.raises(BadRequestError, match=f"context is {limit} tokens"):
        preprocessor.preprocess(request("r", [1] * limit), {})


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelLoadError):
        build(settings(tmp_path))
