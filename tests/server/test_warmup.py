"""An API process is warm before `/ready`, and its caches and counters tell nothing of it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from contextlib import asynccontextmanager, closing

import pytest

from lookonce.errors import UnprocessableMediaError
from lookonce.render.media.pool import share_of_workers
from lookonce.render.readonly import open_readonly
from lookonce.server.http.app import RENDER_ROUTES, build_app
from lookonce.server.rate_limits import RateLimits
from lookonce.server.tracing import FinishedTrace, Tracer
from lookonce.server.warmup import warm_up, warming_up
from lookonce.types.counts import Counts
from lookonce.types.limits import Limits, TenantLimits
from tests.support.drawing import image_part
from tests.support.model.cases import picture
from tests.support.nodes import engine_node, render_node, run
from tests.support.server.media import chat


@pytest.fixture
def log(caplog):
    """Lines of the server alone: tests before may have asked for those of others."""
    caplog.set_level(logging.INFO, logger="lookonce.server")
    with caplog.filtering(logging.Filter("lookonce.server")):
        yield caplog


@asynccontextmanager
async def stage(node):
    """The node with a renderer to warm up with, and its app."""
    async with open_readonly(
        node.services.renderer, node.services.config.media, reads_headers=False
    ) as warmup_renderer:
        node.services.warmup_renderer = warmup_renderer
        yield node, build_app(node.services)


def without_slabs(stats: dict[str, float]) -> dict[str, float]:
    """Slabs stay leased after warm-up: that is what makes the first picture's memory warm."""
    return {name: value for name, value in stats.items() if "mm_slab" not in name}


def without_slab_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "mm_slab" not in line]


def test_every_route_is_warmed_up_with_every_modality_and_the_log_says_so(folder, log):
    async def scenario():
        async with engine_node(folder("qwen2_5_omni")) as node, stage(node) as (_, app):
            before, stats = node.memory, without_slabs(await node.engine.stats())
            metrics = (await node.http.get("/metrics")).text
            await warm_up(node.services, app)
            assert len(node.pool.jobs) == 2 * share_of_workers()  # one of each, for every worker
            assert node.memory == before
            assert without_slabs(await node.engine.stats()) == stats
            after = (await node.http.get("/metrics")).text
            assert without_slab_lines(after) == without_slab_lines(metrics)

    run(scenario())
    warmed = [record.getMessage() for record in log.records]
    routes = ("/v1/chat/completions/render", "/tokenize", "/v1/chat/completions")
    for route, line in zip(routes, warmed, strict=True):
        assert line.startswith(f"warmed up {route} with image, audio in ")


def test_it_leaves_no_trace(folder):
    traces: list[FinishedTrace] = []
    counts = Counts()

    async def scenario():
        async with engine_node(folder("llava")) as node, stage(node) as (_, app):
            node.services.tracer = Tracer(counts, traces.append, ratio=1.0)
            await warm_up(node.services, app)
            assert traces == []
            assert counts.read() == {}
            await node.ok("/v1/completions", {"prompt": "What is this?", "max_tokens": 1})
            assert len(traces) == 1

    run(scenario())


def test_limits_neither_count_it_nor_hold_it_up(folder, tmp_path, log):
    one = TenantLimits(requests_per_second=1, concurrent_requests=1, media_per_minute=1)

    async def scenario():
        async with engine_node(folder("llava")) as node, stage(node) as (_, app):
            with closing(RateLimits(Limits(default=one), tmp_path / "limits")) as rates:
                node.services.rates = rates
                await warm_up(node.services, app)
                body = {"prompt": "What is this?", "max_tokens": 1}
                answer = await node.http.post("/v1/completions", json=body)
                assert answer.status_code == 200
                assert answer.headers["x-ratelimit-remaining-requests"] == "0"  # its own
                assert answer.headers["x-ratelimit-remaining-media"] == "1"

    run(scenario())
    assert {record.levelname for record in log.records} == {"INFO"}


def test_a_model_that_takes_sound_alone_is_warmed_up_with_sound_alone(folder, log):
    made = folder("voxtral_realtime")

    async def scenario():
        async with engine_node(made, max_audio_seconds=60) as node, stage(node) as (_, app):
            await warm_up(node.services, app)

    run(scenario())
    warmed = [record.getMessage().split(" in ")[0] for record in log.records]
    routes = ("/v1/chat/completions/render", "/tokenize", "/v1/chat/completions")
    assert warmed == [f"warmed up {route} with audio" for route in routes]


def test_a_render_server_warms_what_it_serves(folder, log):
    async def scenario():
        async with render_node(folder("llava")) as node, stage(node) as (_, _app):
            await warm_up(node.services, build_app(node.services, RENDER_ROUTES))

    run(scenario())
    assert [record.args[0] for record in log.records] == [
        "/v1/chat/completions/render", "/tokenize",
    ]  # fmt: skip


def test_ready_says_no_until_it_is_done_and_again_is_the_same(folder):
    async def scenario():
        async with engine_node(folder("llava")) as node, stage(node) as (_, app):
            for _ in range(2):
                done = asyncio.Event()
                async with warming_up(node.services, app, done.set):
                    answer = await node.http.get("/ready")
                    assert (answer.status_code, answer.json()["status"]) == (503, "warming")
                    assert (await node.http.get("/health")).status_code == 200
                    await done.wait()
                    assert (await node.http.get("/ready")).status_code == 200

    run(scenario())


def test_the_first_picture_whose_tokens_are_asked_for_waits_for_no_proof(folder):
    async def scenario():
        async with engine_node(folder("qwen2_5_vl")) as node, stage(node) as (_, app):
            done = asyncio.Event()
            async with warming_up(node.services, app, done.set):
                await done.wait()
            node.pool.jobs.clear()
            await node.ok("/tokenize", chat(image_part(picture(1))))
            assert not node.pool.jobs

    run(scenario())


def test_what_fails_is_a_warning_and_the_server_becomes_ready(folder, log):
    async def broken(job):
        raise UnprocessableMediaError("no luck today")

    async def scenario():
        async with engine_node(folder("llava")) as node, stage(node) as (_, app):
            node.pool.run = broken
            await warm_up(node.services, app)
            assert (await node.http.get("/ready")).status_code == 200

    run(scenario())
    assert "no luck today" in log.text
    assert {record.levelname for record in log.records} == {"WARNING"}


def test_what_breaks_altogether_is_a_warning_too(folder, log):
    async def scenario():
        async with engine_node(folder("llava")) as node, stage(node) as (_, app):
            node.services.config = dataclasses.replace(node.services.config, scheduler=None)
            await warm_up(node.services, app)
            assert (await node.http.get("/ready")).status_code == 200

    run(scenario())
    assert "warm-up failed" in log.text
