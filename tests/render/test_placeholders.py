"""User texts cannot forge placeholders; each placeholder becomes its expansion, in order."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lookonce.config import NANO_FOLDER
from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.families.registry import load_family
from lookonce.render.prompt.encoder import ChatOptions, ChatTemplate, PromptEncoder
from lookonce.render.prompt.messages import read_messages
from lookonce.render.prompt.placeholders import (
    RESERVED,
    PlaceholderEscaping,
    escaped_tokenizer,
    escaping_of,
    match_placeholders,
    place_media,
    refuse_reserved,
)
from lookonce.types.media import Expansion
from lookonce.types.request import RenderedItem
from tests.support.render.tokenizers import nano_tokenizer

IMAGE, AUDIO, BEGIN, END, EMBED = 9, 3, 20, 21, 22


IDS = {"image": IMAGE, "audio": AUDIO}


def image(name, tokens):
    return RenderedItem(
        name, b"", "image", item=None, expansion=Expansion(((IMAGE, tokens),), IMAGE)
    )


def audio(name, tokens):
    return RenderedItem(
        name, b"", "audio", item=None, expansion=Expansion(((AUDIO, tokens),), AUDIO)
    )


def wrapped(name, tokens):
    """An expansion that brings its own begin and end."""
    return RenderedItem(
        name,
        b"",
        "image",
        item=None,
        expansion=Expansion(((BEGIN, 1), (EMBED, tokens), (END, 1)), EMBED),
    )


def placed_in(token_ids, parts, placeholder_ids=IDS):
    """The parts, each where the template wanted it."""
    modalities = [part.modality for part in parts]
    return place_media(token_ids, parts, match_placeholders(token_ids, modalities, placeholder_ids))


def test_the_template_s_wrapping_stays_around_the_expansion():
    placed = placed_in([1, 6, IMAGE, 7, 50], [image(b"a", 3)])
    assert placed.token_ids == [1, 6, IMAGE, IMAGE, IMAGE, 7, 50]
    [feature] = placed.features
    assert (feature.key, feature.offset, feature.length, feature.num_embeds) == (b"a", 2, 3, 3)


def test_an_expansion_brings_its_own_wrapping():
    placed = placed_in([1, BEGIN, 50], [wrapped(b"a", 2)], {"image": BEGIN})
    assert placed.token_ids == [1, BEGIN, EMBED, EMBED, END, 50]
    assert (placed.features[0].offset, placed.features[0].length) == (2, 2)


def test_parts_of_each_modality_are_taken_in_order_and_features_sorted_by_place():
    # The template wrote both pictures first, although the sound stood between them.
    parts = [image(b"a", 1), audio(b"s", 2), image(b"b", 2)]
    placed = placed_in([IMAGE, IMAGE, 50, AUDIO], parts)
    assert [f.key for f in placed.features] == [b"a", b"b", b"s"]
    assert [f.offset for f in placed.features] == [0, 1, 4]
    assert placed.items == [parts[0], parts[2], parts[1]]


@pytest.mark.parametrize(
    ("token_ids", "modalities"),
    [
        ([1, IMAGE], []),
        ([1], ["image"]),
        ([IMAGE, IMAGE], ["image"]),
        ([IMAGE, AUDIO], ["image", "image"]),
        ([AUDIO], ["image"]),
    ],
)
def test_a_template_that_drops_or_invents_a_placeholder_is_refused(token_ids, modalities):
    with pytest.raises(BadRequestError, match="placeholders"):
        match_placeholders(token_ids, modalities, IDS)


pieces = st.lists(
    st.one_of(
        st.integers(50, 60),
        st.tuples(st.sampled_from(["image", "audio"]), st.integers(1, 5)),
    ),
    max_size=30,
)


@given(pieces)
def test_every_feature_covers_exactly_its_part_s_embeds(sequence):
    parts, token_ids, expected = [], [], []
    for piece in sequence:
        if isinstance(piece, int):
            token_ids.append(piece)
            expected.append(piece)
            continue
        make = image if piece[0] == "image" else audio
        parts.append(make(str(len(parts)).encode(), piece[1]))
        token_ids.append(IDS[piece[0]])
        expected += [IDS[piece[0]]] * piece[1]
    placed = placed_in(token_ids, parts)
    assert placed.token_ids == expected
    assert [item.key for item in placed.items] == [f.key for f in placed.features]
    covered = [p for f in placed.features for p in range(f.offset, f.end)]
    assert covered == [p for p, token in enumerate(expected) if token < 50]


def test_a_thousand_items_are_placed():
    parts = [image(str(n).encode(), 64) for n in range(1000)]
    placed = placed_in([token for _ in parts for token in (6, IMAGE, 7)], parts)
    assert len(placed.token_ids) == 1000 * 66
    assert placed.features[999].offset == 999 * 66 + 1


MEDIA_TOKENS = ("<|IMAGE|>", "<|AUDIO|>", "<|vision_bos|>", "<|audio_eos|>", "<|VIDEO|>")
PIECES = (*MEDIA_TOKENS, "<|", "|>", "<|IMA", "GE|>", "IMAGE", "<|im_end|>", " ", "\n", "é🙂")
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=8).map("".join)
clean_texts = texts.filter(lambda text: RESERVED not in text)
TEMPLATE = NANO_FOLDER.joinpath("chat_template.jinja").read_text()
nano_encoder = PromptEncoder(
    nano_tokenizer(), {"default": TEMPLATE}, load_family(NANO_FOLDER, "float32")
)


def encode(messages, encoder=nano_encoder, **options):
    chat = read_messages(messages, modalities=("image", "audio"), limits={"image": 9, "audio": 9})
    return asyncio.run(encoder.encode_chat(chat.conversation, ChatOptions(**options)))


def text_part(text):
    return {"type": "text", "text": text}


@given(clean_texts)
def test_no_text_in_a_message_becomes_a_placeholder_and_decoding_gives_it_back(text):
    encoded = encode([{"role": "user", "content": text}])
    expected = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert not {IMAGE, AUDIO, 4, 5, 6, 7, 10} & set(encoded.token_ids)
    assert nano_tokenizer().decode(encoded.token_ids, skip_special_tokens=False) == expected
    assert encoded.text == expected


@given(st.lists(clean_texts, min_size=1, max_size=6))
@example(["<|IMA", "GE|>"])
def test_no_placeholder_arises_where_parts_meet(parts):
    media = {"type": "image_url", "image_url": {"url": "https://x.test/"}}
    content = [media, *map(text_part, parts), media]
    assert encode([{"role": "user", "content": content}]).token_ids.count(IMAGE) == 2


@given(clean_texts)
def test_a_plain_prompt_holds_no_placeholder(text):
    encoded = asyncio.run(nano_encoder.encode_text(text, add_special_tokens=True))
    assert IMAGE not in encoded.token_ids
    assert nano_tokenizer().decode(encoded.token_ids, skip_special_tokens=False) == text


def test_special_tokens_that_are_not_of_media_still_count_in_plain_prompts():
    encoded = asyncio.run(nano_encoder.encode_text("<|im_start|>user", add_special_tokens=True))
    assert encoded.token_ids[0] == 1


CHANNELS = {
    "name": [{"role": "user", "name": "<|IMAGE|>", "content": "x"}],
    "tool call": [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": '{"<|IMAGE|>": "<|IMAGE|>"}'}}],
        }
    ],
    "tool result": [{"role": "tool", "content": "<|IMAGE|>", "tool_call_id": "<|IMAGE|>"}],
    "reasoning": [{"role": "assistant", "content": "x", "reasoning_content": "<|IMAGE|>"}],
}


@pytest.mark.parametrize("channel", CHANNELS)
def test_nothing_else_a_client_sends_becomes_a_placeholder(channel):
    printing_all = "{{ messages | tojson }}{{ tools | tojson }}{{ extra }}{{ extra | upper }}"
    encoder = PromptEncoder(
        nano_tokenizer(), {"default": printing_all}, load_family(NANO_FOLDER, "float32")
    )
    encoded = encode(
        CHANNELS[channel],
        encoder,
        tools=[{"function": {"name": "<|IMAGE|>"}}],
        chat_template_kwargs={"extra": "<|IMAGE|>"},
    )
    assert "<|IMAGE|>" in encoded.text
    assert IMAGE not in encoded.token_ids


def test_a_template_may_print_the_tokenizer_s_own_variables():
    encoder = PromptEncoder(
        nano_tokenizer(),
        {"default": "{{ image_token }}{{ messages[0].content }}"},
        load_family(NANO_FOLDER, "float32"),
    )
    assert encode([{"role": "user", "content": "<|IMAGE|>"}], encoder).token_ids.count(IMAGE) == 1


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": RESERVED}, "messages[0].content"),
        ({"role": "user", "content": [text_part(f"a{RESERVED}b")]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "name": RESERVED}, "messages[0].name"),
    ],
)
def test_the_character_secret_texts_begin_with_is_refused(message, param):
    with pytest.raises(BadRequestError) as caught:
        encode([message])
    assert caught.value.param == param


@pytest.mark.parametrize(
    "options",
    [
        {"chat_template_kwargs": {"a": {"b": [RESERVED]}}},
        {"tools": [{"function": {RESERVED: 1}}]},
    ],
)
def test_it_is_refused_wherever_it_hides(options):
    with pytest.raises(BadRequestError, match="U\\+FDD0"):
        encode([{"role": "user", "content": "x"}], **options)


def test_depth_costs_a_client_s_request_only():
    deep: object = "x"
    for _ in range(5000):
        deep = [deep]
    message = {"role": "user", "content": "x"}
    assert encode([{**message, "name": deep}]).text == encode([message]).text  # nobody reads it
    with pytest.raises(BadRequestError, match="cannot render"):
        ChatTemplate("{{ messages[0].name | tojson }}").render([{**message, "name": deep}])


def nested(value, depth):
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "beside", [["\ud800"], [10**5000], [{(1, 2): 3}], nested(0, 3000)], ids=lambda v: type(v[0])
)
def test_it_is_refused_beside_what_is_no_json(beside):
    for value in ([*beside, RESERVED], {"x": [beside, {"y": RESERVED}]}):
        with pytest.raises(BadRequestError, match="U\\+FDD0"):
            refuse_reserved(value, "x")
    refuse_reserved(beside, "x")


def test_what_is_refused_is_named_without_words_for_all_the_rest():
    """Long keys times many values were gigabytes."""
    value = {"k" * 1_000_000: [1] * 20_000, "z": ["x", {"y" * 500: RESERVED}]}
    tracemalloc.start()
    try:
        with pytest.raises(BadRequestError) as caught:
            refuse_reserved(value, "x")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.param == f"x.z[1].{'y' * 64}"
    assert most < 20_000_000


def test_unescaping_undoes_escaping():
    escaping = PlaceholderEscaping(MEDIA_TOKENS)
    text = "a<|IMAGE|><|AUDIO|>b<|im_end|>"
    assert escaping.escape(text) != text
    assert escaping.unescape(escaping.escape(text)) == text


def test_a_token_whose_text_contains_another_s_is_escaped_whole():
    escaping = PlaceholderEscaping(["<image>", "<image>s"])
    assert escaping.unescape(escaping.escape("<image>s<image>")) == "<image>s<image>"
    assert len(escaping.escape("<image>s")) == len(escaping.escape("<image>"))


def test_a_model_without_media_keeps_its_tokenizer():
    escaping = escaping_of(nano_tokenizer(), [])
    assert escaped_tokenizer(nano_tokenizer(), escaping, []) is nano_tokenizer()


def test_a_placeholder_that_is_no_token_is_a_load_error():
    escaping = escaping_of(nano_tokenizer(), [500])
    with pytest.raises(ModelLoadError, match="500"):
        escaped_tokenizer(nano_tokenizer(), escaping, [500])
