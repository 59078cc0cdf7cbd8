"""A model's local folder, downloaded from the Hugging Face hub if need be."""

from __future__ import annotations

import dataclasses
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from lookonce.config import Config
from lookonce.errors import ConfigError, ModelLoadError
from lookonce.types.model import (
    EMBEDDERS,
    NEEDED_PACKAGES,
    check_known,
    check_served,
    unsupported,
)
from lookonce.types.network import connection_error
from lookonce.types.pooling import read_pooling
from lookonce.types.transformers_types import known_types

Json = dict[str, Any]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_SECONDS = 1.5
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]
SECOND_COPIES = ["original/*", "*consolidated*.safetensors"]
"""Second copies of the weights, in the formats of Meta, Mistral and OpenAI: never read."""


def with_local_model(config: Config, *, weights: bool = True) -> Config:
    """The same configuration with the model's local folder; its type is checked before weights are
    downloaded.

    `weights`: download the weights too. Raises `ConfigError` naming MODEL.
    """
    folder = local_folder(config.model.folder, weights=False)
    check_type(folder, config.model.pooling)
    if weights:
        folder = local_folder(config.model.folder)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, folder=folder))


def local_folder(model: str, *, weights: bool = True) -> str:
    """`model` itself if it is a folder, else the folder with the hub's files of that id."""
    if model and Path(model).is_dir():
        return model
    if not HUB_ID.fullmatch(model) or Path(model).exists():
        raise ConfigError(f"MODEL {model!r} is not a folder, and cannot be a hub id")
    # Imported only when it is needed: the import takes as long as the rest of the supervisor.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = SMALL_FILES + WEIGHTS * weights
    offline = constants.HF_HUB_OFFLINE or not _is_reachable(constants.ENDPOINT)
    try:
        return str(
            snapshot_download(
                model,
                allow_patterns=patterns,
                ignore_patterns=SECOND_COPIES,
                local_files_only=bool(offline),
            )
        )
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        if offline:
            problem = f"{constants.ENDPOINT} cannot be reached, and it was not downloaded earlier"
        elif isinstance(error, HfHubHTTPError | HFValidationError):
            problem = f"{constants.ENDPOINT} gives out no such model (HF_TOKEN if it is private)"
        else:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            problem = f"{constants.ENDPOINT} did not send it: {reason}"
        raise ConfigError(f"MODEL {model!r} is not a folder; as a hub id: {problem}") from None


def _is_reachable(endpoint: str) -> bool:
    """Whether the hub, or the proxy of this machine, takes a connection."""
    url = urlsplit(endpoint)
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(url.netloc):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = url.port or (443 if url.scheme == "https" else 80)
    return connection_error(url.hostname or "", port, HUB_SECONDS) is None


def check_type_served(config: Json) -> None:
    """Raises `ModelLoadError` for a config of a type that is not served, that transformers does not
    know, or for which it needs a package that is not installed: before weights are downloaded or an
    engine is started."""
    check_served(config)
    if (known := known_types()) is not None:
        check_known(config, known)
    model_type = str(config.get("model_type"))
    for package, types in NEEDED_PACKAGES.items():
        if model_type in types and find_spec(package) is None:
            reason = f"transformers needs {package} for it (pip install {package})"
            raise unsupported(model_type, reason)


def check_type(folder: str, pooling: str | None = None) -> None:
    """Raises `ConfigError` for a folder of a model type that is not served, or that pools as is not
    supported. `pooling` is `--pooling`."""
    try:
        config = msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=Json)
    except (OSError, msgspec.DecodeError):
        raise ConfigError("MODEL: the folder has no readable config.json") from None
    try:
        check_type_served(config)
        pools = read_pooling(folder, config, pooling)
    except ModelLoadError as error:
        raise ConfigError(f"MODEL: {error.message}") from None
    if pools is None and config.get("model_type") in EMBEDDERS:
        raise ConfigError("--pooling none: this model gives embeddings and generates nothing")
