"""The tokenizer gives Hugging Face's ids for every folder, and the bytes of single tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.config import NANO_FOLDER
from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.prompt.tokenizer import FORCED_CLASSES, GENERIC_CLASSES, Tokenizer
from tests.support.model_folders.make import KINDS
from tests.support.render.tokenizers import nano_tokenizer, spaced_tokenizer

TEXTS = (
    "What is in this picture?",
    "  two spaces, a\ttab\r\nand\n\n\nlines ",
    "Grüße, 你好, 🙂👩‍👩‍👧, \x00\x7f",
    "<|im_start|>user <|IMAGE|><image><start_of_image> <|im_end|> <s>",
    "",
)


@pytest.mark.parametrize("kind", [*KINDS, "nano"])
def test_ids_and_text_equal_those_of_auto_tokenizer(kind, folder):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(folder(kind)), AutoTokenizer.from_pretrained(folder(kind))
    for text in TEXTS:
        for special in (False, True):
            token_ids = ours.encode(text, add_special_tokens=special)
            assert token_ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(token_ids, skip_special_tokens=special) == theirs.decode(
                token_ids, skip_special_tokens=special
            )
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)


def test_a_folder_that_names_its_class_loads_as_transformers_decides(folder, tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(folder("qwen2_5_vl"), tmp_path / "named")
    config = tmp_path / "named" / "tokenizer_config.json"
    described = json.loads(config.read_text()) | {"tokenizer_class": "Qwen2TokenizerFast"}
    config.write_text(json.dumps(described))
    ours = Tokenizer.load(tmp_path / "named")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "named")
    assert type(theirs).__name__ == "Qwen2Tokenizer"
    image = next(token for token, text in ours.added_tokens.items() if "image" in text)
    with_renamed_tokens = ours.with_renamed_tokens({ours.added_tokens[image]: "§§"})
    for text in TEXTS:
        assert ours.encode(text) == with_renamed_tokens.encode(text) == theirs.encode(text)
    assert with_renamed_tokens.encode("§§") == [image]


def test_a_generic_folder_loads_without_torch():
    check = (
        "import sys; from lookonce.render.renderer import Renderer;"
        "from lookonce.render.prompt.tokenizer import Tokenizer;"
        f"Tokenizer.load({str(NANO_FOLDER)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_model_types_whose_class_transformers_overrules_are_known():
    from transformers.models.auto import tokenization_auto as auto

    kept = {*GENERIC_CLASSES, "MistralCommonBackend", None}
    forced = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert {m for m in forced if auto.TOKENIZER_MAPPING_NAMES.get(m) not in kept} == FORCED_CLASSES


def test_a_folder_without_tokenizer_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer.load(tmp_path)


@given(st.text())
def test_bytes_of_byte_level_tokens_join_to_the_text(text):
    tokenizer = nano_tokenizer()
    token_ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


def test_tokens_of_a_spaced_vocabulary_have_their_bytes():
    tokenizer = spaced_tokenizer()
    said = [tokenizer.token_bytes(token) for token in tokenizer.encode("the cat €")]
    assert said == [b" the", b" cat", b" ", b"\xe2", b"\x82", b"\xac"]
    assert tokenizer.token_bytes(0) == b"<s>"


def test_ids_without_a_token_say_nothing():
    tokenizer = nano_tokenizer()
    for unused in (tokenizer.vocab_size, 2**31, -1):
        assert tokenizer.token_bytes(unused) == b""
    assert tokenizer.decode([5000]) == ""


def test_ids_that_cannot_be_are_the_client_s_mistake():
    with pytest.raises(BadRequestError):
        nano_tokenizer().decode([-1])


def test_lone_surrogates_are_the_client_s_mistake():
    with pytest.raises(BadRequestError, match="surrogate"):
        nano_tokenizer().encode("a\ud800")


@pytest.mark.parametrize("make", [nano_tokenizer, spaced_tokenizer])
def test_a_respelled_token_keeps_its_id_and_loses_its_old_text(make):
    tokenizer = make()
    old = tokenizer.added_tokens[2]
    with_renamed_tokens = tokenizer.with_renamed_tokens({old: "§§"})
    assert with_renamed_tokens.encode("a§§b") == tokenizer.encode(f"a{old}b")
    assert 2 not in with_renamed_tokens.encode(f"a{old}b")
    assert tokenizer.decode(with_renamed_tokens.encode(f"the {old}!")) == f"the {old}!"
