"""What a request leaves open comes from the model's own recommendation."""

from __future__ import annotations

import json

import pytest

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.frontend import sampling_params
from lookonce.frontend.requests import ChatRequest, CompletionRequest
from lookonce.frontend.sampling_params import (
    SamplingDefaults,
    chat_sampling,
    completion_sampling,
    default_sampling,
    read_defaults,
)
from lookonce.types.sampling import MAX_BIASES, MAX_GRAMMAR_BYTES, SamplingParams

NONE = SamplingDefaults()


def write(folder, content: str):
    (folder / "generation_config.json").write_text(content)
    return str(folder)


def test_a_model_without_recommendations_gets_openai_s(tmp_path):
    assert read_defaults(str(tmp_path)) == NONE
    assert chat_sampling(ChatRequest(messages=[]), NONE) == SamplingParams()
    assert completion_sampling(CompletionRequest(prompt=""), NONE) == SamplingParams(max_tokens=16)


def test_the_model_s_recommendations_are_used_unless_asked_otherwise(tmp_path):
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 99, "eos": [1]}
    defaults = read_defaults(write(tmp_path, json.dumps(content)))
    silent = chat_sampling(ChatRequest(messages=[]), defaults)
    assert (silent.temperature, silent.top_k, silent.top_p) == (0.6, 20, 0.9)
    assert silent.max_tokens == 99
    asked = chat_sampling(ChatRequest(messages=[], temperature=0, max_tokens=5), defaults)
    assert (asked.temperature, asked.max_tokens, asked.top_k) == (0, 5, 20)
    assert default_sampling(defaults) == silent


def test_a_model_that_says_not_to_sample_is_greedy_by_default(tmp_path):
    defaults = read_defaults(write(tmp_path, '{"do_sample": false, "temperature": 0.7}'))
    assert chat_sampling(ChatRequest(messages=[]), defaults).greedy
    assert not chat_sampling(ChatRequest(messages=[], temperature=1), defaults).greedy


def test_max_completion_tokens_comes_before_max_tokens():
    request = ChatRequest(messages=[], max_completion_tokens=7, max_tokens=9)
    assert chat_sampling(request, NONE).max_tokens == 7


def test_a_broken_recommendation_is_a_model_that_cannot_be_served(tmp_path):
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        read_defaults(write(tmp_path, "{"))


LARGE_SCHEMA = {"properties": {f"a{number}": {} for number in range(MAX_GRAMMAR_BYTES // 10)}}


@pytest.mark.parametrize("schema", [LARGE_SCHEMA, json.dumps(LARGE_SCHEMA), " " * 300_000 + "{}"])
def test_a_schema_that_is_too_large_is_refused_before_it_is_closed(schema, monkeypatch):
    """Closing one of ten megabytes takes the event loop seconds."""
    closed = []
    monkeypatch.setattr(sampling_params, "closed_schema", lambda *asked: closed.append(asked))
    with pytest.raises(BadRequestError, match="at most 262144") as refused:
        chat_sampling(ChatRequest(messages=[], guided_json=schema), NONE)
    assert (refused.value.param, refused.value.code) == ("guided_json", "grammar_too_large")
    assert not closed


def test_logit_bias_names_so_many_tokens_and_no_more():
    bias = {str(token): 1.0 for token in range(MAX_BIASES)}
    assert chat_sampling(ChatRequest(messages=[], logit_bias=bias), NONE).logit_bias is not None
    bias["x"] = 1.0  # counted before any is read
    with pytest.raises(BadRequestError, match="65537 token ids, 65536 are allowed"):
        chat_sampling(ChatRequest(messages=[], logit_bias=bias), NONE)
    with pytest.raises(BadRequestError, match="65537 token ids, 65536 are allowed"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0))
