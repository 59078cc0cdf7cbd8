"""An answer ends at what the configs say and at the tokenizer's own end of sequence."""

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


def stops(folder: Path) -> tuple[int, ...]:
    return load(folder).info.eos_token_ids


def test_where_the_configs_name_no_end_it_is_the_tokenizer_s(silent):
    assert stops(silent) == (EOT,)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_it_may_be_an_object_and_stand_in_either_file(silent, name):
    (silent / "tokenizer_config.json").write_text("{}")
    (silent / name).write_text(json.dumps({"eos_token": {"content": "<|eot_id|>"}}))
    assert stops(silent) == (EOT,)


def test_it_is_added_to_what_the_configs_say(folder, tmp_path):
    """As in fine-tunes that end their turns by another token than their base."""
    copy = copied(folder("llama"), tmp_path)
    edit(copy / "tokenizer_config.json", eos_token="<|end_header_id|>")
    assert stops(copy) == (EOT, 4)


def test_what_both_name_counts_once(folder):
    assert stops(folder("llama")) == (EOT,)


@pytest.mark.parametrize("vocab", [{"<end>": 3, "a": 1}, UNIGRAM])
def test_it_may_be_a_plain_word_of_the_vocabulary(silent, vocab):
    edit(silent / "tokenizer_config.json", eos_token="<end>")
    edit(silent / "tokenizer.json", added_tokens=[], model={"vocab": vocab})
    assert stops(silent) == (3,)


def test_a_token_that_the_model_cannot_draw_ends_nothing(silent):
    edit(silent / "tokenizer_config.json", eos_token="<far>")
    edit(silent / "tokenizer.json", added_tokens=[{"id": 9999, "content": "<far>"}])
    assert stops(silent) == ()


def test_a_folder_without_tokenizer_names_none(silent):
    for path in silent.glob("tokenizer*"):
        path.unlink()
    assert stops(silent) == ()


def test_a_broken_file_is_named(silent):
    (silent / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load(silent)
