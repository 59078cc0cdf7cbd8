"""Pictures and sounds are checked before they are decoded, and decoded as Hugging Face does."""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from lookonce.errors import TooLargeError, UnprocessableMediaError
from lookonce.render.media.processing import IMAGE_FORMATS, decode_audio, decode_image

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


OWN_WORDS = re.compile(
    r"the image (is broken or incomplete \((PNG|JPEG|WEBP|GIF)\)|is empty|has more than \d+ pixels"
    r"|is more than \d+ times longer than wide, or wider than long)"
    r"|the data is not a readable PNG, JPEG, WebP or GIF image"
)
"""All that a client may be told of a picture; nothing of a decoder's own message."""


class TestBroken:
    @pytest.mark.parametrize("kind", IMAGE_FORMATS)
    @pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
    def test_a_truncated_picture_is_refused_in_our_own_words(self, kind: str, share: float) -> None:
        data = encode(picture(200, 200), kind)
        with pytest.raises(UnprocessableMediaError) as raised:
            decode_image(data[: int(len(data) * share)], LIMIT)
        assert OWN_WORDS.fullmatch(raised.value.message)

    @pytest.mark.parametrize("step", ["PIL.Image.open", "PIL.ImageOps.exif_transpose"])
    def test_too_little_memory_is_no_fault_of_the_picture(
        self, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise MemoryError

        monkeypatch.setattr(step, fail)
        with pytest.raises(MemoryError):
            decode_image(encode(picture(), "PNG"), LIMIT)

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
        told = ""
        try:
            assert decode_image(bytes(data), LIMIT).mode == "RGB"
        except (UnprocessableMediaError, TooLargeError) as error:
            told = error.message
        assert not told or OWN_WORDS.fullmatch(told)


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
        """Nothing is left to be decoded lazily, where errors are not caught."""
        data = encode(picture(200, 200), "JPEG")
        image = decode_image(data, LIMIT)
        assert np.asarray(image).shape == (200, 200, 3)


RATE = 16_000


def tone(seconds: float = 1.0, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def encode_sound(
    samples: np.ndarray, kind: str = "WAV", rate: int = RATE, subtype: str | None = None
) -> bytes:
    buffer = BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def wav(
    rate: int = RATE, channels: int = 1, declared: int | None = None, data: bytes = b""
) -> bytes:
    """A 16-bit WAV whose header says what we want it to say."""
    size = len(data) if declared is None else declared
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 * channels & 0xFFFFFFFF, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size)
    return b"RIFF" + struct.pack("<I", (len(body) + size) & 0xFFFFFFFF) + body + data


def num_samples(data: bytes, max_seconds: float) -> int:
    """Samples heard, 0 for a clean refusal; anything else is an error of its own."""
    with contextlib.suppress(UnprocessableMediaError, TooLargeError):
        samples = decode_audio(data, RATE, max_seconds)
        assert np.isfinite(samples).all()
        return len(samples)
    return 0


class TestSounds:
    @pytest.mark.parametrize("kind", ["WAV", "WAVEX", "FLAC", "OGG", "MP3"])
    def test_the_four_formats_are_heard(self, kind: str) -> None:
        samples = decode_audio(encode_sound(tone(), kind), RATE, 30)
        assert samples.dtype == np.float32
        assert abs(len(samples) - RATE) < 0.15 * RATE  # MP3 pads
        spectrum = np.abs(np.fft.rfft(samples))
        assert abs(np.argmax(spectrum) * RATE / len(samples) - 440) < 5

    @pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "PCM_32", "FLOAT", "PCM_U8"])
    def test_any_sample_width(self, subtype: str) -> None:
        samples = decode_audio(encode_sound(tone(), subtype=subtype), RATE, 30)
        np.testing.assert_allclose(samples, tone(), atol=1e-2)

    def test_float_samples_come_back_as_they_were(self) -> None:
        assert np.array_equal(decode_audio(encode_sound(tone(), subtype="FLOAT"), RATE, 30), tone())

    def test_channels_are_averaged(self) -> None:
        stereo = np.stack([tone(hertz=440), tone(hertz=880)], axis=1)
        samples = decode_audio(encode_sound(stereo, subtype="FLOAT"), RATE, 30)
        assert np.array_equal(samples, stereo.mean(axis=1))

    @pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
    def test_other_rates_are_resampled_as_librosa_does(self, rate: int) -> None:
        sound = tone(0.7, rate)
        samples = decode_audio(encode_sound(sound, rate=rate, subtype="FLOAT"), RATE, 30)
        length = -(-len(sound) * RATE // rate)
        expected = soxr.resample(sound, rate, RATE, quality="HQ")
        assert len(samples) == length
        assert np.array_equal(samples[: len(expected)], expected[:length])

    def test_long_clips_are_read_whole(self) -> None:
        """More than one block."""
        sound = tone(10.0)
        assert np.array_equal(decode_audio(encode_sound(sound, subtype="FLOAT"), RATE, 30), sound)

    def test_memory_of_any_kind_is_read(self) -> None:
        data = encode_sound(tone())
        assert np.array_equal(
            decode_audio(memoryview(data), RATE, 30), decode_audio(data, RATE, 30)
        )


class TestSoundLimits:
    def test_the_limit_is_exact(self) -> None:
        assert len(decode_audio(encode_sound(tone(2.0)), RATE, 2.0)) == 2 * RATE
        with pytest.raises(TooLargeError, match="longer than 2 seconds"):
            decode_audio(encode_sound(tone(2.0)[:-1].repeat(2)), RATE, 2.0)

    @pytest.mark.parametrize("rate", [1, 100, 3_999, 192_001, 4_000_000_000])
    def test_a_forged_rate_is_refused(self, rate: int) -> None:
        """At 1 Hz, two kilobytes would become sixteen million samples."""
        with pytest.raises((UnprocessableMediaError, TooLargeError)):
            decode_audio(wav(rate=rate, data=bytes(2000)), RATE, 3600)

    def test_a_forged_length_does_not_reserve_memory(self) -> None:
        forged = wav(declared=0xFFFFFFF0, data=bytes(3200))
        assert num_samples(forged, 30) <= 1600

    def test_a_flac_that_understates_its_length_is_stopped(self) -> None:
        """STREAMINFO says one sample; the stream goes on for ten seconds."""
        data = bytearray(encode_sound(tone(10.0), "FLAC"))
        at = data.index(b"fLaC") + 8 + 13
        data[at] &= 0xF0
        data[at + 1 : at + 5] = (1).to_bytes(4, "big")
        assert num_samples(bytes(data), 5.0) <= 5 * RATE

    def test_silence_that_packs_well_is_judged_by_its_length(self) -> None:
        packed = encode_sound(np.zeros(RATE * 600, np.int16), "FLAC")
        assert len(packed) < 100_000
        with pytest.raises(TooLargeError):
            decode_audio(packed, RATE, 599)

    def test_too_many_channels_are_refused(self) -> None:
        with pytest.raises(UnprocessableMediaError):
            decode_audio(wav(channels=200, data=bytes(4000)), RATE, 30)


class TestBrokenSounds:
    @pytest.mark.parametrize(
        "data",
        [
            encode_sound(tone(), "AIFF"),
            encode_sound(tone(), "AU"),
            encode_sound(tone(), "CAF"),
            encode_sound(tone(), "W64"),
            encode_sound(tone(), "VOC", subtype="PCM_16"),
            b"",
            b"RIFF",
            b"RIFFxxxxWAVE",
            b"OggS" + bytes(100),
            b"fLaC" + bytes(100),
            b"ID3" + bytes(100),
            b"\xff\xfb" + bytes(100),
            b"plain text, no sound",
            bytes(1000),
        ],
    )
    def test_everything_else_is_refused_in_our_own_words(self, data: bytes) -> None:
        with pytest.raises(UnprocessableMediaError, match=r"WAV, FLAC, Ogg or MP3|empty") as raised:
            decode_audio(data, RATE, 30)
        assert "0x" not in raised.value.message

    def test_a_clip_without_samples_is_empty(self) -> None:
        with pytest.raises(UnprocessableMediaError, match="empty"):
            decode_audio(encode_sound(tone(0.0)), RATE, 30)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_samples_that_are_no_numbers_are_refused(self, value: float) -> None:
        sound = tone()
        sound[77] = value
        with pytest.raises(UnprocessableMediaError, match="no numbers"):
            decode_audio(encode_sound(sound, subtype="FLOAT"), RATE, 30)

    @settings(deadline=None, max_examples=100)
    @given(
        kind=st.sampled_from(["WAV", "FLAC", "OGG", "MP3"]),
        changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=20),
        cut=st.integers(0, 10**6),
    )
    def test_hostile_bytes_give_a_sound_or_a_clean_error(
        self, kind: str, changes: list[tuple[int, int]], cut: int
    ) -> None:
        data = bytearray(encode_sound(tone(0.2), kind))
        for place, value in changes:
            data[place % len(data)] = value
        data = data[: cut % (2 * len(data))]
        assert num_samples(bytes(data), 2.0) <= 2 * RATE
