"""`kv_transfer_params`: asked for by a key, answered on every route, streamed or not."""

from __future__ import annotations

import pytest

from lookonce.types.kv import ExternalCacheStats
from lookonce.types.request import PrefillStats
from tests.support.server.site import events

ASK = {"num_lmcache_extra_cached_tokens": None}
ANSWER = {
    "num_lmcache_extra_cached_tokens": 48,
    "num_external_cached_tokens": 32,
    "external_cache": {"status": "partial", "by_tier": {"host": 16, "disk": 16}},
}


def give_reuse_stats(site) -> None:
    external = ExternalCacheStats(48, 32, "partial", (("host", 16), ("disk", 16)))
    site.engine._reuse_stats = lambda rendered: PrefillStats(2, 32, external=external)


def test_the_key_with_any_value_brings_the_figures(on_site):
    async def scenario(site):
        give_reuse_stats(site)
        for value in (None, 0, -5, "x", [], True):
            asked = {"num_lmcache_extra_cached_tokens": value, "do_remote_prefill": False}
            body = (await site.chat("hello", kv_transfer_params=asked)).json()
            assert body["kv_transfer_params"] == ANSWER
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 34

    on_site(scenario)


def test_without_the_key_nothing_is_added_and_the_answer_is_the_same(on_site):
    async def scenario(site):
        give_reuse_stats(site)
        for asked in (None, {}, {"other": 1}):
            body = (await site.chat("hello", kv_transfer_params=asked)).json()
            assert "kv_transfer_params" not in body
            assert body["choices"][0]["message"]["content"] == "a red circle"

    on_site(scenario)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_a_stream_carries_them_in_its_last_chunk_alone(on_site, options):
    async def scenario(site):
        give_reuse_stats(site)
        response = await site.chat("hello", stream=True, kv_transfer_params=ASK, **options)
        *others, last = events(response.text)
        assert last["kv_transfer_params"] == ANSWER
        assert not any("kv_transfer_params" in chunk for chunk in others)

    on_site(scenario)


def test_completions_sum_over_their_prompts(on_site):
    async def scenario(site):
        give_reuse_stats(site)
        body = {"prompt": ["one", "two"], "kv_transfer_params": ASK}
        whole = (await site.client.post("/v1/completions", json=body)).json()
        assert whole["kv_transfer_params"] == {
            "num_lmcache_extra_cached_tokens": 96,
            "num_external_cached_tokens": 64,
            "external_cache": {"status": "partial", "by_tier": {"host": 32, "disk": 32}},
        }
        streamed = await site.client.post("/v1/completions", json={**body, "stream": True})
        assert events(streamed.text)[-1]["kv_transfer_params"] == whole["kv_transfer_params"]

    on_site(scenario)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_generate_answers_them_whole_and_in_the_last_chunk_alone(on_site, options):
    async def scenario(site):
        give_reuse_stats(site)
        url, body = "/inference/v1/generate", {"token_ids": [97, 98], "kv_transfer_params": ASK}
        whole = (await site.client.post(url, json=body)).json()
        assert whole["kv_transfer_params"] == ANSWER
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 34
        response = await site.client.post(url, json={**body, "stream": True, **options})
        *others, last = events(response.text)
        assert last["kv_transfer_params"] == ANSWER
        assert not any("kv_transfer_params" in chunk for chunk in others)
        unasked = (await site.client.post(url, json={"token_ids": [97, 98]})).json()
        assert "kv_transfer_params" not in unasked

    on_site(scenario)


def test_a_server_without_tiers_says_none(on_site):
    async def scenario(site):
        body = (await site.chat("hello", kv_transfer_params=ASK)).json()
        assert body["kv_transfer_params"] == {
            "num_lmcache_extra_cached_tokens": 0,
            "num_external_cached_tokens": 0,
            "external_cache": {"status": "none", "by_tier": {}},
        }

    on_site(scenario)


def test_kv_transfer_params_that_are_no_object_are_refused(on_site):
    async def scenario(site):
        assert (await site.chat("hello", kv_transfer_params=3)).status_code == 400

    on_site(scenario)


def test_tier_metrics_have_their_labels(on_site):
    async def scenario(site):
        site.engine.counters = {
            "kv_tier_held_bytes:host": 7.0,
            "kv_tier_failures_total:valkey,timeout": 2.0,
            "external_prefix_cache_hits_total": 32.0,
        }
        text = (await site.client.get("/metrics")).text
        assert 'lookonce_kv_tier_held_bytes{tier="host"} 7.0' in text
        assert 'lookonce_kv_tier_failures_total{reason="timeout",tier="valkey"} 2.0' in text
        assert "lookonce_external_prefix_cache_hits_total 32.0" in text

    on_site(scenario)
