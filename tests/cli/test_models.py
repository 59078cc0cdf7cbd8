"""`lookonce models`: every type once, for people and for programs."""

from __future__ import annotations

import json

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


def test_every_type_is_listed_once_with_its_media(monkeypatch, capsys):
    rows = json.loads(run(monkeypatch, capsys, "--json"))
    media = {row["model_type"]: tuple(row["media"]) for row in rows}
    assert len(rows) == len(media)
    general = {**dict.fromkeys(GENERAL_TEXT, ()), **GENERAL_MEDIA}
    assert media == {**SUPPORTED, **EMBEDDERS, **general}
    gives = {row["model_type"]: row["gives"] for row in rows}
    assert {name for name, given in gives.items() if given == "embeddings"} == set(EMBEDDERS)
    assert {row["served_by"] for row in rows if row["model_type"] in SUPPORTED} == {"own"}


def test_people_see_why_a_type_is_not_served(monkeypatch, capsys):
    shown = run(monkeypatch, capsys)
    for reason, types in {**UNSERVABLE, **UNSERVABLE_MEDIA}.items():
        line = next(line for line in shown.splitlines() if reason in line)
        assert all(model_type in line for model_type in types)
