"""Formats against libsndfile's, the input buffer's positions, and turns."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from lookonce.server.routes.realtime.audio import AudioBuffer, AudioFormat, Clip, VoiceFeed
from lookonce.server.routes.realtime.options import TurnDetection
from lookonce.server.routes.realtime.turns import TurnDetector
from tests.support.server.realtime import speech

PCM = AudioFormat("audio/pcm", 24_000)
PCM_16K = AudioFormat("audio/pcm", 16_000)


@pytest.mark.parametrize(("encoding", "name"), [("audio/pcmu", "ULAW"), ("audio/pcma", "ALAW")])
def test_g711_is_what_libsndfile_says(encoding, name):
    codes = bytes(range(256))
    expected, _ = soundfile.read(
        io.BytesIO(codes), channels=1, samplerate=8000, format="RAW", subtype=name, dtype="int16"
    )
    assert AudioFormat(encoding, 8_000).decode(codes).tolist() == expected.tolist()


def test_a_clip_is_a_wav_file_of_the_same_samples():
    samples = speech(0.1)
    clip = Clip(PCM, samples.tobytes())
    read, rate = soundfile.read(io.BytesIO(clip.wav()), dtype="int16")
    assert (rate, read.tolist(), clip.milliseconds) == (24_000, samples.tolist(), 100)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-10, 120)), max_size=20))
def test_positions_count_every_sample_once(steps):
    """Each step appends so many samples and takes those before a position."""
    buffer, sent, taken = AudioBuffer(PCM, begin=7), [], []
    for count, position in steps:
        new = list(range(len(sent), len(sent) + count))
        sent += new
        buffer.append(np.array(new, "<i2").tobytes())
        assert buffer.end == 7 + len(sent)
        taken += np.frombuffer(buffer.take_until(position).data, "<i2").tolist()
        assert buffer.begin == 7 + len(taken)
    rest = np.frombuffer(buffer.take_until(buffer.end).data, "<i2").tolist()
    assert taken + rest == sent


@pytest.mark.parametrize("format", [PCM, PCM_16K, AudioFormat("audio/pcmu", 8_000)])
def test_voice_detection_hears_the_same_sound_however_it_is_cut(format):
    whole = speech(1.5, format.rate)
    wide = format.sample_bytes == 2
    data = whole.tobytes() if wide else (whole >> 8).astype(np.uint8).tobytes()
    heard = []
    for step in (len(data), 2 * 1111):
        feed, frames, position = VoiceFeed(format, 100), b"", 100
        for at in range(0, len(data), step):
            feed.push(data[at : at + step])
            while new := feed.next_frames():
                frames += new
                for _ in range(len(new) // 1024):
                    position = feed.heard()
        heard.append(frames)
        assert abs(position - 100 - format.num_samples(len(data))) <= format.rate // 15
    shorter = min(map(len, heard))
    first, second = (np.frombuffer(each[:shorter], np.int16).astype(int) for each in heard)
    assert np.abs(first - second).max() <= 2
    if format is PCM_16K:
        assert heard[0] == whole.tobytes()[: len(heard[0])]


def turns(probabilities, **settings):
    detector = TurnDetector(TurnDetection(**settings))
    found = [(at, detector.push(each)) for at, each in enumerate(probabilities)]
    return [(at, turn) for at, turn in found if turn is not None]


def test_a_pause_that_is_too_short_ends_no_turn():
    voices = [0.0, 0.9, 0.9, 0.0, 0.0, 0.9, *[0.0] * 5]
    assert turns(voices, silence_duration_ms=96) == [(1, "started"), (8, "stopped")]
    assert turns(voices, silence_duration_ms=64) == [
        (1, "started"),
        (4, "stopped"),
        (5, "started"),
        (7, "stopped"),
    ]


def test_speech_begins_at_the_threshold_and_goes_on_a_little_below():
    assert turns([0.49, 0.5, 0.36, 0.34, 0.34], silence_duration_ms=64) == [
        (1, "started"),
        (4, "stopped"),
    ]
    assert turns([0.7, 0.79], threshold=0.8) == []


@given(st.lists(st.floats(0, 1)), st.floats(0, 1), st.integers(32, 500))
def test_turns_begin_and_end_in_turn(probabilities, threshold, silence):
    found = turns(probabilities, threshold=threshold, silence_duration_ms=silence)
    assert [turn for _, turn in found] == ["started", "stopped"] * (len(found) // 2) + [
        "started"
    ] * (len(found) % 2)
