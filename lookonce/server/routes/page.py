"""The web page at `/`: its files, with a policy that lets a browser load nothing from elsewhere.

The page is a client like any other: it calls the public routes with the key its user types. So its
files need no key; they say nothing about who uses this server.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path

from blake3 import blake3
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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


PART_BYTES = 64 * 1024
"""Of a file, written at a time: the next part waits until the client has read most of it."""


class PageFile:
    """A file's contents in memory, which all answers share, and the headers of these.

    Its ETag is made of the contents: time and size two builds of a package may have in common.
    """

    def __init__(self, name: str, content: bytes) -> None:
        self.parts = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        self.etag = f'"{blake3(content).hexdigest(16)}"'
        self.headers = HEADERS | {
            "Content-Type": f"{kind}; charset=utf-8" if kind.startswith("text/") else kind,
            "Content-Length": str(len(content)),
            "ETag": self.etag,
        }


class PageFileResponse(Response):
    """A `PageFile` as it is: an answer that its client does not read holds neither a copy nor a
    descriptor."""

    def __init__(self, file: PageFile) -> None:
        super().__init__(None, headers=file.headers)
        self._parts = file.parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        for part in self._parts if scope["method"] != "HEAD" else ():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class PageFiles:
    """The files of a folder, read once."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            path.name: PageFile(path.name, path.read_bytes())
            for path in folder.iterdir()
            if path.is_file()
        }

    def response(self, name: str, headers: Headers) -> Response:
        """The file, or 304 where the client of a request with these headers has it.

        Raises `HTTPException` where there is none of this name.
        """
        file = self._files.get(name)
        if file is None:
            raise HTTPException(status_code=404)
        known = {
            tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")
        }
        if known & {file.etag, "*"}:
            return Response(status_code=304, headers=HEADERS | {"ETag": file.etag})
        return PageFileResponse(file)


FILES = PageFiles(FOLDER)


async def show_page(request: Request) -> Response:
    return FILES.response("index.html", request.headers)


async def show_page_file(request: Request) -> Response:
    return FILES.response(request.path_params["name"], request.headers)
