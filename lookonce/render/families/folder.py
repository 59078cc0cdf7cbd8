"""The JSON files of a model that say how media is processed, from a folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lookonce.errors import ModelLoadError

Json = dict[str, Any]


class FolderFiles(msgspec.Struct, frozen=True):
    """The JSON files of a Hugging Face folder that say how media is processed."""

    config: Json
    preprocessor: Json
    """Of the image processor and the feature extractor; both may share one file."""
    processor: Json
    """Top level of processor_config.json: what the processor class itself was given."""
    tokenizer: str | None = None
    """Path of tokenizer.json; None where there is none."""

    def described(self) -> list[Json]:
        """What of the files decides how media is processed, wherever they lie."""
        return [self.config, self.preprocessor, self.processor]

    @property
    def image_processor(self) -> Json:
        nested = self.processor.get("image_processor")
        return dict(nested) if isinstance(nested, dict) else self.preprocessor

    @property
    def feature_extractor(self) -> Json:
        nested = self.processor.get("feature_extractor")
        return dict(nested) if isinstance(nested, dict) else self.preprocessor


def read_folder(folder: str | Path) -> FolderFiles:
    """The files of a local Hugging Face folder or a hub id.

    Raises `ModelLoadError` when config.json is missing or any of the files is not JSON.
    """
    config = _read_json(folder, "config.json")
    if not config:
        raise ModelLoadError(f"{folder} has no config.json")
    tokenizer = _file(folder, "tokenizer.json")
    return FolderFiles(
        config=config,
        preprocessor=_read_json(folder, "preprocessor_config.json"),
        processor=_read_json(folder, "processor_config.json"),
        tokenizer=None if tokenizer is None else str(tokenizer),
    )


def _read_json(folder: str | Path, name: str) -> Json:
    """Empty when there is no such file."""
    path = _file(folder, name)
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=Json)
    except msgspec.DecodeError:
        raise ModelLoadError(f"{name} of {folder} is not a JSON object") from None


def _file(folder: str | Path, name: str) -> Path | None:
    if Path(folder).is_dir():
        path = Path(folder) / name
        return path if path.is_file() else None
    return _hub_file(str(folder), name)


def _hub_file(model: str, name: str) -> Path | None:
    # Imported where a hub is needed: a worker that reads a local folder starts sooner.
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError:
        raise ModelLoadError(f"{model} is no local folder, and the hub is not reached") from None
    except EntryNotFoundError:
        return None
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ModelLoadError(f"{name} of {model} cannot be read: {error}") from None
