"""Documents: the file parts of messages → text, and a picture of each page.

    file part ─▶ bytes ─▶ text file: its text
                          PDF, by scope and digest ─▶ known: the pages that are held here
                                                      else:  rendered in media workers, page by page
                                                        │
                    texts, and PNG pictures as media parts ◀┘

A page's picture is a picture like any other: what it is known by is its own content. So a document
that shares pages with another one is rendered, and these pages are neither processed nor encoded
again. A document that is held is not even rendered, whichever route it comes to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lookonce.cache.directory import ByteLRU
from lookonce.cache.identity import HashAlgorithm, item_key, media_hash
from lookonce.errors import (
    BadRequestError,
    RequestError,
    TooLargeError,
    UnprocessableMediaError,
)
from lookonce.render.media.loader import (
    MAX_HEADER_LENGTH,
    OFF_LOOP_BYTES,
    Encoded,
    MediaSource,
    for_part,
    source_of_url,
)
from lookonce.render.media.pdf import (
    DOCUMENTS_MISSING,
    PAGE_DPI,
    PAGE_PIXELS,
    PAGES_PER_JOB,
    Page,
    PagesJob,
    RenderedPages,
    can_read_pdf,
)
from lookonce.render.media.resolver import gather
from lookonce.render.media.single_flight import SingleFlight
from lookonce.types.counts import Counts
from lookonce.types.logs import current_request_id

DOCUMENT_CACHE_BYTES = 128 << 20
"""Texts and pictures of pages that one API process keeps. A page takes 0.1 to 0.4 MB, a scanned one
up to 3."""
PAGE_OVERHEAD = 256
"""Bytes charged per page beside its text and picture."""
MAX_JOBS_SIDE_BY_SIDE = 4
"""Jobs of one document that wait for workers or are with them."""
MAX_FILENAME = 255
PDF_MAGIC = b"%PDF-"
PDF_MAGIC_WITHIN = 1024
"""Readers of PDF look for the magic in so many first bytes."""
PDF_TYPES = frozenset({"application/pdf", "application/x-pdf"})
TEXT_TYPES = frozenset(
    {
        "application/csv", "application/javascript", "application/json", "application/ld+json",
        "application/sql", "application/toml", "application/x-javascript", "application/x-ndjson",
        "application/x-sh", "application/x-yaml", "application/xml", "application/yaml",
    }
)  # fmt: skip
"""Media types of texts beside `text/*`, `*+json` and `*+xml`."""
UNTOLD = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""Media types that say nothing: the bytes decide."""
COUNTED = "document_pages_total"
SERVED = "PDF files and texts in UTF-8 are served"

Json = dict[str, Any]
PartContent = Json | MediaSource
"""What a document becomes in a message: a text part, or the picture of a page."""


class DocumentLoader(Protocol):
    """Implemented by `loader.MediaLoader`."""

    async def load(
        self, source: MediaSource, scope: bytes = b"", kind: str = "", tenant: str = ""
    ) -> Encoded: ...


class PagesPool(Protocol):
    """Implemented by `pool.MediaPool`."""

    def start_beside(self) -> None:
        """Begin to start a worker, unless one was started."""

    def render(self, job: PagesJob) -> Coroutine[Any, Any, RenderedPages]: ...


@dataclass(frozen=True, slots=True)
class DocumentSource:
    """One file part, and where its bytes come from."""

    file: MediaSource
    name: str = ""
    media_type: str = ""
    """As the client says, in lower case; empty where it does not."""

    @property
    def param(self) -> str:
        return self.file.param


def document_source(part: Mapping[str, object], param: str) -> DocumentSource:
    """The source of a part `{"type": "file", "file": {…}}`; its text or pages are read later.

    `file_data` is a data URL, base64, or a URL; `file_url` is a URL. Raises `BadRequestError`
    naming the part.
    """
    body = part.get("file")
    if not isinstance(body, Mapping):
        raise BadRequestError(f"{param}: a file part needs an object `file`", param=param)
    if body.get("file_id") is not None:
        raise BadRequestError(
            f"{param}: file_id is not supported, because no files are kept here: "
            "send the file as file_data",
            param=param,
            code="unsupported_parameter",
        )
    name = body.get("filename")
    if name is not None and (not isinstance(name, str) or len(name) > MAX_FILENAME):
        raise BadRequestError(
            f"{param}: filename must be a text of at most {MAX_FILENAME} characters", param=param
        )
    given = {key: body[key] for key in ("file_data", "file_url") if body.get(key) is not None}
    if len(given) != 1:
        raise BadRequestError(f"{param}: a file needs file_data or file_url", param=param)
    ((key, value),) = given.items()
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"{param}: {key} must be a text", param=param)
    file, media_type = _file(value, param, is_url=key == "file_url")
    _check_media_type(media_type, param)
    return DocumentSource(file, name or _name_of(file), media_type)


def _file(value: str, param: str, *, is_url: bool) -> tuple[MediaSource, str]:
    """The source of the bytes, and the media type of a data URL. Where the modality would stand is
    "image", which nothing reads."""
    if not is_url and ":" not in value[:16]:  # no character of base64
        return MediaSource("image", "inline", value, param), ""
    file = source_of_url(value, "image", param)
    if file.origin != "inline":
        return file, ""
    header = value[len("data:") : min(file.start, MAX_HEADER_LENGTH)]
    return file, header.partition(";")[0].strip().lower()


def _name_of(file: MediaSource) -> str:
    """The last part of a URL's path."""
    if file.origin not in ("remote", "file"):
        return ""
    return file.value.partition("?")[0].partition("#")[0].rpartition("/")[2][:MAX_FILENAME]


def _check_media_type(media_type: str, param: str) -> None:
    known = media_type in PDF_TYPES or media_type in UNTOLD or _is_text(media_type)
    if not known:
        hint = "; send it as image_url" if media_type.startswith("image/") else ""
        raise BadRequestError(
            f"{param}: a file of type {media_type[:60]!r} is not supported: {SERVED}{hint}",
            param=param,
        )


def _is_text(media_type: str) -> bool:
    return (
        media_type.startswith("text/")
        or media_type in TEXT_TYPES
        or media_type.endswith(("+json", "+xml"))
    )


def text_content(data: Encoded, source: DocumentSource) -> str:
    """The text of a text file. Raises `UnprocessableMediaError` naming the part."""
    try:
        text = bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text, wrong = "", f"byte {error.start} is not UTF-8"
    else:
        wrong = "it holds NUL" if "\0" in text else ""
    if wrong:
        what = "the text" if _is_text(source.media_type) else "the file is neither PDF nor text"
        raise UnprocessableMediaError(
            f"{source.param}: {what}: {wrong}; {SERVED}", param=source.param
        )
    return text


class Documents:
    """Reads documents; one per API process, used on its event loop."""

    def __init__(
        self,
        *,
        loader: DocumentLoader,
        pool: PagesPool,
        pictures: bool,
        max_pages: int,
        max_pixels: int,
        algorithm: HashAlgorithm = "blake3",
        counts: Counts | None = None,
        capacity_bytes: int = DOCUMENT_CACHE_BYTES,
        available: bool | None = None,
    ) -> None:
        """`pool` need not be started; `pictures`: the model sees; `max_pages` of one request,
        `max_pixels` of a page; `available`: PDF can be read, None: find out."""
        self._loader = loader
        self._pool = pool
        self._pictures = pictures
        self._max_pages = max_pages
        self._algorithm: HashAlgorithm = algorithm
        self._options = {
            "dpi": PAGE_DPI, "pixels": min(PAGE_PIXELS, max_pixels), "pictures": pictures,
        }  # fmt: skip
        self._held: ByteLRU[tuple[Page, ...]] = ByteLRU(capacity_bytes)
        self._rendering: SingleFlight[bytes, tuple[Page, ...]] = SingleFlight()
        self._available = can_read_pdf() if available is None else available
        self.pages = (Counts() if counts is None else counts).by_label(COUNTED)
        """Pages of documents, by whether they were `rendered` or `held`."""
        for source in ("rendered", "held"):
            self.pages[source] += 0

    async def read(
        self, sources: Sequence[DocumentSource], scope: bytes, tenant: str = ""
    ) -> dict[str, list[PartContent]]:
        """The content of each document, by the name of its part.

        Raises a `RequestError` that names the part.
        """
        contents: dict[str, list[PartContent]] = {}
        num_pages = 0
        for source in sources:
            data = await self._loader.load(source.file, scope, "document", tenant)
            if PDF_MAGIC not in bytes(data[:PDF_MAGIC_WITHIN]):
                contents[source.param] = [self._text(data, source)]
                continue
            pages = await self._pages(data, source, scope, tenant)
            num_pages += len(pages)
            if num_pages > self._max_pages:
                raise TooLargeError(
                    f"{source.param}: the documents have {num_pages} pages up to here; at most "
                    f"{self._max_pages} are allowed in a request",
                    param=source.param,
                )
            contents[source.param] = self._page_parts(pages, source)
        return contents

    def _text(self, data: Encoded, source: DocumentSource) -> Json:
        if source.media_type in PDF_TYPES:
            raise UnprocessableMediaError(
                f"{source.param}: the file is not a PDF, as its type says", param=source.param
            )
        text = text_content(data, source).removesuffix("\n") + "\n"
        return {"type": "text", "text": f"[{source.name}]\n{text}" if source.name else text}

    def _page_parts(self, pages: Sequence[Page], source: DocumentSource) -> list[PartContent]:
        """A line that names the page, its picture if the model sees, and its text."""
        if not self._pictures and not any(page.text for page in pages):
            raise UnprocessableMediaError(
                f"{source.param}: the PDF's pages hold no text, and the model takes no pictures",
                param=source.param,
            )
        parts: list[PartContent] = []
        named = f"{source.name}, " if source.name else ""
        for number, page in enumerate(pages, 1):
            title = f"[{named}page {number} of {len(pages)}]\n"
            if page.picture is None:
                parts.append({"type": "text", "text": f"{title}{page.text}\n"})
                continue
            parts.append({"type": "text", "text": title})
            parts.append(
                MediaSource("image", "inline", "", source.param, data=page.png, is_page=True)
            )
            parts.append({"type": "text", "text": f"\n{page.text}\n" if page.text else "\n"})
        return parts

    async def _pages(
        self, data: Encoded, source: DocumentSource, scope: bytes, tenant: str
    ) -> tuple[Page, ...]:
        if not self._available:
            raise BadRequestError(f"{source.param}: {DOCUMENTS_MISSING}", param=source.param)
        if len(data) > OFF_LOOP_BYTES:
            digest = await asyncio.to_thread(self._hash, data)
        else:
            digest = self._hash(data)
        key = item_key(scope, digest)
        pages = self._held.get(key)
        if pages is not None:
            self.pages["held"] += len(pages)
            return pages
        try:
            pages = await self._rendering.run(key, lambda: self._render(data, tenant))
        except RequestError as error:
            raise for_part(error, source.param) from None
        if key not in self._held:
            self._held.try_insert(key, sum(map(_nbytes, pages)), pages)
        return pages

    def _hash(self, data: Encoded) -> bytes:
        return media_hash(
            data, modality="document", decode_options=self._options, algorithm=self._algorithm
        )

    async def _render(self, data: Encoded, tenant: str) -> tuple[Page, ...]:
        """All pages. The first job says how many there are, or that the document is refused."""
        view = memoryview(data).toreadonly() if isinstance(data, bytearray) else data
        self._pool.start_beside()

        async def rendered(first: int) -> RenderedPages:
            job = PagesJob(
                view,
                first,
                PAGES_PER_JOB,
                self._pictures,
                tenant,
                current_request_id.get(),
            )
            made = await self._pool.render(job)
            self.pages["rendered"] += len(made.pages)
            return made

        begun = await rendered(0)
        later = range(PAGES_PER_JOB, begun.num_pages, PAGES_PER_JOB)
        rest = await gather([partial(rendered, first) for first in later], MAX_JOBS_SIDE_BY_SIDE)
        return tuple(page for made in (begun, *rest) for page in made.pages)


def _nbytes(page: Page) -> int:
    picture = 0 if page.picture is None else page.picture.nbytes
    return PAGE_OVERHEAD + len(page.text.encode()) + picture
