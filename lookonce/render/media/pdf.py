"""PDF files → a picture and the text of each page, by PDFium, inside a media worker.

    bytes ─▶ open ─▶ number and sizes of all pages are judged ─▶ some pages are rendered
                        nothing is drawn before                     PNG, and the page's text

The only module that uses PDFium, through the bindings of pypdfium2 (`pip install
'lookonce[documents]'`). It draws as Chromium does, its licences are BSD and Apache, its wheels need
nothing of the system, and it is built without JavaScript and XFA. PDFium is set up without a folder
of fonts: a worker can open no file, and a page looks the same on every machine. Text whose font is
not in the file is drawn with PDFium's own fonts, which have Latin, Greek and Cyrillic letters.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any, Literal

import msgspec
from PIL import Image

from lookonce.errors import TooLargeError, UnprocessableMediaError
from lookonce.render.families.base import MAX_SIDE_RATIO
from lookonce.types.media import Array

BINDINGS = "pypdfium2_raw"
"""Of PDFium alone; the package `pypdfium2` would set PDFium up with the system's fonts."""
DOCUMENTS_MISSING = (
    "this server reads no PDF files: it needs the optional extra, pip install 'lookonce[documents]'"
)
POINTS_PER_INCH = 72
PAGE_DPI = 144
"""A page is drawn in this resolution, or in the largest with `PAGE_PIXELS`."""
PAGE_PIXELS = 2_000_000
"""A4 and Letter have a little less at 144 dots per inch. Families make pictures smaller, never
larger."""
PAGES_PER_JOB = 4
"""A tenant's long document must not keep a worker from other tenants' media for long."""
PAGE_SECONDS = 0.25
"""CPU seconds that rendering a page is estimated at; one with text alone takes 0.05."""
MAX_PAGE_CHARACTERS = 1_000_000
PNG_LEVEL = 1
"""Of zlib: pages are mostly white, and are decoded soon."""
ENCRYPTED = 4
"""PDFium's `FPDF_ERR_PASSWORD`."""
EVERYWHERE = 1e9
"""Points; no page is so large."""
NO_FOLDERS = (ctypes.c_char_p * 1)()
"""Of fonts: a list that ends at once. PDFium keeps its address."""
UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f\ufdd0-\ufdef\ufffe\uffff]")
"""What is no text: control characters, and noncharacters, with which PDFium marks the hyphen of a
word that goes on in the next line, and the renderer placeholders."""


def can_read_pdf() -> bool:
    """Whether the extra is installed."""
    return find_spec(BINDINGS) is not None


class PagesJob(msgspec.Struct, frozen=True, array_like=True):
    """Some pages of a PDF file to render."""

    data: bytes | memoryview
    """The file."""
    first: int = 0
    """Number of the first page, from 0."""
    count: int = PAGES_PER_JOB
    """Pages; fewer where the document ends before."""
    pictures: bool = True
    """Also draw the pages; False: text alone."""
    tenant: str = ""
    request_id: str = ""

    @property
    def modality(self) -> Literal["document"]:
        return "document"

    @property
    def seconds(self) -> float:
        """The estimated CPU seconds: how many pages there really are is not known before."""
        return PAGE_SECONDS * self.count


class Page(msgspec.Struct, frozen=True, array_like=True):
    """One page; `picture` is a PNG file as uint8 [n]."""

    text: str
    picture: Array | None = None

    @property
    def png(self) -> bytes | None:
        return None if self.picture is None else bytes(self.picture.data)


class RenderedPages(msgspec.Struct, frozen=True, array_like=True):
    """What becomes of a `PagesJob`."""

    num_pages: int
    """Of the whole document."""
    pages: tuple[Page, ...]
    render_ms: float = 0.0


class PdfRenderer:
    """PDFium, set up once per process. Raises `ImportError` without the extra."""

    def __init__(self, *, max_pages: int, max_pixels: int) -> None:
        """`max_pages` of one document, `max_pixels` of one page at `PAGE_DPI`."""
        self._max_pages = max_pages
        self._max_pixels = max_pixels
        self._lib = _pdfium()

    def render(self, job: PagesJob) -> RenderedPages:
        """Raises `UnprocessableMediaError` or `TooLargeError`, naming no request part."""
        begun = time.perf_counter()
        data = bytes(job.data)
        with self._opened(data) as document:
            sizes = self._sizes(document)
            end = min(job.first + job.count, len(sizes))
            pages = tuple(
                self._page(document, number, sizes[number], drawn=job.pictures)
                for number in range(job.first, end)
            )
        return RenderedPages(len(sizes), pages, (time.perf_counter() - begun) * 1e3)

    @contextmanager
    def _opened(self, data: bytes) -> Iterator[_Document]:
        lib = self._lib
        handle = lib.FPDF_LoadMemDocument64(data, len(data), None)
        if not handle:
            if lib.FPDF_GetLastError() == ENCRYPTED:
                raise UnprocessableMediaError("the PDF is encrypted: send it without a password")
            raise UnprocessableMediaError("the PDF is broken or incomplete")
        with ExitStack() as stack:
            stack.callback(lib.FPDF_CloseDocument, handle)
            form = None
            if lib.FPDF_GetFormType(handle) != lib.FORMTYPE_NONE:
                info = lib.FPDF_FORMFILLINFO(version=2)
                form = lib.FPDFDOC_InitFormFillEnvironment(handle, info)
                if form:
                    stack.callback(lib.FPDFDOC_ExitFormFillEnvironment, form)
                # PDFium reads `info` until then: it lives as long as this frame.
            yield _Document(handle, form or None)

    def _sizes(self, document: _Document) -> list[tuple[float, float]]:
        """Width and height of every page, points; all within the limits."""
        lib = self._lib
        num_pages = lib.FPDF_GetPageCount(document.handle)
        if num_pages < 1:
            raise UnprocessableMediaError("the PDF has no pages")
        if num_pages > self._max_pages:
            raise TooLargeError(
                f"the PDF has {num_pages} pages; at most {self._max_pages} are allowed"
            )
        sizes = []
        for number in range(num_pages):
            size = lib.FS_SIZEF()
            if not lib.FPDF_GetPageSizeByIndexF(document.handle, number, ctypes.byref(size)):
                raise _unreadable(number)
            sizes.append(self._checked_size(number, size.width, size.height))
        return sizes

    def _checked_size(self, number: int, width: float, height: float) -> tuple[float, float]:
        if not (0 < width < math.inf and 0 < height < math.inf):
            raise _unreadable(number)
        inches = f"{width / POINTS_PER_INCH:.4g} x {height / POINTS_PER_INCH:.4g} inches"
        if width * height * (PAGE_DPI / POINTS_PER_INCH) ** 2 > self._max_pixels:
            raise TooLargeError(
                f"page {number + 1} of the PDF is {inches}: more than {self._max_pixels} pixels "
                f"at {PAGE_DPI} dots per inch"
            )
        if max(width, height) > MAX_SIDE_RATIO * min(width, height):
            raise UnprocessableMediaError(
                f"page {number + 1} of the PDF is {inches}: more than {MAX_SIDE_RATIO} times "
                "longer than wide, or wider than long"
            )
        return width, height

    def _page(
        self, document: _Document, number: int, size: tuple[float, float], *, drawn: bool
    ) -> Page:
        lib = self._lib
        handle = lib.FPDF_LoadPage(document.handle, number)
        if not handle:
            raise _unreadable(number)
        with ExitStack() as stack:
            stack.callback(lib.FPDF_ClosePage, handle)
            if document.form is not None:
                lib.FORM_OnAfterLoadPage(handle, document.form)
                stack.callback(lib.FORM_OnBeforeClosePage, handle, document.form)
            text = self._text(handle, number)
            if not drawn:
                return Page(text)
            png = self._png(document, handle, number, *self._pixels(*size))
            return Page(text, Array("uint8", (len(png),), png))

    def _pixels(self, width: float, height: float) -> tuple[int, int]:
        """Of the page's picture, at least 1 x 1."""
        most = min(PAGE_PIXELS, self._max_pixels)
        scale = min(PAGE_DPI / POINTS_PER_INCH, math.sqrt(most / (width * height)))
        columns = max(1, min(most, int(width * scale)))
        return columns, max(1, min(most // columns, int(height * scale)))

    def _text(self, page: Any, number: int) -> str:
        lib = self._lib
        handle = lib.FPDFText_LoadPage(page)
        if not handle:
            raise _unreadable(number)
        try:
            corners = (handle, -EVERYWHERE, EVERYWHERE, EVERYWHERE, -EVERYWHERE)
            length = lib.FPDFText_GetBoundedText(*corners, None, 0)
            if length <= 0:
                return ""
            if length > MAX_PAGE_CHARACTERS:
                raise TooLargeError(
                    f"page {number + 1} of the PDF has {length} characters; at most "
                    f"{MAX_PAGE_CHARACTERS} are allowed"
                )
            units = (ctypes.c_ushort * length)()
            lib.FPDFText_GetBoundedText(*corners, units, length)
        finally:
            lib.FPDFText_ClosePage(handle)
        text = bytes(units).decode(f"utf-16-{sys.byteorder[0]}e", errors="ignore")
        return UNWANTED.sub("", text.replace("\r\n", "\n")).strip()

    def _png(self, document: _Document, page: Any, number: int, width: int, height: int) -> bytes:
        """The page on white, with its notes and the values of its form."""
        lib = self._lib
        bitmap = lib.FPDFBitmap_CreateEx(width, height, lib.FPDFBitmap_BGR, None, 0)
        if not bitmap:
            raise UnprocessableMediaError(f"page {number + 1} of the PDF takes too much memory")
        try:
            lib.FPDFBitmap_FillRect(bitmap, 0, 0, width, height, 0xFFFFFFFF)
            place = (0, 0, width, height, 0, lib.FPDF_ANNOT)
            lib.FPDF_RenderPageBitmap(bitmap, page, *place)
            if document.form is not None:
                lib.FPDF_FFLDraw(document.form, bitmap, page, *place)
            stride = lib.FPDFBitmap_GetStride(bitmap)
            pixels = ctypes.string_at(lib.FPDFBitmap_GetBuffer(bitmap), stride * height)
        finally:
            lib.FPDFBitmap_Destroy(bitmap)
        file = BytesIO()
        drawn = Image.frombuffer("RGB", (width, height), pixels, "raw", "BGR", stride, 1)
        drawn.save(file, "PNG", compress_level=PNG_LEVEL)
        return file.getvalue()


class _Document(msgspec.Struct, frozen=True):
    """PDFium's handles of an open document and of its form."""

    handle: Any
    form: Any


@cache
def _pdfium() -> Any:
    """PDFium's functions; it is set up once in a process, with an empty list of font folders."""
    lib: Any = import_module(BINDINGS)
    config = lib.FPDF_LIBRARY_CONFIG(version=2)
    config.m_pUserFontPaths = ctypes.cast(NO_FOLDERS, type(config.m_pUserFontPaths))
    lib.FPDF_InitLibraryWithConfig(config)
    return lib


def _unreadable(number: int) -> UnprocessableMediaError:
    return UnprocessableMediaError(f"page {number + 1} of the PDF cannot be read")


def sample_pdf() -> bytes:
    """One page with a line of text, a form field and a picture: what warms PDFium up."""
    drawing = b"BT /F 12 Tf 20 60 Td (warm) Tj ET q 9 0 0 9 60 20 cm /I Do Q"
    pixel = b"\xff\x80\x00"
    bodies = (
        b"<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[7 0 R]/DR<</Font<</F 4 0 R>>>>>>>>",
        b"<</Type/Pages/Count 1/Kids[3 0 R]>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 100 100]/Contents 5 0 R/Annots[7 0 R]"
        b"/Resources<</Font<</F 4 0 R>>/XObject<</I 6 0 R>>>>>>",
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        b"<</Length %d>>stream\n%b\nendstream" % (len(drawing), drawing),
        b"<</Type/XObject/Subtype/Image/Width 1/Height 1/ColorSpace/DeviceRGB"
        b"/BitsPerComponent 8/Length 3>>stream\n%b\nendstream" % pixel,
        b"<</Type/Annot/Subtype/Widget/FT/Tx/T(a)/V(b)/DA(/F 9 Tf)/Rect[10 10 40 30]/P 3 0 R>>",
    )
    return pdf_file(bodies)


def pdf_file(bodies: tuple[bytes, ...]) -> bytes:
    """A PDF file of objects numbered from 1, the first being its catalogue."""
    file, starts = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(bodies, 1):
        starts.append(len(file))
        file += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % start for start in starts)
    count, end = len(bodies) + 1, len(file)
    file += b"xref\n0 %d\n0000000000 65535 f \n%b" % (count, table)
    file += b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (count, end)
    return bytes(file)
