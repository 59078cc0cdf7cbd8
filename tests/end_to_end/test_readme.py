"""README's examples run unchanged, except for the address of the server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.drawing import encoded, picture

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|)\n(.*?)```", README, re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
CURL = [code for _, code in BLOCKS if code.startswith("curl ")]
SERVED_AT = "http://127.0.0.1:8000"


def output(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(blocks: list[str], word: str) -> str:
    (found,) = [code for code in blocks if word in code]
    return found


def test_nothing_else_in_it_is_left_untried():
    assert len(PYTHON) == 2
    assert len(CURL) == 1


def test_the_openai_client_s_example_tells_what_is_in_its_picture(server):
    code = example(PYTHON, "OpenAI")
    assert SERVED_AT in code
    answer = output(sys.executable, "-c", code.replace(SERVED_AT, server.url))
    assert answer == "a red circle to the left of a blue square"


def test_the_example_without_a_server_says_what_the_model_is():
    answer = output(sys.executable, "-c", example(PYTHON, "LLM"))
    assert answer == "I am a tiny model that knows simple pictures and sounds.\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_shell_s_example_tells_what_is_in_the_file_and_what_was_reused(server, tmp_path):
    (tmp_path / "picture.png").write_bytes(encoded(picture(("green", "triangle"))))
    (code,) = CURL
    assert SERVED_AT in code
    command = code.replace(SERVED_AT, server.url)
    answer = json.loads(output("bash", "-c", command, folder=tmp_path))
    assert answer["choices"][0]["message"]["content"] == "a green triangle"
    assert answer["reuse_receipt"]["items"][0]["modality"] == "image"
