"""The tokens that end an answer: those of the configs, and the tokenizer's end of sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookonce.errors import ModelLoadError
from tests.support.model.copies import copied, edit, load

EOT = 5
"""Of the llama folder's tokenizer: `<|eot_id|>`, which its configs name too."""
UNIGRAM = [["a", -1.5], ["b", 0], ["c", 0], ["<end>", 0]]


@pytest.fixture
def silent(folder, tmp_path) -> Path:
    """A llama folder whose configs name no end."""
    copy = copied(folder("llama"), tmp_path)
    edit(copy / "config.json", eos_token_id=None)
    (copy / "generation_config.json").unlink()
    return copy


def eos_tokens(folder: Path) -> tuple[int, ...]:
    return load(folder).info.eos_token_ids


def test_without_one_in_the_configs_the_tokenizers_end_counts(silent):
    assert eos_tokens(silent) == (EOT,)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_tokenizers_end_may_be_an_object_in_either_file(silent, name):
    (silent / "tokenizer_config.json").write_text("{}")
    (silent / name).write_text(json.dumps({"eos_token": {"content": "<|eot_id|>"}}))
    assert eos_tokens(silent) == (EOT,)


def test_the_tokenizers_end_is_added_to_those_of_the_configs(folder, tmp_path):
    """As in fine-tunes that end their turns by another token than their base."""
    copy = copied(folder("llama"), tmp_path)
    edit(copy / "tokenizer_config.json", eos_token="<|end_header_id|>")
    assert eos_tokens(copy) == (EOT, 4)


def test_an_end_that_both_name_counts_once(folder):
    assert eos_tokens(folder("llama")) == (EOT,)


@pytest.mark.parametrize("vocab", [{"<end>": 3, "a": 1}, UNIGRAM])
def test_the_end_may_be_a_plain_word_of_the_vocabulary(silent, vocab):
    edit(silent / "tokenizer_config.json", eos_token="<end>")
    edit(silent / "tokenizer.json", added_tokens=[], model={"vocab": vocab})
    assert eos_tokens(silent) == (3,)


def test_an_end_outside_the_logits_is_left_out(silent):
    edit(silent / "tokenizer_config.json", eos_token="<far>")
    edit(silent / "tokenizer.json", added_tokens=[{"id": 9999, "content": "<far>"}])
    assert eos_tokens(silent) == ()


def test_a_folder_without_tokenizer_names_none(silent):
    for path in silent.glob("tokenizer*"):
        path.unlink()
    assert eos_tokens(silent) == ()


def test_a_broken_file_is_named(silent):
    (silent / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load(silent)
