"""Why nobody can forge a placeholder: inside the renderer, media tokens have a secret spelling.

    template source   <|vision_bos|><|IMAGE|>…   →  the secret spellings, which only it can write
    tokenizer         knows media tokens by their secret spelling, and no other
    user text         `<|IMAGE|>` is ordinary text to that tokenizer: nothing to search or escape

Everything else about the tokenizer is as before, so a clean chat has the ids Hugging Face gives it.
A secret spelling begins with U+FDD0, a noncharacter that Unicode reserves for exactly such use
inside a program; text that arrives with it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.prompt.tokenizer import Tokenizer

RESERVED = "\ufdd0"
_FIRST_LABEL = 0xE000
"""What follows `RESERVED` tells the tokens apart: private-use characters."""
_MEDIA_WORDS = re.compile("image|img|audio|video|vision|sound|speech|picture|<[be]o[iav]>", re.I)


class SecretSpelling:
    """Public and secret spellings of a tokenizer's media tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Longest first: a token's text may contain another's.
        ordered = sorted(set(texts), key=lambda text: (-len(text), text))
        self.secrets = {
            text: RESERVED + chr(_FIRST_LABEL + number) for number, text in enumerate(ordered)
        }
        self._publics = {secret: text for text, secret in self.secrets.items()}
        self._public_pattern = _any_of(self.secrets)
        self._secret_pattern = _any_of(self._publics)

    def conceal(self, text: str) -> str:
        """Trusted text (a template's source, its variables) in the secret spelling."""
        return self._public_pattern.sub(lambda found: self.secrets[found[0]], text)

    def reveal(self, text: str) -> str:
        """Rendered text, or a message about it, as a person should read it."""
        if RESERVED not in text:
            return text
        return self._secret_pattern.sub(lambda found: self._publics[found[0]], text)


def media_spelling(tokenizer: Tokenizer, placeholder_ids: Iterable[int]) -> SecretSpelling:
    """Covers every added token about media; none when the model takes no media."""
    placeholders = set(placeholder_ids)
    if not placeholders:
        return SecretSpelling(())
    return SecretSpelling(
        text
        for token_id, text in tokenizer.added_tokens.items()
        if token_id in placeholders or _MEDIA_WORDS.search(text)
    )


def secret_tokenizer(
    tokenizer: Tokenizer, spelling: SecretSpelling, placeholder_ids: Iterable[int]
) -> Tokenizer:
    """The tokenizer that knows media tokens by their secret spelling only.

    Raises `ModelLoadError` when a placeholder is no token of its own: no prompt could hold it.
    """
    if not spelling.secrets:
        return tokenizer
    secret = tokenizer.respelled(spelling.secrets)
    for token_id in placeholder_ids:
        text = secret.added_tokens.get(token_id)
        if text is None or token_id not in secret.encode(text, add_special_tokens=False):
            raise ModelLoadError(f"the tokenizer cannot produce the placeholder token {token_id}")
    return secret


def refuse_reserved(value: object, param: str) -> None:
    """Raise `BadRequestError` if a text anywhere in a JSON value holds the reserved character."""
    # Not recursive: a client chooses the depth.
    waiting = [(value, param)]
    while waiting:
        part, where = waiting.pop()
        if isinstance(part, str):
            if not part.isascii() and RESERVED in part:
                raise BadRequestError(
                    f"{where}: the text holds U+FDD0, which is not a character", param=where
                )
        elif isinstance(part, Mapping):
            waiting += [(key, where) for key in part]
            waiting += [(inner, f"{where}.{key}") for key, inner in part.items()]
        elif isinstance(part, Sequence):
            waiting += [(inner, f"{where}[{number}]") for number, inner in enumerate(part)]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `texts`, earlier ones first; `(?!)` never matches."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
