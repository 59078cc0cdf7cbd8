"""Encoded bytes of remote media, kept by URL for as long as HTTP lets us, bounded in bytes."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lookonce.types.ports import Clock

MAX_FRESH_SECONDS = 24 * 3600.0
ENTRY_OVERHEAD = 1024
"""Bytes charged per entry beside its body."""

CacheKey = tuple[bytes, str]
"""Scope and URL: what one tenant fetched is not shown to another, not even by its speed."""


@dataclass(frozen=True, slots=True)
class CachedBody:
    """A body, how to ask whether it still holds, and until when that need not be asked."""

    data: bytes
    etag: str | None
    last_modified: str | None
    fresh_until: float

    def conditional_headers(self) -> list[tuple[str, str]]:
        """Headers that make the origin answer 304 when the body still holds."""
        headers = []
        if self.etag is not None:
            headers.append(("If-None-Match", self.etag))
        if self.last_modified is not None:
            headers.append(("If-Modified-Since", self.last_modified))
        return headers


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
        directives = _directives(headers)
        etag, modified = headers.get("etag"), headers.get("last-modified")
        seconds = _fresh_seconds(directives, headers)
        reusable = seconds > 0 or etag is not None or modified is not None
        forbidden = "no-store" in directives or headers.get("vary", "").strip() == "*"
        cost = len(data) + ENTRY_OVERHEAD
        if forbidden or not reusable or cost > self._capacity:
            return
        self._entries[key] = CachedBody(data, etag, modified, self._clock() + seconds)
        self._bytes += cost
        while self._bytes > self._capacity:
            self.remove(next(iter(self._entries)))

    def refresh(self, key: CacheKey, headers: Mapping[str, str]) -> None:
        """A 304 confirmed the entry: its freshness starts again."""
        entry = self._entries.get(key)
        if entry is not None:
            seconds = _fresh_seconds(_directives(headers), headers)
            self._entries[key] = replace(entry, fresh_until=self._clock() + seconds)

    def remove(self, key: CacheKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry.data) + ENTRY_OVERHEAD

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the byte account is off."""
        held = sum(len(entry.data) + ENTRY_OVERHEAD for entry in self._entries.values())
        if held != self._bytes or held > self._capacity:
            raise AssertionError(f"{held} bytes held, {self._bytes} accounted")


def _directives(headers: Mapping[str, str]) -> dict[str, str]:
    parts = (part.strip().lower() for part in headers.get("cache-control", "").split(","))
    pairs = (part.partition("=") for part in parts if part)
    return {name: value.strip('"') for name, _, value in pairs}


def _fresh_seconds(directives: Mapping[str, str], headers: Mapping[str, str]) -> float:
    """`max-age` less `Age`; without a stated lifetime every use asks the origin again."""
    if "no-cache" in directives:
        return 0.0
    age = _seconds(headers.get("age", "0"))
    return min(max(_seconds(directives.get("max-age", "0")) - age, 0.0), MAX_FRESH_SECONDS)


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,10}", text.strip(), re.ASCII) else 0.0
