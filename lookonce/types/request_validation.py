"""What the served model can take of a request: the one place where a prompt's length, token ids and
`max_tokens` are refused.

The API process calls these functions before a request costs anything, the engine process again
for whatever reaches it by another way. Each raises a `RequestError` that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.errors import BadRequestError, TooLargeError
from lookonce.types.model import ModelInfo
from lookonce.types.sampling import SamplingParams

CONTEXT_EXCEEDED = "context_length_exceeded"
"""`code` of an error about the model's context, as OpenAI's."""
MAX_DROPPED_RATIO = 2
"""A tokenizer may drop characters (spaces beside special tokens), but not half of a long text."""


def check_fits(num_prompt_tokens: int, sampling: SamplingParams, model: ModelInfo) -> None:
    """Refuse a prompt and sampling parameters that the model cannot take together."""
    limit = model.max_model_len
    if num_prompt_tokens == 0:
        raise BadRequestError("the prompt is empty", param="prompt")
    if model.pooling is not None:
        check_input_length(num_prompt_tokens, limit, "prompt")
        return
    if num_prompt_tokens + (sampling.max_tokens or 1) > limit:
        param = "max_tokens" if num_prompt_tokens < limit else "prompt"
        raise _no_room(num_prompt_tokens, sampling.max_tokens, limit, param)
    if sampling.stop_token_ids or sampling.logit_bias or sampling.allowed_token_ids:
        _check_named_tokens("stop_token_ids", sampling.stop_token_ids, model.vocab_size)
        _check_named_tokens("allowed_token_ids", sampling.allowed_token_ids, model.vocab_size)
        _check_named_tokens("logit_bias", sampling.logit_bias or (), model.vocab_size)


def shorten_max_tokens(
    sampling: SamplingParams, num_prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """`sampling` with `max_tokens` cut to the room that the prompt leaves in the context.

    For a `max_tokens` that the server chose. Where there is no room at all nothing is changed.
    """
    room = max_model_len - num_prompt_tokens
    if sampling.max_tokens is None or not 0 < room < sampling.max_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room)


def check_prompt_length(num_tokens: int, max_model_len: int | None, param: str) -> None:
    """Refuse an empty prompt, and one that leaves no room for a generated token.

    `max_model_len` is None as long as the model's context is not known.
    """
    if num_tokens == 0:
        raise BadRequestError("the prompt is empty", param=param)
    if max_model_len is not None and num_tokens >= max_model_len:
        raise _no_room(num_tokens, None, max_model_len, param)


def check_text_length(
    num_characters: int, longest_token: int, max_model_len: int, param: str
) -> None:
    """Refuse a text that has too many tokens for certain, before it is looked at.

    `longest_token` is in characters. `check_token_count` is closer, but reads the text.
    """
    if num_characters > MAX_DROPPED_RATIO * max_model_len * longest_token:
        raise BadRequestError(
            f"{param}: the prompt has {num_characters} characters, far more than the model's "
            f"context of {max_model_len} tokens can hold",
            param=param,
            code=CONTEXT_EXCEEDED,
        )


def check_token_count(at_least: int, max_model_len: int, param: str) -> None:
    """Refuse a text that has `at_least` so many tokens, where that leaves no room for another."""
    if at_least >= max_model_len:
        raise BadRequestError(
            f"{param}: the prompt has at least {at_least} tokens, more than the model's context of "
            f"{max_model_len} tokens can hold",
            param=param,
            code=CONTEXT_EXCEEDED,
        )


def check_prompt_capacity(num_tokens: int, max_model_len: int, kv_tokens: int) -> None:
    """Refuse a prompt that the scheduler could never compute. `kv_tokens`: tokens of KV cache."""
    if num_tokens > max_model_len - 1:
        raise TooLargeError(
            f"the prompt has {num_tokens} tokens; this model takes at most {max_model_len - 1}",
            param="prompt",
        )
    if num_tokens > kv_tokens:
        raise TooLargeError(
            f"the prompt has {num_tokens} tokens; the KV cache holds {kv_tokens}", param="prompt"
        )


def check_token_ids(
    token_ids: Sequence[int],
    vocab_size: int,
    placeholders: Collection[int],
    spans: Sequence[tuple[int, int]] = (),
    param: str = "prompt",
) -> None:
    """Refuse ids of a client that are outside the vocabulary or stand for media.

    Ids inside `spans`, the half-open ranges of the prompt's media, are not looked at.
    """
    if not _all_are_tokens(token_ids, vocab_size, placeholders, spans):
        _refuse_first(token_ids, vocab_size, placeholders, spans, param)


def _all_are_tokens(
    token_ids: Sequence[int],
    vocab_size: int,
    placeholders: Collection[int],
    spans: Sequence[tuple[int, int]],
) -> bool:
    """The check of all ids at once: a loop over 100,000 of them takes 10 ms."""
    if set(map(type, token_ids)) != {int}:
        return False
    try:
        ids = np.array(token_ids, np.int64)
    except OverflowError:
        return False
    refused = (ids < 0) | (ids >= vocab_size) | np.isin(ids, list(placeholders))
    for begin, end in spans:
        refused[begin:end] = False
    return not refused.any()


def _refuse_first(
    token_ids: Sequence[int],
    vocab_size: int,
    placeholders: Collection[int],
    spans: Sequence[tuple[int, int]],
    param: str,
) -> None:
    """Name the first id that is refused, if any is."""
    start = 0
    for begin, end in [*spans, (len(token_ids), len(token_ids))]:
        for number in range(start, begin):
            token_id = token_ids[number]
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                problem = f"token ids are 0 to {vocab_size - 1}"
            elif token_id in placeholders:
                problem = f"token {token_id} stands for media, which there is none of here"
            else:
                continue
            name = f"{param}[{number}]"
            raise BadRequestError(f"{name}: {problem}", param=name)
        start = end


def check_token_array(
    prompt: NDArray[np.int32], vocab_size: int, covered: Callable[[int], NDArray[np.bool_]]
) -> None:
    """Refuse ids outside the vocabulary where no row of a media item replaces them.

    `covered(length)` tells for each position whether an item's row does; it is called only where
    an id is outside.
    """
    if not len(prompt) or prompt.view(np.uint32).max() < vocab_size:  # negative ids are large ones
        return
    outside = np.flatnonzero((prompt < 0) | (prompt >= vocab_size))
    wrong = outside[~covered(len(prompt))[outside]]
    if len(wrong):
        raise BadRequestError(
            f"token id {prompt[wrong[0]]} at position {wrong[0]} is outside the vocabulary of "
            f"{vocab_size}",
            param="prompt",
        )


def _check_named_tokens(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """More tokens than there are would be looked through again for every sample."""
    if len(token_ids) > vocab_size:
        raise BadRequestError(
            f"{name}: {len(token_ids)} token ids, but the vocabulary has {vocab_size}", param=name
        )
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise BadRequestError(
                f"{name}: token ids are 0 to {vocab_size - 1}, got {token!r:.20}", param=name
            )


def check_input_length(num_tokens: int, max_model_len: int, param: str) -> None:
    """Refuse an input that a model which generates nothing cannot take."""
    if num_tokens == 0:
        raise BadRequestError("the input is empty", param=param)
    if num_tokens > max_model_len:
        raise BadRequestError(
            f"{param}: the input has {num_tokens} tokens; this model takes at most {max_model_len}",
            param=param,
            code=CONTEXT_EXCEEDED,
        )


def _no_room(num_tokens: int, wanted: int | None, limit: int, param: str) -> BadRequestError:
    to_generate = "at least one is" if wanted is None else f"{wanted} are"
    return BadRequestError(
        f"the prompt has {num_tokens} tokens and {to_generate} to be generated, but the model's "
        f"context is {limit} tokens",
        param=param,
        code=CONTEXT_EXCEEDED,
    )
