"""The encoded bytes behind a media part, wherever they come from."""

from __future__ import annotations

import asyncio
import os
import stat
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lookonce.config import MediaConfig
from lookonce.errors import (
    BadRequestError,
    MediaForbiddenError,
    MediaNotCachedError,
    RequestError,
    TooLargeError,
    UnprocessableMediaError,
)
from lookonce.render.media.address_guard import GuardedBackend, is_any, is_public
from lookonce.render.media.fetch import FetchCounts, Fetcher
from lookonce.render.media.fetch_cache import FetchCache
from lookonce.render.media.single_flight import Flights
from lookonce.render.media.sources import MediaSource, for_part

FETCH_CACHE_BYTES = 256 * 1024 * 1024
OFF_LOOP_BYTES = 4 * 1024 * 1024
"""Encoded media above this is decoded from base64, and hashed, in a thread."""


class MediaLoader:
    """Opens media sources under the limits of the configuration. One per API process."""

    def __init__(self, config: MediaConfig, *, cache_bytes: int = FETCH_CACHE_BYTES) -> None:
        self._max_bytes = config.max_bytes
        self._local = LocalFiles(config.local_path, config.max_bytes)
        self._fetcher = Fetcher(
            timeout=config.timeout,
            max_bytes=config.max_bytes,
            allowed_domains=config.allowed_domains,
            cache=FetchCache(cache_bytes),
            backend=GuardedBackend(is_any if config.allow_private else is_public),
        )
        self._reads: Flights[str, bytes] = Flights()

    @property
    def counts(self) -> FetchCounts:
        return self._fetcher.counts

    @property
    def fetched(self) -> Counter[str]:
        """Bodies fetched and files read, by modality."""
        return self._fetcher.counts.fetched

    async def load(self, source: MediaSource, scope: bytes = b"") -> bytes:
        """The encoded bytes. `scope` (32 bytes) keeps tenants apart in the fetch cache.

        Raises a `RequestError` that names the part.
        """
        if source.origin == "inline" and len(source.value) > OFF_LOOP_BYTES:
            return await asyncio.to_thread(source.inline_bytes, self._max_bytes)
        if source.origin == "inline":
            return source.inline_bytes(self._max_bytes)
        try:
            if source.origin == "remote":
                return await self._fetcher.fetch(source.value, scope, source.modality)
            if source.origin == "file":
                return await self._reads.run(source.value, lambda: self._read(source))
        except RequestError as error:
            raise for_part(error, source.param) from None
        raise MediaNotCachedError(
            f"{source.param}: no media is held under this uuid; send it again",
            param=source.param,
        )

    async def _read(self, source: MediaSource) -> bytes:
        data = await asyncio.to_thread(self._local.read, source.value)
        self.fetched[source.modality] += 1
        return data

    async def aclose(self) -> None:
        await self._fetcher.aclose()


class LocalFiles:
    """`file://` URLs beneath one folder; outside it nothing exists."""

    def __init__(self, root: str | None, max_bytes: int) -> None:
        self._root = None if root is None else Path(root).resolve()
        self._max_bytes = max_bytes

    def read(self, url: str) -> bytes:
        """The file's bytes. Errors never tell whether something outside the folder exists."""
        path = self._resolved(url)
        try:
            # Without O_NONBLOCK a FIFO would hang us; without O_NOFOLLOW a late link leads out.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise UnprocessableMediaError("the file cannot be read") from None
        try:
            data = self._read_open(fd)
        except OSError:  # the disk failed, or went away
            raise UnprocessableMediaError("the file cannot be read") from None
        finally:
            os.close(fd)
        if len(data) > self._max_bytes:
            raise TooLargeError(f"the media is larger than {self._max_bytes} bytes")
        return data

    def _read_open(self, fd: int) -> bytes:
        """At most one byte more than allowed."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise UnprocessableMediaError("the file cannot be read")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(self._max_bytes + 1)

    def _resolved(self, url: str) -> Path:
        """The real path, symlinks followed, beneath the allowed folder."""
        if self._root is None:
            raise MediaForbiddenError("local files are not allowed")
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path, errors="strict")).resolve()
        except (ValueError, OSError, RuntimeError):
            raise BadRequestError("the file URL is not valid") from None
        if parts.netloc not in ("", "localhost"):
            raise MediaForbiddenError("a file URL must not name a host")
        if not path.is_relative_to(self._root):
            raise MediaForbiddenError("the file is not beneath the allowed folder")
        return path
