"""Limits of tenants and keys (`--limits`), exact over all API processes of one server.

    request ─▶ admit ──▶ take_media ──▶ take_tokens ──▶ … ──▶ close: what was not used comes back
               429         429            429

What has been used lies in one file of the server's socket folder, which every API process maps and
locks for each change: a few microseconds, and no message. The engine would be as exact, but asking
it costs a turn of its input thread per request, and a flood that is refused would still reach it.
A process that dies keeps nothing: the kernel gives back its lock, and the process that takes its
place forgets the requests that it was serving.

A rate is a bucket that holds one period's worth and fills steadily, kept as the time at which it
will be full again (the generic cell rate algorithm, ITU-T I.371). So a burst of one period's worth
is let through, and no window has an edge.

    row of a tenant or key: name 16 bytes │ 3 times at which its buckets are full │ requests being
    served, one number for each API process
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from lookonce.errors import BadRequestError, RateLimitedError
from lookonce.types.counts import Counts
from lookonce.types.fair_queue import TenantWeights
from lookonce.types.limits import Limits, UsageLimits

Headers = list[tuple[bytes, bytes]]

NAME_BYTES = 16
RATES = ("requests", "tokens", "media")
"""What has a bucket, in the order of a row."""
PERIOD = {"requests": 1.0, "tokens": 60.0, "media": 60.0}
"""Seconds; a bucket holds what comes in so many."""
FIELD = {
    "requests": "requests_per_second",
    "tokens": "tokens_per_minute",
    "media": "media_per_minute",
}
CONCURRENT = "concurrent"
MAX_ROWS = 65_536
HEADER_BYTES = 64
_TIMES = struct.Struct(f"={len(RATES)}d")
_COUNT = struct.Struct("=I")
BUSY_SECONDS = 1.0
"""What a client is told to wait for another request of its own to end."""


class UsageFile:
    """The rows, mapped and shared. Inside `locked` this process alone reads and changes them."""

    def __init__(self, path: Path, num_processes: int, index: int) -> None:
        """`index`: of this process among `num_processes`; requests of an earlier are dropped."""
        self._counts_at = NAME_BYTES + _TIMES.size
        self._stride = self._counts_at + _COUNT.size * num_processes
        self._num_processes = num_processes
        self._index = index
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = HEADER_BYTES + MAX_ROWS * self._stride
        with self.locked():
            os.ftruncate(self._fd, size)  # pages that are not used take no memory
            self._map = mmap.mmap(self._fd, size)
            for row in range(self._num_rows):
                self.add_running(row, -self._running_here(row))
        self._known: dict[bytes, int] = {}

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def row(self, name: bytes, now: float) -> int:
        """The row of a name of 16 bytes; a new one, or one that is not used any more."""
        found = self._known.get(name)
        if found is not None and self._name(found) == name:
            return found
        count = self._num_rows
        row = next((row for row in range(count) if self._name(row) == name), None)
        if row is None:
            row = self._free_row(now)
            self._map[self._at(row) : self._at(row) + NAME_BYTES] = name
            self.set_times(row, [0.0] * len(RATES))
        self._known[name] = row
        return row

    def times(self, row: int) -> tuple[float, ...]:
        """`time.monotonic()` at which each bucket is full."""
        return _TIMES.unpack_from(self._map, self._at(row) + NAME_BYTES)

    def set_times(self, row: int, times: Sequence[float]) -> None:
        _TIMES.pack_into(self._map, self._at(row) + NAME_BYTES, *times)

    def running(self, row: int) -> int:
        """Requests that are served, in all API processes."""
        start = self._at(row) + self._counts_at
        return sum(struct.unpack_from(f"={self._num_processes}I", self._map, start))

    def add_running(self, row: int, change: int) -> None:
        at = self._at(row) + self._counts_at + _COUNT.size * self._index
        _COUNT.pack_into(self._map, at, self._running_here(row) + change)

    def _running_here(self, row: int) -> int:
        at = self._at(row) + self._counts_at + _COUNT.size * self._index
        return int(_COUNT.unpack_from(self._map, at)[0])

    def _at(self, row: int) -> int:
        return HEADER_BYTES + row * self._stride

    def _name(self, row: int) -> bytes:
        at = self._at(row)
        return self._map[at : at + NAME_BYTES]

    @property
    def _num_rows(self) -> int:
        return int(_COUNT.unpack_from(self._map, 0)[0])

    def _free_row(self, now: float) -> int:
        count = self._num_rows
        if count < MAX_ROWS:
            _COUNT.pack_into(self._map, 0, count + 1)
            return count
        for row in range(count):
            if not self.running(row) and max(self.times(row)) <= now:
                return row
        raise RuntimeError("more tenants and keys are limited than there is room for")


@dataclass(slots=True)
class _Subject:
    """A tenant or a key, and what it may use."""

    name: bytes
    limits: UsageLimits
    row: int = 0

    def rate(self, what: str) -> float:
        """Per second; infinite where there is no limit."""
        limit = getattr(self.limits, FIELD[what])
        return math.inf if limit is None else limit / PERIOD[what]

    def holds(self, what: str) -> float:
        """What a full bucket holds; one request or item at least."""
        limit = getattr(self.limits, FIELD[what])
        return math.inf if limit is None else max(1.0, limit)


class RateLimits:
    """Decides for the requests of one API process. Used on its event loop."""

    def __init__(
        self,
        limits: Limits,
        path: Path,
        *,
        num_processes: int = 1,
        index: int = 0,
        weights: TenantWeights | None = None,
        counts: Counts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path`: of the file that all API processes share; `weights` are set as `limits` says;
        `clock` must be the same in all processes."""
        self._file = UsageFile(path, num_processes, index)
        self._weights = weights or TenantWeights()
        self._clock = clock
        self._refused = (counts or Counts()).by_label("rate_limited_total")
        self.replace(limits)

    def replace(self, limits: Limits) -> None:
        """Use these limits from now on; what has been used stays used."""
        self._limits = limits
        default = limits.default.weight or 1.0
        weights = {name: own.weight or 1.0 for name, own in limits.tenants.items()}
        self._weights.replace(weights, default)

    def close(self) -> None:
        self._file.close()

    def admit(self, tenant: str, key: str = "") -> RequestUsage:
        """Count one request of a tenant, sent with the key of this digest.

        Raises `RateLimitedError`; it then counts as nothing.
        """
        subjects = [_Subject(_name("tenant", tenant), self._limits.of_tenant(tenant))]
        own = self._limits.of_key(key) if key else None
        if own is not None:
            subjects.append(_Subject(_name("key", key), own))
        try:
            self._admit(subjects)
        except RateLimitedError as refused:
            headers = self.headers(subjects)
            refused.headers = {name.decode(): value.decode() for name, value in headers}
            raise
        return RequestUsage(self, subjects)

    def _admit(self, subjects: Sequence[_Subject]) -> None:
        now = self._clock()
        with self._file.locked():
            for subject in subjects:
                subject.row = self._file.row(subject.name, now)
            for subject in subjects:
                most = subject.limits.concurrent_requests
                if most is not None and self._file.running(subject.row) + 1 > most:
                    raise self._refusal(CONCURRENT, BUSY_SECONDS, subject)
            self._take(subjects, "requests", 1, now)
            for subject in subjects:
                self._file.add_running(subject.row, 1)

    def take(self, subjects: Sequence[_Subject], what: str, amount: float) -> None:
        """Raises `RateLimitedError`, with nothing taken."""
        with self._file.locked():
            self._take(subjects, what, amount, self._clock())

    def _take(self, subjects: Sequence[_Subject], what: str, amount: float, now: float) -> None:
        """More than a bucket holds is let through where the bucket is full, which then owes it."""
        at = RATES.index(what)
        for subject in subjects:
            needed = min(amount, subject.holds(what)) / subject.rate(what)
            full_in = max(0.0, self._file.times(subject.row)[at] - now)
            wait = full_in + needed - subject.holds(what) / subject.rate(what) if needed else 0.0
            if wait > 1e-9:
                raise self._refusal(what, wait, subject)
        self._give(subjects, what, -amount, now)

    def give_back(self, subjects: Sequence[_Subject], what: str, amount: float) -> None:
        """A negative amount was used beyond what was taken."""
        with self._file.locked():
            self._give(subjects, what, amount, self._clock())

    def _give(self, subjects: Sequence[_Subject], what: str, amount: float, now: float) -> None:
        at = RATES.index(what)
        for subject in subjects:
            rate = subject.rate(what)
            if math.isfinite(rate):
                times = list(self._file.times(subject.row))
                times[at] = max(times[at], now) - amount / rate
                self._file.set_times(subject.row, times)

    def end(self, subjects: Sequence[_Subject]) -> None:
        """A request that was admitted has ended."""
        with self._file.locked():
            for subject in subjects:
                self._file.add_running(subject.row, -1)

    def headers(self, subjects: Sequence[_Subject]) -> Headers:
        """`x-ratelimit-*` of requests, tokens and media that are limited: of the tenant or its key,
        whichever has less left."""
        now = self._clock()
        found: Headers = []
        with self._file.locked():
            for at, what in enumerate(RATES):
                limited = [s for s in subjects if math.isfinite(s.rate(what))]
                if not limited:
                    continue
                left, reset, most = min(self._state(subject, at, what, now) for subject in limited)
                suffix = what.encode()
                found += [
                    (b"x-ratelimit-limit-" + suffix, b"%d" % most),
                    (b"x-ratelimit-remaining-" + suffix, b"%d" % left),
                    (b"x-ratelimit-reset-" + suffix, duration(reset).encode()),
                ]
        return found

    def _state(
        self, subject: _Subject, at: int, what: str, now: float
    ) -> tuple[float, float, float]:
        """(left, seconds until the bucket is full, what it holds)."""
        reset = max(0.0, self._file.times(subject.row)[at] - now)
        most = subject.holds(what)
        return max(0.0, math.floor(most - reset * subject.rate(what) + 1e-6)), reset, most

    def _refusal(self, what: str, wait: float, subject: _Subject) -> RateLimitedError:
        self._refused[what] += 1
        field = "concurrent_requests" if what == CONCURRENT else FIELD[what]
        limit = getattr(subject.limits, field)
        return RateLimitedError(
            f"the limit of {limit:g} {field.replace('_', ' ')} is reached; try again in "
            f"{duration(wait)}",
            retry_after=wait,
        )


@dataclass(slots=True)
class RequestUsage:
    """What one admitted request uses; a context manager around the request."""

    _rates: RateLimits
    _subjects: list[_Subject]
    _taken: int = 0
    """Tokens that were taken ahead."""
    _used: int = 0
    _closed: bool = field(default=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what was taken ahead and not used."""
        if self._closed:
            return
        self._closed = True
        if self._taken != self._used:
            self._rates.give_back(self._subjects, "tokens", self._taken - self._used)
        self._rates.end(self._subjects)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of one answer."""
        limits = [s.limits.max_tokens for s in self._subjects]
        finite = [limit for limit in limits if limit is not None and math.isfinite(limit)]
        return max(1, int(min(finite))) if finite else None

    def limit_answer(self, wanted: int | None, *, asked: bool) -> int | None:
        """The most tokens to generate: what a client `asked` for is refused where it is too much,
        another limit is lowered. Raises `BadRequestError`."""
        most = self.max_tokens
        if most is None or (wanted is not None and wanted <= most):
            return wanted
        if asked and wanted is not None:
            raise BadRequestError(
                f"max_tokens: {wanted} tokens are asked for, {most} are allowed with this key",
                param="max_tokens",
            )
        return most

    def take_media(self, count: int) -> None:
        """Raises `RateLimitedError`."""
        if count:
            self._rates.take(self._subjects, "media", count)

    def take_tokens(self, prompt: int, generated: int) -> None:
        """Tokens of a prompt and, at most, of its answers. The prompt's are used with that; for an
        answer no more is held ready than one bucket has.

        Raises `RateLimitedError`.
        """
        most = min(subject.holds("tokens") for subject in self._subjects)
        generated = int(min(generated, max(0.0, most - prompt)))
        self._rates.take(self._subjects, "tokens", prompt + generated)
        self._taken += prompt + generated
        self._used += prompt

    def generated(self, count: int) -> None:
        """So many tokens were generated."""
        self._used += count

    def headers(self) -> Headers:
        return self._rates.headers(self._subjects)


class NoLimits(RequestUsage):
    """Of a server without `--limits`."""

    def __init__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def limit_answer(self, wanted: int | None, *, asked: bool) -> int | None:
        return wanted

    def take_media(self, count: int) -> None:
        pass

    def take_tokens(self, prompt: int, generated: int) -> None:
        pass

    def generated(self, count: int) -> None:
        pass

    def headers(self) -> Headers:
        return []


NO_LIMITS = NoLimits()


def count_media(messages: Iterable[object]) -> int:
    """Media parts of a request's messages, before anything of them is checked or loaded."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    kinds = (part.get("type") for part in parts if isinstance(part, Mapping))
    return sum(kind not in ("text", "refusal") for kind in kinds)


def _name(kind: str, name: str) -> bytes:
    text = f"{kind}:{name}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=NAME_BYTES).digest()


def duration(seconds: float) -> str:
    """As OpenAI writes it: `17ms`, `1.2s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000 - 1e-6)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 10 - 1e-6) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
