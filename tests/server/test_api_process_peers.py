"""API processes of one server abort requests for each other, by tenant."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest

from lookonce.server.api_process_peers import AbortPeers
from lookonce.server.services import RunningRequests
from tests.support.nodes import engine_node, run

ROUTE = "/inference/v1/abort_requests"


@contextmanager
def noted(running, tenant, request_id, abort):
    running.note(tenant, request_id, abort)
    yield
    running.forget(tenant, request_id, abort)


def recorder(ended: list[str], name: str):
    async def abort() -> None:
        ended.append(name)

    return abort


def test_only_the_tenant_s_own_running_requests_end():
    running, ended = RunningRequests(), []

    async def scenario():
        with noted(running, "alice", "r", recorder(ended, "a")):
            assert await running.abort("bob", ["r"]) == []
            assert await running.abort("alice", ["r", "s", "r"]) == ["r"]
        assert await running.abort("alice", ["r"]) == []

    asyncio.run(scenario())
    assert ended == ["a"]


def test_an_id_that_two_requests_share_ends_both():
    running, ended = RunningRequests(), []

    async def scenario():
        with (
            noted(running, "", "r", recorder(ended, "first")),
            noted(running, "", "r", recorder(ended, "second")),
        ):
            assert await running.abort("", ["r"]) == ["r"]

    asyncio.run(scenario())
    assert ended == ["first", "second"]


def test_every_process_of_the_server_is_asked(tmp_path):
    """The third one is gone: the others answer for themselves."""
    runs, ended = [RunningRequests() for _ in range(3)], []

    async def scenario():
        async with (
            AbortPeers(tmp_path, 0, 3, runs[0].abort) as first,
            AbortPeers(tmp_path, 1, 3, runs[1].abort),
        ):
            with (
                noted(runs[0], "t", "here", recorder(ended, "here")),
                noted(runs[1], "t", "there", recorder(ended, "there")),
                noted(runs[1], "other", "theirs", recorder(ended, "theirs")),
            ):
                asked = ["there", "theirs", "here", "nowhere"]
                assert await first.abort("t", asked) == ["there", "here"]

    asyncio.run(scenario())
    assert sorted(ended) == ["here", "there"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_finishes_with_abort(folder, stream):
    """It would go on for long; asked to end as soon as it is known, it does."""

    async def scenario():
        async with engine_node(folder("llava")) as node:
            body = {
                "prompt": "On and on", "max_tokens": 3000, "ignore_eos": True,
                "request_id": "mine", "stream": stream,
            }  # fmt: skip
            asked = asyncio.create_task(node.post("/v1/completions", body))
            ended = []
            while not ended and not asked.done():
                await asyncio.sleep(0.02)
                answer = await node.ok(ROUTE, {"request_ids": ["mine", "other"]})
                ended = answer["aborted"]
            assert ended == ["mine"]
            assert '"finish_reason":"abort"' in (await asked).text

    run(scenario())


@pytest.mark.parametrize("body", [{}, {"request_ids": "mine"}, {"request_ids": [1]}, []])
def test_a_body_that_names_no_requests_is_refused(on_site, body):
    async def scenario(site):
        answer = await site.client.post(ROUTE, json=body)
        assert answer.status_code == 400

    on_site(scenario)
