"""A model's local folder, downloaded from the Hugging Face hub if need be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from lookonce.config import Config
from lookonce.errors import ConfigError, ModelLoadError
from lookonce.types.model import check_served

Json = dict[str, Any]
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]
SECOND_COPIES = ["original/*", "*consolidated*.safetensors"]
"""Second copies of the weights, in the formats of Meta, Mistral and OpenAI: never read."""


def with_local_model(config: Config, *, weights: bool = True) -> Config:
    """The same configuration with the model's local folder, whose type is checked.

    `weights`: download the weights too. Raises `ConfigError` naming MODEL.
    """
    folder = local_folder(config.model.folder, weights=weights)
    check_type(folder)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, folder=folder))


def local_folder(model: str, *, weights: bool = True) -> str:
    """`model` itself if it is a folder, else the folder with the hub's files of that id."""
    if model and Path(model).is_dir():
        return model
    # Imported only when it is needed: the import takes as long as the rest of the supervisor.
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
    """Raises `ConfigError` for a folder of a model type that is not served."""
    try:
        config = msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=Json)
    except (OSError, msgspec.DecodeError):
        raise ConfigError("MODEL: the folder has no readable config.json") from None
    try:
        check_served(config)
    except ModelLoadError as error:
        raise ConfigError(f"MODEL: {error.message}") from None
