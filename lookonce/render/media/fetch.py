"""Fetches remote media over http(s), within limits and from allowed addresses only.

Redirects are followed here, not by the HTTP library: every hop is checked and looked up in the
cache. The guarded backend connects only to addresses it has checked. Proxy settings of the
environment are ignored, and compressed bodies are refused.

Errors name no request part; `loader.for_part` adds it.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import httpcore
import httpx

from lookonce.errors import (
    BadRequestError,
    MediaForbiddenError,
    TooLargeError,
    UnprocessableMediaError,
)
from lookonce.render.media.address_guard import (
    AddressRefusedError,
    GuardedBackend,
    TenantSlots,
    fetching_for,
)
from lookonce.render.media.fetch_cache import CachedBody, CacheKey, FetchCache
from lookonce.render.media.single_flight import SingleFlight
from lookonce.types.held_bytes import current_held_bytes

MAX_REDIRECTS = 5
MAX_CONNECTIONS = 64
MAX_FETCHES = 32
"""Fetches of one tenant at a time: hosts that are slow on purpose take no connection from others.
"""
IDLE_CONNECTIONS = 8
IDLE_SECONDS = 15.0
REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(slots=True)
class FetchCounts:
    """Counts since the fetcher started."""

    fetched: Counter[str] = field(default_factory=Counter)
    """Bodies read from the network, by the `kind` they were fetched as."""
    confirmed: int = 0
    """Held bodies that an origin confirmed with 304."""
    reused: int = 0
    """Held bodies used without a request."""


class Fetcher:
    """Fetches URLs. One per API process; `aclose` ends its idle connections."""

    def __init__(
        self,
        *,
        timeout: float,
        max_bytes: int,
        allowed_domains: tuple[str, ...] = (),
        cache: FetchCache | None = None,
        backend: GuardedBackend | None = None,
        fetched: Counter[str] | None = None,
    ) -> None:
        """`timeout` is seconds for a whole fetch; empty `allowed_domains` allow every host."""
        self.counts = FetchCounts() if fetched is None else FetchCounts(fetched)
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._domains = frozenset(domain.lower().rstrip(".") for domain in allowed_domains)
        self._cache = cache if cache is not None else FetchCache(0)
        self._running: SingleFlight[CacheKey, bytes] = SingleFlight()
        self._slots = TenantSlots(MAX_FETCHES)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=fetch_ssl_context(),
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=IDLE_CONNECTIONS,
            keepalive_expiry=IDLE_SECONDS,
            network_backend=backend if backend is not None else GuardedBackend(),
        )

    async def aclose(self) -> None:
        await self._pool.aclose()

    async def fetch(
        self, url: str, scope: bytes = b"", kind: str = "media", tenant: str = ""
    ) -> bytes:
        """The body behind `url`; concurrent calls for one URL and scope fetch once, counted under
        the `kind` of the first. `scope` is one of `tenant`'s.

        Raises `MediaForbiddenError`, `UnprocessableMediaError`, `TooLargeError` or
        `BadRequestError`.
        """
        return await self._running.run((scope, url), lambda: self._fetch(url, scope, kind, tenant))

    async def _fetch(self, url: str, scope: bytes, kind: str, tenant: str) -> bytes:
        fetching_for.set(tenant)  # in a task of this fetch alone
        await self._slots.acquire(tenant)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._follow(url, scope, kind)
        except AddressRefusedError:
            raise MediaForbiddenError(
                "the host of the media URL is not allowed: its address is not public"
            ) from None
        except (TimeoutError, httpcore.TimeoutException):
            raise UnprocessableMediaError(
                f"the media could not be fetched within {self._timeout:g} seconds"
            ) from None
        except (OSError, UnicodeError, httpcore.NetworkError, httpcore.ProtocolError):
            raise UnprocessableMediaError(
                "the media could not be fetched: the connection failed"
            ) from None
        finally:
            self._slots.release(tenant)

    async def _follow(self, url: str, scope: bytes, kind: str) -> bytes:
        target = self._checked(url)
        for _ in range(MAX_REDIRECTS + 1):
            body = await self._hop(target, (scope, str(target)), kind)
            if isinstance(body, bytes):
                return body
            target = self._checked(str(body))
        raise UnprocessableMediaError(
            f"the media could not be fetched: more than {MAX_REDIRECTS} redirects"
        )

    async def _hop(self, url: httpx.URL, key: CacheKey, kind: str) -> bytes | httpx.URL:
        """One request: the body, or the URL to request next."""
        held = self._cache.lookup(key)
        if held is not None and self._cache.is_fresh(held):
            self.counts.reused += 1
            return held.data
        async with self._request(url, held) as response:
            headers = _header_map(response)
            if response.status in REDIRECTS:
                return _redirect(url, headers)
            if response.status != 304 or held is None:
                data = await self._read(response, headers)
            elif self._cache.refresh(key, headers):
                self.counts.confirmed += 1
                return held.data
            else:
                return (
                    url  # the 304 is about other content than ours: request again, unconditionally
                )
        self.counts.fetched[kind] += 1
        self._cache.store(key, data, headers)
        return data

    def _request(
        self, url: httpx.URL, held: CachedBody | None
    ) -> AbstractAsyncContextManager[httpcore.Response]:
        headers: list[tuple[bytes | str, bytes | str]] = [
            ("Host", url.netloc),
            ("User-Agent", "lookonce"),
            ("Accept", "image/*, audio/*, */*;q=0.5"),
            ("Accept-Encoding", "identity"),
            *(held.conditional_headers() if held is not None else ()),
        ]
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        return self._pool.stream("GET", target, headers=headers)

    async def _read(self, response: httpcore.Response, headers: Mapping[str, str]) -> bytes:
        """The body of a 200 response. Raises `TooLargeError` above `max_bytes`, `QueueFullError`
        where the tenant's requests hold too much."""
        if response.status != 200:
            raise UnprocessableMediaError(
                f"the media could not be fetched: the server answered {response.status}"
            )
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise UnprocessableMediaError("the media could not be fetched: it came compressed")
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        held = current_held_bytes.get()
        with nullcontext() if held is None else held.another() as held:
            async for chunk in response.aiter_stream():
                body += chunk
                if len(body) > self._max_bytes:
                    raise self._too_large()
                if held is not None:
                    held.take(len(chunk))
        if not body:
            raise UnprocessableMediaError("the media could not be fetched: the answer was empty")
        return bytes(body)

    def _checked(self, url: str) -> httpx.URL:
        """The parsed URL, if it may be requested. The connection uses the same parsed URL."""
        if re.search(r"[\s\\\x00-\x20\x7f]", url):
            raise BadRequestError("the media URL is not valid")
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            raise BadRequestError("the media URL is not valid") from None
        if parsed.scheme not in ("http", "https"):
            raise MediaForbiddenError("the media URL must be http or https on every redirect")
        if not parsed.raw_host or (parsed.port or 0) > 65535:
            raise BadRequestError("the media URL is not valid")
        if parsed.userinfo:
            raise MediaForbiddenError("the media URL must not contain credentials")
        if self._domains and parsed.raw_host.decode("ascii").rstrip(".") not in self._domains:
            raise MediaForbiddenError("the host of the media URL is not one of the allowed ones")
        return parsed.copy_with(fragment=None)

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"the media is larger than {self._max_bytes} bytes")


@cache
def fetch_ssl_context() -> ssl.SSLContext:
    """One context per process, or for all that are forked from one: reading the certificates takes
    tens of milliseconds and a megabyte."""
    return httpcore.default_ssl_context()


def _redirect(url: httpx.URL, headers: Mapping[str, str]) -> httpx.URL:
    try:
        return url.join(headers["location"])
    except (KeyError, httpx.InvalidURL, ValueError):
        raise UnprocessableMediaError(
            "the media could not be fetched: the server sent an invalid redirect"
        ) from None


def _header_map(response: httpcore.Response) -> dict[str, str]:
    """Lower-case name → value; values of a repeated field are joined by commas."""
    joined: dict[str, str] = {}
    for raw_name, raw_value in response.headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined
