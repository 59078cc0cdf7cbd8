"""`lookonce models`: every type once, for people and for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from lookonce.cli.main import main
from lookonce.model.quantized_weights import unpacked_methods
from lookonce.types.model import (
    EMBEDDERS,
    GENERAL_MEDIA,
    GENERAL_TEXT,
    KEEPS_LATENTS,
    KEEPS_STATES,
    READ_FROM_GGUF,
    SUPPORTED,
    UNSERVABLE,
    UNSERVABLE_MEDIA,
    WITHOUT_LINEAR_LAYERS,
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
    assert "embeddings" not in gives["whisper"]
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


def test_what_is_said_of_weights_states_and_adapters(monkeypatch, capsys):
    """The words; whether they are true of each type is seen where it is loaded (`test_facts`)."""
    rows = {row["model_type"]: row for row in served_rows(monkeypatch, capsys)}
    for table in (KEEPS_STATES, KEEPS_LATENTS, READ_FROM_GGUF, WITHOUT_LINEAR_LAYERS):
        assert rows.keys() >= {*table}
    assert all(row["weights"][0] == "safetensors" for row in rows.values())
    assert rows["lfm2"]["keeps"] == "keys, values and states"
    assert rows["deepseek_v3"]["keeps"] == "latents"
    assert rows["bert"]["keeps"] == "nothing"
    assert (rows["qwen3"]["int8"], rows["qwen3"]["lora"]) == (True, True)
    assert "mxfp4" in rows["gpt_oss"]["weights"]
    assert not rows["whisper"]["lora"]
    shown = run(monkeypatch, capsys)
    line = next(line for line in shown.splitlines() if line.startswith("qwen3_next "))
    assert "LoRA, int8, states" in line
    for method in unpacked_methods():
        assert method in shown


def test_gguf_is_read_for_the_types_that_transformers_reads():
    read = {name.replace("gemma3_text", "gemma3") for name in READ_FROM_GGUF}
    assert read <= set(GGUF_SUPPORTED_ARCHITECTURES)


def test_people_see_why_a_type_is_not_served(monkeypatch, capsys):
    shown = run(monkeypatch, capsys)
    for reason, types in {**UNSERVABLE, **UNSERVABLE_MEDIA}.items():
        line = next(line for line in shown.splitlines() if reason in line)
        assert all(model_type in line for model_type in types)


def test_types_are_found_by_a_part_of_their_names(monkeypatch, capsys):
    rows = json.loads(run(monkeypatch, capsys, "Qwen3", "--json"))
    assert {"qwen3", "qwen3_vl"} <= {row["model_type"] for row in rows}
    assert all("qwen3" in row["model_type"] for row in rows)
    for name in ("qwen2-audio", "Qwen2.5-VL"):
        (line,) = run(monkeypatch, capsys, name).splitlines()
        assert line.startswith(re.sub("[-.]", "_", name.lower()))
    (line,) = run(monkeypatch, capsys, "falcon_mamba").splitlines()
    assert line.startswith("not served, ")
    assert "'foobar'" in run(monkeypatch, capsys, "foobar")


def test_columns_begin_in_one_place(monkeypatch, capsys):
    lines = run(monkeypatch, capsys).split("\n\n")[0].splitlines()
    beginnings = {re.search(r"  (own|general) ", line).start() for line in lines}
    assert len(beginnings) == 1
