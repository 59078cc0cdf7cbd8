"""Only four picture formats, judged before they are decoded, seen as Hugging Face sees them."""

from __future__ import annotations

import contextlib
import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from lookonce.errors import TooLargeError, UnprocessableMediaError
from lookonce.render.media.processing import IMAGE_FORMATS, decode_image

LIMIT = 1_000_000


def picture(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A grey PNG whose header says what we want it to say."""

    def chunk(name: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packed = zlib.compress(rows)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def bmp() -> bytes:
    return encode(picture(), "BMP")


FITS_GZIP_BOMB = (
    b"SIMPLE  =                    T".ljust(80)
    + b"BITPIX  =                    8".ljust(80)
    + b"NAXIS   =                    2".ljust(80)
    + b"ZCMPTYPE= 'GZIP_1  '".ljust(80)
    + b"END".ljust(2880 - 320)
    + zlib.compress(bytes(100_000))
)


class TestFormats:
    @pytest.mark.parametrize("kind", IMAGE_FORMATS)
    def test_the_four_formats_open(self, kind: str) -> None:
        image = decode_image(encode(picture(), kind), LIMIT)
        assert (image.mode, image.size) == ("RGB", (40, 30))

    @pytest.mark.parametrize("kind", ["PNG", "WEBP"])
    def test_lossless_pixels_come_back(self, kind: str) -> None:
        image = decode_image(encode(picture(), kind, lossless=True), LIMIT)
        assert np.array_equal(image, picture())

    @pytest.mark.parametrize(
        "data",
        [
            bmp(),
            encode(picture(), "TIFF"),
            encode(picture(), "PPM"),
            encode(picture(), "ICO"),
            encode(picture(), "TGA"),
            encode(picture(), "JPEG2000") if features.check("jpg_2000") else b"jp2",
            encode(picture(), "PDF"),
            encode(picture(), "EPS"),
            FITS_GZIP_BOMB,
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            b"%!PS-Adobe-3.0 EPSF-3.0\n",
            b"plain text",
            b"",
            b"\x00" * 100,
        ],
        ids=[
            "bmp", "tiff", "ppm", "ico", "tga", "jp2", "pdf", "eps", "fits", "svg", "ps", "text",
            "nothing", "zeros",
        ],
    )  # fmt: skip
    def test_nothing_else_does(self, data: bytes) -> None:
        with pytest.raises(UnprocessableMediaError, match="PNG, JPEG, WebP or GIF"):
            decode_image(data, LIMIT)

    def test_memory_of_any_kind_is_read(self) -> None:
        data = encode(picture(), "PNG")
        assert decode_image(memoryview(data), LIMIT) == decode_image(data, LIMIT)


class TestLimits:
    def test_the_limit_is_exact(self) -> None:
        data = encode(picture(40, 30), "PNG")
        assert decode_image(data, 1200).size == (40, 30)
        with pytest.raises(TooLargeError, match="more than 1199 pixels"):
            decode_image(data, 1199)

    @pytest.mark.parametrize(
        ("width", "height"), [(20_000, 20_000), (2**31 - 1, 2**31 - 1), (65_000, 65_000)]
    )
    def test_a_forged_size_is_refused_from_the_header(self, width: int, height: int) -> None:
        with pytest.raises(TooLargeError):
            decode_image(png(width, height), LIMIT)

    def test_a_bomb_is_refused_before_it_unpacks(self) -> None:
        """50 KB that would become 50 million pixels."""
        bomb = png(7000, 7000, bytes(7001) * 7000)
        assert len(bomb) < 100_000
        with pytest.raises(TooLargeError):
            decode_image(bomb, LIMIT)

    def test_more_data_than_the_header_says_is_not_decoded(self) -> None:
        image = decode_image(png(4, 4, bytes(5 * 4) + bytes(1_000_000)), LIMIT)
        assert image.size == (4, 4)

    @pytest.mark.parametrize("size", [(201, 1), (1, 201), (5000, 10)])
    def test_a_thread_thin_picture_is_refused(self, size: tuple[int, int]) -> None:
        with pytest.raises(UnprocessableMediaError, match="times longer"):
            decode_image(encode(picture(*size), "PNG"), LIMIT)

    @pytest.mark.parametrize("size", [(1, 1), (1, 2), (200, 1), (1, 200)])
    def test_tiny_pictures_are_pictures(self, size: tuple[int, int]) -> None:
        assert decode_image(encode(picture(*size), "PNG"), LIMIT).size == size


class TestBroken:
    @pytest.mark.parametrize("kind", IMAGE_FORMATS)
    @pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
    def test_a_truncated_picture_is_refused_in_our_own_words(self, kind: str, share: float) -> None:
        data = encode(picture(200, 200), kind)
        with pytest.raises(UnprocessableMediaError) as raised:
            decode_image(data[: int(len(data) * share)], LIMIT)
        assert "0x" not in raised.value.message
        assert "BytesIO" not in raised.value.message

    @settings(deadline=None, max_examples=150)
    @given(
        kind=st.sampled_from(IMAGE_FORMATS),
        changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=20),
        cut=st.integers(0, 10**6),
    )
    def test_hostile_bytes_give_a_picture_or_a_clean_error(
        self, kind: str, changes: list[tuple[int, int]], cut: int
    ) -> None:
        data = bytearray(encode(picture(), kind))
        for place, value in changes:
            data[place % len(data)] = value
        data = data[: cut % (2 * len(data))]
        with contextlib.suppress(UnprocessableMediaError, TooLargeError):
            assert decode_image(bytes(data), LIMIT).mode == "RGB"


class TestAsHuggingFaceSees:
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_orientation_is_applied(self, orientation: int) -> None:
        from transformers.image_utils import load_image

        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("JPEG", "PNG", "WEBP"):
            data = encode(picture(), kind, exif=exif)
            image = decode_image(data, LIMIT)
            assert np.array_equal(image, load_image(Image.open(BytesIO(data))))

    @pytest.mark.parametrize(
        ("kind", "mode"),
        [
            ("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "L"), ("PNG", "P"), ("PNG", "1"),
            ("PNG", "I;16"), ("WEBP", "RGBA"), ("GIF", "P"), ("GIF", "RGBA"), ("JPEG", "CMYK"),
            ("JPEG", "L"), ("PNG", "RGB"),
        ],
    )  # fmt: skip
    def test_every_mode_becomes_the_same_rgb(self, kind: str, mode: str) -> None:
        from transformers.image_transforms import convert_to_rgb

        image = (
            Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)
            if mode == "I;16"
            else picture(mode=mode)
        )
        data = encode(image, kind)
        expected = convert_to_rgb(Image.open(BytesIO(data)), return_numpy=True)
        assert np.array_equal(decode_image(data, LIMIT), expected)

    def test_transparent_is_white(self) -> None:
        clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
        for kind in ("PNG", "WEBP"):
            image = decode_image(encode(clear, kind, lossless=True), LIMIT)
            assert image.getpixel((1, 1)) == (255, 255, 255)

    def test_a_transparent_palette_entry_is_white(self) -> None:
        palette = Image.new("P", (4, 4), 1)
        palette.putpalette([0, 0, 0, 255, 0, 0])
        data = encode(palette, "GIF", transparency=1)
        assert decode_image(data, LIMIT).getpixel((1, 1)) == (255, 255, 255)

    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
    def test_an_animation_is_its_first_frame(self, kind: str) -> None:
        frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert decode_image(data, LIMIT).getpixel((3, 3)) == (255, 0, 0)

    def test_the_result_is_fully_loaded(self) -> None:
        """No lazy decoding is left that could fail where nobody expects it."""
        data = encode(picture(200, 200), "JPEG")
        image = decode_image(data, LIMIT)
        assert np.asarray(image).shape == (200, 200, 3)
