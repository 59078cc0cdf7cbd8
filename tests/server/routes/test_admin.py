"""Health, readiness, version, models and metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from lookonce.config import ApiKey, key_digest


async def figures(site) -> dict[str, float]:
    """Every sample of /metrics: `name` or `name{label=value}` → value."""
    text = (await site.client.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items() if k != "model_name")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_health_follows_the_engine_and_readiness_the_service(on_site):
    async def scenario(site):
        expected = {"starting": (200, 503), "ready": (200, 200), "stuck": (503, 503),
                    "dead": (503, 503)}  # fmt: skip
        for state, (health, ready) in expected.items():
            site.engine.state = state
            assert (await site.client.get("/health")).status_code == health
            assert (await site.client.get("/ready")).status_code == ready
            assert (await site.client.get("/v1/models")).status_code == 200

    on_site(scenario)


def test_readiness_tells_how_long_the_engine_process_has_been_silent(on_site):
    async def scenario(site):
        assert (await site.client.get("/ready")).json() == {"status": "ready"}
        for silent, told in ((0.01, 0.0), (3.14, 3.1)):
            site.engine.silence = silent
            answer = (await site.client.get("/ready")).json()
            assert answer == {"status": "ready", "engine_silent_seconds": told}

    on_site(scenario)


def test_models_and_version(on_site):
    async def scenario(site):
        models = (await site.client.get("/v1/models")).json()
        assert [card["id"] for card in models["data"]] == ["recital"]
        assert models["data"][0]["max_model_len"] == 200
        assert models["data"][0]["modalities"] == ["image", "audio"]
        assert (await site.client.get("/v1/models/recital")).json() == models["data"][0]
        assert (await site.client.get("/version")).json()["version"]

    on_site(scenario)


def test_requests_are_counted_and_timed(on_site):
    async def scenario(site):
        await site.chat("hello")
        await site.chat("hello", n=2, stream=True, max_tokens=3)
        found = await figures(site)
        assert found["lookonce_request_success_total{finished_reason=stop}"] == 1
        assert found["lookonce_request_success_total{finished_reason=length}"] == 1
        assert found["lookonce_prompt_tokens_total"] == 10
        assert found["lookonce_generation_tokens_total"] == 13 + 6
        assert found["lookonce_time_to_first_token_seconds_count"] == 2
        assert found["lookonce_e2e_request_latency_seconds_count"] == 2
        assert found["lookonce_inter_token_latency_seconds_count"] == 12 + 4
        assert found["lookonce_render_seconds_count"] == 2
        assert not any(name.startswith("vllm:") for name in found)

    on_site(scenario)


def test_a_request_that_fails_is_no_success(on_site):
    async def scenario(site):
        site.engine.refusal = ValueError()  # type: ignore[assignment]
        await site.chat("hello")
        found = await figures(site)
        assert not any("success_total" in name for name in found)

    on_site(scenario)


def test_what_others_count_is_read_when_asked(on_site):
    async def scenario(site):
        site.engine.counters = {"prefix_cache_hits_total": 48, "kv_cache_usage_ratio": 0.25}
        counts = site.services.metrics.counts
        counts.count("mm_cache_queries_total").add(5)
        decodes = counts.by_label("media_decodes_total")
        decodes["image"] += 3
        decodes["audio"] += 4
        found = await figures(site)
        assert found["lookonce_prefix_cache_hits_total"] == 48
        assert found["lookonce_kv_cache_usage_ratio"] == 0.25
        assert found["lookonce_mm_cache_queries_total"] == 5
        assert found["lookonce_media_decodes_total{modality=image}"] == 3
        assert found["lookonce_media_decodes_total{modality=audio}"] == 4
        assert found["lookonce_num_requests_running"] == 0

    on_site(scenario)


def test_vllm_s_names_on_request(on_site):
    async def scenario(site):
        site.services.metrics.counts.count("mm_cache_hits_total").add(7)
        site.engine.counters = {"kv_cache_usage_ratio": 0.5}
        await site.chat("hello")
        found = await figures(site)
        assert found["vllm:mm_cache_hits_total"] == found["lookonce_mm_cache_hits_total"] == 7
        assert found["vllm:kv_cache_usage_perc"] == 0.5
        assert found["vllm:request_success_total{finished_reason=stop}"] == 1
        assert found["vllm:time_to_first_token_seconds_count"] == 1
        assert found["vllm:num_requests_running"] == 0

    on_site(scenario, vllm_metric_names=True)


def test_a_tenant_is_told_what_reuse_saved_it_and_an_admin_what_it_saved_all(on_site):
    async def scenario(site):
        keys = {"one": "a", "two": "b", "root": "c"}
        site.services.keys.replace(
            tuple(ApiKey(key_digest(k), tenant=t, admin=k == "root") for k, t in keys.items())
        )
        body = {"messages": [{"role": "user", "content": "hello"}]}
        told = {}
        for key in keys:
            site.client.headers["Authorization"] = f"Bearer {key}"
            await site.client.post("/v1/chat/completions", json=body)
            told[key] = (await site.client.get("/savings")).json()
        # the engine of this site finds 3 tokens of every prompt
        assert told["one"]["saved"] == told["two"]["saved"]
        assert (told["one"]["saved"]["prompt_tokens"], told["one"]["saved"]["cached_tokens"]) == (
            5,
            3,
        )
        assert "tenants" not in told["one"]
        assert told["root"]["saved"]["cached_tokens"] == 9
        assert told["root"]["tenants"].keys() == {"a", "b", "c"}

    on_site(scenario, api_key=("x",))
