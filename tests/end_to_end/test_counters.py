"""Sequential requests move every counter by exactly the expected number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.support.live_server import LiveServer, samples
from tests.support.nodes import Node, engine_node, run
from tests.support.nodes import cache_type as cache_type
from tests.support.traffic import Medium, drawn, sounding

MEDIA_COUNTERS = (
    "mm_cache_queries_total",
    "mm_cache_hits_total",
    "media_decodes_total:image",
    "media_decodes_total:audio",
    "media_processed_total:image",
    "media_processed_total:audio",
    "encoder_runs_total",
)
BYPASS_GB = 0.0001
"""107 kB: a sound fits, a picture of 170 kB does not."""


@pytest.fixture
def on(cache_server: LiveServer) -> LiveServer:
    return cache_server


def chat(*media: Medium, question: str = "", **fields) -> dict[str, object]:
    content = [medium.part for medium in media]
    content.append({"type": "text", "text": question or media[0].question})
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 4,
        "reuse_receipt": True,
        **fields,
    }


def ask(server: LiveServer, *media: Medium, status: int = 200, **fields):
    """The receipt's items, or None for a refusal."""
    answer = server.post("/v1/chat/completions", chat(*media, **fields))
    assert answer.status_code == status, answer.text
    return answer.json().get("reuse_receipt")


def check_moved(
    before: Mapping[str, float], after: Mapping[str, float], expected: Mapping[str, float]
) -> None:
    """These counters have moved by these numbers, and no other media counter."""
    named = {name.replace("_image", ":image").replace("_audio", ":audio"): value
             for name, value in expected.items()}  # fmt: skip
    names = {*MEDIA_COUNTERS, *named}
    moved = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}
    assert moved == {name: named.get(name, 0.0) for name in moved}


@contextmanager
def moves(server: LiveServer, **expected: float) -> Iterator[None]:
    """Asserts that the block moves these counters by these numbers, and no other media counter."""
    before = server.metrics()
    yield
    check_moved(before, server.metrics(), expected)


def processors(receipt: Mapping[str, list[dict[str, str]]]) -> list[str]:
    return [item["processor"] for item in receipt["items"]]


def test_misses_hits_and_copies_of_pictures_and_sounds(on):
    red, tone = drawn(0), sounding(0)
    with moves(
        on, mm_cache_queries_total=3, mm_cache_hits_total=1, encoder_runs_total=2,
        media_decodes_total_image=1, media_processed_total_image=1,
        media_decodes_total_audio=1, media_processed_total_audio=1,
    ):  # fmt: skip
        receipt = ask(on, red, tone, red)
    assert processors(receipt) == ["miss", "miss", "hit"]
    with moves(on, mm_cache_queries_total=3, mm_cache_hits_total=3):
        receipt = ask(on, tone, red, red, question="What is in the picture?")
    assert processors(receipt) == ["hit", "hit", "hit"]


def test_a_request_refused_after_rendering_counts_its_parts(on):
    with moves(
        on, mm_cache_queries_total=2, mm_cache_hits_total=1,
        media_decodes_total_image=1, media_processed_total_image=1,
    ):  # fmt: skip
        ask(on, drawn(1), drawn(1), max_tokens=1_000_000, status=400)


def test_a_request_refused_before_rendering_counts_nothing(on):
    with moves(on):
        ask(on, drawn(2), temperature=-1, status=400)


def test_a_picture_that_cannot_be_decoded_counts_nothing(on):
    url = {"url": "data:image/png;base64,AAAA"}
    broken = Medium({"type": "image_url", "image_url": url}, "?", "")
    with moves(on):
        ask(on, broken, status=422)


def test_prefix_tokens_are_those_of_the_receipts(on):
    before = on.metrics()
    receipts = [ask(on, drawn(3)), ask(on, drawn(3)), ask(on, drawn(3), sounding(3))]
    after = on.metrics()
    queries, hits = (
        after[name] - before[name]
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")
    )
    assert queries == sum(receipt["prompt_tokens"] for receipt in receipts)
    assert hits == sum(receipt["prefix_cached_tokens"] for receipt in receipts) > 0
    tokens = after["prompt_tokens_total"] - before["prompt_tokens_total"]
    assert tokens == queries


def test_what_the_prefix_covers_is_neither_sent_nor_encoded_again(on):
    """After a reset the expansion is not known, so the item is processed, but not encoded."""
    red = drawn(4)
    ask(on, red)
    on.post("/reset_mm_cache")
    with moves(
        on, mm_cache_queries_total=1,
        media_decodes_total_image=1, media_processed_total_image=1,
    ):  # fmt: skip
        receipt = ask(on, red)
    assert (processors(receipt), receipt["items"][0]["encoder"]) == (["miss"], "skipped")


def test_vllm_s_names_carry_the_same_figures(on):
    found = on.metrics()
    assert found["mm_cache_hits_total"] > 0
    for name in (
        "mm_cache_queries_total", "mm_cache_hits_total",
        "prefix_cache_queries_total", "prefix_cache_hits_total",
    ):  # fmt: skip
        assert found[f"vllm:{name}:nano"] == found[name]


async def figures(node: Node) -> dict[str, float]:
    return samples((await node.http.get("/metrics")).text)


async def receipt_of(node: Node, *media: Medium, **expected: float):
    """The receipt of a request that moves these counters by these numbers, and no others."""
    before = await figures(node)
    answer = await node.ok("/v1/chat/completions", chat(*media))
    check_moved(before, await figures(node), expected)
    return answer["reuse_receipt"]


def test_with_the_cache_off_there_are_no_queries_and_no_hits(nano_folder):
    async def scenario():
        async with engine_node(nano_folder, mm_processor_cache_gb=0) as node:
            red = drawn(0)
            for encoder_runs in (1, 0):
                receipt = await receipt_of(
                    node, red, red, encoder_runs_total=encoder_runs,
                    media_decodes_total_image=1, media_processed_total_image=1,
                )  # fmt: skip
            found = await figures(node)
            assert found["mm_cache_queries_total"] == found["mm_cache_hits_total"] == 0
            assert found["mm_cache_bytes"] == found["mm_store_bytes"] == 0
            assert receipt["items"][0]["encoder"] in ("hit", "skipped")
            assert not any(name.startswith("vllm:") for name in found)

    run(scenario())


def test_an_item_too_large_for_the_cache_is_a_query_and_no_hit(nano_folder, cache_type):
    """In this process, with both types of cache."""

    async def scenario():
        async with engine_node(nano_folder, mm_processor_cache_gb=BYPASS_GB) as node:
            red, tone = drawn(0), sounding(0)
            receipt = await receipt_of(
                node, red, tone, mm_cache_queries_total=2, encoder_runs_total=2,
                media_decodes_total_image=1, media_processed_total_image=1,
                media_decodes_total_audio=1, media_processed_total_audio=1,
            )  # fmt: skip
            assert processors(receipt) == ["bypass", "miss"]
            # Its expansion is known, and prefix or encoder output cover it: nothing is made again.
            receipt = await receipt_of(
                node, red, tone, mm_cache_queries_total=2, mm_cache_hits_total=2
            )
            assert processors(receipt) == ["not_needed", "hit"]
            for tier in ("prefix", "encoder"):
                assert (await node.post(f"/reset_{tier}_cache", None)).status_code == 200
            asks = (await figures(node))["mm_cache_asks_total"]
            receipt = await receipt_of(
                node, red, tone, mm_cache_queries_total=2, mm_cache_hits_total=1,
                encoder_runs_total=2, media_decodes_total_image=1, media_processed_total_image=1,
            )  # fmt: skip
            assert processors(receipt) == ["bypass", "hit"]
            found = await figures(node)
            assert (found["mm_cache_asks_total"] - asks, found["mm_cache_resends_total"]) == (1, 0)
            assert found["mm_cache_bytes"] == found["mm_store_bytes"] > 0

    run(scenario())
