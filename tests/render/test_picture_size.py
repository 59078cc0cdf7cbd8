"""The size that a picture's headers tell is the size that decoding gives, or there is none."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from lookonce.errors import LookOnceError, UnavailableError
from lookonce.render.media.picture_size import ExpansionsBySize, upright_size
from lookonce.render.media.processing import MediaJob, Processed, decode_image
from lookonce.types.media import Expansion, ProcessedItem

SAVED = [
    ("PNG", {}),
    ("PNG", {"compress_level": 0}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True, "optimize": True}),
    ("JPEG", {"comment": b"made by hand", "icc_profile": b"x" * 200}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
]


def saved(
    size: tuple[int, int], kind: str, options: dict[str, object], turn: int, mode: str = "RGB"
) -> bytes:
    target = io.BytesIO()
    if turn:
        exif = Image.Exif()
        exif[0x0110] = "a camera"
        exif[0x0112] = turn
        options = {**options, "exif": exif}
    Image.new(mode, size).save(target, kind, **options)
    return target.getvalue()


def decoded_size(data: bytes) -> tuple[int, int] | None:
    try:
        return decode_image(data, 1 << 30).size
    except LookOnceError:
        return None


@pytest.mark.parametrize(("kind", "options"), SAVED)
@pytest.mark.parametrize("turn", range(9))
def test_every_format_and_turn(kind: str, options: dict[str, object], turn: int) -> None:
    for size in ((1, 1), (37, 91), (300, 201)):
        data = saved(size, kind, options, turn)
        found = upright_size(data)
        assert found == decoded_size(data) or (found is None and kind == "WEBP" and turn)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "CMYK"])
def test_every_mode(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert upright_size(saved((31, 17), kind, {}, 0, mode)) == (31, 17)
    assert upright_size(saved((31, 17), "WEBP", {}, 0, "RGBA")) == (31, 17)


def test_where_only_decoding_tells_there_is_no_answer() -> None:
    gif = saved((8, 9), "GIF", {}, 0)
    animation = io.BytesIO()
    frames = [Image.new("RGB", (8, 9), colour) for colour in ("red", "blue")]
    frames[0].save(animation, "WEBP", save_all=True, append_images=frames[1:])
    xmp = saved((8, 9), "JPEG", {"xmp": b"<x tiff:Orientation='6'/>"}, 0)
    hidden = PngImagePlugin.PngInfo()
    hidden.add_text("Raw profile type exif", "\nexif\n4\n00000000\n")
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Software", "a program")
    assert upright_size(saved((8, 9), "PNG", {"pnginfo": texts}, 0)) == (8, 9)
    unknown = (gif, animation.getvalue(), xmp, saved((8, 9), "PNG", {"pnginfo": hidden}, 0), b"")
    assert [upright_size(data) for data in unknown] == [None] * 5


@given(
    saving=st.sampled_from(SAVED),
    turn=st.integers(0, 8),
    changes=st.lists(st.tuples(st.integers(0, 160), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 400) | st.none(),
)
@example(saving=("JPEG", {}), turn=5, changes=[(48, 1)], cut=None)
@settings(max_examples=300, deadline=None)
def test_headers_and_decoder_agree_whatever_the_bytes(
    saving: tuple[str, dict[str, object]],
    turn: int,
    changes: Sequence[tuple[int, int]],
    cut: int | None,
) -> None:
    """A file that cannot be decoded may have a size: it is refused where it is decoded."""
    data = bytearray(saved((37, 91), *saving, turn))
    for at, value in changes:
        data[at % len(data)] = value
    found = upright_size(bytes(data[:cut]))
    if found is not None:
        assert decoded_size(bytes(data[:cut])) in (found, None)


def runs(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test on an event loop of its own."""
    return wraps(scenario)(lambda: asyncio.run(scenario()))


class Family:
    """A token for each pixel of the width, and one picture for each option."""

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong

    def expansion_of_size(self, modality, size, options):  # type: ignore[no-untyped-def]
        return Expansion(((1, size[0] + self.wrong),), 1)


class Workers:
    def __init__(self) -> None:
        self.jobs: list[MediaJob] = []
        self.busy = False

    async def run(self, job: MediaJob) -> Processed:
        self.jobs.append(job)
        if self.busy:
            raise UnavailableError("busy")
        width, _ = decode_image(job.data, 1 << 30).size
        return Processed(ProcessedItem("image", {}, Expansion(((1, width),), 1)), 0.0, 0.0)


@runs
async def test_a_family_that_is_right_is_asked_alone_after_a_proof_for_each_options() -> None:
    workers = Workers()
    by_size = ExpansionsBySize(Family(), workers.run)
    picture = saved((37, 91), "JPEG", {}, 6)
    for _ in range(3):
        found = await by_size.find(picture, {})
        assert found is not None
        assert found.length == 91
    proof = len(workers.jobs)
    assert proof == 5
    assert await by_size.find(picture, {"longest_edge": 5}) is not None
    assert len(workers.jobs) == 2 * proof
    assert await by_size.find(saved((2001, 10), "PNG", {}, 0), {}) is None, "it is refused"


@runs
async def test_a_family_that_is_wrong_once_is_not_believed() -> None:
    workers = Workers()
    by_size = ExpansionsBySize(Family(wrong=True), workers.run)
    assert [await by_size.find(saved((9, 9), "PNG", {}, 0), {}) for _ in range(3)] == [None] * 3
    assert len(workers.jobs) == 1


@runs
async def test_a_proof_that_found_no_worker_is_tried_again() -> None:
    workers = Workers()
    by_size = ExpansionsBySize(Family(), workers.run)
    workers.busy = True
    assert await by_size.find(saved((9, 9), "PNG", {}, 0), {}) is None
    workers.busy = False
    assert await by_size.find(saved((9, 9), "PNG", {}, 0), {}) is not None
