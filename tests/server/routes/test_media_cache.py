"""`/inference/v1/media_cache`: items processed elsewhere are judged, stored, counted and used."""

from __future__ import annotations

import base64
import logging

import msgspec
import numpy as np
import pytest

from tests.support.drawing import audio_part, image_part
from tests.support.model.cases import picture, sound
from tests.support.nodes import cache_type as cache_type
from tests.support.nodes import engine_node, run
from tests.support.server.media import MEDIA_CACHE_ROUTE, chat, frontend, inject, processors

pytestmark = pytest.mark.usefixtures("cache_type")

RED, BLUE = image_part(picture(1)), image_part(picture(2))


TONE = audio_part(sound(1))
KEYS = ("a:alice:inject", "b:bob", "c:carol:inject")


def on_node(folder, kind, scenario, **options):
    async def whole():
        async with engine_node(folder(kind), **{"allow_injection": True, **options}) as node:
            await scenario(node)

    run(whole())


def test_an_item_injected_twice_is_two_queries_and_one_hit(folder):
    async def scenario(node):
        item = await frontend(node, RED)
        assert await inject(node, item) == [("stored", None)]
        assert await inject(node, item) == [("already_held", None)]
        assert node.counts == (2, 1)

    on_node(folder, "llava", scenario)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_omni", "gemma3", "pixtral", "idefics3"])
def test_a_chat_with_an_injected_picture_decodes_and_processes_nothing(folder, kind):
    async def scenario(node):
        plain = await node.ok("/v1/chat/completions", chat(RED, cache_salt="apart"))
        jobs, counts = node.jobs(), node.counts
        await inject(node, await frontend(node, RED))
        answer = await node.ok("/v1/chat/completions", chat(RED))
        assert processors(answer) == ["injected"]
        assert node.jobs() == jobs
        assert node.counts == (counts[0] + 2, counts[1] + 1)
        assert answer["choices"] == plain["choices"]

    on_node(folder, kind, scenario)


@pytest.mark.parametrize("kind", ["qwen2_audio", "voxtral", "qwen2_5_omni"])
def test_sounds_too(folder, kind):
    async def scenario(node):
        assert await inject(node, await frontend(node, TONE)) == [("stored", None)]
        answer = await node.ok("/v1/chat/completions", chat(TONE))
        assert (processors(answer), node.jobs()) == (["injected"], 0)

    on_node(folder, kind, scenario)


def test_several_items_are_judged_one_by_one(folder, caplog):
    async def scenario(node):
        good, other = await frontend(node, RED), await frontend(node, BLUE)
        bad = ("image", "00" * 32, "AAAA")
        caplog.set_level(logging.WARNING, logger="lookonce.server")
        outcomes = await inject(node, good, bad, other, good)
        assert [status for status, _ in outcomes] == [
            "stored", "rejected", "stored", "already_held",
        ]  # fmt: skip
        assert "kwargs_data must be msgpack" in outcomes[1][1]
        assert len(caplog.records) == 1
        assert node.counts == (3, 1)

    on_node(folder, "llava", scenario)


def test_with_the_cache_off_everything_is_rejected_and_nothing_counted(folder):
    async def scenario(node):
        item = await frontend(node, RED)
        assert await inject(node, item) == [("rejected", "cache disabled")]
        assert node.counts == (0, 0)

    on_node(folder, "llava", scenario, mm_processor_cache_gb=0)


def test_what_is_too_large_for_the_cache_is_rejected(folder):
    async def scenario(node):
        ((status, reason),) = await inject(node, await frontend(node, RED))
        assert status == "rejected"
        assert "the cache holds" in reason

    on_node(folder, "llava", scenario, mm_processor_cache_gb=1e-6)


# --- trust and scope ---------------------------------------------------------------------------


def test_a_tenant_s_items_are_out_of_reach_of_any_other(folder):
    """Bob knows the public hash; Carol may even inject; neither finds or changes Alice's item."""

    async def scenario(node):
        item = await frontend(node, RED, key="alice")
        await inject(node, item, key="alice")
        for key in ("bob", "carol"):
            answer = await node.ok("/v1/chat/completions", chat(RED), key=key)
            assert processors(answer) == ["miss"]
        wrong = (item[0], item[1], (await frontend(node, BLUE, key="bob"))[2])
        assert await inject(node, wrong, key="bob") == [("stored", None)]
        assert await inject(node, wrong, key="carol") == [("already_held", None)]
        answer = await node.ok("/v1/chat/completions", chat(RED), key="alice")
        assert processors(answer) == ["injected"]

    on_node(folder, "llava", scenario, api_key=KEYS)


def test_an_untrusted_tenant_cannot_stand_in_for_media_even_in_its_own_scope(folder):
    """Bob's arrays under a MediaHash are his own business: whoever sends the picture gets it."""

    async def scenario(node):
        modality, name, _ = await frontend(node, RED, key="bob")
        blue = await frontend(node, BLUE, key="bob")
        assert await inject(node, (modality, name, blue[2]), key="bob") == [("stored", None)]
        answer = await node.ok("/v1/chat/completions", chat(RED), key="bob")
        assert (processors(answer), node.jobs()) == (["miss"], 1)

    on_node(folder, "llava", scenario, api_key=KEYS)


def test_a_salt_is_a_scope_of_its_own(folder):
    async def scenario(node):
        await inject(node, await frontend(node, RED), salt="s")
        assert processors(await node.ok("/v1/chat/completions", chat(RED))) == ["miss"]
        salted = await node.ok("/v1/chat/completions", chat(RED, cache_salt="s"))
        assert processors(salted) == ["injected"]

    on_node(folder, "llava", scenario)


def test_any_name_may_be_generated_from_by_reference(folder):
    """Without trust, and under a name that is no hash at all."""

    async def scenario(node):
        modality, _, data = await frontend(node, RED)
        assert await inject(node, (modality, "picture-17", data)) == [("stored", None)]
        body = await node.ok("/v1/chat/completions/render", chat(RED, media="reference"))
        expected = await node.ok(
            "/v1/chat/completions", chat(RED, cache_salt="apart", logprobs=True)
        )
        body["features"]["mm_hashes"]["image"] = ["picture-17"]
        body["sampling_params"]["logprobs"] = 0
        answer = await node.ok("/inference/v1/generate", body)
        assert processors(answer) == ["injected"]
        told = [token["token"] for token in answer["choices"][0]["logprobs"]["content"]]
        assert told == [t["token"] for t in expected["choices"][0]["logprobs"]["content"]]
        assert (await node.post("/inference/v1/generate", {**body, "cache_salt": "x"})).is_error

    on_node(folder, "llava", scenario, allow_injection=False)


def test_what_is_held_is_used_and_not_what_came(folder):
    """Arrays under a name that is held already change nothing: neither injected nor by value."""

    async def scenario(node):
        modality, name, data = await frontend(node, RED)
        _, _, others = await frontend(node, BLUE)
        await inject(node, (modality, name, data))
        asked = chat(RED, media="tensors", logprobs=True)
        expected = await node.ok("/v1/chat/completions", {**asked, "cache_salt": "apart"})
        assert await inject(node, (modality, name, others)) == [("already_held", None)]
        body = await node.ok("/v1/chat/completions/render", asked)
        body["features"]["kwargs_data"]["image"] = [others]
        answer = await node.ok("/inference/v1/generate", body)
        told = [token["token"] for token in answer["choices"][0]["logprobs"]["content"]]
        assert told == [t["token"] for t in expected["choices"][0]["logprobs"]["content"]]

    on_node(folder, "llava", scenario)


# --- requests that are no good as a whole ------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"mm_hashes": {"image": ["a"]}, "kwargs_data": {"image": []}},
        {"mm_hashes": {"image": ["a"]}, "kwargs_data": {"audio": ["AAAA"]}},
        {"mm_hashes": {"smell": ["a"]}, "kwargs_data": {"smell": ["AAAA"]}},
        {"mm_hashes": {"image": ["a"]}},
        {"mm_hashes": [], "kwargs_data": []},
    ],
)
def test_names_and_items_that_do_not_match_are_refused(folder, body):
    async def scenario(node):
        answer = await node.post(MEDIA_CACHE_ROUTE, body)
        assert answer.status_code == 400
        assert node.counts == (0, 0)

    on_node(folder, "llava", scenario)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_item_with_a_value_that_is_no_number_is_refused_wherever_it_comes(folder, value):
    """In the cache it would spoil every request that uses it."""

    async def scenario(node):
        body = await node.ok("/v1/chat/completions/render", chat(RED, media="tensors"))
        (data,) = body["features"]["kwargs_data"]["image"]
        wire = msgspec.msgpack.decode(base64.b64decode(data))
        pixels = np.frombuffer(wire["pixel_values"]["data"], "<f4").copy()
        pixels[-1] = value
        wire["pixel_values"]["data"] = pixels.tobytes()
        bad = base64.b64encode(msgspec.msgpack.encode(wire)).decode()
        ((status, reason),) = await inject(node, ("image", "picture-17", bad))
        assert status == "rejected"
        assert "'pixel_values' has values that are NaN or infinite" in reason
        body["features"]["kwargs_data"]["image"] = [bad]
        answer = await node.post("/inference/v1/generate", {**body, "cache_salt": "by value"})
        assert answer.status_code == 400
        assert "NaN or infinite" in answer.json()["error"]["message"]
        body["features"]["kwargs_data"]["image"] = [data]
        await node.ok("/inference/v1/generate", {**body, "cache_salt": "by value"})

    on_node(folder, "llava", scenario)


def test_arrays_of_another_shape_dtype_or_name_are_rejected_with_the_reason(folder):
    async def scenario(node):
        _, name, data = await frontend(node, RED)
        wire = msgspec.msgpack.decode(base64.b64decode(data))
        pixels = np.frombuffer(wire["pixel_values"]["data"], "<f4")
        shape = wire["pixel_values"]["shape"]

        async def reason(**arrays) -> str:
            packed = base64.b64encode(msgspec.msgpack.encode(arrays)).decode()
            ((status, why),) = await inject(node, ("image", name, packed))
            assert status == "rejected"
            return why

        def array(dtype, shape, values):
            return {"dtype": dtype, "shape": shape, "data": values.tobytes()}

        assert "arrays pixel_values" in await reason(pixels=array("float32", shape, pixels))
        double = array("float64", shape, pixels.astype("<f8"))
        assert "float64" in await reason(pixel_values=double)
        flat = array("float32", [pixels.size], pixels)
        assert "shape" in await reason(pixel_values=flat)
        assert node.counts == (0, 0)

    on_node(folder, "llava", scenario)
