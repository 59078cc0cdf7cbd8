"""The page for operators says what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lookonce.cli.budgets import markdown
from lookonce.cli.main import BENCHMARKS
from lookonce.cli.options import HELP
from lookonce.config import Options, ServerConfig
from lookonce.engine.supervisor.child_process import (
    MAX_DELAY,
    MAX_FAILED_RESTARTS,
    MAX_FAILED_STARTS,
)
from lookonce.frontend.metrics import COUNTED_ELSEWHERE
from lookonce.server.http.app import OPEN_PATHS

PAGE = (Path(__file__).parent.parent / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_table_of_budgets_is_the_one_that_is_declared():
    assert markdown() in PAGE


@pytest.mark.parametrize("name", [name for name in HELP if name != "model"])
def test_every_option_is_explained(name):
    assert f"`--{name.replace('_', '-')}" in PAGE


def test_no_option_is_explained_that_there_is_not():
    known = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(Options)}
    known |= {"--no-prefix-caching", "--no-encoder-prefetch", "--no-closed-schemas", "--config"}
    of_benchmarks = {
        "--url",
        "--model",
        "--rate",
        "--concurrency",
        "--plot",
        "--peer-shape",
        "--before",
        "--cost",
        "--rounds",
        "--attack",
        "--renders",
    }
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= known | of_benchmarks | {"--json"}


def test_every_metric_it_names_is_exported():
    named = set(re.findall(r"`([a-z_]+_(?:total|ratio|state|waiting))`", PAGE))
    assert len(named) > 5
    assert named <= set(COUNTED_ELSEWHERE)


def test_routes_that_need_no_key_are_named():
    assert all(f"`{path}`" in PAGE for path in OPEN_PATHS)


def test_its_numbers_are_those_of_the_code():
    assert (MAX_FAILED_STARTS, MAX_FAILED_RESTARTS, MAX_DELAY) == (4, 10, 30.0)
    assert ServerConfig().drain_timeout == 30.0
    assert "four starts in a row" in PAGE
    assert "ten in a row" in PAGE
    assert "30 seconds" in PAGE


@pytest.mark.parametrize("name", re.findall(r"lookonce bench (\w+)", PAGE))
def test_its_benchmarks_exist(name):
    assert name == "list" or name in BENCHMARKS
