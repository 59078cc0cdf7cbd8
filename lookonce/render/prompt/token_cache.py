"""Token ids of texts that were tokenized before: a text is cut into chunks, and only new ones are
tokenized.

    text     <|im_start|>system\\nYou are …<|im_end|>\\n│<|im_start|>user\\nA long document … a│ b …
    chunks   0                                       │1                                  │2
    ids      found by digest                         │found by digest                    │tokenized

The ids of a text are those of its chunks, one after the other, only if no token and no decision of
the tokenizer crosses a cut. `TextSplitter` cuts at two kinds of places, each only where the
tokenizer's own description proves that. A tokenizer with a part that is not known here is left
alone: its texts are tokenized whole.

**Before an added token.** `tokenizers` first cuts a text at the occurrences of its added tokens
that are matched before normalization; normalizer, pre-tokenizer and model then see each part alone.
So the start of such an occurrence is a cut, if it always is an occurrence: no other added token can
overlap it from the left, it takes no space to its left (`lstrip`) and asks for no word's end
(`single_word`). Metaspace's `prepend_scheme` "first" is decided at the text's first character only:
in a chunk that begins with an added token nothing else stands there, as in the whole text.

**Before a space within a part**, after a printable ASCII character. Known patterns of
pre-tokenizers (GPT-2's, cl100k's and its relatives) match a space only as the first character of a
match or between other spaces, look at no character before a match, and look ahead of spaces only.
So a match begins at that space, and those before and after it are the same without each other. NFC,
the one normalizer that is allowed here, composes nothing across an ASCII character that a space
follows.

A text all of whose chunks are known is kept as one more chunk: asked again, it is not even cut.

The first chunks of two texts that begin alike are equal, since a cut depends on the text before it
and on a few hundred characters after it. So a message that grows is tokenized from its last common
chunk on.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from tokenizers import AddedToken

from lookonce.cache.directory import ByteLRU
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.counts import Counts

TOKEN_CACHE_BYTES = 32 * 1024**2
"""Of one renderer: about six million tokens."""
MIN_TEXT = 1024
"""Characters of the shortest text that is cut: a shorter one is tokenized in 0.3 ms."""
MIN_CHUNK = 32
"""Characters of the shortest chunk before an added token, so that many short messages share one."""
LONG_PART = 256
"""Characters without an added token from which on a part begins a chunk however short the one
before it is."""
MAX_CHUNK = 1024
"""Characters from which on a chunk ends before the next space, where that is a cut."""
ENTRY_BYTES = 320
"""Charged per chunk beside its ids: digest, objects, places in the dictionary."""
ID_BYTES = 4
NO_SCOPE = bytes(32)

_Json = dict[str, Any]


class TokenCache:
    """Digest of scope and chunk → token ids; the least recently used leave first.

    Belongs to one tokenizer. The scope keeps tenants apart: how long an answer takes must not tell
    one of them what another has sent. Safe to share between threads.
    """

    def __init__(
        self, capacity_bytes: int = TOKEN_CACHE_BYTES, counts: Counts | None = None
    ) -> None:
        """`counts` gets `token_cache_*`; by default they are counted for this cache alone."""
        counts = Counts() if counts is None else counts
        self._queries = counts.count("token_cache_queries_total")
        self._hits = counts.count("token_cache_hits_total")
        self._bytes = counts.count("token_cache_bytes", gauge=True)
        self._chunks: ByteLRU[bytes] = ByteLRU(capacity_bytes)
        """Digest → token ids as int32 bytes."""
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def queries(self) -> int:
        """Tokens of the texts that were looked up."""
        return int(self._queries.value)

    @property
    def hits(self) -> int:
        """Those of them that were not tokenized again."""
        return int(self._hits.value)

    @property
    def nbytes(self) -> int:
        return self._chunks.nbytes

    def get(self, digests: Iterable[bytes]) -> list[bytes | None]:
        """The ids of each chunk as int32 bytes, None where they are unknown."""
        with self._lock:
            return [self._chunks.get(digest) for digest in digests]

    def put(self, chunks: Mapping[bytes, bytes]) -> None:
        """Keep digest → ids; a chunk larger than the cache is not kept."""
        with self._lock:
            for digest, ids in chunks.items():
                if digest not in self._chunks:  # another thread may have been faster
                    self._chunks.try_insert(digest, ENTRY_BYTES + len(ids), ids)
            self._bytes.set(self.nbytes)

    def count(self, queries: int, hits: int) -> None:
        with self._lock:
            self._queries.add(queries)
            self._hits.add(hits)

    def clear(self) -> None:
        """Forget all chunks and counts."""
        with self._lock:
            self._chunks.clear()
            for count in (self._queries, self._hits, self._bytes):
                count.set(0)


class CachingTokenizer:
    """Tokenizes a text by its chunks, if the tokenizer allows that."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._splitter = TextSplitter.of(tokenizer)
        self._ends = _post_processor_ends(tokenizer)

    @property
    def cuts_texts(self) -> bool:
        """Whether this tokenizer's texts can be cut anywhere."""
        return self._splitter is not None and self._ends is not None

    def encode(
        self, text: str, cache: TokenCache | None, scope: bytes, *, add_special_tokens: bool
    ) -> NDArray[np.int32]:
        """[T], the ids of `Tokenizer.encode`, not writeable. `scope` is 32 bytes or empty.

        Raises `BadRequestError` for text with lone surrogates.
        """
        return self.complete(
            self.look_up(text, cache, scope), add_special_tokens=add_special_tokens
        )

    def look_up(self, text: str, cache: TokenCache | None, scope: bytes) -> LookedUp:
        """What the cache knows of a text; nothing is tokenized."""
        if cache is None or self._splitter is None or self._ends is None or len(text) < MIN_TEXT:
            return LookedUp(text, None, b"", [], [], [])
        whole = _digest(text, scope)
        known = cache.get((whole,))
        if known[0] is not None:
            return LookedUp(text, cache, whole, [text], [whole], known)
        chunks = list(self._splitter.split(text))
        digests = [_digest(chunk, scope) for chunk in chunks]
        return LookedUp(text, cache, whole, chunks, digests, cache.get(digests))

    def complete(self, found: LookedUp, *, add_special_tokens: bool) -> NDArray[np.int32]:
        """`encode` of a text that was looked up: what was not known is tokenized, and kept."""
        if found.cache is None:
            return _ids(
                _packed(self._tokenizer.encode(found.text, add_special_tokens=add_special_tokens))
            )
        packed = self._encode_chunks(found, found.cache)
        before, after = self._ends or (b"", b"") if add_special_tokens else (b"", b"")
        return _ids(b"".join((before, *packed, after)))

    def _encode_chunks(self, found: LookedUp, cache: TokenCache) -> list[bytes]:
        """The ids of each chunk, of which only those that the cache lacks are tokenized."""
        new: dict[bytes, bytes] = {}
        packed, num_hits = [], 0
        for chunk, digest, ids in zip(found.chunks, found.digests, found.known, strict=True):
            if ids is not None:
                num_hits += len(ids)
            elif digest in new:
                ids = new[digest]
            else:
                encoded = self._tokenizer.encode(chunk, add_special_tokens=False)
                ids = new[digest] = _packed(encoded)
            packed.append(ids)
        if new:
            cache.put(new)
        elif len(packed) > 1:  # it comes again as it is, and is not cut the next time
            cache.put({found.whole: b"".join(packed)})
        cache.count(sum(map(len, packed)) // ID_BYTES, num_hits // ID_BYTES)
        return packed


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A text, its chunks, and the ids of those that are known."""

    text: str
    cache: TokenCache | None
    """None: the text is tokenized whole."""
    whole: bytes
    """Its digest."""
    chunks: list[str]
    digests: list[bytes]
    known: list[bytes | None]

    @property
    def num_unknown(self) -> int:
        """Characters that have to be tokenized."""
        if self.cache is None:
            return len(self.text)
        return sum(
            len(chunk) for chunk, ids in zip(self.chunks, self.known, strict=True) if ids is None
        )


def _packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def _ids(packed: bytes) -> NDArray[np.int32]:
    return np.frombuffer(packed, np.int32)


def _digest(chunk: str, scope: bytes) -> bytes:
    """Lone surrogates, which have no UTF-8 form, get bytes that no text has."""
    return blake3(chunk.encode("utf-8", "surrogatepass"), key=scope or NO_SCOPE).digest()


# --- where a text may be cut ---------------------------------------------------------------------

SPACE_CUT = re.compile(r"(?<=[!-~]) ")
"""The space before which a part may be cut."""


class TextSplitter:
    """Cuts texts where no token of one tokenizer crosses.

    `tokens`: texts of the added tokens that begin a chunk. `at_spaces`: chunks may begin within a
    part, too.
    """

    def __init__(self, tokens: Iterable[str], *, at_spaces: bool) -> None:
        self.tokens = frozenset(tokens)
        self.at_spaces = at_spaces
        self._token = re.compile(_start_of_any(sorted(self.tokens)))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TextSplitter | None:
        """The splitter that the tokenizer's description allows; None if it allows no cut."""
        backend = tokenizer.backend
        if backend.encode_special_tokens or not _model_is_pure(backend.model):
            return None
        normalizers = _stages(backend.normalizer, "normalizers")
        pre_tokenizers = _stages(backend.pre_tokenizer, "pretokenizers")
        if not all(_is_known(stage, NORMALIZERS) for stage in normalizers):
            return None
        if not all(_is_known(stage, PRE_TOKENIZERS) for stage in pre_tokenizers):
            return None
        added = list(backend.get_added_tokens_decoder().values())
        tokens = list(cut_tokens(added))
        at_spaces = (
            all(stage["type"] == "NFC" for stage in normalizers)
            and _splits_at_spaces(pre_tokenizers)
            and not any(_hinders_space_cuts(token) for token in added)
        )
        return cls(tokens, at_spaces=at_spaces) if tokens or at_spaces else None

    def split(self, text: str) -> Iterator[str]:
        """The chunks of a text, in order; they are never empty, and join to the text."""
        start = 0
        while start < len(text):
            end = self._next_cut(text, start)
            yield text[start:end]
            start = end

    def _next_cut(self, text: str, start: int) -> int:
        """The end of the chunk that begins at `start`.

        A long part begins a chunk, so that it is found again behind another text; short ones share
        a chunk with others.
        """
        end = start + MAX_CHUNK if self.at_spaces else len(text)
        at = start + 1
        while (token := self._token.search(text, at, end)) is not None:
            at = token.start() + 1
            if at > start + MIN_CHUNK or self._token.search(text, at, at + LONG_PART) is None:
                return token.start()
        space = SPACE_CUT.search(text, end)
        return len(text) if space is None else space.start()


def cut_tokens(added: Iterable[AddedToken]) -> Iterator[str]:
    """Texts of the added tokens whose every occurrence begins a match, whatever stands before it.

    Only tokens that are matched before normalization count. None of them may reach into such an
    occurrence from the left, so no end of another one's text is a beginning of it or contains it.
    """
    first = [token for token in added if not token.normalized]
    texts = {token.content for token in first}
    lengths = sorted({len(text) for text in texts})
    tails = {text[at:] for text in texts for at in range(1, len(text))}
    inside = {tail[:length] for tail in tails for length in lengths}
    for token in first:
        text = token.content
        overlapped = text in inside or any(text[:length] in tails for length in range(1, len(text)))
        plain = not (token.lstrip or token.single_word) and re.match(r"\s|\w", text) is None
        if text and plain and not overlapped:
            yield text


def _start_of_any(texts: Iterable[str]) -> str:
    """A pattern that matches where one of the texts begins. As a tree of common beginnings, since
    vocabularies have thousands of added tokens that begin alike."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[0], []).append(text)
    return "|".join(_start_of_group(group) for group in by_first.values()) or "(?!)"


def _start_of_group(texts: list[str]) -> str:
    lowest, highest = min(texts), max(texts)
    shared = [a == b for a, b in zip(lowest, highest, strict=False)]
    common = lowest[: (*shared, False).index(False)]
    rest = [text[len(common) :] for text in texts]
    if not all(rest):  # one of them is the others' beginning, so finding it is enough
        return re.escape(common)
    return f"{re.escape(common)}(?:{_start_of_any(rest)})"


def _hinders_space_cuts(token: AddedToken) -> bool:
    """Whether a match of the token may reach over a space cut, or depend on what stands there."""
    strips = token.lstrip or token.rstrip or token.single_word
    return strips or SPACE_CUT.search(token.content) is not None


NORMALIZERS = frozenset(
    {
        "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace", "Prepend", "Strip", "StripAccents",
        "Nmt", "Precompiled", "BertNormalizer", "ByteLevel",
    }
)  # fmt: skip
"""Normalizers that change each part by itself."""
PRE_TOKENIZERS = frozenset(
    {
        "ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit",
        "BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts", "Metaspace",
    }
)  # fmt: skip
"""Pre-tokenizers that cut each part by itself, or look at the text's first character only."""
POST_PROCESSORS = frozenset({"ByteLevel", "TemplateProcessing"})

SPACE_PATTERNS = frozenset(
    {
        # GPT-2
        "'s", "'t", "'re", "'ve", "'m", "'ll", "'d",
        r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)", r"\s+",
        # cl100k (GPT-4), Llama 3, Qwen
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        # o200k (GPT-4o, gpt-oss, Llama 4), Tekken
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    }
)  # fmt: skip
"""Alternatives of which no match contains a space after an ASCII character that is none, and which
depend on nothing outside their match but what follows a run of spaces."""
LOCAL_PATTERNS = frozenset({"(?=[A-Z])", r"\p{N}{1,3}", r"\p{N}"})
"""Patterns that never cut before a space, and nowhere because of one."""


def _is_known(stage: _Json, known: frozenset[str]) -> bool:
    return stage.get("type") in known


def _model_is_pure(model: Any) -> bool:
    """Whether the ids of a piece depend on the piece alone (BPE's dropout draws lots)."""
    if type(model).__name__ == "BPE":
        return not model.dropout
    return type(model).__name__ in ("Unigram", "WordPiece", "WordLevel")


def _stages(part: Any, inner: str) -> list[_Json]:
    """The stages of a normalizer, pre-tokenizer or post-processor, nested ones in order."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__()), inner))


def _flat(described: _Json, inner: str) -> Iterator[_Json]:
    if described.get("type") == "Sequence":
        for stage in described[inner]:
            yield from _flat(stage, inner)
    else:
        yield described


def _splits_at_spaces(stages: list[_Json]) -> bool:
    """Whether the pre-tokenizer cuts before a space that follows a printable ASCII character, and
    does to both sides what it does to each alone."""
    cuts = False
    for number, stage in enumerate(stages):
        if stage["type"] == "ByteLevel":
            # It writes bytes as letters, which later stages would not know as spaces.
            return number == len(stages) - 1 and (cuts or stage.get("use_regex", True))
        if stage["type"] == "Split":
            pattern = stage["pattern"].get("Regex", "")
            isolated = stage["behavior"] == "Isolated" and not stage["invert"]
            if isolated and _is_space_pattern(pattern):
                cuts = True
            elif not isolated or pattern not in LOCAL_PATTERNS:
                return False
        elif stage["type"] != "Digits":
            return False
    return cuts


def _is_space_pattern(pattern: str) -> bool:
    alternatives = list(_alternatives(pattern))
    return r"\s+" in alternatives and all(each in SPACE_PATTERNS for each in alternatives)


def _alternatives(pattern: str) -> Iterator[str]:
    """The alternatives of a pattern outside of groups. Those with classes that hold a parenthesis
    or a bar come in pieces, which no known alternative equals."""
    depth, start = 0, 0
    for at, character in enumerate(pattern):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "|" and depth == 0:
            yield pattern[start:at]
            start = at + 1
    yield pattern[start:]


def _post_processor_ends(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """The ids that are put before and after a text with `add_special_tokens`; None if unknown."""
    before: list[int] = []
    after: list[int] = []
    templates = 0
    for stage in _stages(tokenizer.backend.post_processor, "processors"):
        if not _is_known(stage, POST_PROCESSORS):
            return None
        if stage["type"] == "ByteLevel":
            continue  # it moves offsets, no ids
        templates += 1
        texts = [part for part in stage["single"] if "Sequence" in part]
        if templates > 1 or len(texts) != 1:
            return None
        place = stage["single"].index(texts[0])
        for number, part in enumerate(stage["single"]):
            if number != place:
                ids = stage["special_tokens"][part["SpecialToken"]["id"]]["ids"]
                (before if number < place else after).extend(ids)
    return _packed(before), _packed(after)
