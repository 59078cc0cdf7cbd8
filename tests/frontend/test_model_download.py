"""Where a model's files are."""

from __future__ import annotations

import subprocess
import sys

import pytest
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lookonce.config import Options, resolve
from lookonce.errors import ConfigError
from lookonce.frontend import model_download as hub
from lookonce.types.model import GENERAL_MEDIA, NEEDED_PACKAGES
from lookonce.types.transformers_types import known_types


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


def test_weights_of_a_type_that_is_not_served_are_not_fetched(tmp_path, monkeypatch):
    fetched: list[list[str]] = []

    def hub_of_one_model(repo_id: str, *, allow_patterns: list[str], **_: object) -> str:
        fetched.append(allow_patterns)
        return str(tmp_path)

    (tmp_path / "config.json").write_text('{"model_type": "qwen9"}')
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub_of_one_model)
    with pytest.raises(ConfigError, match="qwen9"):
        hub.with_local_model(resolve(Options(model="org/model")))
    assert fetched == [hub.SMALL_FILES]


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
        ('{"model_type": "qwen9"}', "knows no such type (did you mean qwen"),
        ('{"model_type": "qwen9_vl", "image_token_id": 5, "vision_config": {}}', "qwen2_vl"),
        ('{"model_type": "vits"}', "transformers knows no text model of this type"),
    ],
)
def test_a_type_that_is_not_served_is_refused_with_the_reason(tmp_path, content, words):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="MODEL: models of type") as raised:
        hub.with_local_model(resolve(Options(model=str(tmp_path))))
    assert words in raised.value.message


@pytest.mark.parametrize("installed", [True, False])
def test_a_type_that_needs_a_package_says_so_before_anything_starts(
    tmp_path, monkeypatch, installed
):
    content = '{"model_type": "llama4", "image_token_index": 5, "vision_config": {}}'
    (tmp_path / "config.json").write_text(content)
    monkeypatch.setattr(hub, "find_spec", lambda _: object() if installed else None)
    if installed:
        hub.check_type(str(tmp_path))
        return
    with pytest.raises(ConfigError, match=r"needs torchvision for it \(pip install torchvision\)"):
        hub.check_type(str(tmp_path))


def test_the_types_that_need_a_package_are_types_that_are_served():
    named = {name for types in NEEDED_PACKAGES.values() for name in types}
    assert named < {*GENERAL_MEDIA}


def test_the_types_of_transformers_are_read_without_importing_it():
    """Its own tables say the same."""
    known = known_types()
    assert known is not None
    assert known.version == transformers.__version__
    assert known.configs == set(CONFIG_MAPPING_NAMES)
    assert known.text_models == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_an_unknown_type_costs_one_line_and_no_engine(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen9"}')
    started = [sys.executable, "-X", "importtime", "-m", "lookonce", "serve", str(tmp_path)]
    ended = subprocess.run(started, capture_output=True, text=True, check=False, timeout=60)
    said = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert ended.returncode == 2
    assert len(said) == 1
    assert "'qwen9' are not supported: transformers" in said[0]
    assert "knows no such type (did you mean qwen" in said[0]
    imported = {line.split("|")[-1].strip() for line in ended.stderr.splitlines()}
    assert not imported & {"torch", "transformers"}
