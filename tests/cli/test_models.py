"""`lookonce models`: every type once, for people and for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lookonce.cli.main import main
from lookonce.types.model import (
    EMBEDDERS,
    GENERAL_MEDIA,
    GENERAL_TEXT,
    SUPPORTED,
    UNSERVABLE,
    UNSERVABLE_MEDIA,
)


def run(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["lookonce", "models", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return capsys.readouterr().out


def served_rows(monkeypatch, capsys):
    rows = json.loads(run(monkeypatch, capsys, "--json"))
    return [row for row in rows if row["refused_because"] is None]


def test_programs_see_why_a_type_is_not_served(monkeypatch, capsys):
    rows = json.loads(run(monkeypatch, capsys, "--json"))
    found = {row["model_type"]: row["refused_because"] for row in rows if not row["served_by"]}
    tables = {**UNSERVABLE, **UNSERVABLE_MEDIA}
    assert found == {name: reason for reason, types in tables.items() for name in types}


def test_every_type_is_listed_once_with_its_media(monkeypatch, capsys):
    rows = served_rows(monkeypatch, capsys)
    media = {row["model_type"]: tuple(row["media"]) for row in rows}
    assert len(rows) == len(media)
    general = {**dict.fromkeys(GENERAL_TEXT, ()), **GENERAL_MEDIA}
    assert media == {**SUPPORTED, **EMBEDDERS, **general}
    gives = {row["model_type"]: row["gives"] for row in rows}
    assert {name for name, given in gives.items() if given == "embeddings"} == set(EMBEDDERS)
    assert {row["served_by"] for row in rows if row["model_type"] in SUPPORTED} == {"own"}


def test_the_documented_types_are_those_that_the_command_lists(monkeypatch, capsys):
    """The table of own types and the lists of the others, in docs/models.md."""
    rows = served_rows(monkeypatch, capsys)
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    table: dict[str, str] = dict(
        re.findall(r"^\| `(\w+)` \|[^|]*\| ([\w, ]*?) ?\|", page, re.MULTILINE)
    )
    own = {row["model_type"]: ", ".join(row["media"]) for row in rows if row["served_by"] == "own"}
    answers = {row["model_type"] for row in rows if row["gives"] != "embeddings"}
    table.pop("model_type")
    assert table == {name: media for name, media in own.items() if name in answers}
    lists = page.partition("## Text models without")[2].partition("What such a type lacks")[0]
    named = set(re.findall(r"`([\w.-]+)`", lists))
    assert {row["model_type"] for row in rows if row["served_by"] == "general"} <= named


def test_people_see_why_a_type_is_not_served(monkeypatch, capsys):
    shown = run(monkeypatch, capsys)
    for reason, types in {**UNSERVABLE, **UNSERVABLE_MEDIA}.items():
        line = next(line for line in shown.splitlines() if reason in line)
        assert all(model_type in line for model_type in types)
