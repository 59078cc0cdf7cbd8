"""The web page at `/`: its files, with a policy that lets a browser load nothing from elsewhere.

The page is a client like any other: it calls the public routes with the key its user types. So its
files need no key; they say nothing about who uses this server.
"""

from __future__ import annotations

import mimetypes
import os
from functools import lru_cache
from pathlib import Path

from blake3 import blake3
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import NotModifiedResponse, PathLike, StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parents[1] / "static"
PREFIX = "/page/"

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
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # browsers keep the files and ask by ETag whether they changed
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

mimetypes.add_type("text/javascript", ".js")  # some systems' tables have another type


class PageFiles(StaticFiles):
    """Starlette's static files with `HEADERS`, and ETags made of their contents.

    Starlette makes an ETag of time and size, which two builds of a package may have in common.
    """

    def file_response(
        self, full_path: PathLike, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = FileResponse(full_path, status_code=status_code, stat_result=stat_result)
        response.headers.update(HEADERS)
        del response.headers["last-modified"]
        response.headers["etag"] = _etag(os.fspath(full_path), stat_result.st_mtime_ns)
        if self.is_not_modified(response.headers, Headers(scope=scope)):
            return NotModifiedResponse(response.headers)
        return response


@lru_cache
def _etag(path: str, _changed: int) -> str:
    return f'"{blake3(Path(path).read_bytes()).hexdigest(16)}"'


FILES = PageFiles(directory=FOLDER)


async def show_page(request: Request) -> Response:
    return await FILES.get_response("index.html", request.scope)


async def show_page_file(request: Request) -> Response:
    return await FILES.get_response(request.path_params["name"], request.scope)
