"""The cost of an item is known from its headers; dear items are refused before any worker."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
import soundfile
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from lookonce.errors import TooLargeError
from lookonce.render.media.cost import (
    MAX_CHUNKS,
    MAX_SCANS,
    MAX_SEGMENTS,
    CostLimits,
    cpu_deadline,
    estimate_cost,
)
from lookonce.render.media.processing import IMAGE_FORMATS
from tests.support.render.bombs import Scan, gif, png, progressive_jpeg, segment
from tests.support.render.samples import picture

LIMITS = CostLimits(max_pixels=50_000_000, max_audio_seconds=600.0, max_cpu_seconds=10.0)
REFINING = Scan(refining=True)


def image_cost(data: bytes, limits: CostLimits = LIMITS) -> float:
    return estimate_cost("image", data, limits)


def saved(image: Image.Image, file_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def sound(container: str, codec: str, rate: int, channels: int, seconds: float) -> bytes:
    file, block = io.BytesIO(), np.zeros((rate // 10, channels), np.float32)
    with soundfile.SoundFile(file, "w", rate, channels, codec, format=container) as target:
        for _ in range(round(seconds * 10)):
            target.write(block)
    return file.getvalue()


@pytest.mark.parametrize("file_format", IMAGE_FORMATS)
def test_every_accepted_format_is_measured_by_its_pixels(file_format: str) -> None:
    costs = [image_cost(saved(picture(side, side), file_format)) for side in (100, 1000)]
    assert costs[1] > 10 * costs[0]
    with pytest.raises(TooLargeError, match="more than 999 pixels"):
        image_cost(saved(picture(40, 25), file_format), CostLimits(999, 1.0, 10.0))
    image_cost(saved(picture(40, 25), file_format), CostLimits(1000, 1.0, 10.0))


@pytest.mark.parametrize(
    ("mode", "file_format", "options"),
    [
        ("RGB", "JPEG", {"quality": 85}),
        ("RGB", "JPEG", {"quality": 95, "subsampling": 0, "progressive": True}),
        ("CMYK", "JPEG", {}),
        ("L", "JPEG", {"progressive": True}),
        ("RGB", "PNG", {}),
        ("RGBA", "PNG", {}),
        ("P", "PNG", {}),
        ("1", "PNG", {}),
        ("P", "GIF", {}),
        ("RGB", "WEBP", {"method": 0}),
        ("RGBA", "WEBP", {"method": 0, "lossless": True}),
    ],
)
def test_pictures_of_48_megapixels_from_usual_encoders_are_allowed(
    mode: str, file_format: str, options: dict[str, object]
) -> None:
    """Their headers are those of a small picture; the size is written over."""
    data = bytearray(saved(Image.new(mode, (480, 480)), file_format, **options))
    small = image_cost(bytes(data))
    assert small < 0.2
    if file_format == "JPEG":
        at = next(
            data.index(bytes([255, code])) for code in (0xC0, 0xC2) if bytes([255, code]) in data
        )
        data[at + 5 : at + 9] = (6900).to_bytes(2, "big") * 2
    elif file_format == "PNG":
        data[16:24] = (6900).to_bytes(4, "big") * 2
    elif file_format == "GIF":
        data[6:10] = (6900).to_bytes(2, "little") * 2
    else:
        return
    assert small < image_cost(bytes(data)) < 0.5 * LIMITS.max_cpu_seconds


class TestJpeg:
    def test_a_scan_bomb_is_refused(self) -> None:
        with pytest.raises(TooLargeError, match="more than 100 scans"):
            image_cost(progressive_jpeg(64, [REFINING] * 600))

    def test_a_hundred_scans_are_allowed(self) -> None:
        image_cost(progressive_jpeg(64, [Scan()] * (MAX_SCANS - 1)))
        with pytest.raises(TooLargeError):
            image_cost(progressive_jpeg(64, [Scan()] * MAX_SCANS))

    def test_scans_that_visit_more_cost_more(self) -> None:
        def cost(*scans: Scan, side: int = 2000) -> float:
            return image_cost(progressive_jpeg(side, scans))

        assert cost(*[Scan()] * 50) > cost(*[Scan()] * 5) > cost()
        assert cost(*[REFINING] * 50) > 1.5 * cost(*[Scan()] * 50)
        assert cost(*[REFINING] * 50) > 1.2 * cost(*[Scan(last=1, refining=True)] * 50)

    def test_the_dearest_that_the_scan_limit_allows_is_refused_by_its_seconds(self) -> None:
        limits = CostLimits(50_000_000, 600.0, 2.0)
        with pytest.raises(TooLargeError, match=r"about \d+ CPU seconds; at most 2 are allowed"):
            image_cost(progressive_jpeg(4000, [REFINING] * 95), limits)

    def test_no_scan_hides_in_a_segment_or_behind_filling(self) -> None:
        """Segments between scans may hold anything; 0xFF may be repeated before a marker."""
        plain = progressive_jpeg(64, [REFINING] * 600)
        hidden = plain.replace(b"\xff\xda", segment(0xFE, b"\xff\xd9") + b"\xff\xff\xff\xda")
        with pytest.raises(TooLargeError, match="scans"):
            image_cost(hidden)

    def test_what_looks_like_a_scan_in_metadata_is_none(self) -> None:
        plain = progressive_jpeg(64, [])
        thumbnail = segment(0xE1, b"Exif\0\0" + b"\xff\xda" * 500)
        assert image_cost(plain[:2] + thumbnail + plain[2:]) < 2 * image_cost(plain) + 0.01

    def test_what_follows_the_end_is_not_decoded(self) -> None:
        image_cost(progressive_jpeg(64, []) + progressive_jpeg(64, [REFINING] * 600))

    def test_many_segments_are_refused(self) -> None:
        plain = progressive_jpeg(64, [])
        many = segment(0xFE, b"") * (MAX_SEGMENTS + 1)
        with pytest.raises(TooLargeError, match="segments"):
            image_cost(plain[:2] + many + plain[2:])

    def test_bytes_between_segments_cost_what_skipping_them_costs(self) -> None:
        plain = progressive_jpeg(64, [])
        with pytest.raises(TooLargeError, match="CPU seconds"):
            image_cost(plain[:20] + bytes(30_000_000) + plain[20:])

    @pytest.mark.parametrize("filling", [b"\xff", b"\xff\x00", b"\xff\xd0", b"\x00"])
    def test_no_filling_of_a_scan_makes_the_walk_quadratic(self, filling: bytes) -> None:
        """A quadratic walk would take hours; the test's time limit notices."""
        plain = progressive_jpeg(64, [REFINING])[:-2]
        image_cost(plain + filling * (10_000_000 // len(filling)))


class TestOtherPictures:
    def test_many_png_chunks_are_refused(self) -> None:
        image_cost(png(64, 64, chunks=100))
        with pytest.raises(TooLargeError, match="chunks"):
            image_cost(png(64, 64, chunks=MAX_CHUNKS))

    def test_many_gif_blocks_are_refused(self) -> None:
        image_cost(gif(64, 64, comments=100))
        with pytest.raises(TooLargeError, match="blocks before its first frame"):
            image_cost(gif(64, 64, comments=MAX_CHUNKS + 1))

    def test_a_gif_frame_larger_than_the_canvas_counts(self) -> None:
        with pytest.raises(TooLargeError, match="pixels"):
            image_cost(gif(60_000, 60_000))

    def test_a_webp_animation_is_measured_by_its_canvas(self) -> None:
        frames = [picture(64, 64, seed) for seed in range(3)]
        file = io.BytesIO()
        frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
        data = bytearray(file.getvalue())
        assert data[12:16] == b"VP8X"
        data[24:30] = (16_000).to_bytes(3, "little") * 2
        with pytest.raises(TooLargeError, match="pixels"):
            image_cost(bytes(data))


class TestSounds:
    @pytest.mark.parametrize(
        ("container", "codec", "rate", "channels"),
        [
            ("WAV", "PCM_16", 44100, 2),
            ("WAV", "FLOAT", 16000, 1),
            ("FLAC", "PCM_16", 48000, 2),
            ("OGG", "VORBIS", 44100, 2),
            ("OGG", "OPUS", 48000, 2),
            ("MP3", "MPEG_LAYER_III", 44100, 2),
            ("MP3", "MPEG_LAYER_III", 16000, 1),
        ],
    )
    def test_sounds_cost_by_their_seconds(
        self, container: str, codec: str, rate: int, channels: int
    ) -> None:
        costs = [
            estimate_cost("audio", sound(container, codec, rate, channels, seconds), LIMITS)
            for seconds in (2.0, 20.0)
        ]
        assert 3 * costs[0] < costs[1] < 1.0

    def test_many_channels_at_a_high_rate_are_refused(self) -> None:
        data = bytearray(sound("FLAC", "PCM_16", 192000, 8, 0.2))
        samples = 590 * 192000
        data[21] = data[21] & 0xF0 | samples >> 32
        data[22:26] = (samples & 0xFFFFFFFF).to_bytes(4, "big")
        with pytest.raises(TooLargeError, match="CPU seconds"):
            estimate_cost("audio", bytes(data), LIMITS)

    def test_no_sound_costs_more_than_the_longest_allowed(self) -> None:
        """The decoder stops there; that it is too long is said by the worker."""
        data = sound("FLAC", "PCM_16", 16000, 1, 30.0)
        short = CostLimits(1, 1.0, 10.0)
        assert estimate_cost("audio", data, short) < estimate_cost("audio", data, LIMITS)


@given(
    modality=st.sampled_from(["image", "audio"]),
    head=st.sampled_from(
        [
            b"\xff\xd8\xff",
            b"\x89PNG\r\n\x1a\n",
            b"GIF89a",
            b"RIFF\0\0\0\0WEBP",
            b"RIFF\0\0\0\0WAVE",
            b"fLaC",
            b"OggS",
            b"ID3",
            b"\xff\xfb",
            b"",
        ]
    ),
    rest=st.binary(max_size=300),
)
@example("image", b"RIFF\0\0\0\0WEBP", b"VP8X")
def test_no_bytes_end_otherwise_than_in_a_cost_or_a_refusal(
    modality: str, head: bytes, rest: bytes
) -> None:
    with contextlib.suppress(TooLargeError):
        assert 0 < estimate_cost(modality, head + rest, LIMITS) <= LIMITS.max_cpu_seconds


@example(number=0, changes=[(205, 17)], length=207)  # a segment that ends beyond the data
@given(
    number=st.integers(0, 9),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6),
    length=st.integers(0, 4000),
)
def test_no_change_to_a_real_file_ends_otherwise(
    number: int, changes: list[tuple[int, int]], length: int
) -> None:
    modality, data = REAL_FILES[number % len(REAL_FILES)]
    changed = bytearray(data[:length] if length < 3000 else data)
    for at, value in changes:
        if at < len(changed):
            changed[at] = value
    with contextlib.suppress(TooLargeError):
        assert estimate_cost(modality, bytes(changed), LIMITS) > 0


def test_a_deadline_is_in_proportion_and_bounded() -> None:
    assert cpu_deadline(0.1) == cpu_deadline(0.2) == 4.0
    assert cpu_deadline(2.0) == 12.0
    assert cpu_deadline(1000.0) == 60.0


REAL_FILES = [
    ("image", saved(picture(20, 20), "JPEG", progressive=True)),
    *(("image", saved(picture(20, 20), file_format)) for file_format in IMAGE_FORMATS),
    ("audio", sound("WAV", "PCM_16", 16000, 1, 0.1)),
    ("audio", sound("FLAC", "PCM_16", 16000, 1, 0.1)),
    ("audio", sound("OGG", "VORBIS", 16000, 1, 0.1)),
    ("audio", sound("OGG", "OPUS", 48000, 1, 0.1)),
    ("audio", sound("MP3", "MPEG_LAYER_III", 16000, 1, 0.5)),
]
