"""What a model cannot take of a request, and the words, field and code it is refused with."""

from __future__ import annotations

import numpy as np
import pytest

from lookonce.errors import BadRequestError, TooLargeError
from lookonce.types.request_validation import (
    check_fits,
    check_prompt_capacity,
    check_prompt_length,
    check_text_length,
    check_token_array,
    check_token_ids,
    shorten_max_tokens,
)
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import model_info

MODEL = model_info(max_model_len=10)
CODE = "context_length_exceeded"


@pytest.mark.parametrize(
    ("num_tokens", "sampling", "words", "param", "code"),
    [
        (0, {}, "the prompt is empty", "prompt", "bad_request"),
        (9, {"max_tokens": 2}, "9 tokens and 2 are to be generated", "max_tokens", CODE),
        (10, {}, "10 tokens and at least one is to be generated", "prompt", CODE),
        (1, {"stop_token_ids": (1000,)}, "0 to 999, got 1000", "stop_token_ids", "bad_request"),
        (
            1,
            {"allowed_token_ids": (7,) * 1001},
            "1001 token ids",
            "allowed_token_ids",
            "bad_request",
        ),
        (1, {"stop_token_ids": (7,) * 1001}, "1001 token ids", "stop_token_ids", "bad_request"),
        (1, {"logit_bias": {-1: 1.0}}, "0 to 999, got -1", "logit_bias", "bad_request"),
    ],
)
def test_what_the_model_cannot_take(num_tokens, sampling, words, param, code):
    with pytest.raises(BadRequestError, match=words) as caught:
        check_fits(num_tokens, SamplingParams(**sampling), MODEL)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_what_just_fits_is_taken():
    check_fits(9, SamplingParams(stop_token_ids=(0, 999), logit_bias={999: 1.0}), MODEL)
    check_prompt_length(9, 10, "messages")
    check_prompt_length(9, None, "messages")
    check_prompt_capacity(9, 10, 9)
    check_text_length(40, 2, 10, "messages")


@pytest.mark.parametrize("num_tokens", [0, 10])
def test_a_prompt_is_refused_in_the_name_of_the_field_it_came_in(num_tokens):
    with pytest.raises(BadRequestError) as caught:
        check_prompt_length(num_tokens, 10, "messages")
    assert caught.value.param == "messages"


def test_a_prompt_that_the_scheduler_could_never_compute():
    with pytest.raises(TooLargeError, match="this model takes at most 9"):
        check_prompt_capacity(10, 10, 64)
    with pytest.raises(TooLargeError, match="the KV cache holds 8"):
        check_prompt_capacity(9, 10, 8)


def test_a_text_that_is_too_long_however_it_is_tokenized():
    with pytest.raises(BadRequestError, match="41 characters, far more"):
        check_text_length(41, 2, 10, "prompt")


@pytest.mark.parametrize("wrong", [-1, 1000, 7, 1.0, True])
def test_ids_of_a_client_are_of_the_vocabulary_and_stand_for_no_media(wrong):
    with pytest.raises(BadRequestError) as caught:
        check_token_ids([1, wrong], 1000, {7}, param="tokens")
    assert caught.value.param == "tokens[1]"
    check_token_ids([1, wrong], 1000, {7}, [(1, 2)])


def test_ids_outside_the_vocabulary_are_taken_where_an_item_covers_them():
    prompt = np.array([1, 1000], np.int32)
    check_token_array(prompt, 1000, lambda length: np.array([False, True]))
    with pytest.raises(BadRequestError, match="token id 1000 at position 1"):
        check_token_array(prompt, 1000, lambda length: np.array([True, False]))


def test_a_limit_that_the_server_chose_is_cut_to_the_room_left():
    assert shorten_max_tokens(SamplingParams(max_tokens=8), 7, 10).max_tokens == 3
    assert shorten_max_tokens(SamplingParams(max_tokens=2), 7, 10).max_tokens == 2
    assert shorten_max_tokens(SamplingParams(max_tokens=2), 12, 10).max_tokens == 2
    assert shorten_max_tokens(SamplingParams(), 7, 10).max_tokens is None
