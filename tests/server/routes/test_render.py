"""Rendering without generating.

Render and tokenize leave no trace: compared before and after, and by what the next chat does. An
engine's server takes what a render server answers as it is, and answers as to the chat.
"""

from __future__ import annotations

import base64
import io
import json
import shutil

import msgspec
import numpy as np
import pytest
from PIL import Image

from lookonce.fleet.identity import Processor, body_with_names, identify_body
from lookonce.frontend.frontend import dialect_of
from lookonce.render.media import picture_size
from lookonce.types.model import ONE_IN_A_PROMPT
from tests.support.drawing import audio_part, image_part, text_part
from tests.support.model.cases import ALL_MODELS, picture, sound
from tests.support.model.films import film_part
from tests.support.model_folders.make import KINDS
from tests.support.nodes import engine_node, render_node, run
from tests.support.render.counted import counts_of
from tests.support.server.media import chat, processors

KNOWN, NEW = image_part(picture(1)), image_part(picture(2))


ROUTES = ("/v1/chat/completions/render", "/tokenize")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("part", [KNOWN, NEW, {**NEW, "uuid": "mine"}])
def test_directory_store_recency_and_counters_stay_as_they_are(folder, route, part):
    """The known picture is the older of two: a look that counted would make it the newer one."""

    async def scenario():
        async with engine_node(folder("llava")) as node:
            await node.ok("/v1/chat/completions", chat(KNOWN))
            await node.ok("/v1/chat/completions", chat(image_part(picture(3))))
            before, stats = node.memory, await node.figures()
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
def test_a_new_picture_is_decoded_only_where_its_headers_do_not_tell_its_tokens(folder, route):
    """A GIF's do not: it is decoded the first time it is met."""

    async def scenario():
        async with engine_node(folder("llava")) as node:
            for part, decodes in ((NEW, 0), (image_part(picture(2), "GIF"), 1)):
                answers = [await node.ok(route, chat(part, request_id="r")) for _ in range(3)]
                assert answers[0] == answers[1] == answers[2]
                decoded = counts_of(node.services.readonly)["media_decodes_total:image"]
                assert (decoded, node.jobs()) == (decodes, 0)

    run(scenario())


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "gemma3", "pixtral", "idefics3"])
def test_tokens_without_decoding_are_those_of_decoding(folder, kind, monkeypatch):
    body = chat(*(image_part(picture(n, 61 + 40 * n, 200 - 31 * n), "JPEG") for n in (1, 2, 3)))

    found = []

    async def scenario():
        async with render_node(folder(kind)) as node:
            tokens = (await node.ok("/tokenize", body))["tokens"]
            found.append((tokens, counts_of(node.services.readonly)["media_decodes_total:image"]))

    run(scenario())
    monkeypatch.setattr(picture_size, "upright_size", lambda data: None)
    run(scenario())
    (told, without), (made, decoded) = found
    assert told == made
    assert (without, decoded) == (0, 3)


@pytest.mark.parametrize("route", ROUTES)
def test_a_picture_the_engine_knows_is_not_decoded_at_all(folder, route):
    async def scenario():
        async with engine_node(folder("llava")) as node:
            await node.ok("/v1/chat/completions", chat(KNOWN))
            await node.ok(route, chat(KNOWN))
            assert counts_of(node.services.readonly)["media_decodes_total:image"] == 0

    run(scenario())


PICTURES = (image_part(picture(1)), text_part(" and "), image_part(picture(2, 90, 140)))
SOUNDS = (audio_part(sound(1)), text_part(" and "), audio_part(sound(2, 1.3)))
FORMS = ("encoded", "tensors")
SAMPLING = {"temperature": 0, "max_tokens": 8, "logprobs": True}
MEDIA_KINDS = sorted(kind for kind, made in KINDS.items() if made.preprocessor is not None)
SAMPLE = ("gemma3", "qwen3_vl", "voxtral")


def chats_of(kind, modalities) -> list[dict[str, object]]:
    sounds = SOUNDS[: 1 if kind in ONE_IN_A_PROMPT else 3]
    parts = [PICTURES] * ("image" in modalities) + [sounds] * ("audio" in modalities)
    if len(parts) == 2:
        parts.append((*SOUNDS[:1], *PICTURES[:1]))
    parts += [(film_part(range(3), 2.0),)] * ("video" in modalities)
    contents = [[text_part("Look. "), *part, text_part(" What now?")] for part in parts]
    return [{"messages": [{"role": "user", "content": c}], **SAMPLING} for c in contents]


def spoken(answer) -> list[tuple[str, list[int]]]:
    """The tokens of either route's answer."""
    content = answer["choices"][0]["logprobs"]["content"]
    return [(token["token"], token["bytes"]) for token in content]


SOUND_ALONE = "voxtral_realtime"
"""Its prompt is one sound, whose frames go on beyond the prompt's tokens: token ids with
placeholders cannot say that, so that only a chat has it."""


def test_token_ids_for_a_model_whose_prompt_is_one_sound_are_refused_by_name(folder):
    async def scenario():
        async with engine_node(folder(SOUND_ALONE)) as engine:
            chat = {"messages": [{"role": "user", "content": [SOUNDS[0]]}], **SAMPLING}
            body = await engine.ok("/v1/chat/completions/render", chat)
            answer = await engine.post("/inference/v1/generate", body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "token_ids")
            assert "send it in a chat" in answer.json()["error"]["message"]
            assert spoken(await engine.ok("/v1/chat/completions", chat))

    run(scenario())


@pytest.mark.parametrize("kind", ["nano", *(MEDIA_KINDS if ALL_MODELS else SAMPLE)])
def test_render_then_generate_equals_chat_token_for_token(folder, kind):
    """No cache helps: every form has a salt, and with it a scope, of its own."""
    if kind == SOUND_ALONE:
        pytest.skip("token ids cannot say its prompts")

    async def scenario():
        async with engine_node(folder(kind)) as engine, render_node(folder(kind)) as renderer:
            for chat in chats_of(kind, engine.pool.family.modalities):
                whole = await engine.ok("/v1/chat/completions", chat)
                for form in FORMS:
                    asked = {**chat, "media": form, "cache_salt": form}
                    body = await renderer.ok("/v1/chat/completions/render", asked)
                    answer = await engine.ok("/inference/v1/generate", body)
                    assert spoken(answer) == spoken(whole)
                    assert len(answer["choices"][0]["token_ids"]) == len(spoken(whole)) > 0
                    assert answer["usage"] == whole["usage"]

    run(scenario())


def test_a_stream_has_the_same_tokens(folder):
    async def scenario():
        async with engine_node(folder("nano")) as engine, render_node(folder("nano")) as renderer:
            (chat,) = chats_of("llava", ["image"])
            body = await renderer.ok("/v1/chat/completions/render", chat)
            whole = await engine.ok("/inference/v1/generate", body)
            streamed = await engine.post("/inference/v1/generate", {**body, "stream": True})
            chunks = [json.loads(line[6:]) for line in streamed.text.splitlines()
                      if line.startswith("data: {")]  # fmt: skip
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            tokens = [token for choice in choices for token in choice["token_ids"]]
            assert tokens == whole["choices"][0]["token_ids"]
            assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]

    run(scenario())


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_media_in_a_body_is_hardly_longer_than_its_base64(folder, kind):
    noise = np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, kind)
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, text_part("What is this?")]

    async def scenario():
        async with render_node(folder("nano")) as renderer:
            chat = {"messages": [{"role": "user", "content": content}]}
            body = await renderer.ok("/v1/chat/completions/render", chat)
            assert body["features"].keys() == {"mm_hashes", "mm_placeholders", "media_data"}
            media = len(json.dumps(body["features"]))
            assert media <= 1.1 * len(base64.b64encode(file.getvalue()))
            assert body["features"]["media_data"]["image"] == [url.partition(",")[2]]

    run(scenario())


def test_by_reference_only_what_is_held_is_found(folder):
    async def scenario():
        async with engine_node(folder("llava")) as engine, render_node(folder("llava")) as renderer:
            (chat,) = chats_of("llava", ["image"])
            asked = {**chat, "media": "reference"}
            body = await renderer.ok("/v1/chat/completions/render", asked)
            assert body["features"].keys() == {"mm_hashes", "mm_placeholders"}
            refused = await engine.post("/inference/v1/generate", body)
            assert refused.status_code == 422
            assert refused.json()["error"]["code"] == "media_not_cached"
            whole = await engine.ok("/v1/chat/completions", chat)
            jobs = engine.jobs()
            answer = await engine.ok("/inference/v1/generate", body)
            assert spoken(answer) == spoken(whole)
            assert engine.jobs() == jobs

    run(scenario())


def test_films_of_a_model_that_takes_nothing_processed_are_carried_by_reference(folder):
    chat = {
        "messages": [{"role": "user", "content": [film_part(range(3)), text_part(" What?")]}],
        **SAMPLING,
    }

    async def scenario():
        async with engine_node(folder("media:internvl")) as engine:
            for form in FORMS:
                refused = await engine.post("/v1/chat/completions/render", {**chat, "media": form})
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "media"
            whole = await engine.ok("/v1/chat/completions", chat)
            asked = {**chat, "media": "reference"}
            body = await engine.ok("/v1/chat/completions/render", asked)
            assert spoken(await engine.ok("/inference/v1/generate", body)) == spoken(whole)

    run(scenario())


def test_a_film_time_is_of_a_film_alone(folder):
    async def scenario():
        async with engine_node(folder("llava")) as engine:
            (chat,) = chats_of("llava", ["image"])
            body = await engine.ok("/v1/chat/completions/render", chat)
            body["features"]["mm_placeholders"]["image"][0]["film_time"] = 3
            refused = await engine.post("/inference/v1/generate", body)
            assert refused.status_code == 400
            assert "only an item of a film" in refused.json()["error"]["message"]

    run(scenario())


def test_items_by_value_are_kept_and_counted_like_any_others(folder):
    async def scenario():
        async with engine_node(folder("llava")) as engine, render_node(folder("llava")) as renderer:
            (chat,) = chats_of("llava", ["image"])
            body = await renderer.ok("/v1/chat/completions/render", chat)
            await engine.ok("/inference/v1/generate", body)
            assert (engine.counts, engine.jobs()) == ((2, 0), 2)
            await engine.ok("/inference/v1/generate", body)
            await engine.ok("/v1/chat/completions", chat)
            assert (engine.counts, engine.jobs()) == ((6, 4), 2)

    run(scenario())


def test_media_that_has_not_the_digest_it_is_sent_with_is_refused(folder):
    """It was rendered with another processor, dtype or option: its arrays would be others."""

    async def scenario():
        async with engine_node(folder("llava")) as engine, render_node(folder("llava")) as renderer:
            (chat,) = chats_of("llava", ["image"])
            body = await renderer.ok("/v1/chat/completions/render", chat)
            body["features"]["mm_hashes"]["image"][1] = "00" * 32
            answer = await engine.post("/inference/v1/generate", body)
            assert answer.status_code == 422
            error = answer.json()["error"]
            assert "does not have the hash" in error["message"]
            assert error["param"] == "features.mm_hashes.image[1]"
            assert engine.counts == (0, 0)

    run(scenario())


def test_a_prompt_is_rendered_for_an_adapter_by_its_name(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")

    async def scenario():
        async with render_node(folder("llama"), lora=(f"letters={tmp_path}",)) as node:
            listed = (await node.http.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["m", "letters"]
            bodies = {}
            for model in ("m", "letters"):
                given = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
                answer = await node.http.post("/v1/chat/completions/render", json=given)
                bodies[model] = answer.json()
            assert bodies["letters"].pop("model") == "letters"
            assert bodies["m"].pop("model") == "m"
            for body in bodies.values():
                del body["request_id"]
            assert bodies["m"] == bodies["letters"]
            given["model"] = "bills"
            answer = await node.http.post("/v1/chat/completions/render", json=given)
            assert answer.status_code == 404

    run(scenario())


def test_plain_prompts_go_the_same_way(folder):
    async def scenario():
        async with engine_node(folder("llava")) as engine, render_node(folder("llava")) as renderer:
            asked = {"prompt": ["One", "Two, three"], "temperature": 0, "max_tokens": 8}
            whole = await engine.ok("/v1/completions", {**asked, "logprobs": 0})
            bodies = await renderer.ok("/v1/completions/render", asked)
            answers = [await engine.ok("/inference/v1/generate", body) for body in bodies]
            counted = [len(a["choices"][0]["token_ids"]) for a in answers]
            assert counted == [len(c["logprobs"]["tokens"]) for c in whole["choices"]]
            assert bodies[0]["request_id"] != bodies[1]["request_id"]

    run(scenario())


def test_what_tokens_cannot_answer_is_refused_where_they_are_rendered(folder):
    async def whole():
        async with engine_node(folder("llava")) as node:
            asked = {"prompt": "Hi there", "max_tokens": 3}
            refused = await node.post("/v1/completions/render", {**asked, "echo": True})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "echo"
            body = await node.ok("/v1/completions/render", {**asked, "prompt_logprobs": 1})
            answer = await node.ok("/inference/v1/generate", body)
            direct = await node.ok("/v1/completions", {**asked, "prompt_logprobs": 1})
            assert answer["prompt_logprobs"] == direct["choices"][0]["prompt_logprobs"]

    run(whole())


TELLS_ALL = (
    "{{ messages | tojson }}{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{{ reasoning_effort }}{{ verbosity }}"
)
CLOCK = {"name": "now", "parameters": {"type": "object", "properties": {}}}
CALLED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
    {"role": "function", "name": "now", "content": "noon"},
]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"functions": [CLOCK]},
        {"functions": [CLOCK], "function_call": "none"},
        {"tools": [{"type": "function", "function": CLOCK}], "tool_choice": "none"},
        {"reasoning_effort": "high", "verbosity": "low"},
        {"reasoning": {"effort": "low"}},
    ],
)
def test_the_prompt_is_the_chat_s_whatever_it_depends_on(folder, tmp_path, fields):
    """The template prints all that it is given."""
    copy = shutil.copytree(folder("llama"), tmp_path / "model")
    (copy / "chat_template.jinja").write_text(TELLS_ALL)
    asked = {"messages": CALLED, **fields}

    async def scenario():
        async with engine_node(copy) as node:
            services = node.services
            services.tool_dialect = dialect_of(services.config, services.renderer)
            chat = {**asked, "max_tokens": 1, "prompt_logprobs": 0}
            scored = (await node.ok("/v1/chat/completions", chat))["prompt_logprobs"]
            seen = [int(next(iter(entry))) for entry in scored[1:]]
            assert (await node.ok("/tokenize", asked))["tokens"][1:] == seen
            body = await node.ok("/v1/chat/completions/render", {**asked, "max_tokens": 1})
            assert body["token_ids"][1:] == seen

    run(scenario())


@pytest.mark.parametrize("route", ROUTES)
def test_functions_that_cannot_be_are_refused_by_their_own_names(folder, route):
    async def scenario():
        async with render_node(folder("llama")) as node:
            answer = await node.post(route, {"messages": CALLED, "functions": [{"name": ""}]})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "functions[0].name")

    run(scenario())


def test_a_front_ends_name_for_a_picture_is_the_engines(folder):
    """What a fleet's front-end makes of a body is answered as the body is."""
    body = chat(image_part(Image.effect_noise((320, 320), 90).convert("RGB")))

    async def scenario():
        async with engine_node(folder("llava")) as node:
            told = (await node.http.get("/inference/v1/media_cache")).json()
            processor = Processor(bytes.fromhex(told["fingerprint"]), told["algorithm"])
            sent = msgspec.json.encode(body)
            _, identity = identify_body(sent, "", lambda _: processor)
            named = msgspec.json.decode(body_with_names(sent, identity.inline))
            assert named != body
            assert (await node.post("/v1/chat/completions", named)).status_code == 422
            first = await node.ok("/v1/chat/completions", body)
            second = await node.ok("/v1/chat/completions", named)
            assert second["choices"] == first["choices"]
            assert (processors(first), processors(second)) == (["miss"], ["hit"])

    run(scenario())
