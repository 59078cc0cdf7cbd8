"""`tools/make_folder.py` writes what the server loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lookonce.config import ModelConfig
from lookonce.model.loader import load_model
from tools.make_folder import main


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_either_type_loads(tmp_path: Path, dtype: str) -> None:
    assert main(["qwen2_5_vl", str(tmp_path / "folder"), "--dtype", dtype]) == 0
    weights = load_file(tmp_path / "folder" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    loaded = load_model(ModelConfig(folder=str(tmp_path / "folder"), served_name="x", dtype=dtype))
    assert loaded.info.modalities == ("image", "video")


@pytest.mark.parametrize("kind", ["text:olmo2", "media:vipllava"])
def test_types_without_a_family_of_their_own_have_folders(tmp_path: Path, kind: str) -> None:
    assert main([kind, str(tmp_path / "folder")]) == 0
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["model_type"] == kind.partition(":")[2]


def test_the_same_arguments_give_the_same_weights(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["llama", str(tmp_path / name), "--seed", "7"]) == 0
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_folder_with_something_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("keep")
    assert main(["llama", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_it_runs_from_any_folder(tmp_path: Path) -> None:
    """It finds what it imports; what it makes, other tests see."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    script = Path(__file__).parents[2] / "tools" / "make_folder.py"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, script, "llama", "mine"]
    done = subprocess.run(
        command, cwd=tmp_path, env=bare, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "mine is not empty\n")
