"""What a folder hears: greedy transcripts by plain transformers, and its word error rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from tools.ear import folder
from tools.ear.corpus import extractor

LEFT_PADDING = 32
"""Frames of silence before a sound, as mistral_common puts them."""
RIGHT_PADDING = folder.DELAY + 11
"""Frames of silence after it, in which its last words are written."""


def transcribe(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    wave: NDArray[np.float32],
    *,
    left: int = LEFT_PADDING,
) -> tuple[str, ...]:
    """The words that the model hears, greedily, frame by frame, as in a live session."""
    frames = left + math.ceil(len(wave) / folder.FRAME) + RIGHT_PADDING
    whole = np.zeros(frames * folder.FRAME, np.float32)
    whole[left * folder.FRAME :][: len(wave)] = wave
    mel = extractor()(
        [whole], sampling_rate=folder.SAMPLE_RATE, center=True, return_tensors="pt"
    ).input_features[:, :, : frames * folder.MEL_PER_TOKEN]
    pad = folder.token_numbers(tokenizer).pad
    prompt = [tokenizer.bos_token_id, *[pad] * (left + folder.DELAY)]
    with torch.inference_mode():
        audio = model.model.get_audio_features(input_features=mel, use_cache=False).pooler_output
        said, cache, at = list(prompt), None, 0
        condition = model.model.time_embedding(torch.full((1,), float(folder.DELAY)))[None]
        while at < frames:
            embeds = model.get_input_embeddings()(torch.tensor([said[at : at + frames]]))
            embeds = embeds + audio[:, at : len(said)]
            made = model.model.language_model(
                inputs_embeds=embeds, past_key_values=cache, use_cache=True, t_cond=condition
            )
            cache, at = made.past_key_values, len(said)
            said.append(int(model.lm_head(made.last_hidden_state[:, -1]).argmax(-1)))
    text: str = tokenizer.decode(said[len(prompt) :], skip_special_tokens=True)
    return tuple(text.split())


def edits(said: tuple[str, ...], written: tuple[str, ...]) -> int:
    """Levenshtein distance in words."""
    row = list(range(len(written) + 1))
    for i, word in enumerate(said, 1):
        above, row[0] = row[0], i
        for j, other in enumerate(written, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (word != other))
    return row[-1]
