"""Chat templates render as in transformers, with content in the form that each of them takes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.errors import BadRequestError, ConfigError
from lookonce.render.families.registry import load_family
from lookonce.render.prompt.encoder import (
    ChatOptions,
    ChatTemplate,
    ChatTemplates,
    PromptEncoder,
    template_sources,
)
from lookonce.render.prompt.messages import read_messages
from lookonce.render.prompt.tokenizer import Tokenizer
from tests.support.model_folders.make import KINDS
from tests.support.render.tokenizers import nano_tokenizer

PICTURE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
SOUND = {"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}
LOOPS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
PRINTS = "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}\n{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}"
)


def text(said):
    return {"type": "text", "text": said}


def user(*content):
    return {"role": "user", "content": list(content)}


def said(role, content):
    return {"role": role, "content": content}


# --- equality with Hugging Face ------------------------------------------------------------------

PLAIN = [said("user", "Hello, Wörld 🙂\n"), said("assistant", " Hi! "), said("user", "And you?")]
SYSTEM = [said("system", "Be brief."), said("user", "Count to\n\n3.")]
IN_PARTS = [said("user", [text("one"), text(" two ")])]
WITH_PICTURES = [user(PICTURE, text("Which?"), PICTURE), said("assistant", "This."), user(PICTURE)]
WITH_SOUND = [user(text("Listen: "), SOUND, PICTURE, SOUND, text("?"))]


@pytest.fixture(scope="session")
def encoder_of(folder):
    made = {}

    def get(kind):
        if kind not in made:
            path = folder(kind)
            tokenizer = Tokenizer.load(path)
            sources = template_sources(path, tokenizer)
            made[kind] = PromptEncoder(tokenizer, sources, load_family(path, "float32"))
        return made[kind]

    return get


def theirs(path, messages, **options):
    """Hugging Face's ids; its processors add a bos token where the template wrote none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if load_family(path, "float32") is None:
        return tokenizer.apply_chat_template(messages, tokenize=True, **options)["input_ids"]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    # What Gemma 3's processor writes around a picture, before it tokenizes.
    prompt = prompt.replace("<start_of_image>", "\n\n<start_of_image>\n\n")
    has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    return tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"]


def in_parts(message):
    content = message["content"]
    return said(message["role"], [text(content)] if isinstance(content, str) else content)


def encode(encoder, conversation, **options):
    return asyncio.run(encoder.encode_chat(conversation, ChatOptions(**options)))


MEDIA_KINDS = ("llava", "qwen2_5_vl", "gemma3", "qwen2_5_omni", "nano")
TEXT_KINDS = tuple(name for name, kind in KINDS.items() if kind.preprocessor is None)
CASES = [
    *((kind, chat) for kind in TEXT_KINDS for chat in (PLAIN, SYSTEM)),
    *((kind, chat) for kind in MEDIA_KINDS for chat in (PLAIN, SYSTEM, IN_PARTS, WITH_PICTURES)),
    *((kind, WITH_SOUND) for kind in ("qwen2_5_omni", "nano")),
]


@pytest.mark.parametrize(("kind", "messages"), CASES)
@pytest.mark.parametrize("generation", [True, False])
def test_ids_equal_those_of_hugging_face(kind, messages, generation, folder, encoder_of):
    conversation = read_messages(
        messages, modalities=("image", "audio"), limits={"image": 9, "audio": 9}
    ).conversation
    # LLaVA's template takes parts only: of a text it would print nothing.
    for_them = conversation if kind != "llava" else [*map(in_parts, conversation)]
    try:
        expected = theirs(folder(kind), for_them, add_generation_prompt=generation)
    except jinja2.TemplateError as refusal:
        with pytest.raises(BadRequestError, match=re.escape(str(refusal))):
            encode(encoder_of(kind), conversation, add_generation_prompt=generation)
    else:
        ours = encode(encoder_of(kind), conversation, add_generation_prompt=generation)
        assert ours.token_ids == expected


def test_a_final_message_is_continued_as_hugging_face_continues_it(folder, encoder_of):
    messages = [said("user", "Count."), said("assistant", "One, two,")]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ours = encode(encoder_of("llama"), messages, **options)
    assert ours.text.endswith("One, two,")
    assert ours.token_ids == theirs(folder("llama"), messages, **options)


# --- the form of contents ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "form"), [(LOOPS, "parts"), (PRINTS, "text"), (EITHER, "either")]
)
def test_the_form_a_template_takes_is_found_out(source, form):
    assert ChatTemplate(source).content_form == form


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("llama", "text"),
        ("llava", "parts"),
        ("qwen2_5_vl", "either"),
        ("gemma3", "either"),
        ("nano", "either"),
    ],
)
def test_the_shipped_templates_have_these_forms(kind, form, folder):
    source = (folder(kind) / "chat_template.jinja").read_text()
    assert ChatTemplate(source, variables={"bos_token": ""}).content_form == form


@pytest.mark.parametrize(
    "source",
    [
        "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% for m in messages %}{% set c = m['content'] %}"
        "{% for p in c | selectattr('type', 'eq', 'text') %}{{ p.text }}{% endfor %}{% endfor %}",
    ],
)
def test_parts_are_recognised_behind_macros_and_variables(source):
    assert ChatTemplate(source).content_form == "parts"


@pytest.mark.parametrize(
    "source", [PRINTS, "{{ messages[0].content | tojson }}", "{{ messages[0].content + '!' }}"]
)
def test_a_template_that_prints_the_list_itself_takes_texts(source):
    assert ChatTemplate(source).content_form == "text"


def test_parts_become_lines_for_a_template_that_takes_texts():
    rendered = ChatTemplate(PRINTS).render([said("user", [text("one"), text("two")])])
    assert rendered == "<user>one\ntwo\n"


def test_media_stands_as_its_placeholder_in_a_text():
    template = ChatTemplate(PRINTS, placeholders={"image": "<img>"})
    assert template.render([said("user", [{"type": "image"}, text("x")])]) == "<user><img>\nx\n"


def test_a_text_becomes_one_part_for_a_template_that_takes_parts():
    assert ChatTemplate(LOOPS).render([said("user", "hello")]) == "[hello]"


# --- roles, tools, variables ---------------------------------------------------------------------


def test_developer_means_system_to_templates_that_do_not_know_it():
    assert ChatTemplate(PRINTS).render([said("developer", "x")]) == "<system>x\n"
    knowing = PRINTS + "{# developer #}"
    assert ChatTemplate(knowing).render([said("developer", "x")]) == "<developer>x\n"


PRINTS_X = "{{ messages[0].x }}"
SHOWS_ALL = (
    "{{ messages | tojson }}{{ messages | string }}{{ tools | tojson }}{{ documents }}"
    "{{ add_generation_prompt }}{{ continue_final_message }}{{ mode | tojson }}{{ bos_token }}"
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
fields = st.sampled_from(
    ["name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "x"]
)


@given(
    st.lists(st.dictionaries(fields, json_values, max_size=3), min_size=1, max_size=3),
    st.none() | st.lists(st.dictionaries(st.text(max_size=3), json_values, max_size=2), max_size=2),
    json_values,
)
def test_whatever_is_in_a_message_is_rendered_as_transformers_does(extra, tools, mode):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{**said("user", "x"), **each} for each in extra]
    options = {"tools": tools, "add_generation_prompt": True}
    expected, _ = render_jinja_template(
        [messages], chat_template=SHOWS_ALL, bos_token="<s>", mode=mode, **options
    )
    template = ChatTemplate(SHOWS_ALL, variables={"bos_token": "<s>"})
    assert template.render(messages, variables={"mode": mode}, **options) == expected[0]


@pytest.mark.parametrize("other", [np.float32(0.5), np.arange(3), Path("x"), (1, 2)], ids=repr)
def test_what_is_no_json_is_shown_to_the_template_as_transformers_does(other):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{**said("user", "x"), "x": [other]}]
    expected, _ = render_jinja_template([messages], chat_template=PRINTS_X)
    assert ChatTemplate(PRINTS_X).render(messages) == expected[0]


def test_a_template_for_tools_is_used_when_there_are_tools():
    templates = ChatTemplates({"default": ChatTemplate("plain"), "tool_use": ChatTemplate("tools")})
    assert templates.select([{"function": {}}]).render([]) == "tools"
    assert templates.select([]).render([]) == "plain"
    assert templates.select(None).render([]) == "plain"


def test_variables_of_a_request_overrule_the_tokenizer_s():
    template = ChatTemplate("{{ bos_token }}{{ mode }}", variables={"bos_token": "<s>"})
    assert template.render([], variables={"mode": "fast"}) == "<s>fast"
    assert template.render([], variables={"bos_token": ""}) == ""


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt"])
def test_variables_cannot_replace_what_has_a_field_of_its_own(name):
    with pytest.raises(BadRequestError, match=name) as caught:
        ChatTemplate("x").render([], variables={name: 1})
    assert caught.value.param == "chat_template_kwargs"


# --- refusals ------------------------------------------------------------------------------------


def test_a_template_s_own_words_reach_the_client():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequestError, match="roles must alternate"):
        template.render([said("user", "x")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
        "{{ messages + 1 }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_breaks_is_a_bad_request_without_inner_details(source):
    with pytest.raises(BadRequestError) as caught:
        ChatTemplate(source).render([said("user", "x")])
    assert "0x" not in caught.value.message


def test_continuing_and_prompting_exclude_each_other():
    with pytest.raises(BadRequestError):
        ChatTemplate(PRINTS).render([said("user", "x")], continue_final_message=True)


def test_a_model_without_template_says_so():
    with pytest.raises(BadRequestError, match="chat template"):
        ChatTemplates({}).select()


# --- where templates come from -------------------------------------------------------------------


def test_the_folder_s_template_is_used_unless_a_file_overrides_it(folder, tmp_path):
    own = template_sources(folder("nano"), nano_tokenizer())
    assert own == {"default": (folder("nano") / "chat_template.jinja").read_text()}
    other = tmp_path / "other.jinja"
    other.write_text("other")
    assert template_sources(folder("nano"), nano_tokenizer(), str(other)) == {"default": "other"}


def test_a_template_beside_an_older_processor_is_found(tmp_path):
    (tmp_path / "chat_template.json").write_text('{"chat_template": "older"}')
    assert template_sources(tmp_path, nano_tokenizer()) == {"default": "older"}


def test_an_unreadable_override_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="--chat-template"):
        template_sources(tmp_path, nano_tokenizer(), str(tmp_path / "none.jinja"))


def test_a_template_that_is_none_is_refused_with_its_line():
    with pytest.raises(ConfigError, match="the chat template is broken in line 2: "):
        ChatTemplate("fine\n{{ broken")
