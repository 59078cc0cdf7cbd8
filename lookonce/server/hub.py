"""A model's folder on this machine, fetched from the Hugging Face hub where it is not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lookonce.config import Config
from lookonce.errors import ConfigError

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]


def with_local_model(config: Config, *, weights: bool = True) -> Config:
    """The same configuration, its model a local folder. Raises `ConfigError` naming MODEL.

    Without `weights` the hub is not asked for them.
    """
    folder = local_folder(config.model.folder, weights=weights)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, folder=folder))


def local_folder(model: str, *, weights: bool = True) -> str:
    """`model` itself if it is a folder, else where the hub's files of that id are."""
    if model and Path(model).is_dir():
        return model
    # Imported where a hub is needed: it takes as long as the rest of the supervisor.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, allow_patterns=SMALL_FILES + WEIGHTS * weights))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError):
        raise ConfigError(
            f"MODEL {model!r} is neither a local folder nor a model the hub gives out"
        ) from None
