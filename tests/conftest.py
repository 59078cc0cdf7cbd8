"""Fixtures for all tests: random Hugging Face folders, built once per session, and nano."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from lookonce.config import NANO_FOLDER
from tests.support.model_folders.embedders import SOURCES, make_embedder
from tests.support.model_folders.make import FolderMaker, make_folder

os.environ["OMP_NUM_THREADS"] = "1"
"""Read when torch is first imported: two threads on busy cores can be five times slower."""

os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "trusted.pem")
"""What clients trust that say nothing else: one certificate whose key is gone. Each of thousands of
clients would otherwise read those of all authorities, which takes it 30 ms of CPU."""

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
"""No test may fail for the time that examples take: the first text in a new checkout alone takes
Hypothesis a second."""

LONGEST = (
    "tests/end_to_end/",
    "tests/tools/",
    "tests/benchmarks/",
    "tests/test_llm.py",
)
"""What starts processes or trains, longest first: `make test` begins with it, so that only short
files are left at its end."""
ONE_SERVER = ("tests/end_to_end/", "tests/attack/", "tests/clients/")
"""Folders whose tests share servers: one test process gets a folder whole, and starts them once."""
OWN_SERVERS = frozenset(
    f"tests/end_to_end/test_{name}.py"
    for name in (
        *("chaos", "faults", "film", "general_media", "kv_tiers", "nano_ear"),
        *("observability", "soak", "voxtral_realtime"),
    )
)
"""Files of these folders that start servers of their own: any process may get them."""

SAME_MODELS = frozenset(
    f"tests/model/test_{name}.py"
    for name in (
        *("general_media", "general_text", "parity", "parity_chat", "parity_controls"),
        *("prompt_logprobs", "sessions"),
    )
)
"""Files that compare the same models with Hugging Face's answers: one test process gets them all,
and loads and asks each model once."""


class FolderScheduling(LoadFileScheduling):
    """pytest-xdist's `--dist loadfile`, but tests that share much go to one process whole."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        if file in OWN_SERVERS:
            return file
        if file in SAME_MODELS:
            return "tests/model/: same models"
        return next((folder for folder in ONE_SERVER if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # else files with few tests, however long, come last
    return FolderScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make millions of objects, no garbage, and what was imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()  # collections need not walk it
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest first where tests are divided among processes."""

    def place(item: pytest.Item) -> int:
        starts = (number for number, start in enumerate(LONGEST) if item.nodeid.startswith(start))
        return next(starts, len(LONGEST))

    if hasattr(config, "workerinput"):
        items.sort(key=place)


@pytest.fixture(scope="session")
def made_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where folders are that are made once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    folders = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "model-folders"
    folders.mkdir(exist_ok=True)
    return folders


def made_once(target: Path, make: Callable[[Path], object]) -> Path:
    """`target`, made whole under another name first: another process may make it just now."""
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="being-made-", dir=target.parent) as own:
            make(Path(own, target.name))
            with suppress(OSError):  # it is there by now
                Path(own, target.name).rename(target)
    return target


@pytest.fixture(scope="session")
def folder(made_folders: Path) -> FolderMaker:
    """`folder(kind, seed=0, scale="tiny")`: a complete random folder; `folder("nano")`: nano."""

    def get(kind: str, *, seed: int = 0, scale: str = "tiny") -> Path:
        if kind == "nano":
            return NANO_FOLDER
        return made_once(
            made_folders / f"{kind}-{scale}-{seed}",
            lambda target: make_folder(kind, target, seed=seed, scale=scale),
        )

    return get


@pytest.fixture(scope="session")
def embedder(folder: FolderMaker, made_folders: Path) -> FolderMaker:
    """`embedder(kind)`: a random folder of a model that gives embeddings or scores."""

    def get(kind: str, *, seed: int = 0, scale: str = "tiny") -> Path:
        source = folder(SOURCES[kind], seed=seed, scale=scale)
        return made_once(
            made_folders / f"embedder-{kind}-{scale}-{seed}",
            lambda target: make_embedder(kind, source, target),
        )

    return get


@pytest.fixture(scope="session")
def nano_folder() -> Path:
    return NANO_FOLDER


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
