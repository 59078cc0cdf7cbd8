"""Whether a prompt and what is to be generated fit the model."""

from __future__ import annotations

import msgspec

from lookonce.errors import BadRequestError
from lookonce.types.model import ModelInfo
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams


def shortened(rendered: RenderedPrompt, sampling: SamplingParams, limit: int) -> SamplingParams:
    """With a `max_tokens` that nobody asked for no larger than a context of `limit` leaves room."""
    room = limit - len(rendered.token_ids)
    if sampling.max_tokens is None or not 0 < room < sampling.max_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room)


def check_fits(rendered: RenderedPrompt, sampling: SamplingParams, model: ModelInfo) -> None:
    """Refuse what the model cannot take; raises `BadRequestError` naming the field."""
    prompt, limit = len(rendered.token_ids), model.max_model_len
    if prompt == 0:
        raise BadRequestError("the prompt is empty", param="prompt")
    asked = sampling.max_tokens
    if prompt + (asked or 1) > limit:
        raise BadRequestError(
            f"the prompt has {prompt} tokens and {asked or 'at least 1'} are to be generated, but "
            f"the model's context is {limit} tokens",
            param="max_tokens" if prompt < limit else "prompt",
            code="context_length_exceeded",
        )
    if not sampling.stop_token_ids and not sampling.logit_bias:
        return
    named = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": sampling.logit_bias or ()}
    for name, token_ids in named.items():
        for token in token_ids:
            if not 0 <= token < model.vocab_size:
                raise BadRequestError(
                    f"{name}: token ids are 0 to {model.vocab_size - 1}, got {token!r:.20}",
                    param=name,
                )
