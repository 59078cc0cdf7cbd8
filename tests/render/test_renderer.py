"""Messages in, token ids and items out: the renderer on the embedded model's real folder."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading

import pytest
from PIL import Image

from lookonce.cache.directory import Directory
from lookonce.cache.identity import UuidBindings, scope_digest
from lookonce.config import NANO_FOLDER, MediaConfig, ModelConfig
from lookonce.errors import BadRequestError, ModelLoadError, UnprocessableMediaError
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.registry import load_family
from lookonce.render.media.pool import ServerShare
from lookonce.render.media.processing import MediaJob, Processed, Processing, ProcessingSettings
from lookonce.render.media.resolver import MediaResolver
from lookonce.render.prompt import encoder as encoding
from lookonce.render.prompt.encoder import ChatOptions, PromptEncoder, template_sources
from lookonce.render.prompt.long_texts import LongTextThreads
from lookonce.render.prompt.messages import CHARACTERS_PER_VALUE, FEW_VALUES
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.render.readonly import open_readonly
from lookonce.render.renderer import Renderer, open_renderer, preloaded_encoder
from lookonce.types.sampling import SamplingParams
from tests.support.render.counted import counts_of
from tests.support.render.doubles import FakeLoader, FakePool

IMAGE, AUDIO = 9, 3


LIMITS = {"image": 4, "audio": 2}


def picture(data):
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def sound(data):
    audio = {"data": base64.b64encode(data).decode(), "format": "wav"}
    return {"type": "input_audio", "input_audio": audio}


def text(said):
    return {"type": "text", "text": said}


def user(*content):
    return {"role": "user", "content": list(content)}


class RenderingSetup:
    """A renderer of a real folder whose processing is a double (or, on request, the real one)."""

    def __init__(self, folder=NANO_FOLDER, pool=None, template=None, **options):
        self.directory = Directory(1 << 20)
        self.pool = pool or FakePool()
        family = load_family(folder, "float32")
        tokenizer = Tokenizer.load(folder)
        sources = {"default": template} if template else template_sources(folder, tokenizer)
        resolver = family and MediaResolver(
            family=family,
            directory=self.directory,
            uuids=UuidBindings(),
            loader=FakeLoader({}),
            pool=self.pool,
            max_bytes=1 << 24,
        )
        self.renderer = Renderer(
            encoder=PromptEncoder(tokenizer, sources, family),
            family=family,
            resolver=resolver,
            limits=LIMITS,
            **options,
        )

    def chat(self, *messages, tenant="", cache_salt=None, **options):
        return asyncio.run(
            self.renderer.render_chat(
                messages, tenant=tenant, cache_salt=cache_salt, options=options
            )
        )

    def completion(self, prompt, **options):
        return asyncio.run(self.renderer.render_completion(prompt, **options))


@pytest.fixture
def setup():
    return RenderingSetup()


# --- chats ---------------------------------------------------------------------------------------


LONG = "A question about a long document. " * 60


def test_a_known_chat_is_not_tokenized_again_for_its_tenant(setup):
    first = setup.chat(user(text(LONG)), tenant="one")
    cache = setup.renderer.token_cache
    again = setup.chat(user(text(LONG)), tenant="one")
    assert again.token_ids == first.token_ids
    assert cache.hits == first.num_tokens
    setup.chat(user(text(LONG)), tenant="two")
    setup.chat(user(text(LONG)), tenant="one", cache_salt="other")
    assert cache.hits == first.num_tokens


def test_a_known_completion_is_not_tokenized_again(setup):
    first = setup.completion(LONG)
    assert setup.completion(LONG).token_ids == first.token_ids
    assert setup.renderer.token_cache.hits == first.num_tokens


def test_rendering_alone_leaves_the_token_cache_as_it_is(setup):
    async def tokenize():
        async with open_readonly(setup.renderer, MediaConfig()) as readonly:
            await readonly.render_chat([user(text(LONG))])
            await readonly.render_chat([user(text(LONG))])
            return readonly.token_cache.hits

    assert asyncio.run(tokenize()) > 0
    assert (setup.renderer.token_cache.queries, len(setup.renderer.token_cache)) == (0, 0)


def test_a_chat_becomes_ids_features_and_items_in_prompt_order(setup):
    prompt = setup.chat(user(text("A"), sound(b"uh"), picture(b"cat"), text("B")))
    assert [f.modality for f in prompt.features] == ["audio", "image"]
    assert [item.modality for item in prompt.items] == ["audio", "image"]
    assert [f.key for f in prompt.features] == [item.key for item in prompt.items]
    for feature, token in zip(prompt.features, (AUDIO, IMAGE), strict=True):
        assert set(prompt.token_ids[feature.offset : feature.end]) == {token}
    assert prompt.modality_tokens("image") == 3
    assert prompt.modality_tokens("audio") == 2
    assert prompt.text == (
        "<|im_start|>user\nA<|audio_bos|><|AUDIO|><|audio_eos|>"
        "<|vision_bos|><|IMAGE|><|vision_eos|>B<|im_end|>\n<|im_start|>assistant\n"
    )


def test_items_follow_the_template_s_order_of_modalities():
    pictures_first = (
        "{% for kind in ('image', 'audio') %}{% for p in messages[0].content %}"
        "{% if p.type == kind %}{{ '<|IMAGE|>' if kind == 'image' else '<|AUDIO|>' }}"
        "{% endif %}{% endfor %}{% endfor %}{{ messages[0].content[-1].text }}"
    )
    prompt = RenderingSetup(template=pictures_first).chat(
        user(sound(b"s"), picture(b"a"), sound(b"ss"), picture(b"aa"), text("x"))
    )
    assert [(i.modality, i.expansion.length) for i in prompt.items] == [
        ("image", 1),
        ("image", 2),
        ("audio", 1),
        ("audio", 2),
    ]
    assert [f.offset for f in prompt.features] == [0, 1, 3, 4]


def test_the_scope_tells_tenants_and_salts_apart(setup):
    chats = [
        setup.chat(user(picture(b"cat")), tenant=tenant, cache_salt=salt)
        for tenant in ("", "t")
        for salt in (None, "", "s")
    ]
    assert len({prompt.scope for prompt in chats}) == 6
    assert len({prompt.items[0].key for prompt in chats}) == 6
    assert len({prompt.items[0].media_hash for prompt in chats}) == 1
    assert chats[0].scope == scope_digest("", None)


def test_a_text_only_model_takes_no_media(folder):
    setup = RenderingSetup(folder("llama"))
    assert setup.chat(user(text("x"))).features == ()
    with pytest.raises(BadRequestError, match="takes no image"):
        setup.chat(user(picture(b"cat")))
    with pytest.raises(BadRequestError, match="takes no media"):
        setup.chat(user(text("x")), mm_processor_kwargs={"max_pixels": 9})


def test_options_reach_the_template():
    setup = RenderingSetup(
        template="{{ mood }}{{ tools }}{% if add_generation_prompt %}>{% endif %}"
    )
    prompt = setup.chat(
        {"role": "user", "content": "x"},
        tools=[{"a": 1}],
        add_generation_prompt=False,
        chat_template_kwargs={"mood": "calm"},
    )
    assert prompt.text == "calm[{'a': 1}]"


def test_options_may_be_given_typed(setup):
    work = setup.renderer.render_chat(
        [user(text("x"))], options=ChatOptions(add_generation_prompt=False)
    )
    assert asyncio.run(work).text == "<|im_start|>user\nx<|im_end|>\n"


def test_options_of_the_wrong_type_are_refused(setup):
    with pytest.raises(BadRequestError, match="tools"):
        setup.chat(user(text("x")), tools="many")


def test_unknown_processor_options_are_refused(setup):
    with pytest.raises(BadRequestError, match="mm_processor_kwargs"):
        setup.chat(user(picture(b"cat")), mm_processor_kwargs={"colour": 1})


def test_too_many_media_parts_are_refused_before_any_work(setup):
    with pytest.raises(BadRequestError, match="4 are allowed"):
        setup.chat(user(*[picture(b"cat")] * 5))
    assert setup.pool.jobs == []


@pytest.mark.parametrize("template", ["no picture", "<|IMAGE|><|IMAGE|>", "<|AUDIO|>"])
def test_a_template_that_drops_or_invents_placeholders_is_refused_before_any_work(template):
    setup = RenderingSetup(template=template)
    with pytest.raises(BadRequestError, match="placeholders"):
        setup.chat(user(picture(b"cat")))
    assert setup.pool.jobs == []


def test_texts_are_tokenized_off_the_loop_when_large(setup, monkeypatch):
    small = setup.chat(user(text("hello")))
    monkeypatch.setattr(encoding, "OFF_LOOP_CHARACTERS", 3)
    assert setup.chat(user(text("hello"))).token_ids == small.token_ids


def test_a_long_text_is_tokenized_off_the_loop_only_where_it_is_new(setup, monkeypatch):
    """A conversation that grew by a sentence waits for no thread, and none of other tenants."""
    in_threads = []
    run = LongTextThreads.run

    async def running(self, work, tenant, cost):
        in_threads.append(cost)
        return await run(self, work, tenant, cost)

    monkeypatch.setattr(LongTextThreads, "run", running)
    long = "A long text of many words. " * 1000
    first = setup.chat(user(text(long)))
    assert len(in_threads) == 1
    assert in_threads[0] >= len(long)
    assert setup.chat(user(text(long))).token_ids == first.token_ids
    assert len(setup.chat(user(text(long + "And a sentence."))).token_ids) > len(first.token_ids)
    assert len(in_threads) == 1
    setup.chat(user(text("Other words, as many. " * 1000)))
    assert len(in_threads) == 2


def test_text_that_is_not_unicode_is_refused(setup):
    with pytest.raises(BadRequestError, match="surrogate") as caught:
        setup.chat(user(text("\ud800")))
    assert caught.value.param == "messages"


# --- lengths and pins ----------------------------------------------------------------------------


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers():
    prompt = user(text("hello"))
    length = len(RenderingSetup().chat(prompt).token_ids)
    assert RenderingSetup(max_model_len=length + 1).chat(prompt)
    with pytest.raises(BadRequestError, match=f"{length} tokens.*{length} tokens") as caught:
        RenderingSetup(max_model_len=length).chat(prompt)
    assert caught.value.code == "context_length_exceeded"


def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it():
    small = RenderingSetup(max_model_len=1000)
    for render in (lambda: small.chat(user(text("ab " * 500_000))),
                   lambda: small.completion("ab " * 500_000)):  # fmt: skip
        with pytest.raises(BadRequestError, match=r"15\d{5} characters") as caught:
            render()
        assert caught.value.code == "context_length_exceeded"


def test_a_prompt_too_long_without_its_media_costs_no_processing():
    setup = RenderingSetup(max_model_len=5)
    with pytest.raises(BadRequestError):
        setup.chat(user(picture(b"cat"), text("hello")))
    assert setup.pool.jobs == []


def test_a_prompt_too_long_with_its_media_gives_its_pins_back():
    setup = RenderingSetup(max_model_len=60)
    large = bytes(40)
    [item] = setup.chat(user(picture(large))).items
    setup.directory.try_list(item.key, item.item.nbytes, item.expansion)
    with pytest.raises(BadRequestError, match=r"the prompt has \d+ tokens"):
        setup.chat(user(picture(large), picture(large)))
    assert setup.directory.num_pins == 0


def test_pins_of_a_rendered_prompt_can_be_given_back(setup):
    [item] = setup.chat(user(picture(b"cat"))).items
    setup.directory.try_list(item.key, item.item.nbytes, item.expansion)
    prompt = setup.chat(user(picture(b"cat")))
    assert setup.directory.num_pins == 1
    setup.renderer.release(prompt)
    setup.renderer.release(prompt)
    assert setup.directory.num_pins == 0


def test_what_cannot_be_decoded_is_named(setup):
    with pytest.raises(UnprocessableMediaError) as caught:
        setup.chat(user(text("x")), user(text("y"), picture(b"bad")))
    assert caught.value.param == "messages[1].content[1]"


# --- plain prompts -------------------------------------------------------------------------------


def test_a_plain_text_is_tokenized_with_its_special_tokens(folder):
    setup = RenderingSetup(folder("llama"))
    with_bos, without = setup.completion("Hi"), setup.completion("Hi", add_special_tokens=False)
    assert with_bos.token_ids == [1, *without.token_ids]
    assert with_bos.text == "Hi"


def test_token_ids_are_taken_as_they_are(setup):
    assert setup.completion([1, 75, 2]).token_ids == [1, 75, 2]


@pytest.mark.parametrize("wrong", [-1, 1024, True, 2.0, "7", None, IMAGE, AUDIO])
def test_token_ids_that_cannot_be_are_named(setup, wrong):
    with pytest.raises(BadRequestError) as caught:
        setup.completion([75, wrong])
    assert caught.value.param == "prompt[1]"


def test_ids_beyond_the_tokenizer_are_taken_where_the_model_has_them():
    assert RenderingSetup(vocab_size=2048).completion([2000]).token_ids == [2000]


@pytest.mark.parametrize("empty", ["", []])
def test_an_empty_prompt_is_refused(setup, empty):
    with pytest.raises(BadRequestError, match="empty"):
        setup.completion(empty)


# --- answers -------------------------------------------------------------------------------------


def test_a_detokenizer_follows_the_sampling_params(setup):
    sampling = SamplingParams(stop=("c",), include_stop_str_in_output=True)
    detokenizer = setup.renderer.detokenizer(sampling)
    token_ids = setup.renderer.tokenizer.encode("abcd")
    assert detokenizer.push(token_ids) == "abc"
    assert detokenizer.stopped == "c"


def test_decoding_shows_special_tokens(setup):
    assert setup.renderer.decode([1, 75]) == "<|im_start|>a"
    assert setup.renderer.token_bytes(1) == b"<|im_start|>"


def test_work_is_counted_by_modality(setup):
    setup.chat(user(picture(b"cat"), picture(b"cat"), sound(b"uh")))
    assert counts_of(setup.renderer) == {
        "media_fetches_total:image": 0.0,
        "media_fetches_total:audio": 0.0,
        "media_queued_total:image": 1.0,
        "media_queued_total:audio": 1.0,
        "media_decodes_total:image": 1.0,
        "media_decodes_total:audio": 1.0,
        "media_processed_total:image": 1.0,
        "media_processed_total:audio": 1.0,
        "mm_cache_overtaking_hits_total:image": 0.0,
        "mm_cache_overtaking_hits_total:audio": 0.0,
        "mm_cache_waiting_hits_total:image": 1.0,
        "mm_cache_waiting_hits_total:audio": 0.0,
    }


# --- the real processors -------------------------------------------------------------------------


class HerePool:
    """The real processing, in this process."""

    def __init__(self, folder):
        self.processing = Processing(ProcessingSettings(str(folder), "float32", 10**6, 30.0))

    async def run(self, job: MediaJob) -> Processed:
        return self.processing.run(job)

    def counts(self) -> dict[str, float]:
        return {}


def png(width, height):
    target = io.BytesIO()
    Image.effect_noise((width, height), 80).convert("RGB").save(target, "PNG")
    return target.getvalue()


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_prompts_with_pictures_equal_those_of_hugging_face_s_processor(kind, folder):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder(kind), backend="pil")
    encoded = [png(90, 60), png(64, 120)]
    pictures = [Image.open(io.BytesIO(data)) for data in encoded]
    content = [text("Look:\n"), {"type": "image"}, text("and\n\n"), {"type": "image"}, text("?")]
    asked = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    bos = processor.tokenizer.bos_token
    expected = processor(
        text=asked, images=[pictures], add_special_tokens=not asked.startswith(bos)
    )
    content = [
        text("Look:\n"),
        picture(encoded[0]),
        text("and\n\n"),
        picture(encoded[1]),
        text("?"),
    ]
    prompt = RenderingSetup(folder(kind), pool=HerePool(folder(kind))).chat(user(*content))
    assert prompt.token_ids == list(expected["input_ids"][0])


def opened(folder=NANO_FOLDER, **options):
    """A renderer as an API process opens it."""
    return open_renderer(
        ModelConfig(folder=str(folder), served_name="nano"),
        MediaConfig(),
        directory=Directory(1 << 20),
        uuids=UuidBindings(),
        **options,
    )


def test_a_renderer_opens_with_real_workers_and_closes():
    async def scenario():
        async with opened() as renderer:
            prompt = await renderer.render_chat([user(picture(png(112, 112)), text("What?"))])
            assert prompt.modality_tokens("image") == 16
            assert prompt.items[0].decode_ms > 0

    asyncio.run(scenario())


def test_who_asks_for_the_fingerprint_makes_it_no_second_time(monkeypatch):
    """Front-ends of a fleet ask each second."""
    made = []
    make = ProcessorFamily.fingerprint
    monkeypatch.setattr(
        ProcessorFamily, "fingerprint", lambda family: made.append(1) or make(family)
    )

    async def scenario():
        async with opened(share=ServerShare(wait_for_worker=False)) as renderer:
            told = renderer.fingerprint
            num_made = len(made)
            assert [renderer.fingerprint for _ in range(3)] == [told] * 3
            assert len(made) == num_made

    asyncio.run(scenario())


def test_a_tokenizer_that_was_loaded_before_a_fork_is_not_loaded_again(monkeypatch, tmp_path):
    model = ModelConfig(folder=str(NANO_FOLDER), served_name="nano")
    expected = RenderingSetup().chat(user(text("What?"))).token_ids
    encoder = preloaded_encoder(model)
    loaded = []
    load = Tokenizer.load
    monkeypatch.setattr(Tokenizer, "load", lambda folder: loaded.append(folder) or load(folder))
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")

    async def rendered(chat_template):
        opening = opened(
            chat_template=chat_template,
            share=ServerShare(wait_for_worker=False),
            encoder=encoder,
        )
        async with opening as renderer:
            return (await renderer.render_chat([user(text("What?"))])).token_ids

    assert asyncio.run(rendered(None)) == expected
    assert not loaded
    assert asyncio.run(rendered(str(template))) != expected
    assert loaded == [str(NANO_FOLDER)]


def test_a_folder_that_is_none_is_a_load_error(tmp_path):
    async def scenario():
        async with opened(tmp_path):
            pass

    with pytest.raises(ModelLoadError):
        asyncio.run(scenario())


CONTEXT = 4096
WRONG = {"role": "wizard", "content": "no message: the first to be converted would be refused"}
OUTSIDE = 1 << 30
"""A token id that no vocabulary has."""


@pytest.fixture(scope="module")
def limited():
    return RenderingSetup(max_model_len=CONTEXT)


CALLS = {"role": "assistant", "tool_calls": [{}] * (CONTEXT + 1)}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([WRONG, *[user()] * CONTEXT], "messages"),
        ([WRONG, user(*[text("")] * CONTEXT, text(""))], "messages[1].content"),
        ([WRONG, user(*[text("")] * CONTEXT), user(text(""))], "messages[2].content"),
        ([WRONG, CALLS], "messages[1].tool_calls"),
    ],
)
def test_more_messages_or_parts_than_tokens_are_refused_unread(limited, messages, param):
    with pytest.raises(BadRequestError, match=str(CONTEXT)) as caught:
        limited.chat(*messages)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_token_ids_that_do_not_fit_are_not_looked_at(limited):
    with pytest.raises(BadRequestError) as caught:
        limited.completion([OUTSIDE] * CONTEXT)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


class Watched(dict):
    """A message, or a template's variable, that notes which threads read it."""

    threads: set[int]

    def items(self):
        self.threads.add(threading.get_ident())
        return super().items()


LONG = "a" * FEW_VALUES * CHARACTERS_PER_VALUE
HIDDEN = {"tool_calls": [{"function": {"name": "f", "arguments": json.dumps([LONG])}}]}


@pytest.mark.parametrize(
    ("many", "on_the_loop"),
    [
        ({"many": [1]}, True),
        ({"many": [1] * FEW_VALUES}, False),
        ({"many": LONG}, False),
        (HIDDEN, False),
        ({"many": {LONG: 1}}, False),
        ({"many": {"data": LONG}}, False),
        ({"content": [{"type": "text", "text": "a", "image_url": LONG}]}, True),
    ],
    ids=["few", "many", "a long text", "json within json", "a key", "no file", "a file"],
)
@pytest.mark.parametrize("heavy", ["messages", "chat_template_kwargs"])
def test_only_a_large_chat_is_converted_and_rendered_beside_the_loop(
    limited, heavy, many, on_the_loop
):
    Watched.threads = set()
    message = Watched(user(text("Hello")), **(many if heavy == "messages" else {}))
    variables = Watched(many if heavy == "chat_template_kwargs" else {})

    async def scenario() -> int:
        options = {"chat_template_kwargs": variables}
        await limited.renderer.render_chat([message], options=options)
        return threading.get_ident()

    loop_thread = asyncio.run(scenario())
    assert Watched.threads
    assert (loop_thread in Watched.threads) == on_the_loop


def test_one_tenant_s_large_chats_do_not_stand_before_another_s():
    """They shared the process's threads, first come first served."""
    setup, ended = RenderingSetup(), []

    async def chat(tenant: str) -> None:
        await setup.renderer.render_chat([user(text("Hello"), *[text("a")] * FEW_VALUES)],
                                         tenant=tenant)  # fmt: skip
        ended.append(tenant)

    async def scenario() -> None:
        attacks = [asyncio.create_task(chat("mallory")) for _ in range(20)]
        await asyncio.sleep(0)
        await chat("alice")
        await asyncio.gather(*attacks)

    asyncio.run(scenario())
    assert ended.index("alice") < 10
