"""What `lookonce bench embeddings` and `documents` send is new, or the same, as their rows say."""

from __future__ import annotations

import pytest

from benchmarks.documents import document
from benchmarks.embeddings import inputs
from lookonce.render.media.pdf import PagesJob, PdfRenderer


def test_inputs_are_new_or_the_same_as_they_are_called():
    first, second = dict(inputs(0, "data:a")), dict(inputs(1, "data:b"))
    assert first["again"] == first["known picture"] != first["new picture"]
    assert first["text again"] == first["new text"] != second["new text"]
    assert str(first["known picture"]).count("data:a") == 1
    assert "data:a" not in str(second)


def test_documents_share_the_pages_that_have_the_same_numbers():
    pytest.importorskip("pypdfium2")
    renderer = PdfRenderer(max_pages=10, max_pixels=50_000_000)
    whole, changed = (
        [page.png for page in renderer.render(PagesJob(data=document(numbers))).pages]
        for numbers in ([1, 2], [1, 3])
    )
    assert whole[0] == changed[0] != whole[1] != changed[1]
