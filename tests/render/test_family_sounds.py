"""What every family makes of a sound is what Hugging Face's own extractors make of it.

Within rounding: Hugging Face itself has two implementations, by torch and by NumPy. Lengths and
prompts are compared exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lookonce.errors import ModelLoadError, UnprocessableMediaError
from lookonce.types.media import ProcessedItem
from tests.support.render import hugging_face
from tests.support.render.samples import SOUND_KINDS, load, numpy_of, sound

FolderMaker = Callable[..., Path]

SECONDS = [0.03, 0.5, 1.003, 1.995, 2.0]
"""Two seconds are all that the random Qwen2-Audio takes at once."""
LONGER = [3.21, 7.77, 29.995, 30.0]
TAKES_LONGER = ("qwen2_5_omni", "nano", "voxtral")
CLIPS = [
    *((kind, seconds) for kind in SOUND_KINDS for seconds in SECONDS),
    *((kind, seconds) for kind in TAKES_LONGER for seconds in LONGER),
]
WRITTEN = [clip for clip in CLIPS if clip[0] != "voxtral"]
"""Voxtral's prompts are written by mistral_common: see `test_a_voxtral_prompt_...`."""


def theirs(folder: Path, samples: np.ndarray, kind: str) -> np.ndarray:
    """Features as the model gets them: Omni's of the real length, the others' in whole spans."""
    if kind == "voxtral":
        return hugging_face.voxtral_features(folder, samples)
    found = hugging_face.feature_extractor(folder)(
        samples, sampling_rate=16000, return_attention_mask=True, return_tensors="np"
    )
    features = found["input_features"][0]
    return features if kind == "qwen2_audio" else features[:, : found["attention_mask"].sum()]


@pytest.mark.parametrize(("kind", "seconds"), CLIPS)
def test_features_equal_the_extractors_to_the_last_digits(
    folder: FolderMaker, kind: str, seconds: float
) -> None:
    samples = sound(seconds)
    item = load(folder(kind)).process("audio", samples, {})
    ours, expected = numpy_of(item.arrays["input_features"]), theirs(folder(kind), samples, kind)
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seconds", [0.5, 7.77])
def test_features_equal_the_torch_path_within_single_precision(
    folder: FolderMaker, seconds: float
) -> None:
    from transformers import AutoFeatureExtractor

    samples = sound(seconds)
    ours = numpy_of(load(folder("nano")).process("audio", samples, {}).arrays["input_features"])
    extractor = AutoFeatureExtractor.from_pretrained(folder("nano"))
    found = extractor(samples, sampling_rate=16000, return_tensors="np")["input_features"][0]
    np.testing.assert_allclose(ours, found[:, : ours.shape[1]], rtol=0, atol=3e-4)


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1.003, 7.77, 29.97, 29.995, 30.0])
def test_silence_may_come_before_the_sound(
    folder: FolderMaker, tmp_path: Path, seconds: float
) -> None:
    """As Qwen2.5-Omni is published: frames end with the sound, and begin between samples."""
    for name in ("config.json", "preprocessor_config.json"):
        content = json.loads((folder("qwen2_5_omni") / name).read_text())
        (tmp_path / name).write_text(json.dumps({**content, "padding_side": "left"}))
    found = hugging_face.feature_extractor(tmp_path)(
        sound(seconds), sampling_rate=16000, return_attention_mask=True, return_tensors="np"
    )
    expected = found["input_features"][0][:, found["attention_mask"][0].astype(bool)]
    item = load(tmp_path).process("audio", sound(seconds), {})
    ours = numpy_of(item.arrays["input_features"])
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)
    assert item.expansion == load(tmp_path).expansion_of_size("audio", sound(seconds).shape, {})


@pytest.mark.parametrize("kind", ["qwen2_audio", "voxtral"])
def test_an_encoder_of_whole_spans_takes_silence_after_the_sound_only(
    folder: FolderMaker, tmp_path: Path, kind: str
) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        content = json.loads((folder(kind) / name).read_text())
        (tmp_path / name).write_text(json.dumps({**content, "padding_side": "left"}))
    with pytest.raises(ModelLoadError, match="left"):
        load(tmp_path)


@pytest.mark.parametrize("seconds", SECONDS)
def test_the_mask_says_what_is_sound_and_what_is_padding(
    folder: FolderMaker, seconds: float
) -> None:
    item = load(folder("qwen2_audio")).process("audio", sound(seconds), {})
    found = hugging_face.feature_extractor(folder("qwen2_audio"))(
        sound(seconds), sampling_rate=16000, return_attention_mask=True, return_tensors="np"
    )
    mask = numpy_of(item.arrays["feature_attention_mask"])
    assert mask.tolist() == found["attention_mask"][0].tolist()


@pytest.mark.parametrize(("kind", "seconds"), WRITTEN)
def test_the_expanded_prompt_equals_the_full_processors(
    folder: FolderMaker, kind: str, seconds: float
) -> None:
    family, samples = load(folder(kind)), sound(seconds)
    text = f"one {hugging_face.token(folder(kind), family.placeholder_token_id('audio'))} two"
    expected = hugging_face.prompt_ids(folder(kind), text, audio=[samples])
    ids = hugging_face.token_ids(folder(kind), text)
    at = ids.index(family.placeholder_token_id("audio"))
    expansion = family.process("audio", samples, {}).expansion
    assert ids[:at] + expansion.token_ids() + ids[at + 1 :] == expected


@pytest.mark.parametrize("seconds", [*SECONDS, *LONGER])
def test_a_voxtral_prompt_has_a_token_for_every_eight_frames_of_whole_spans(
    folder: FolderMaker, seconds: float
) -> None:
    family = load(folder("voxtral"))
    spans, _, frames = hugging_face.voxtral_features(folder("voxtral"), sound(seconds)).shape
    expansion = family.process("audio", sound(seconds), {}).expansion
    assert expansion.runs == ((family.placeholder_token_id("audio"), spans * frames // 8),)


@pytest.mark.parametrize(("kind", "seconds"), CLIPS)
def test_the_expansion_is_known_from_the_length_and_from_the_arrays(
    folder: FolderMaker, kind: str, seconds: float
) -> None:
    family, samples = load(folder(kind)), sound(seconds)
    item = family.process("audio", samples, {})
    assert item.expansion.grid is None
    assert item.expansion == family.expansion_of_size("audio", samples.shape, {})
    assert item.expansion == family.expansion_of_arrays("audio", item.arrays)
    family.check_processed(item)


def test_silence_is_silent(folder: FolderMaker) -> None:
    item = load(folder("nano")).process("audio", np.zeros(16000, np.float32), {})
    assert set(numpy_of(item.arrays["input_features"]).reshape(-1).tolist()) == {-1.5}


def test_memory_follows_the_length_of_the_sound(folder: FolderMaker) -> None:
    def nbytes(seconds: float) -> int:
        item: ProcessedItem = load(folder("nano")).process("audio", sound(seconds), {})
        return item.nbytes

    assert 9 < nbytes(10) / nbytes(1) < 10


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "nano", "qwen2_audio"])
def test_a_clip_too_short_for_one_token_is_refused(folder: FolderMaker, kind: str) -> None:
    with pytest.raises(UnprocessableMediaError, match="too short"):
        load(folder(kind)).process("audio", np.zeros(100, np.float32), {})
