"""A model's folder on this machine, fetched from the Hugging Face hub where it is not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from lookonce.config import Config
from lookonce.errors import ConfigError
from lookonce.types.model import SUPPORTED, unsupported

Json = dict[str, Any]
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]
SECOND_COPIES = ["original/*", "*consolidated*.safetensors"]
"""The same weights once more, as Llama's, Mistral's and gpt-oss's makers have them: never read."""


def with_local_model(config: Config, *, weights: bool = True) -> Config:
    """The same configuration, its model a local folder of a type that is served.

    Without `weights` the hub is not asked for them. Raises `ConfigError` naming MODEL.
    """
    folder = local_folder(config.model.folder, weights=weights)
    check_type(folder)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, folder=folder))


def local_folder(model: str, *, weights: bool = True) -> str:
    """`model` itself if it is a folder, else where the hub's files of that id are."""
    if model and Path(model).is_dir():
        return model
    # Imported where a hub is needed: it takes as long as the rest of the supervisor.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = SMALL_FILES + WEIGHTS * weights
        return str(snapshot_download(model, allow_patterns=patterns, ignore_patterns=SECOND_COPIES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError):
        raise ConfigError(
            f"MODEL {model!r} is neither a local folder nor a model the hub gives out"
        ) from None


def check_type(folder: str) -> None:
    """Whether the folder is of a type that is served, before any process starts to load it."""
    try:
        config = msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=Json)
    except (OSError, msgspec.DecodeError):
        raise ConfigError("MODEL: the folder has no readable config.json") from None
    model_type = str(config.get("model_type"))
    if model_type not in SUPPORTED:
        raise ConfigError(f"MODEL: {unsupported(model_type).message}")
