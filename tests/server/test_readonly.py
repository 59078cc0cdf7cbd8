"""Render and tokenize leave no trace: compared before and after, and by what the next chat does."""

from __future__ import annotations

import pytest

from tests.support.drawing import image_part, text_part
from tests.support.model.cases import picture
from tests.support.nodes import engine_node, run

KNOWN, NEW = image_part(picture(1)), image_part(picture(2))
ROUTES = ("/v1/chat/completions/render", "/tokenize")


def chat(*parts, **fields):
    return {
        "messages": [{"role": "user", "content": [*parts, text_part(" What?")]}],
        "temperature": 0,
        "max_tokens": 4,
        "reuse_receipt": True,
        **fields,
    }


def processors(answer) -> list[str]:
    return [item["processor"] for item in answer["reuse_receipt"]["items"]]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("part", [KNOWN, NEW, {**NEW, "uuid": "mine"}])
def test_directory_store_recency_and_counters_stay_as_they_are(folder, route, part):
    """The known picture is the older of two: a look that counted would make it the newer one."""

    async def scenario():
        async with engine_node(folder("llava")) as node:
            await node.ok("/v1/chat/completions", chat(KNOWN))
            await node.ok("/v1/chat/completions", chat(image_part(picture(3))))
            before, stats = node.memory, await node.engine.stats()
            for form in ("encoded", "tensors"):
                await node.ok(route, chat(part, media=form))
            assert node.memory == before
            assert await node.engine.stats() == stats

    run(scenario())


@pytest.mark.parametrize("route", ROUTES)
def test_the_next_chat_does_what_it_would_have_done(folder, route):
    async def scenario():
        async with engine_node(folder("llava")) as node:
            await node.ok("/v1/chat/completions", chat(KNOWN))
            await node.ok(route, chat(KNOWN, NEW))
            answer = await node.ok("/v1/chat/completions", chat(KNOWN, NEW))
            assert processors(answer) == ["hit", "miss"]
            assert (node.counts, node.jobs()) == ((3, 1), 2)

    run(scenario())


def test_a_uuid_met_in_passing_means_nothing_to_the_next_chat(folder):
    async def scenario():
        async with engine_node(folder("llava")) as node:
            await node.ok("/tokenize", chat({**NEW, "uuid": "mine"}))
            alone = {"type": "image_url", "image_url": None, "uuid": "mine"}
            assert (await node.post("/v1/chat/completions", chat(alone))).status_code == 422
            await node.ok("/v1/chat/completions", chat({**KNOWN, "uuid": "mine"}))
            await node.ok("/tokenize", chat(alone))

    run(scenario())


@pytest.mark.parametrize("route", ROUTES)
def test_a_picture_met_again_is_not_decoded_again(folder, route):
    async def scenario():
        async with engine_node(folder("llava")) as node:
            answers = [await node.ok(route, chat(NEW, request_id="r")) for _ in range(3)]
            assert answers[0] == answers[1] == answers[2]
            decoded = node.services.readonly.counts()["media_decodes_total:image"]
            assert (decoded, node.jobs()) == (1, 0)

    run(scenario())


@pytest.mark.parametrize("route", ROUTES)
def test_a_picture_the_engine_knows_is_not_decoded_at_all(folder, route):
    async def scenario():
        async with engine_node(folder("llava")) as node:
            await node.ok("/v1/chat/completions", chat(KNOWN))
            await node.ok(route, chat(KNOWN))
            assert node.services.readonly.counts()["media_decodes_total:image"] == 0

    run(scenario())
