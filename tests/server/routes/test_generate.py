"""`/inference/v1/generate`: what features may say, and how anything else is refused."""

from __future__ import annotations

import copy
import json

import pytest

from tests.support.drawing import image_part
from tests.support.model.cases import picture
from tests.support.nodes import cache_type as cache_type
from tests.support.nodes import engine_node, run
from tests.support.server.media import chat

pytestmark = pytest.mark.usefixtures("cache_type")

ROUTE = "/inference/v1/generate"
ONE, TWO = image_part(picture(1)), image_part(picture(2))


def on_rendered(folder, scenario, kind="llava", parts=(ONE, TWO), **options):
    """`async def scenario(node, body)` with the rendered body of a chat."""

    async def whole():
        async with engine_node(folder(kind), **options) as node:
            body = await node.ok("/v1/chat/completions/render", chat(*parts))
            await scenario(node, body)

    run(whole())


def test_groups_come_in_any_order_and_are_merged_by_offset(folder):
    async def scenario(node, body):
        expected = await node.ok(ROUTE, body)
        for lists in body["features"].values():
            lists["image"].reverse()
        answer = await node.ok(ROUTE, {**body, "cache_salt": "apart"})
        assert answer["choices"] == expected["choices"]
        offsets = [item["offset"] for item in answer["reuse_receipt"]["items"]]
        assert offsets == sorted(offsets)

    on_rendered(folder, scenario)


@pytest.mark.parametrize("form", ["pairs", "booleans"])
def test_is_embed_comes_as_pairs_or_as_booleans(folder, form):
    """Idefics3 writes rows and columns between the tokens of a picture's tiles."""

    async def scenario(node, body):
        expected = await node.ok(ROUTE, body)
        for place in body["features"]["mm_placeholders"]["image"]:
            pairs = place["is_embed"]
            assert len(pairs) > 1
            if form == "booleans":
                inside = {p for start, end in pairs for p in range(start, end)}
                place["is_embed"] = [p in inside for p in range(place["length"])]
        answer = await node.ok(ROUTE, {**body, "cache_salt": "apart"})
        assert answer["choices"] == expected["choices"]

    big = image_part(picture(3, 120, 200))
    on_rendered(folder, scenario, kind="idefics3", parts=(big,))


def placed(body) -> dict:
    return body["features"]["mm_placeholders"]["image"]


def overlap(body):
    placed(body)[1]["offset"] = placed(body)[0]["offset"]


def shifted(body):
    placed(body)[0]["offset"] += 1


def shorter(body):
    placed(body)[0]["length"] -= 1


def beyond(body):
    placed(body)[1]["offset"] = len(body["token_ids"])


def negative(body):
    placed(body)[0]["offset"] = -1


def enormous(body):
    placed(body)[0]["offset"] = 2**40


def unplaced(body):
    placed(body).pop()


def nameless(body):
    body["features"]["mm_hashes"]["image"].pop()


def unknown_modality(body):
    body["features"]["mm_hashes"]["smell"] = []


def other_lists(body):
    body["features"]["media_data"] = {"audio": []}


def strange_mask(body):
    placed(body)[0]["is_embed"] = [True]


def mixed_mask(body):
    placed(body)[0]["is_embed"] = [True, [0, 1]]


def forged(body):
    """A placeholder's token where no item lies."""
    body["token_ids"].append(body["token_ids"][placed(body)[0]["offset"]])


def no_features(body):
    del body["features"]


def foreign_token(body):
    body["token_ids"][0] = 2**30


def not_base64(body):
    body["features"]["media_data"]["image"][0] = "?"


def empty(body):
    body["token_ids"], body["features"] = [], None


def bad_sampling(body):
    body["sampling_params"]["temperature"] = -1


SPOILT = [
    overlap, shifted, shorter, beyond, negative, enormous, unplaced, nameless, unknown_modality,
    other_lists, strange_mask, mixed_mask, forged, no_features, foreign_token, not_base64, empty,
    bad_sampling,
]  # fmt: skip


def test_what_does_not_fit_is_refused_by_name_and_leaves_nothing_behind(folder):
    async def scenario(node, body):
        for spoil in SPOILT:
            spoilt = copy.deepcopy(body)
            spoil(spoilt)
            answer = await node.post(ROUTE, spoilt)
            assert 400 <= answer.status_code < 500, (spoil.__name__, answer.text)
            error = answer.json()["error"]
            assert error["param"], (spoil.__name__, error)
            assert node.engine.directory.num_pins == 0, spoil.__name__
        assert (await node.ok(ROUTE, body))["choices"]

    on_rendered(folder, scenario)


def test_more_items_than_the_limit_are_refused(folder):
    async def scenario(node, body):
        body["features"] = {
            name: {"image": lists["image"] * 2} for name, lists in body["features"].items()
        }
        answer = await node.post(ROUTE, body)
        assert answer.status_code == 400
        assert "at most 3" in answer.json()["error"]["message"]

    on_rendered(folder, scenario, limit_mm_per_prompt="image=3")


def test_the_prompt_is_scored_where_asked(folder):
    async def scenario(node, body):
        body["sampling_params"] = {"prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
        told = (await node.ok(ROUTE, body))["prompt_logprobs"]
        assert len(told) == len(body["token_ids"])
        (first, second) = body["features"]["mm_placeholders"]["image"]
        media = {
            place
            for part in (first, second)
            for place in range(part["offset"], part["offset"] + part["length"])
        }
        assert {place for place, entry in enumerate(told) if entry is None} == {0, *media}
        assert all(str(body["token_ids"][at]) in entry for at, entry in enumerate(told) if entry)

        streamed = events(await node.post(ROUTE, {**body, "stream": True}))
        assert streamed[0]["prompt_logprobs"] == told
        assert not any("prompt_logprobs" in event for event in streamed[1:])

    on_rendered(folder, scenario)


def test_a_receipt_comes_with_the_first_chunk_where_it_is_asked_for_so(folder):
    async def scenario(node, body):
        body |= {
            "stream": True,
            "stream_options": {"include_usage": True},
            "reuse_receipt": True,
            "kv_transfer_params": {"num_lmcache_extra_cached_tokens": 0},
        }
        body["sampling_params"] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        *_, last = events(await node.post(ROUTE, body))
        first, *others = events(await node.post(ROUTE, {**body, "receipt_first": True}))
        for name in ("reuse_receipt", "kv_transfer_params"):
            assert first[name].keys() == last[name].keys()
            assert not any(name in event for event in others)
        assert [item["encoder"] for item in first["reuse_receipt"]["items"]] == ["skipped"] * 2
        assert others[-1]["usage"]["completion_tokens"] == 4

    on_rendered(folder, scenario)


def test_log_probabilities_may_name_tokens_by_their_ids(folder):
    async def scenario(node, body):
        body["sampling_params"] = {"logprobs": 2, "max_tokens": 3, "temperature": 0}
        answer = await node.ok(ROUTE, {**body, "return_tokens_as_token_ids": True})
        (choice,) = answer["choices"]
        told = choice["logprobs"]["content"]
        assert [entry["token"] for entry in told] == [f"token_id:{t}" for t in choice["token_ids"]]
        assert all(e["token"].startswith("token_id:") for t in told for e in t["top_logprobs"])

    on_rendered(folder, scenario)


def test_tokens_end_at_a_stop_string_though_no_text_is_shown(folder):
    async def scenario(node, body):
        sampling = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
        body["sampling_params"] = sampling
        (whole,) = (await node.ok(ROUTE, body))["choices"]
        text = (await node.ok("/detokenize", {"tokens": whole["token_ids"]}))["prompt"]
        stop = text[5]
        body["sampling_params"] = sampling | {"stop": [stop]}
        (choice,) = (await node.ok(ROUTE, body))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["token_ids"] == whole["token_ids"][: len(choice["token_ids"])]
        assert len(choice["token_ids"]) < 24

    on_rendered(folder, scenario)


def events(response):
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    "wrong", [[], "hot", {"max_new_tokens": 3}, {"stpo": "x"}, {"temprature": 0}, {"top_j": 0.0}]
)
def test_sampling_params_that_mean_nothing_here_are_refused(folder, wrong):
    async def scenario(node, body):
        answer = await node.post(ROUTE, {**body, "sampling_params": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].split(".")[0] in (
            "sampling_params",
            "max_new_tokens",
        )

    on_rendered(folder, scenario)


def test_what_a_frontend_of_another_engine_sends_along_is_taken(folder):
    async def scenario(node, body):
        extras = {
            "detokenize": True, "output_kind": 2, "bad_words": [], "logits_processors": None,
            "skip_reading_prefix_cache": False, "output_text_buffer_length": 3, "extra_args": {},
            "stop": [], "stop_token_ids": [], "logprob_token_ids": [], "stream_interval": 1,
        }  # fmt: skip
        plain = await node.ok(ROUTE, body)
        body["sampling_params"] |= extras
        assert (await node.ok(ROUTE, body))["choices"] == plain["choices"]

    on_rendered(folder, scenario)
