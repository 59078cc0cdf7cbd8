"""Limits of tenants and keys: exact over processes, told in headers, and given back."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.config import Options, key_digest, resolve
from lookonce.engine.supervisor.socket_folder import socket_folder
from lookonce.errors import RateLimitedError
from lookonce.frontend.model_download import with_local_model
from lookonce.server.rate_limits import RateLimits, count_media, duration
from lookonce.server.routes.realtime.audio import PCM_24K, Clip
from lookonce.server.services import open_services
from lookonce.types.fair_queue import TenantWeights
from lookonce.types.limits import Limits, TenantLimits, UsageLimits


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def limited(tmp_path, clock, *, index=0, **fields):
    limits = Limits(default=TenantLimits(**fields))
    return RateLimits(limits, tmp_path / "limits", num_processes=3, index=index, clock=clock)


def test_a_rate_lets_one_period_through_at_once_and_then_as_much_as_comes(tmp_path):
    clock = Clock()
    rates = limited(tmp_path, clock, requests_per_second=5)
    for _ in range(5):
        with rates.admit("a"):
            pass
    with pytest.raises(RateLimitedError) as refused:
        rates.admit("a")
    assert refused.value.retry_after == pytest.approx(0.2)
    assert refused.value.code == "rate_limit_exceeded"
    with rates.admit("b"):  # another one's
        pass
    clock.now += 0.2
    with rates.admit("a"):
        pass
    with pytest.raises(RateLimitedError):
        rates.admit("a")


def test_processes_share_what_is_used_and_what_runs(tmp_path):
    clock = Clock()
    one, two = (
        limited(tmp_path, clock, index=index, requests_per_second=100, concurrent_requests=2)
        for index in (0, 1)
    )
    first, second = one.admit("a"), two.admit("a")
    for rates in (one, two):
        with pytest.raises(RateLimitedError, match="2 concurrent requests"):
            rates.admit("a")
    with first:
        pass
    with one.admit("a"), pytest.raises(RateLimitedError):
        two.admit("a")
    with second:
        pass


def test_a_process_that_is_started_again_has_no_requests_running(tmp_path):
    clock = Clock()
    limited(tmp_path, clock, index=1, concurrent_requests=1).admit("a")
    other = limited(tmp_path, clock, index=0, concurrent_requests=1)
    with pytest.raises(RateLimitedError):
        other.admit("a")
    limited(tmp_path, clock, index=1, concurrent_requests=1)
    with other.admit("a"):
        pass


def test_tokens_that_are_not_generated_come_back(tmp_path):
    clock = Clock()
    rates = limited(tmp_path, clock, tokens_per_minute=600)
    with rates.admit("a") as usage:
        usage.take_tokens(100, 400)
        with rates.admit("a") as other, pytest.raises(RateLimitedError) as refused:
            other.take_tokens(150, 100)
        assert refused.value.retry_after == pytest.approx(15.0)  # 150 tokens too few
        usage.generated(50)
    assert dict(rates.headers(usage._subjects))[b"x-ratelimit-remaining-tokens"] == b"450"


def test_a_prompt_larger_than_a_whole_bucket_is_let_in_when_it_is_full(tmp_path):
    clock = Clock()
    rates = limited(tmp_path, clock, tokens_per_minute=60)
    with rates.admit("a") as usage:
        usage.take_tokens(120, 1000)
    with rates.admit("a") as usage:
        with pytest.raises(RateLimitedError) as refused:
            usage.take_tokens(1, 0)
        clock.now += refused.value.retry_after
        usage.take_tokens(1, 0)


def test_a_key_has_limits_of_its_own_beside_its_tenants(tmp_path):
    clock = Clock()
    small = UsageLimits(requests_per_second=1)
    limits = Limits(default=TenantLimits(requests_per_second=3), keys={"a" * 12: small})
    rates = RateLimits(limits, tmp_path / "limits", clock=clock)
    with rates.admit("t", "a" * 64) as usage:
        assert dict(usage.headers())[b"x-ratelimit-limit-requests"] == b"1"
    with pytest.raises(RateLimitedError, match="limit of 1 requests per second"):
        rates.admit("t", "a" * 64)
    for _ in range(2):  # the refused one has cost its tenant nothing
        with rates.admit("t", "b" * 64):
            pass
    with pytest.raises(RateLimitedError, match="limit of 3 requests per second"):
        rates.admit("t", "b" * 64)


def test_weights_come_from_the_file_and_change_with_it(tmp_path):
    weights = TenantWeights()
    default = TenantLimits(weight=2)
    limits = Limits(default=default, tenants={"a": TenantLimits(weight=8), "b": default})
    rates = RateLimits(limits, tmp_path / "limits", weights=weights)
    assert [weights.of(tenant) for tenant in ("a", "b", "c")] == [8, 2, 2]
    rates.replace(Limits())
    assert weights.of("a") == 1


STEPS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 40), st.floats(0, 2)), max_size=40)


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_no_more_than_the_rate_is_let_through_in_any_time(tmp_path_factory, steps):
    """In every stretch of time at most what comes in it, and one bucket."""
    clock = Clock()
    rates = limited(tmp_path_factory.mktemp("r"), clock, tokens_per_minute=600)
    taken = []
    for tenant, amount, pause in steps:
        clock.now += pause
        with rates.admit(tenant) as usage, suppress(RateLimitedError):
            usage.take_tokens(amount, 0)
            taken.append((tenant, clock.now, amount))
    for tenant in "ab":
        own = [(at, amount) for name, at, amount in taken if name == tenant]
        for start, (begun, _) in enumerate(own):
            used = 0
            for at, amount in own[start:]:
                used += amount
                assert used <= 600 + 10 * (at - begun) + 1e-6


def _flood(path, index, results):
    limits = Limits(default=TenantLimits(tokens_per_minute=6_000, concurrent_requests=2))
    rates = RateLimits(limits, path, num_processes=3, index=index, clock=lambda: 5.0)
    counted = Counter()
    for _ in range(400):
        try:
            with rates.admit("a") as usage:
                usage.take_tokens(10, 0)
                counted["taken"] += 1
        except RateLimitedError as refused:
            counted["concurrent" if "concurrent" in refused.message else "tokens"] += 1
    results.put(counted)


def test_three_processes_at_once_let_through_exactly_what_they_may(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    flooding = [
        context.Process(target=_flood, args=(tmp_path / "limits", index, results))
        for index in range(3)
    ]
    for process in flooding:
        process.start()
    counted = sum((results.get(timeout=60) for _ in flooding), Counter())
    for process in flooding:
        process.join()
    assert counted["taken"] == 600
    assert counted.total() == 1200
    rates = limited(tmp_path, lambda: 5.0, concurrent_requests=1)
    with rates.admit("a"):  # none is counted as running
        pass


def test_durations_are_written_as_openai_writes_them():
    assert [duration(s) for s in (0, 0.0171, 1.2, 59.99, 360)] == [
        "0ms", "18ms", "1.2s", "60s", "6m0s",
    ]  # fmt: skip


def test_media_are_counted_before_they_are_checked():
    parts = [{"type": "text"}, {"type": "image_url"}, {"type": "odd"}, "x", {}]
    assert count_media([{"content": parts}, {"content": "text"}, "x", {}]) == 3


# --- through the server ---------------------------------------------------------------------------


def limited_site(on_site, tmp_path, scenario, text, **options):
    path = tmp_path / "limits.toml"
    path.write_text(text)

    async def whole(site):
        rates = RateLimits(
            site.services.config.server.limits,
            tmp_path / "limits",
            weights=site.services.weights,
            counts=site.services.metrics.counts,
        )
        site.services.rates = rates
        await scenario(site)
        rates.close()

    on_site(whole, limits=str(path), **options)


def test_the_weights_of_the_file_reach_everything_that_tenants_take_turns_at(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text("[tenants.a]\nweight = 8")
    config = with_local_model(resolve(Options(limits=str(path))))

    async def scenario():
        with socket_folder(config.channel.address):
            async with open_services(config, restarted=True) as services:
                assert services.weights.of("a") == 8

    asyncio.run(scenario())


def test_clients_are_told_what_is_left_and_when_to_come_again(on_site, tmp_path):
    async def scenario(site):
        first = await site.chat(max_tokens=5)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "1"
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 1000
        second = await site.chat(max_tokens=5)
        assert second.status_code == 429
        assert second.json()["error"]["code"] == "rate_limit_exceeded"
        assert second.json()["error"]["type"] == "rate_limit_error"
        assert int(second.headers["retry-after"]) == 100
        assert second.headers["x-ratelimit-limit-requests"] == "1"
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        assert second.headers["x-ratelimit-limit-tokens"] == "1000"
        assert site.services.metrics.counts.read()["rate_limited_total:requests"].numbers == (1,)
        assert (await site.client.get("/health")).status_code == 200
        models = await site.client.get("/v1/models")
        assert models.status_code == 200
        for path in ("/v1/responses/resp_1/input_items", "/v1/conversations/conv_1"):
            assert (await site.client.get(path)).status_code == 429  # they may read much

    text = "[default]\nrequests_per_second = 0.01\ntokens_per_minute = 1000"
    limited_site(on_site, tmp_path, scenario, text)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_by_what_was_used(on_site, tmp_path, stream):
    async def scenario(site):
        await site.chat("x" * 10, max_tokens=5, stream=stream)
        await asyncio.sleep(0)
        refused = await site.chat("x" * 90, max_tokens=5, stream=stream)
        assert refused.status_code == 429
        assert "tokens per minute" in refused.json()["error"]["message"]
        left = int(refused.headers["x-ratelimit-remaining-tokens"])
        assert 100 - 10 - 20 < left < 100 - 10

    limited_site(on_site, tmp_path, scenario, "[default]\ntokens_per_minute = 100")


def user(text):
    return [{"role": "user", "content": text}]


READ_ONLY = {
    "/tokenize": {"prompt": "x" * 60},
    "/detokenize": {"tokens": [5] * 60},
    "/v1/completions/render": {"prompt": "x" * 60},
    "/v1/chat/completions/render": {"messages": user("x" * 60)},
    "/v1/messages/count_tokens": {"messages": user("x" * 60)},
    "/v1/responses/input_tokens": {"input": "x" * 60},
}


@pytest.mark.parametrize("path", READ_ONLY)
def test_tokens_that_are_only_counted_are_tokens(on_site, tmp_path, path):
    async def scenario(site):
        statuses = []
        for _ in range(3):
            answer = await site.client.post(path, json=READ_ONLY[path])
            statuses.append(answer.status_code)
        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert "tokens per minute" in answer.text
        for prompt in site.renderer.rendered:  # a read-only renderer pins nothing
            site.renderer.release(prompt)

    limited_site(on_site, tmp_path, scenario, "[default]\ntokens_per_minute = 100")


@pytest.mark.parametrize("limit", ["requests_per_second = 0.01", "tokens_per_minute = 100"])
def test_anthropic_s_clients_are_told_too(on_site, tmp_path, limit):
    async def scenario(site):
        def post(text):
            messages = [{"role": "user", "content": text}]
            return site.client.post("/v1/messages", json={"messages": messages, "max_tokens": 5})

        assert (await post("x" * 10)).status_code == 200
        refused = await post("x" * 90)
        assert refused.status_code == 429
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) > 1

    limited_site(on_site, tmp_path, scenario, f"[default]\n{limit}")


def test_media_are_limited_before_they_are_loaded(on_site, tmp_path):
    async def scenario(site):
        part = {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}
        body = {"messages": [{"role": "user", "content": [part, part, part]}]}
        await site.client.post("/v1/chat/completions", json=body)
        refused = await site.client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 429
        assert "media per minute" in refused.json()["error"]["message"]

    limited_site(on_site, tmp_path, scenario, "[default]\nmedia_per_minute = 4")


def test_answers_are_limited(on_site, tmp_path):
    async def scenario(site):
        refused = await site.chat(max_tokens=9)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "max_tokens"
        for asked in ({}, {"max_tokens": 8}):
            answer = await site.chat("recite this to me", **asked)
            assert answer.json()["usage"]["completion_tokens"] <= 8
        tokens = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9}}
        for more, status in (({}, 400), ({"shorten_max_tokens": True}, 200)):
            answer = await site.client.post("/inference/v1/generate", json=tokens | more)
            assert answer.status_code == status
        assert site.engine.samplings[-1].max_tokens == 8

    limited_site(on_site, tmp_path, scenario, "[default]\nmax_tokens = 8")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "recite this to me"}]}),
        ("/v1/completions", {"prompt": "recite this to me"}),
    ],
)
def test_what_is_rendered_is_no_more_than_may_be_generated(on_site, tmp_path, route, body):
    async def scenario(site):
        refused = await site.client.post(f"{route}/render", json={**body, "max_tokens": 9})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        for asked, most in (({}, 8), ({"max_tokens": 5}, 5)):
            rendered = await site.client.post(f"{route}/render", json=body | asked)
            site.renderer.rendered.clear()  # what is rendered for others is not pinned here
            assert rendered.json()["sampling_params"]["max_tokens"] == most
            answer = await site.client.post("/inference/v1/generate", json=rendered.json())
            assert answer.status_code == 200, answer.text
            assert site.engine.samplings[-1].max_tokens == most

    limited_site(on_site, tmp_path, scenario, "[default]\nmax_tokens = 8")


@pytest.mark.parametrize(
    ("route", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}]},
            "max_completion_tokens",
        ),
        ("/v1/completions", {"prompt": "hi"}, "max_tokens"),
        ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
    ],
)
def test_a_longer_answer_than_the_key_may_have_is_refused_by_its_name(
    on_site, tmp_path, route, body, name
):
    async def scenario(site):
        refused = await site.client.post(route, json={**body, name: 9})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["message"].startswith(f"{name}: 9 tokens are asked for")
        assert (await site.client.post(route, json={**body, name: 8})).status_code == 200

    limited_site(on_site, tmp_path, scenario, "[default]\nmax_tokens = 8")


def test_a_key_is_limited_by_its_digest(on_site, tmp_path):
    async def scenario(site):
        headers = {"Authorization": "Bearer one"}
        for status in (200, 429):
            assert (await site.client.get("/v1/models", headers=headers)).status_code == 200
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            answer = await site.client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == status
        other = {"Authorization": "Bearer two"}
        answer = await site.client.post("/v1/chat/completions", json=body, headers=other)
        assert answer.status_code == 200

    text = f"[keys.{key_digest('one')[:16]}]\nrequests_per_second = 0.001"
    limited_site(on_site, tmp_path, scenario, text, api_key=("t:one", "t:two"))


def test_transcriptions_have_the_weight_and_use_the_tokens_of_their_tenant(on_site, tmp_path):
    sound = Clip(PCM_24K, bytes(4800)).wav()

    async def scenario(site):
        def post(**fields):
            files = {"file": ("a.wav", sound)}
            return site.client.post("/v1/audio/transcriptions", files=files, data=fields)

        assert (await post()).status_code == 200
        assert site.engine.prompts[-1].weight == 3.0
        each = site.engine.prompts[-1].num_tokens + len(site.engine.answer) + 1
        left = int((await post(stream="true")).headers["x-ratelimit-remaining-tokens"])
        assert left in (300 - each - 2, 300 - each - 1)  # one is taken before the second begins
        served = 2
        while (answer := await post(stream="true" if served % 2 else "false")).status_code == 200:
            served += 1
        assert 300 / each <= served <= 300 / each + 2
        refused = answer
        assert refused.status_code == 429
        assert "tokens per minute" in refused.json()["error"]["message"]

    limited_site(on_site, tmp_path, scenario, "[default]\nweight = 3\ntokens_per_minute = 300")


@pytest.mark.parametrize(("most", "status"), [(5, 400), (1000, 200)])
def test_a_transcript_beyond_its_limit_is_refused_and_not_cut_off(on_site, tmp_path, most, status):
    files = {"file": ("a.wav", Clip(PCM_24K, bytes(4800)).wav())}

    async def scenario(site):
        answer = await site.client.post("/v1/audio/transcriptions", files=files)
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["text"] == site.engine.answer
            return
        assert answer.json()["error"]["code"] == "transcript_too_long"
        assert answer.json()["error"]["param"] == "file"
        stream = {"stream": "true"}
        answer = await site.client.post("/v1/audio/transcriptions", files=files, data=stream)
        *deltas, last = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        heard = "".join(json.loads(delta[6:])["delta"] for delta in deltas)
        assert heard == site.engine.answer[:5]
        assert json.loads(last[6:])["error"]["code"] == "transcript_too_long"

    limited_site(on_site, tmp_path, scenario, f"[default]\nmax_tokens = {most}")
