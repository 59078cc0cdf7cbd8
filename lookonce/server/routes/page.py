"""The web page at `/`: its files, with a policy that lets a browser load nothing from elsewhere.

The page is a client like any other: it calls the public routes with the key its user types. So its
files need no key; they say nothing about who uses this server.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

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
    """Starlette's static files with `HEADERS`."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


FILES = PageFiles(directory=FOLDER)


async def show_page(request: Request) -> Response:
    return await FILES.get_response("index.html", request.scope)


async def show_page_file(request: Request) -> Response:
    return await FILES.get_response(request.path_params["name"], request.scope)
