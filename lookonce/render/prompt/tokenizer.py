"""A folder's tokenizer, typed: text ↔ token ids, and the bytes of single tokens.

`transformers` decides how the files of a folder make a tokenizer; then only the fast backend (the
`tokenizers` library) is kept. Folders whose tokenizer class is generic load without importing torch
(0.7 s instead of 2.3 s).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.tekken import read_tekken

SHORT_CHARACTERS = 4096
"""A text up to this holds the interpreter's lock while it is tokenized: a few milliseconds."""
GENERIC_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
"""Values of `tokenizer_class` with which transformers takes tokenizer.json as it is."""
FORCED_CLASSES = frozenset(
    {
        "hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen4_exp", "siglip2",
    }
)  # fmt: skip
"""Model types for which transformers overrules a generic `tokenizer_class`."""


TEKKEN_ROLES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
"""The special tokens of Mistral's tokenizers, whose files do not name them by role."""


class Tokenizer:
    """Text ↔ token ids. Safe to share between threads.

    `special_tokens` maps roles (`eos_token`, `image_token`, …) to texts; chat templates take them
    as variables. `chat_template` is the folder's template, several by name, or None.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._bytes: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.added_tokens = {
            token_id: added.content
            for token_id, added in backend.get_added_tokens_decoder().items()
        }
        self.special_ids = frozenset(
            token_id
            for token_id, added in backend.get_added_tokens_decoder().items()
            if added.special
        )

    @property
    def special_texts(self) -> dict[str, int]:
        """Text → id of every special token."""
        return {self.added_tokens[token_id]: token_id for token_id in self.special_ids}

    def special_ids_except(self, kept: Collection[str]) -> frozenset[int]:
        """Ids of the special tokens whose text is not among `kept`."""
        if not kept:
            return self.special_ids
        return frozenset(i for i in self.special_ids if self.added_tokens[i] not in kept)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder or hub id. Raises `ModelLoadError`."""
        tekken = Path(folder) / "tekken.json"
        if tekken.is_file() and not (Path(folder) / "tokenizer.json").is_file():
            template = read_tekken(tekken).chat_template
            return cls(_converted(tekken), special_tokens=TEKKEN_ROLES, chat_template=template)
        try:
            loaded = _load(str(folder))
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ModelLoadError(f"the tokenizer cannot be loaded: {error}") from error
        backend = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise ModelLoadError("the model has no fast tokenizer (tokenizer.json)")
        return cls(
            backend,
            special_tokens={
                role: text
                for role, text in loaded.special_tokens_map.items()
                if isinstance(text, str)
            },
            chat_template=loaded.chat_template,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises `BadRequestError` for text with lone surrogates, which has no UTF-8 form."""
        try:
            if len(text) <= SHORT_CHARACTERS:
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            # Alone `encode_batch*` releases the interpreter's lock; to begin it takes 0.1 ms.
            batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return batch[0].ids
        except (TypeError, UnicodeEncodeError):
            raise BadRequestError("the text is not valid Unicode (a lone surrogate)") from None

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Two texts with the special tokens between them. Raises `BadRequestError`."""
        try:
            return self.backend.encode(first, second, add_special_tokens=True).ids
        except (TypeError, UnicodeEncodeError):
            raise BadRequestError("the text is not valid Unicode (a lone surrogate)") from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids without a token decode to nothing. Raises `BadRequestError` for impossible ids."""
        try:
            return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise BadRequestError("token ids are whole numbers from 0 on") from None

    def token_text(self, token_id: int) -> str | None:
        """The token as written in the vocabulary (`Ġthe`), as `/tokenize` shows it."""
        return self.backend.id_to_token(token_id)

    def token_id(self, text: str) -> int | None:
        return self.backend.token_to_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of the token, not always whole characters; empty for an unused id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The token's text if its bytes are whole characters, else None."""
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole[token_id] = text
        return text

    @property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens.get("eos_token")
        return None if text is None else self.token_id(text)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token of the vocabulary."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a text is the concatenation of the bytes of its tokens."""
        return self._decoder_kinds == ["ByteLevel"]

    def with_renamed_tokens(self, new_texts: Mapping[str, str]) -> Tokenizer:
        """The same tokenizer with other texts for some added tokens (old → new text)."""
        described = json.loads(self.backend.to_str())
        for added in described["added_tokens"]:
            added["content"] = new_texts.get(added["content"], added["content"])
        vocab = described["model"]["vocab"]
        described["model"]["vocab"] = _renamed_vocab(vocab, new_texts)
        return Tokenizer(
            Backend.from_str(json.dumps(described)),
            special_tokens={
                role: new_texts.get(text, text) for role, text in self.special_tokens.items()
            },
            chat_template=self.chat_template,
        )

    # --- inside -------------------------------------------------------------------------------

    @cached_property
    def _decoder_kinds(self) -> list[str]:
        """Types of the decoder's stages."""
        if self.backend.decoder is None:
            return []
        described = json.loads(self.backend.decoder.__getstate__())
        return [stage["type"] for stage in described.get("decoders", [described])]

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.token_text(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if "ByteLevel" in self._decoder_kinds:
            return _byte_level(token)
        if token_id in self.added_tokens:
            return token.encode()
        if "ByteFallback" in self._decoder_kinds and _is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        if "▁" in token:
            return token.replace("▁", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


def _load(folder: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    if _is_generic(Path(folder)):
        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _converted(tekken: Path) -> Backend:
    """Mistral's own file, by transformers' converter, which needs no mistral-common for files that
    list their special tokens."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    try:
        converted: Backend = MistralConverter(str(tekken)).converted()
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        raise ModelLoadError(f"tekken.json cannot be read: {error}") from error
    return converted


def _is_generic(folder: Path) -> bool:
    """Whether `AutoTokenizer`, which imports torch, would use tokenizer.json as it is."""
    named = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    model_type = _read_json(folder / "config.json").get("model_type")
    return (
        named in GENERIC_CLASSES
        and model_type not in FORCED_CLASSES
        and (folder / "tokenizer.json").is_file()
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _renamed_vocab(vocab: Any, new_texts: Mapping[str, str]) -> Any:
    """A BPE-like vocabulary maps tokens to ids; a unigram one lists (token, score)."""
    if isinstance(vocab, dict):
        return {new_texts.get(token, token): token_id for token, token_id in vocab.items()}
    return [[new_texts.get(token, token), score] for token, score in vocab]


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _byte_alphabet(printable: Iterable[int]) -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes are themselves, the others U+0100 and up."""
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(rest)}


BYTE_ALPHABET = _byte_alphabet([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])


def _byte_level(token: str) -> bytes:
    """The bytes of a token. Added tokens may have other characters, and are then their own text."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()
