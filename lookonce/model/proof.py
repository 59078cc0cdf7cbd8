"""Compares a model as it is served with transformers' own forward of it, when it is loaded.

Two random prompts are computed by transformers, each alone, and by `TextModel` over paged keys and
values: both in one batch, cut into chunks, the last tokens one at a time. All logits must agree.
Sliding windows are made so short meanwhile that the prompts exceed them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lookonce.model.attention.hf_attention import ATTENTION_NAME
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.families.general import FORWARD_ERRORS, GeneralTextFamily
from lookonce.model.kv_pages import KVPages
from lookonce.model.step_inputs import AttentionMetadataBuilder, StepInputs
from lookonce.model.text_model import TextModel

LENGTHS = (23, 37)
CUTS = ((0, 9, 21, 22, 23), (0, 20, 35, 36, 37))
"""Where each prompt's chunks begin and end; both prompts advance by one chunk in each step."""
BLOCK_SIZE = 8
SHORT_WINDOW = 7
WINDOW_NAME = re.compile(r"\w*window(_size)?|local_attention")
"""Attributes of configs and modules that hold the length of a sliding window."""
SAME_SCALE = 1e-2
LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.12, torch.float16: 0.05}
"""Root mean square of the difference of logits over that of the logits around their mean."""


@torch.inference_mode()
def prove(family: GeneralTextFamily, dtype: torch.dtype, device: torch.device) -> float:
    """Compare, and set `logit_scale`; the error found, as `LARGEST_ERROR` measures it.

    Raises `ModelLoadError` where that is exceeded, or where either way cannot be run.
    """
    prompts = [_prompt(family, length, seed) for seed, length in enumerate(LENGTHS)]
    with _short_windows(family.model):
        try:
            theirs = torch.cat([_own_logits(family, prompt.to(device)) for prompt in prompts])
        except FORWARD_ERRORS as error:
            raise family.unservable(f"transformers cannot run it ({error})") from error
        try:
            ours = torch.cat(_served_logits(family, prompts, dtype, device))
        except FORWARD_ERRORS as error:
            raise family.unservable(f"it cannot be computed in chunks ({error})") from error
    family.logit_scale = _scale(family, ours, theirs)
    found = _error(ours * family.logit_scale, theirs)
    if not found <= LARGEST_ERROR[dtype]:
        raise family.unservable(
            f"computed in chunks, its logits differ from transformers' by {found:.2g} of their "
            "spread"
        )
    return found


def _prompt(family: GeneralTextFamily, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, family.vocab_size, (length,), generator=generator)


def _own_logits(family: GeneralTextFamily, prompt: Tensor) -> Tensor:
    """transformers' logits [T, V] of a prompt [T], without a cache."""
    model = family.model
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        logits: Tensor = model(input_ids=prompt[None], use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits


def _served_logits(
    family: GeneralTextFamily, prompts: Sequence[Tensor], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Our logits [T, V] of each prompt."""
    blocks = -(-max(LENGTHS) // BLOCK_SIZE)
    # The blocks of the prompts alternate, so that neither's are in one piece.
    tables = np.arange(blocks * len(prompts), dtype=np.int32).reshape(blocks, -1).T.copy()
    pages = KVPages(family.kv_layout(BLOCK_SIZE, dtype), tables.size, device)
    text = TextModel(family, dtype, device, ReferenceBackend(), pages)
    builder = AttentionMetadataBuilder(
        max_num_seqs=len(prompts),
        max_num_tokens=sum(LENGTHS),
        max_blocks_per_seq=blocks,
        block_size=BLOCK_SIZE,
        device=device,
    )
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(len(CUTS[0]) - 1):
        spans = [(cut[step], cut[step + 1]) for cut in CUTS]
        lens = [end - start for start, end in spans]
        metadata = builder.build(
            lens,
            [end for _, end in spans],
            tables,
            num_decodes=len(lens) if max(lens) == 1 else 0,
        )
        ids = torch.cat([p[start:end] for p, (start, end) in zip(prompts, spans, strict=True)])
        positions = torch.cat([torch.arange(start, end) for start, end in spans])[None]
        inputs = StepInputs(ids.to(device), positions.to(device), metadata, (), None, None)
        hidden = text.hidden_states(inputs, None)
        for index, part in enumerate(torch.split(text.compute_logits(hidden), lens)):
            logits[index].append(part)
    return [torch.cat(parts) for parts in logits]


def _scale(family: GeneralTextFamily, ours: Tensor, theirs: Tensor) -> float:
    """The factor that transformers applies to what the output head gives.

    It is found by least squares; a number of the config (or its inverse) that is as large within
    rounding is taken instead. 1 for families with a softcap, which bends the logits.
    """
    if family.final_softcap is not None:
        return 1.0
    found = float((ours * theirs).sum() / (ours * ours).sum().clamp_min(1e-30))
    stated = [v for v in vars(family.text_config).values() if isinstance(v, int | float) and v]
    known = [1.0, *map(float, stated), *(1 / value for value in stated)]
    nearest = min(known, key=lambda value: abs(value - found))
    return nearest if abs(nearest - found) <= SAME_SCALE * abs(found) else found


def _error(ours: Tensor, theirs: Tensor) -> float:
    spread = (theirs - theirs.mean()).square().mean().sqrt()
    return float((ours - theirs).square().mean().sqrt() / spread)


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """In this block every sliding window of the model has `SHORT_WINDOW` tokens."""
    holders = {id(module): module for module in model.modules()}
    configs = [getattr(module, "config", None) for module in model.modules()]
    holders |= {id(config): config for config in configs if config is not None}
    text = model.config.get_text_config(decoder=True)
    holders[id(text)] = text
    saved = [
        (holder, name, value)
        for holder in holders.values()
        for name, value in list(vars(holder).items())
        if WINDOW_NAME.fullmatch(name) and type(value) is int and value > SHORT_WINDOW
    ]
    for holder, name, _ in saved:
        setattr(holder, name, SHORT_WINDOW)
    try:
        yield
    finally:
        for holder, name, value in saved:
            setattr(holder, name, value)
