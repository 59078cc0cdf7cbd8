"""`lookonce ls` and `lookonce pull`: the models that are on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from lookonce.config import EMBEDDED_MODELS, Options, resolve
from lookonce.errors import ModelLoadError
from lookonce.frontend.model_download import WEIGHTS, check_type_served, with_local_model
from lookonce.types.model import EMBEDDERS, GENERAL_MEDIA, SUPPORTED


@dataclass(frozen=True, slots=True)
class HeldModel:
    """A model whose files are here."""

    name: str
    """What `lookonce serve` takes."""
    model_type: str
    media: tuple[str, ...]
    nbytes: int
    state: str
    """"served", or why not."""
    folder: str


def print_models_held(*, as_json: bool) -> None:
    models = held_models()
    if as_json:
        print(json.dumps([asdict(model) for model in models], indent=1))
        return
    width = max(len(model.name) for model in models)
    type_width = max(len(model.model_type) for model in models)
    for model in models:
        media = ", ".join(("text", *model.media))
        print(
            f"{model.name:{width}}  {_size(model.nbytes):>9}  {model.model_type:{type_width}}  "
            f"{media:18}  {model.state}"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def held_models() -> list[HeldModel]:
    """The embedded models, and those in the cache of the Hugging Face hub, by name."""
    return [held_model(name, folder) for name, folder in EMBEDDED_MODELS.items()] + _of_hub()


def _of_hub() -> list[HeldModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        if (newest.snapshot_path / "config.json").is_file():
            found.append(held_model(repo.repo_id, newest.snapshot_path))
    return sorted(found, key=lambda model: model.name.lower())


def held_model(name: str, folder: Path) -> HeldModel:
    """What the folder's files say of it."""
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        return HeldModel(name, "?", (), nbytes, "has no readable config.json", str(folder))
    model_type = str(config.get("model_type", "?"))
    media = (SUPPORTED | EMBEDDERS | GENERAL_MEDIA).get(model_type, ())
    return HeldModel(name, model_type, media, nbytes, _state(folder, config), str(folder))


def _state(folder: Path, config: dict[str, object]) -> str:
    try:
        check_type_served(config)
    except ModelLoadError as error:
        return f"not served: {error.message.splitlines()[0]}"
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return "no weights: lookonce pull fetches them"
    return "served"


def pull(model: str) -> None:
    """Download a model, with the hub's own progress, and print its folder.

    Its small files come first: a type that is not served is refused before its weights. Raises
    `ConfigError`.
    """
    print(with_local_model(resolve(Options(model=model))).model.folder)
