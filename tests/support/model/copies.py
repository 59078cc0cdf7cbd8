"""Copies of random folders, for tests that change a file of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lookonce.config import ModelConfig
from lookonce.model.loader import LoadedModel, load_model


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def edit(path: Path, **changes: Any) -> None:
    """Fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(folder=str(folder), served_name="m", **options))
