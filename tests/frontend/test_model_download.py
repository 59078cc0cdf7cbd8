"""Where a model's files are."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from lookonce.config import Options, resolve
from lookonce.errors import ConfigError
from lookonce.frontend import model_download as hub


def test_a_folder_stays_where_it_is(tmp_path):
    assert hub.local_folder(str(tmp_path)) == str(tmp_path)


def test_a_hub_id_becomes_the_folder_of_its_files_and_keeps_its_name(tmp_path, monkeypatch):
    def hub_of_one_model(repo_id: str, **_: object) -> str:
        assert repo_id == "org/model"
        return str(tmp_path)

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub_of_one_model)
    config = hub.with_local_model(resolve(Options(model="org/model")))
    assert config.model.folder == str(tmp_path)
    assert config.model.served_name == "org/model"


@pytest.mark.parametrize("weights", [True, False])
def test_weights_are_fetched_once_and_only_where_they_are_wanted(tmp_path, monkeypatch, weights):
    small = ["config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    copies = [
        "original/config.json",
        "original/model-00001-of-00001.safetensors",
        "original/consolidated.00.pth",
        "consolidated.safetensors",
        "consolidated-00001-of-00001.safetensors",
        "pytorch_model.bin",
    ]
    fetched: list[str] = []

    def hub_of_copies(
        repo_id: str,
        *,
        allow_patterns: list[str],
        ignore_patterns: list[str],
        local_files_only: bool,
    ) -> str:
        fetched.extend(
            filter_repo_objects(
                small + shards + copies,
                allow_patterns=allow_patterns,
                ignore_patterns=ignore_patterns,
            )
        )
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", hub_of_copies)
    hub.local_folder("org/model", weights=weights)
    assert fetched == small + shards * weights


@pytest.mark.parametrize("model", ["org/model", "/no/such/folder", "a b c", ""])
def test_neither_folder_nor_id_is_a_mistake_in_an_option(model, monkeypatch):
    def unreachable(repo_id: str, **_: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigError, match="MODEL"):
        hub.local_folder(model)


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_folder_without_readable_config_is_a_mistake_in_an_option(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"MODEL: .*config\.json"):
        hub.with_local_model(resolve(Options(model=str(tmp_path))))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "lookonce models"),
        ('{"model_type": "electra"}', "its decoder cannot be run"),
        ('{"model_type": "qwen2_vl_next", "vision_config": {}}', "did you mean qwen2_vl"),
    ],
)
def test_a_type_that_is_not_served_is_refused_with_the_reason(tmp_path, content, words):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="MODEL: models of type") as raised:
        hub.with_local_model(resolve(Options(model=str(tmp_path))))
    assert words in raised.value.message
