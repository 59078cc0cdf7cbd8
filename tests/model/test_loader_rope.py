"""Ropes that extend the length of a model do so; those that change with the longest sequence of a
batch end before they change."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from lookonce.errors import ModelLoadError
from tests.support.model.cases import ALL_MODELS
from tests.support.model.copies import copied, load
from tests.support.model.serving import NUM_TOKENS, compare, make_subject, serve

YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [3.0 + i for i in range(8)]
LONGROPE = {
    "type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "short_factor": SHORT,
    "long_factor": LONG,
}


@pytest.fixture
def scaled(folder, tmp_path):
    """A copy of a folder with `rope_scaling`, as people write it into a published config."""

    def get(kind: str, scaling: dict[str, Any], **changes: Any) -> Path:
        copy = copied(folder(kind), tmp_path)
        config = json.loads((copy / "config.json").read_text())
        text = config.get("text_config", config)
        del text["rope_parameters"]
        text |= {"rope_scaling": scaling, **changes}
        (copy / "config.json").write_text(json.dumps(config))
        return copy

    return get


@pytest.mark.parametrize(
    ("scaling", "stated", "limit"),
    [
        (YARN, 512, 4096),
        (YARN, 640, 4096),  # Qwen3 states 40960, of which 32768 were trained
        (YARN, 4096, 4096),  # gpt-oss states what it reaches
        ({"type": "yarn", "factor": 8.0}, 512, 4096),
        ({"type": "linear", "factor": 2.5}, 512, 1280),
        (LLAMA3, 2048, 2048),
    ],
)
def test_how_far_a_rope_reaches(scaled, scaling, stated, limit):
    folder = scaled("llama", scaling, max_position_embeddings=stated)
    assert load(folder).info.max_model_len == limit
    assert load(folder, max_model_len=limit).info.max_model_len == limit
    with pytest.raises(ModelLoadError, match=f"1 to {limit}"):
        load(folder, max_model_len=limit + 1)


def test_gemma3_states_what_its_stretched_layers_reach(scaled):
    linear = {"rope_type": "linear", "factor": 8.0}
    loaded = load(scaled("gemma3_text", linear, max_position_embeddings=2048))
    assert loaded.family.text_config.rope_parameters["full_attention"]["factor"] == 8.0
    assert loaded.info.max_model_len == 2048


STRETCHED = [("llama", "linear"), ("qwen3", "yarn"), ("qwen2_5_vl", "yarn")]
if ALL_MODELS:
    STRETCHED = list(itertools.product(("llama", "qwen3", "qwen2_5_vl"), ("linear", "yarn")))


@pytest.mark.parametrize(("kind", "name"), STRETCHED)
def test_beyond_the_original_length_answers_are_hugging_face_s(scaled, kind, name):
    scaling = {"type": name, "factor": 64.0}
    if name == "yarn":
        scaling["original_max_position_embeddings"] = 8
    if kind == "qwen2_5_vl":
        scaling["mrope_section"] = [2, 3, 3]
    folder = scaled(kind, scaling, max_position_embeddings=8)
    subject = make_subject(folder)
    assert subject.loaded.family.text_config.rope_parameters["rope_type"] == name
    assert max(len(case.token_ids) for case in subject.cases) > 8
    served = serve(subject.loaded, subject.cases, budget=23)
    difference = compare(served.answers, subject.expected)
    assert difference.wrong == 0
    assert difference.max_logit_error < 1e-4


@pytest.mark.parametrize(
    ("kind", "scaling", "limit"),
    [
        ("llama", LONGROPE, 1024),
        ("llama", {"type": "dynamic", "factor": 4.0}, 2048),
        ("text:phi3", {**LONGROPE, "original_max_position_embeddings": None}, 1024),
    ],
)
def test_a_rope_that_changes_with_the_longest_of_a_batch_ends_before_it(
    scaled, kind, scaling, limit
):
    """Phi-3 states the length beside its rope."""
    scaling = {name: value for name, value in scaling.items() if value is not None}
    original = {"original_max_position_embeddings": 1024} if kind == "text:phi3" else {}
    folder = scaled(kind, scaling, max_position_embeddings=2048, **original)
    assert load(folder).info.max_model_len == limit
    subject = make_subject(folder)
    served = serve(subject.loaded, subject.cases, budget=23)
    difference = compare(served.answers, subject.expected)
    assert difference.wrong == 0
    assert difference.max_logit_error < 1e-4


def test_the_longest_sequence_of_a_longrope_is_hugging_face_s(scaled):
    """One token more, and transformers rotates every key otherwise."""
    scaling = {**LONGROPE, "original_max_position_embeddings": 96}
    subject = make_subject(scaled("llama", scaling, max_position_embeddings=2048))
    assert subject.loaded.info.max_model_len == 96
    longest = max(len(case.token_ids) for case in subject.cases) + NUM_TOKENS
    assert longest <= 96
    served = serve(subject.loaded, subject.cases, budget=23)
    assert compare(served.answers, subject.expected).wrong == 0
