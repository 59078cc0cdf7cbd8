"""Encoded bytes of remote media, kept by URL for as long as HTTP lets us, bounded in bytes."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from lookonce.types.ports import Clock

MAX_FRESH_SECONDS = 24 * 3600.0
ENTRY_OVERHEAD = 1024
"""Bytes charged per entry beside its body, URL and headers."""
MEANINGFUL = ("age", "cache-control", "etag", "last-modified", "vary")
"""Header fields that say whether a body may be kept, for how long, and how to ask about it."""

CacheKey = tuple[bytes, str]
"""Scope and URL: what one tenant fetched is not shown to another, not even by its speed."""


@dataclass(frozen=True, slots=True)
class CachedBody:
    """A body, how to ask whether it still holds, and until when that need not be asked."""

    data: bytes
    headers: Mapping[str, str]
    """The `MEANINGFUL` ones."""
    fresh_until: float

    def conditional_headers(self) -> list[tuple[str, bytes]]:
        """Headers that make the origin answer 304 when the body still holds."""
        asks = {"If-None-Match": "etag", "If-Modified-Since": "last-modified"}
        return [
            (ask, self.headers[name].encode("latin-1"))
            for ask, name in asks.items()
            if name in self.headers
        ]


class FetchCache:
    """URL → body, least recently used first out. Header names are lower case."""

    def __init__(self, capacity_bytes: int, clock: Clock = time.monotonic) -> None:
        self._capacity = capacity_bytes
        self._clock = clock
        self._entries: OrderedDict[CacheKey, CachedBody] = OrderedDict()
        self._bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: CacheKey) -> CachedBody | None:
        """What is held, fresh or not; `is_fresh` tells."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def is_fresh(self, entry: CachedBody) -> bool:
        return self._clock() < entry.fresh_until

    def store(self, key: CacheKey, data: bytes, headers: Mapping[str, str]) -> None:
        """Keep a 200 answer if its headers allow it and make it reusable; else forget the key."""
        self.remove(key)
        kept = {name: headers[name] for name in MEANINGFUL if name in headers}
        seconds = _fresh_seconds(kept)
        reusable = seconds > 0 or "etag" in kept or "last-modified" in kept
        if not reusable or _is_forbidden(kept):
            return
        entry = CachedBody(data, kept, self._clock() + seconds)
        if _cost(key, entry) > self._capacity:
            return
        self._entries[key] = entry
        self._bytes += _cost(key, entry)
        while self._bytes > self._capacity:
            self.remove(next(iter(self._entries)))

    def refresh(self, key: CacheKey, headers: Mapping[str, str]) -> bool:
        """A 304 confirmed the entry: its freshness starts again. False where it did not.

        What the 304 says counts from now on, what it does not mention stays (RFC 9111, 4.3.4). One
        that speaks of other content than ours says nothing about ours, which is not kept.
        """
        entry = self._entries.get(key)
        if entry is None:
            return True
        old, new = (fields.get("etag") for fields in (entry.headers, headers))
        if None not in (old, new) and _opaque(old) != _opaque(new):
            self.remove(key)
            return False
        without_age = {name: value for name, value in entry.headers.items() if name != "age"}
        self.store(key, entry.data, {**without_age, **headers})
        return True

    def remove(self, key: CacheKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= _cost(key, entry)

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the byte account is off."""
        held = sum(_cost(key, entry) for key, entry in self._entries.items())
        if held != self._bytes or held > self._capacity:
            raise AssertionError(f"{held} bytes held, {self._bytes} accounted")


def _cost(key: CacheKey, entry: CachedBody) -> int:
    """Bytes. Whoever asks chooses the URL, and its origin the headers: they may be long."""
    _, url = key
    return len(entry.data) + len(url) + sum(map(len, entry.headers.values())) + ENTRY_OVERHEAD


def _is_forbidden(headers: Mapping[str, str]) -> bool:
    varies = (name.strip() for name in headers.get("vary", "").split(","))
    return "no-store" in _directives(headers) or "*" in varies


def _opaque(etag: str | None) -> str | None:
    """The tag without its mark of weakness: a 304 may weaken it."""
    return None if etag is None else etag.strip().removeprefix("W/")


def _directives(headers: Mapping[str, str]) -> dict[str, str]:
    """Of a directive that is repeated the first counts."""
    parts = (part.strip().lower() for part in headers.get("cache-control", "").split(","))
    pairs = [part.partition("=") for part in parts if part]
    return {name: value.strip('"') for name, _, value in reversed(pairs)}


def _fresh_seconds(headers: Mapping[str, str]) -> float:
    """`max-age` less `Age`; without a stated lifetime every use asks the origin again."""
    directives = _directives(headers)
    if "no-cache" in directives:
        return 0.0
    age = _seconds(headers.get("age", "0").partition(",")[0])
    return min(max(_seconds(directives.get("max-age", "0")) - age, 0.0), MAX_FRESH_SECONDS)


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,10}", text.strip(), re.ASCII) else 0.0
