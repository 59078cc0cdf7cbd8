"""Token ids of the texts some families write around a picture's tokens, by the folder's tokenizer.

It is read by the `tokenizers` library alone: no torch, no transformers, a few tenths of a second.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from blake3 import blake3
from tokenizers import Tokenizer

from lookonce.errors import ModelLoadError
from lookonce.render.families.folder import FolderFiles

Runs = tuple[tuple[int, int], ...]
"""`(token id, count)` in order."""


class Wording:
    """Texts → runs of token ids. Raises `ModelLoadError` for a folder without tokenizer.json."""

    def __init__(self, files: FolderFiles) -> None:
        if files.tokenizer is None:
            raise ModelLoadError("the model has no tokenizer.json, which says how media is written")
        described = Path(files.tokenizer).read_bytes()
        self.digest = blake3(described).digest()
        """Of the tokenizer: a part of the fingerprint of families whose expansions hold its ids."""
        self._tokenizer = Tokenizer.from_buffer(described)

    def runs(self, text: str) -> Runs:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tuple((token, len(list(same))) for token, same in groupby(ids))

    def token(self, text: str) -> int:
        """The id of a text that is one token. Raises `ModelLoadError` where it is not."""
        found = self._tokenizer.token_to_id(text)
        if found is None:
            raise ModelLoadError(f"the tokenizer has no token {text}")
        return int(found)
