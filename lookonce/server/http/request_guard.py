"""Which web pages may use this server, and under which names it may be called.

A browser sends requests for any page its user looks at. Where keys are needed, such a page has
none. A server without keys is guarded by what browsers say truthfully and pages cannot change:

Host     A page whose own name is made to resolve to this server (DNS rebinding) has that name here.
         Loopback names, IP addresses, names without a dot, and names under private top-level
         domains cannot be a stranger's; all others need `--allowed-hosts`.
Origin   Every request of a page of another origin, except plain GETs without effect, names it. Only
         pages of this server and of `--allowed-origins` may.

With keys or without, an HTTP/1.1 request has one `Host` header (RFC 9112).
`--allowed-origins` also makes browsers show the answers to those pages (CORS), with keys or not.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from starlette.types import Scope

from lookonce.config import ServerConfig
from lookonce.errors import BadRequestError, ForbiddenError, UnsupportedMediaTypeError

Headers = list[tuple[bytes, bytes]]

PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that nobody can register."""
PROBES = frozenset({"/health", "/ready"})
"""Paths that any name reaches: probes use whatever they know; the answers are one word."""
FORM_TYPES = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
"""Types of bodies that a page may send anywhere without asking first."""
FILE_PATHS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Paths that take a form with a file."""
HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]/@\s]+))(?::[0-9]*)?")
NO_HEADERS: Headers = []
MAX_REMEMBERED = 1024
PREFLIGHT_SECONDS = b"600"
EXPOSED = b", ".join(
    [
        b"x-request-id", b"request-id", b"retry-after", b"retry-after-ms", b"x-lookonce-warning",
        b"traceresponse",
        *(
            b"x-ratelimit-%b-%b" % (what, of)
            for of in (b"requests", b"tokens", b"media")
            for what in (b"limit", b"remaining", b"reset")
        ),
    ]
)  # fmt: skip
"""Headers of an answer that scripts of other origins may read."""


class RequestGuard:
    """Judges requests by `Host`, `Origin` and `Content-Type`; without arguments any name and origin
    may."""

    def __init__(
        self,
        *,
        check_hosts: bool = False,
        check_origins: bool = False,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> None:
        """`hosts` are names beside those of the default, `origins` those that may use the server.

        Where `check_origins` is False, other origins' requests are served; their pages cannot read
        the answers.
        """
        self._check_hosts = check_hosts and "*" not in hosts
        self._check_origins = check_origins
        self._names = frozenset(host for host in hosts if "*" not in host)
        self._suffixes = tuple(host[1:] for host in hosts if host.startswith("*."))
        self._any_origin = "*" in origins
        self._origins = frozenset(origins)
        self._known: set[bytes | None] = set()
        """Host headers that were allowed."""

    @classmethod
    def of(cls, config: ServerConfig) -> RequestGuard:
        """With keys, names are only checked when they are given; unix sockets have none."""
        keyless = not config.api_keys
        return cls(
            check_hosts=bool(config.allowed_hosts) or (keyless and config.uds is None),
            check_origins=keyless,
            hosts=(*config.allowed_hosts, config.host.lower(), socket.gethostname().lower()),
            origins=config.allowed_origins,
        )

    def admit(self, scope: Scope) -> Headers:
        """The headers that the response to this request must have for browsers.

        Raises `ForbiddenError` for a name or an origin, `UnsupportedMediaTypeError` for a form, and
        `BadRequestError` where there is not one name.
        """
        sent: Headers = scope["headers"]
        headers = dict(sent)
        host = headers.get(b"host")
        if host is None or len(headers) != len(sent):
            _check_is_one(scope)
        if self._check_hosts and host is not None and host not in self._known:
            self._check_host(host, scope)
        origin = headers.get(b"origin")
        cors = NO_HEADERS if origin is None else self._check_origin(origin, headers)
        if scope.get("method") == "POST" and headers.get(b"content-type") != b"application/json":
            _check_type(headers.get(b"content-type", b""), scope["path"])
        return cors

    @staticmethod
    def preflight(scope: Scope) -> Headers | None:
        """Headers that also answer a browser which asks first; None for any other request."""
        headers = dict(scope["headers"])
        if scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        answer = [
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-max-age", PREFLIGHT_SECONDS),
        ]
        asked = headers.get(b"access-control-request-headers")
        if asked:
            answer.append((b"access-control-allow-headers", asked))
        if headers.get(b"access-control-request-private-network") == b"true":
            answer.append((b"access-control-allow-private-network", b"true"))
        return answer

    # --- names ---

    def _check_host(self, host: bytes, scope: Scope) -> None:
        if scope["path"] in PROBES:
            return
        if not self._allows(_name_of(host.decode("latin-1").lower())):
            shown = host.decode("latin-1")[:100]
            raise ForbiddenError(
                f"this server does not answer to the name {shown!r} (Host): start it with "
                "--allowed-hosts NAME, or with API keys",
                code="host_not_allowed",
            )
        if len(self._known) < MAX_REMEMBERED:
            self._known.add(host)

    def _allows(self, name: str) -> bool:
        return bool(name) and (
            "." not in name
            or _is_address(name)
            or name.endswith(PRIVATE_DOMAINS)
            or name in self._names
            or name.endswith(self._suffixes)
        )

    # --- origins ---

    def _check_origin(self, origin: bytes, headers: dict[bytes, bytes]) -> Headers:
        text = origin.decode("latin-1").lower()
        if self._any_origin:
            return [(b"access-control-allow-origin", b"*"), _exposed()]
        if text in self._origins:
            return [(b"access-control-allow-origin", origin), _exposed(), (b"vary", b"Origin")]
        if self._check_origins and not _is_own(text, headers):
            raise ForbiddenError(
                f"pages of {text[:100]!r} (Origin) may not use this server: start it with "
                "--allowed-origins ORIGIN",
                code="origin_not_allowed",
            )
        return []


def _check_is_one(scope: Scope) -> None:
    """Raises `BadRequestError` unless the request has one `Host`; HTTP/1.0, which no browser
    speaks, may have none."""
    count = sum(name == b"host" for name, _ in scope["headers"])
    if count > 1:
        raise BadRequestError("there is more than one Host header", code="host_repeated")
    if not count and scope.get("http_version") == "1.1":
        raise BadRequestError("the Host header is missing", code="host_missing")


def _exposed() -> tuple[bytes, bytes]:
    return (b"access-control-expose-headers", EXPOSED)


def _is_own(origin: str, headers: dict[bytes, bytes]) -> bool:
    """Whether the request comes from a page of this server.

    Behind a proxy that changes `Host`, browsers say so in `Sec-Fetch-Site`, which no page can set.
    """
    if headers.get(b"sec-fetch-site") == b"same-origin":
        return True
    scheme, _, place = origin.partition("://")
    host = headers.get(b"host", b"").decode("latin-1").lower()
    default = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(place) and place == host.removesuffix(default)


def _name_of(host: str) -> str:
    """Without port, brackets and the dot at the end; empty for what is no host."""
    found = HOST.fullmatch(host)
    if found is None:
        return ""
    address, name = found.groups()
    if address is not None:
        return address if _is_address(address) else ""
    return name.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _check_type(content_type: bytes, path: str) -> None:
    """A page's form says where it comes from (Origin), which is checked before."""
    kind = content_type.split(b";", 1)[0].strip().lower().decode("latin-1")
    if kind == "multipart/form-data" and path in FILE_PATHS:
        return
    if path in FILE_PATHS and kind in FORM_TYPES:
        raise UnsupportedMediaTypeError(
            "the body is a form with a file: send it as Content-Type: multipart/form-data, not "
            f"{kind}",
        )
    if kind in FORM_TYPES:
        raise UnsupportedMediaTypeError(
            f"the body is JSON: send it as Content-Type: application/json, not {kind}",
        )
