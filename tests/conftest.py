"""Fixtures for all tests: random Hugging Face folders, built once per session, and nano."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from lookonce.config import NANO_FOLDER
from tests.support.model_folders.make import FolderMaker, make_folder

os.environ["OMP_NUM_THREADS"] = "1"
"""Read when torch is first imported: two threads on busy cores can be five times slower."""

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
"""No test may fail for the time that examples take: the first text in a new checkout alone takes
Hypothesis a second."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FolderMaker:
    """`folder(kind, seed=0, scale="tiny")`: a complete random folder; `folder("nano")`: nano."""
    root = tmp_path_factory.mktemp("folders")

    def get(kind: str, *, seed: int = 0, scale: str = "tiny") -> Path:
        if kind == "nano":
            return NANO_FOLDER
        target = root / f"{kind}-{scale}-{seed}"
        if not target.exists():
            make_folder(kind, target, seed=seed, scale=scale)
        return target

    return get


@pytest.fixture(scope="session")
def nano_folder() -> Path:
    return NANO_FOLDER


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
