"""Folders with Mistral's tekken.json alone: chats and pictures are written as by mistral-common."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec

import numpy as np
import pytest

from lookonce.errors import ModelLoadError
from lookonce.render.families.registry import load_family
from lookonce.render.prompt.encoder import ChatOptions, PromptEncoder, template_sources
from lookonce.render.prompt.messages import read_messages
from lookonce.render.prompt.tokenizer import Tokenizer
from tests.support.model.cases import picture
from tests.support.model.chats import render
from tests.support.model_folders.tekken import SPECIALS, write_tekken

FUNCTION = {
    "name": "f",
    "description": "Größe",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"name": "f", "arguments": '{"a": 1}'}
PLAIN = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes  "},
    {"role": "user", "content": [{"type": "text", "text": "and?"}]},
]
CALLS = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "abcdef121", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "abcdef121", "content": "[1, 2]"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "again"},
]
LISTED = f"[AVAILABLE_TOOLS]{json.dumps(TOOLS, ensure_ascii=False)}[/AVAILABLE_TOOLS]"
CALLED = {
    "v7": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdef121"}]',
    "v11": '[TOOL_CALLS]f[CALL_ID]abcdef121[ARGS]{"a": 1}',
    "v13": '[TOOL_CALLS]f[ARGS]{"a": 1}',
}


def ids_of(folder, messages, tools=None) -> tuple[list[int], str]:
    """A chat as we write it: token ids and text."""
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    tokenizer = Tokenizer.load(folder)
    encoder = PromptEncoder(tokenizer, template_sources(folder, tokenizer), None)
    chat = read_messages(messages, (), {}).conversation
    encoded = asyncio.run(encoder.encode_chat(chat, ChatOptions(tools=tools)))
    return encoded.token_ids, tokenizer.decode(encoded.token_ids, skip_special_tokens=False)


def theirs(folder, messages, tools=None) -> list[int]:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    tokenizer = MistralTokenizer.from_file(str(folder / "tekken.json"))
    return tokenizer.encode_chat_completion(
        ChatCompletionRequest(messages=messages, tools=tools)
    ).tokens


@pytest.mark.parametrize("version", ["v7", "v11", "v13"])
def test_a_chat_is_written_as_its_version_says(tmp_path, version):
    write_tekken(tmp_path / "tekken.json", version)
    _, text = ids_of(tmp_path, PLAIN)
    answered = "[INST]hi[/INST]yes</s>[INST]and?[/INST]"
    assert text == f"<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT]{answered}"
    _, text = ids_of(tmp_path, CALLS, TOOLS)
    first, last = (LISTED, "") if version == "v13" else ("", LISTED)
    which = "" if version == "v13" else "abcdef121[TOOL_CONTENT]"
    result = f"[TOOL_RESULTS]{which}[1, 2][/TOOL_RESULTS]done</s>"
    assert text == (
        f"<s>{first}[INST]hi[/INST]{CALLED[version]}</s>{result}{last}[INST]again[/INST]"
    )


@pytest.mark.skipif(find_spec("mistral_common") is None, reason="mistral-common is not installed")
@pytest.mark.parametrize("version", ["v7", "v11", "v13"])
@pytest.mark.parametrize(("messages", "tools"), [(PLAIN, None), (CALLS, TOOLS), (CALLS[:3], TOOLS)])
def test_a_chat_has_the_tokens_that_mistral_common_gives_it(tmp_path, version, messages, tools):
    write_tekken(tmp_path / "tekken.json", version)
    assert ids_of(tmp_path, messages, tools)[0] == theirs(tmp_path, messages, tools)


def test_a_version_of_which_nothing_is_known_has_no_template(tmp_path):
    write_tekken(tmp_path / "tekken.json", "v99")
    assert Tokenizer.load(tmp_path).chat_template is None


@pytest.fixture
def alone(folder, tmp_path):
    """A Mistral 3 with no other file that says how texts and pictures are tokenized."""
    source = folder("mistral3")
    settings = json.loads((source / "preprocessor_config.json").read_text())
    config = json.loads((source / "config.json").read_text())
    config["image_token_index"] = SPECIALS.index("[IMG]")
    (tmp_path / "config.json").write_text(json.dumps(config))
    images = {
        "image_patch_size": config["vision_config"]["patch_size"],
        "max_image_size": settings["size"]["longest_edge"],
        "spatial_merge_size": config["spatial_merge_size"],
    }
    write_tekken(tmp_path / "tekken.json", "v11", image=images)
    return tmp_path


def test_pictures_are_processed_as_with_all_files(folder, alone):
    whole, ours = (load_family(path, "float32") for path in (folder("mistral3"), alone))
    for image in (picture(1), picture(2, 300, 40)):
        expected, found = whole.process("image", image, {}), ours.process("image", image, {})
        assert found.expansion.length == expected.expansion.length
        for name, array in expected.arrays.items():
            given = np.frombuffer(array.data, array.dtype)
            assert np.array_equal(np.frombuffer(found.arrays[name].data, array.dtype), given)


def test_a_picture_after_the_only_text_goes_before_it(alone):
    prompt = render(alone, ("What?", picture(1)))
    text = Tokenizer.load(alone).decode(prompt.token_ids, skip_special_tokens=False)
    assert text.startswith("<s>[INST][IMG]")
    assert text.endswith("[IMG][IMG_END]What?[/INST]")


def test_a_file_without_the_tokens_of_pictures_is_refused(alone):
    content = json.loads((alone / "tekken.json").read_text())
    del content["special_tokens"]
    (alone / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="no token"):
        load_family(alone, "float32")
