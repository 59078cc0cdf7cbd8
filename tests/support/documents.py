"""PDF files for tests, and the content parts that clients send them in."""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import Any

from lookonce.render.media.pdf import pdf_file

CURVE = 0.5523
"""Where the control points of a quarter of a circle lie."""
ENCRYPTION = b"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O<%b>/U<%b>>>/ID[<00><00>]" % (
    b"01" * 32,
    b"02" * 32,
)
"""No password is known that opens it."""


def line(text: str, top: float = 60, size: float = 12) -> bytes:
    """What draws a line of text `top` points above the page's lower edge."""
    return b"BT /F %g Tf 10 %g Td (%b) Tj ET " % (size, top, text.encode("latin-1"))


def red_circle(x: float = 21, y: float = 21, radius: float = 15) -> bytes:
    """What draws it; units are points."""
    c = CURVE * radius
    ends = [(radius, 0), (0, radius), (-radius, 0), (0, -radius), (radius, 0)]
    path = [f"1 0 0 rg {x + radius:g} {y:g} m"]
    for (ax, ay), (bx, by) in pairwise(ends):
        # The tangent at (a, b) of a circle around 0 is (-b, a).
        first = (x + ax - ay / radius * c, y + ay + ax / radius * c)
        second = (x + bx + by / radius * c, y + by - bx / radius * c)
        path.append("{:g} {:g} {:g} {:g} {:g} {:g} c".format(*first, *second, x + bx, y + by))
    return " ".join([*path, "f "]).encode()


def pdf(*pages: bytes, size: tuple[float, float] = (200, 100)) -> bytes:
    """A PDF file whose pages are drawn so; `size` is in points of 1/72 inch."""
    kids, bodies = [], []
    for drawing in pages:
        number = 4 + len(bodies)
        kids.append(b"%d 0 R" % number)
        bodies.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %g %g]/Contents %d 0 R"
            b"/Resources<</Font<</F 3 0 R>>>>>>" % (*size, number + 1)
        )
        bodies.append(b"<</Length %d>>stream\n%b\nendstream" % (len(drawing), drawing))
    first = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%b]>>" % (len(kids), b" ".join(kids)),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    )
    return pdf_file((*first, *bodies))


def encrypted_pdf() -> bytes:
    return pdf(line("secret")).replace(b"trailer\n<<", b"trailer\n<<" + ENCRYPTION)


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "application/pdf") -> str:
    return f"data:{media_type};base64,{as_base64(data)}"


def file_part(data: bytes, media_type: str = "application/pdf", **fields: Any) -> dict[str, Any]:
    """A chat's content part; `fields` are others of its file, such as `filename`."""
    return {"type": "file", "file": {"file_data": data_url(data, media_type), **fields}}
