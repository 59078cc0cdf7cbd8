"""Only four sound formats, judged by their header, mono and at the processor's rate."""

from __future__ import annotations

import contextlib
import struct
from io import BytesIO

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.errors import TooLargeError, UnprocessableMediaError
from lookonce.render.media.processing import decode_audio

RATE = 16_000


def tone(seconds: float = 1.0, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def encode(
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


class TestDecoding:
    @pytest.mark.parametrize("kind", ["WAV", "WAVEX", "FLAC", "OGG", "MP3"])
    def test_the_four_formats_are_heard(self, kind: str) -> None:
        samples = decode_audio(encode(tone(), kind), RATE, 30)
        assert samples.dtype == np.float32
        assert abs(len(samples) - RATE) < 0.15 * RATE  # MP3 pads
        spectrum = np.abs(np.fft.rfft(samples))
        assert abs(np.argmax(spectrum) * RATE / len(samples) - 440) < 5

    @pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "PCM_32", "FLOAT", "PCM_U8"])
    def test_any_sample_width(self, subtype: str) -> None:
        samples = decode_audio(encode(tone(), subtype=subtype), RATE, 30)
        np.testing.assert_allclose(samples, tone(), atol=1e-2)

    def test_float_samples_come_back_as_they_were(self) -> None:
        assert np.array_equal(decode_audio(encode(tone(), subtype="FLOAT"), RATE, 30), tone())

    def test_channels_are_averaged(self) -> None:
        stereo = np.stack([tone(hertz=440), tone(hertz=880)], axis=1)
        samples = decode_audio(encode(stereo, subtype="FLOAT"), RATE, 30)
        assert np.array_equal(samples, stereo.mean(axis=1))

    @pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
    def test_other_rates_are_resampled_as_librosa_does(self, rate: int) -> None:
        sound = tone(0.7, rate)
        samples = decode_audio(encode(sound, rate=rate, subtype="FLOAT"), RATE, 30)
        length = -(-len(sound) * RATE // rate)
        expected = soxr.resample(sound, rate, RATE, quality="HQ")
        assert len(samples) == length
        assert np.array_equal(samples[: len(expected)], expected[:length])

    def test_long_clips_are_read_whole(self) -> None:
        """More than one block."""
        sound = tone(10.0)
        assert np.array_equal(decode_audio(encode(sound, subtype="FLOAT"), RATE, 30), sound)

    def test_memory_of_any_kind_is_read(self) -> None:
        data = encode(tone())
        assert np.array_equal(
            decode_audio(memoryview(data), RATE, 30), decode_audio(data, RATE, 30)
        )


class TestLimits:
    def test_the_limit_is_exact(self) -> None:
        assert len(decode_audio(encode(tone(2.0)), RATE, 2.0)) == 2 * RATE
        with pytest.raises(TooLargeError, match="longer than 2 seconds"):
            decode_audio(encode(tone(2.0)[:-1].repeat(2)), RATE, 2.0)

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
        data = bytearray(encode(tone(10.0), "FLAC"))
        at = data.index(b"fLaC") + 8 + 13
        data[at] &= 0xF0
        data[at + 1 : at + 5] = (1).to_bytes(4, "big")
        assert num_samples(bytes(data), 5.0) <= 5 * RATE

    def test_silence_that_packs_well_is_judged_by_its_length(self) -> None:
        packed = encode(np.zeros(RATE * 600, np.int16), "FLAC")
        assert len(packed) < 100_000
        with pytest.raises(TooLargeError):
            decode_audio(packed, RATE, 599)

    def test_too_many_channels_are_refused(self) -> None:
        with pytest.raises(UnprocessableMediaError):
            decode_audio(wav(channels=200, data=bytes(4000)), RATE, 30)


class TestBroken:
    @pytest.mark.parametrize(
        "data",
        [
            encode(tone(), "AIFF"),
            encode(tone(), "AU"),
            encode(tone(), "CAF"),
            encode(tone(), "W64"),
            encode(tone(), "VOC", subtype="PCM_16"),
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
            decode_audio(encode(tone(0.0)), RATE, 30)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_samples_that_are_no_numbers_are_refused(self, value: float) -> None:
        sound = tone()
        sound[77] = value
        with pytest.raises(UnprocessableMediaError, match="no numbers"):
            decode_audio(encode(sound, subtype="FLOAT"), RATE, 30)

    @settings(deadline=None, max_examples=100)
    @given(
        kind=st.sampled_from(["WAV", "FLAC", "OGG", "MP3"]),
        changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=20),
        cut=st.integers(0, 10**6),
    )
    def test_hostile_bytes_give_a_sound_or_a_clean_error(
        self, kind: str, changes: list[tuple[int, int]], cut: int
    ) -> None:
        data = bytearray(encode(tone(0.2), kind))
        for place, value in changes:
            data[place % len(data)] = value
        data = data[: cut % (2 * len(data))]
        assert num_samples(bytes(data), 2.0) <= 2 * RATE
