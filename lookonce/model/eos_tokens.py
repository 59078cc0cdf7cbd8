"""What ends an answer: what the configs say, and the tokenizer's own end of sequence.

Fine-tunes that end their turns by another token often name it in `tokenizer_config.json` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from transformers.utils.hub import cached_file

from lookonce.errors import ModelLoadError

Json = dict[str, Any]
Content = TypeVar("Content")


class _Added(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """Of tokenizer.json what names tokens. It may be large, so the rest is skipped."""

    added_tokens: list[_Added] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    """By text; a unigram model's are (token, score) in the order of their ids."""


def stop_token_ids(folder: str, configs: list[Any]) -> tuple[int, ...]:
    """Those of the first of `configs` that names any, and the tokenizer's own.

    `folder` may be a hub id. Raises `ModelLoadError` for a tokenizer file that is broken.
    """
    named = next((ids for ids in map(_named_by, configs) if ids), [])
    text = _eos_text(folder)
    own = None if text is None else _token_id(folder, text)
    return tuple(dict.fromkeys(named if own is None else [*named, own]))


def _named_by(config: Any) -> list[int]:
    found = getattr(config, "eos_token_id", None)
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [int(found)]


def _eos_text(folder: str) -> str | None:
    """A token is written as its text, or as an object that holds it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(folder, name, Json).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            return text
    return None


def _token_id(folder: str, text: str) -> int | None:
    file = _read(folder, "tokenizer.json", _TokenizerFile)
    for added in file.added_tokens:
        if added.content == text:
            return added.id
    vocab = _decode("tokenizer.json", bytes(file.model), _Vocabulary).vocab
    if isinstance(vocab, dict):
        return vocab.get(text)
    return next((index for index, (token, _) in enumerate(vocab) if token == text), None)


def _read(folder: str, name: str, kind: type[Content]) -> Content:
    """Empty where there is no such file."""
    path = cached_file(
        folder,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return _decode(name, b"{}" if path is None else Path(path).read_bytes(), kind)


def _decode(name: str, content: bytes, kind: type[Content]) -> Content:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"the model's {name} cannot be read: {error}") from None
