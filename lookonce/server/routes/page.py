"""The web page at `/`: a few plain files, and a policy that lets in nothing from outside.

The page is a client like any other: it talks to the public routes with the key its user types.
So the files themselves need no key; they say nothing about who uses this server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import blake3
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "static"
PREFIX = "/page/"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

COMMON_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # kept by the browser, asked about by ETag, so never out of date
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str
    etag: str


def is_page(path: str) -> bool:
    """Whether `path` is the page or one of its files."""
    return path == "/" or path.startswith(PREFIX)


async def show_page(request: Request) -> Response:
    return _respond(request, assets()["index.html"])


async def show_asset(request: Request) -> Response:
    asset = assets().get(request.path_params["name"])
    if asset is None:
        raise HTTPException(404)
    return _respond(request, asset)


@cache
def assets() -> Mapping[str, Asset]:
    """Every file of the page by its name; nothing else in the file system can be asked for."""
    return {path.name: _asset(path) for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, MEDIA_TYPES[path.suffix], f'"{blake3.blake3(body).hexdigest(16)}"')


def _respond(request: Request, asset: Asset) -> Response:
    headers = {**COMMON_HEADERS, "ETag": asset.etag}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, 200, {**headers, "Content-Type": asset.media_type})
