"""LookOnce: `LLM`, `SamplingParams` and `media_hash`, each imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookonce.cache.identity import media_hash
    from lookonce.llm import LLM
    from lookonce.types.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "media_hash"]

_HOMES = {
    "LLM": "lookonce.llm",
    "SamplingParams": "lookonce.types.sampling",
    "media_hash": "lookonce.cache.identity",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lookonce' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
