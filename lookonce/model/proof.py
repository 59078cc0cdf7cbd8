"""Compares a model as it is served with transformers' own forward of it, when it is loaded.

Two random prompts are computed by transformers, each alone, and by `TextModel` over paged keys and
values: both in one batch, cut into chunks, the last tokens one at a time. All logits must agree.
Sliding windows are made so short meanwhile that the prompts exceed them. Models with media are also
compared on prompts with random pictures or sounds.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.errors import ModelLoadError
from lookonce.model.attention.hf_attention import ATTENTION_NAME, set_text_attention
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.encoder_runner import item_tensors, to_tensor
from lookonce.model.families.general import FORWARD_ERRORS, GeneralMediaFamily, GeneralTextFamily
from lookonce.model.input_batch import MropePositions, NumberedPictures
from lookonce.model.kv_pages import KVPages
from lookonce.model.state import StateChunk, StatePool, StepStates
from lookonce.model.step_inputs import AttentionMetadataBuilder, StepInputs
from lookonce.model.text_model import TextModel
from lookonce.types.media import MODALITIES, Array, MediaExample, MediaFeature, Modality, feature_at
from lookonce.types.model import Comparison

logger = logging.getLogger(__name__)

LENGTHS = (23, 37)
CUTS = ((0, 9, 21, 22, 23), (0, 20, 35, 36, 37))
"""Where each prompt's chunks begin and end; both prompts advance by one chunk in each step."""
BLOCK_SIZE = 8
SHORT_WINDOW = 7
WINDOW_NAME = re.compile(r"\w*window(_size)?|local_attention")
"""Attributes of configs and modules that hold the length of a sliding window."""
MOST_COMPARED = 128
"""Positions of one prompt. Tiles of pictures make thousands, whose logits would take gigabytes."""
SAME_SCALE = 1e-2
LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.12, torch.float16: 0.05}
"""Root mean square of the difference of logits over that of the logits around their mean."""


class ProofPrompt(NamedTuple):
    """A prompt for both ways of computing."""

    token_ids: Tensor
    """[T], on the CPU."""
    arguments: dict[str, Tensor] = {}
    """What transformers' forward gets beside token ids."""
    features: tuple[MediaFeature, ...] = ()
    rows: Tensor | None = None
    """Encoder rows [N, W] of all items; None without any."""

    @property
    def compared(self) -> Tensor:
        """Positions [C] whose logits are compared, the last one among them."""
        length = len(self.token_ids)
        return torch.linspace(0, length - 1, min(length, MOST_COMPARED)).round().long()

    @property
    def embed_positions(self) -> list[int]:
        """Positions [N] of the encoder rows."""
        return [
            feature.offset + index
            for feature in self.features
            for start, end in feature.is_embed or ((0, feature.length),)
            for index in range(start, end)
        ]


@torch.inference_mode()
def prove(family: GeneralTextFamily, dtype: torch.dtype, device: torch.device) -> float:
    """Compare, and set `logit_scale`; the error found, as `LARGEST_ERROR` measures it.

    Layers with states are tried on whole chunks, and where that differs on one token after the
    other (`mixes_by_token`). Raises `ModelLoadError` where `LARGEST_ERROR` is exceeded, or where
    the model cannot be run in ours or in transformers' way.
    """
    prompts = [_prompt(family, length, seed) for seed, length in enumerate(LENGTHS)]
    with _short_windows(family, SHORT_WINDOW):
        theirs = torch.cat(_transformers_logits(family, prompts, device))
        found = _text_error(family, prompts, theirs, dtype, device)
        if not found <= LARGEST_ERROR[dtype] and family.states:
            family.mixes_by_token = True
            found = _text_error(family, prompts, theirs, dtype, device)
    if not found <= LARGEST_ERROR[dtype]:
        raise family.unservable(
            f"computed in chunks, its logits differ from transformers' by {found:.2g} of their "
            "spread"
        )
    return found


def _text_error(
    family: GeneralTextFamily,
    prompts: Sequence[ProofPrompt],
    theirs: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The error of the prompts' logits, all of which are `theirs`; sets `logit_scale`."""
    family.logit_scale = 1.0
    ours = torch.cat(_our_logits(family, prompts, CUTS, dtype, device))
    family.logit_scale = _scale(family, ours, theirs)
    if (cap := family.final_softcap) is None:
        ours = ours * family.logit_scale
    elif family.logit_scale != 1.0:
        ours = cap * torch.tanh(_before_softcap(ours, cap) * family.logit_scale / cap)
    return _error(ours, theirs)


@torch.inference_mode()
def prove_media(
    family: GeneralMediaFamily,
    examples: Sequence[MediaExample],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Compare prompts with media, after `prove`; sets what of `family` depends on them.

    Each item is encoded alone, by the model's `get_..._features`; where that differs from
    transformers, by its forward up to its decoder (`GeneralMediaFamily.merges`). Where films differ
    and pictures do not, the model takes no films. Raises `ModelLoadError` as `prove` does.
    """
    if not examples:
        raise family.unservable("there are no prompts with media to compare it on")
    family.modalities = _modalities(examples)
    family.learn_token_types(examples)
    refused: ModelLoadError | None = None
    for merges in (False, True):
        family.merges = merges
        family.attend_both_ways((), 0)
        try:
            prompts = [_media_prompt(family, example, dtype, device) for example in examples]
            found = _media_error(family, prompts, dtype, device)
        except ModelLoadError as error:
            refused = refused or error
            continue
        if found <= LARGEST_ERROR[dtype]:
            return found
        refused = family.unservable(
            f"with {' and '.join(family.modalities)}, its logits differ from transformers' by "
            f"{found:.2g} of their spread"
        )
    assert refused is not None
    without = [each for each in examples if all(item.modality != "video" for _, item in each.items)]
    if not without or len(without) == len(examples):
        raise refused
    found = prove_media(family, without, dtype, device)
    logger.warning("films are not served: %s", refused.message)
    return found


def _media_error(
    family: GeneralMediaFamily,
    prompts: Sequence[ProofPrompt],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The error with one way of encoding.

    Prompts are cut inside their items, and not; if either way differs from transformers, items are
    taken to attend to themselves in both directions, and are not cut. If that differs, too, whole
    prompts are.
    """
    with _short_windows(family, SHORT_WINDOW):
        theirs = _transformers_logits(family, prompts, device)
        cut = [_cuts_inside(prompt) for prompt in prompts]
        whole = [(0, len(prompt.token_ids)) for prompt in prompts]
        found = largest(
            _largest_error(_our_logits(family, prompts, cuts, dtype, device), theirs)
            for cuts in (cut, whole)
        )
    if found <= LARGEST_ERROR[dtype]:
        return found
    for compare in (_error_both_ways, _error_over_prompts):
        both = compare(family, prompts, dtype, device)
        if both <= LARGEST_ERROR[dtype]:
            return both
    return found


def _error_both_ways(
    family: GeneralMediaFamily,
    prompts: Sequence[ProofPrompt],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The error with items that attend to themselves in both directions; `family` is left so.

    Windows have room for an item, as in published models: beyond a window, types differ.
    """
    longest = max(feature.length for prompt in prompts for feature in prompt.features)
    cuts = [_cuts_outside(prompt) for prompt in prompts]
    found = math.inf
    with _short_windows(family, max(longest, SHORT_WINDOW)):
        theirs = _transformers_logits(family, prompts, device)
        for in_windows in (False, True) if family.has_windows else (False,):
            family.attend_both_ways(family.modalities, longest, in_windows=in_windows)
            found = _largest_error(_our_logits(family, prompts, cuts, dtype, device), theirs)
            if found <= LARGEST_ERROR[dtype]:
                break
    return found


def _error_over_prompts(
    family: GeneralMediaFamily,
    prompts: Sequence[ProofPrompt],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The error with prompts whose every token sees the whole prompt; `family` is left so.

    Windows have room for a prompt, since transformers lets prompts see beyond them.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    cuts = [(0, len(prompt.token_ids)) for prompt in prompts]
    with _short_windows(family, longest):
        theirs = _transformers_logits(family, prompts, device)
        item = max(f.length for prompt in prompts for f in prompt.features)
        family.attend_over_prompts(item)
        found = _largest_error(_our_logits(family, prompts, cuts, dtype, device), theirs)
        if not found <= LARGEST_ERROR[dtype]:
            return found
        return largest([found, _error_of_texts(family, item, dtype, device)])


def _error_of_texts(
    family: GeneralMediaFamily, item: int, dtype: torch.dtype, device: torch.device
) -> float:
    """The error of prompts without items; `family` is left attending over them, or causally.

    transformers' own way depends on how it computes attention: it leaves out a mask where a layer
    can do without one, and then does what the layer says (PaliGemma 1), and has a causal mask
    elsewhere (PaliGemma 2).
    """
    prompts = [_prompt(family, length, seed) for seed, length in enumerate(LENGTHS)]
    cuts = [(0, length) for length in LENGTHS]
    with family.layers_as_published():
        theirs = _transformers_logits(family, prompts, device)
    found = math.inf
    for causal in (False, True):
        family.attend_over_prompts(item, causal_texts=causal)
        found = _largest_error(_our_logits(family, prompts, cuts, dtype, device), theirs)
        if found <= LARGEST_ERROR[dtype]:
            break
    return found


def _modalities(examples: Sequence[MediaExample]) -> tuple[Modality, ...]:
    seen = {item.modality for example in examples for _, item in example.items}
    return tuple(modality for modality in MODALITIES if modality in seen)


def _prompt(family: GeneralTextFamily, length: int, seed: int) -> ProofPrompt:
    """Random tokens without those of media."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, family.vocab_size, (length,), generator=generator)
    reserved = family.reserved_tokens
    free = next(token for token in range(family.vocab_size) if token not in reserved)
    is_reserved = torch.isin(ids, torch.tensor(sorted(reserved), dtype=ids.dtype))
    return ProofPrompt(torch.where(is_reserved, free, ids))


def _media_prompt(
    family: GeneralMediaFamily, example: MediaExample, dtype: torch.dtype, device: torch.device
) -> ProofPrompt:
    """The prompt with encoder rows of its items. Raises `ModelLoadError`."""
    features, rows = [], []
    for start, item in example.items:
        key = b"%d" % start
        features.append(feature_at(key, item.modality, item.expansion, start))
        tensors = item_tensors(item, dtype=dtype, device=device)
        try:
            (output,) = family.encode(item.modality, [tensors])
        except FORWARD_ERRORS as error:
            raise family.unservable(f"its {item.modality} cannot be encoded ({error})") from error
        expected = (item.expansion.num_embeds, family.row_width)
        if output.shape != expected:
            raise family.unservable(
                f"an encoded {item.modality} has the shape {tuple(output.shape)}, but its prompt "
                f"has places for {expected}"
            )
        rows.append(output.to(dtype))
    arguments = {
        name: _to_device(array, dtype, device)
        for name, array in example.arrays.items()
        if name != "labels"  # of training
    }
    ids = torch.tensor(example.token_ids)
    return ProofPrompt(ids, arguments, tuple(features), torch.cat(rows))


def _to_device(array: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = to_tensor(array)
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def _cuts_inside(prompt: ProofPrompt) -> tuple[int, ...]:
    """Ends of chunks: in the first item, before its last row, in the last item, before the end."""
    length, first, last = len(prompt.token_ids), prompt.features[0], prompt.features[-1]
    ends = {first.offset + first.length // 3, first.end - 1, last.offset + last.length // 2}
    return (0, *sorted({max(end, 1) for end in ends} | {length - 1}), length)


def _cuts_outside(prompt: ProofPrompt) -> tuple[int, ...]:
    """Ends of chunks: before the first item, after it, after the last one, and at the end."""
    length, first, last = len(prompt.token_ids), prompt.features[0], prompt.features[-1]
    return (0, first.offset, first.end, last.end, length - 1, length)


def _transformers_logits(
    family: GeneralTextFamily, prompts: Sequence[ProofPrompt], device: torch.device
) -> list[Tensor]:
    """transformers' logits [C, V] of each prompt, without a cache."""
    model = family.model
    supports_sdpa = model._supports_sdpa and getattr(family.decoder, "_supports_sdpa", True)
    set_text_attention(model, "sdpa" if supports_sdpa else "eager")
    try:
        return [_own_logits(model, prompt, device) for prompt in prompts]
    except FORWARD_ERRORS as error:
        raise family.unservable(f"transformers cannot run it ({error})") from error
    finally:
        set_text_attention(model, ATTENTION_NAME)


def _own_logits(model: Any, prompt: ProofPrompt, device: torch.device) -> Tensor:
    ids = prompt.token_ids.to(device)[None]
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None  # of the prompt before
    compared = prompt.compared.to(device)
    chosen = "logits_to_keep" in inspect.signature(model.forward).parameters
    kept = {"logits_to_keep": compared} if chosen else {}
    output = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        use_cache=False,
        **kept,
        **prompt.arguments,
    )
    logits: Tensor = output.logits[0].float()
    return logits if len(logits) == len(compared) else logits[compared]


def _our_logits(
    family: GeneralTextFamily,
    prompts: Sequence[ProofPrompt],
    cuts: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Our logits [C, V] of each prompt, cut into chunks that end at its `cuts`.

    All prompts advance by one chunk in each step, while they have any.
    """
    lengths = [len(prompt.token_ids) for prompt in prompts]
    blocks = -(-max(lengths) // BLOCK_SIZE)
    # The blocks of the prompts alternate, so that no prompt's are in one piece.
    tables = np.arange(blocks * len(prompts), dtype=np.int32).reshape(blocks, -1).T.copy()
    layout = family.kv_layout(BLOCK_SIZE, dtype)
    pages = KVPages(layout, tables.size, device, family.layer_numbers)
    pool = StatePool(family.states, num_rows=len(prompts), device=device) if family.states else None
    text = TextModel(family, dtype, device, ReferenceBackend(), pages)
    builder = AttentionMetadataBuilder(
        max_num_seqs=len(prompts),
        max_num_tokens=sum(lengths),
        max_blocks_per_seq=blocks,
        block_size=BLOCK_SIZE,
        device=device,
    )
    hidden: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(max(map(len, cuts)) - 1):
        chunks = [
            Chunk(index, prompt, cut[step], cut[step + 1])
            for index, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True))
            if step + 1 < len(cut) and cut[step] < cut[step + 1]
        ]
        if not chunks:
            continue
        inputs, rows = _step_inputs(family, chunks, tables, builder, device)
        if pool is not None:
            state_chunks = [
                StateChunk(chunk.number, chunk.length, is_first=chunk.start == 0)
                for chunk in chunks
            ]
            states = StepStates(pool, state_chunks, by_token=family.mixes_by_token)
            inputs = dataclasses.replace(inputs, states=states)
        try:
            computed = text.hidden_states(inputs, rows)
        except FORWARD_ERRORS as error:
            raise family.unservable(f"it cannot be computed in chunks ({error})") from error
        if inputs.states is not None:
            inputs.states.commit()
        parts = torch.split(computed, [chunk.length for chunk in chunks])
        for chunk, part in zip(chunks, parts, strict=True):
            hidden[chunk.number].append(part)
    return [
        text.compute_logits(torch.cat(states)[prompt.compared.to(device)])
        for prompt, states in zip(prompts, hidden, strict=True)
    ]


class Chunk(NamedTuple):
    """The part of a prompt that one step computes."""

    number: int
    """The prompt's number."""
    prompt: ProofPrompt
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def _step_inputs(
    family: GeneralTextFamily,
    chunks: Sequence[Chunk],
    tables: NDArray[np.int32],
    builder: AttentionMetadataBuilder,
    device: torch.device,
) -> tuple[StepInputs, Tensor | None]:
    """The inputs of one step, and the encoder rows of its tokens."""
    lens = [chunk.length for chunk in chunks]
    spans = [_spans_both_ways(family, chunk) for chunk in chunks]
    metadata = builder.build(
        lens,
        [chunk.end for chunk in chunks],
        tables,
        rows=np.array([chunk.number for chunk in chunks]),
        num_decodes=len(lens) if max(lens) == 1 else 0,
        bidirectional=spans if any(spans) else (),
    )
    ids = torch.cat([chunk.prompt.token_ids[chunk.start : chunk.end] for chunk in chunks])
    at: list[int] = []
    rows: list[Tensor] = []
    first = 0
    for chunk in chunks:
        for row, position in enumerate(chunk.prompt.embed_positions):
            if chunk.start <= position < chunk.end and chunk.prompt.rows is not None:
                at.append(first + position - chunk.start)
                rows.append(chunk.prompt.rows[row])
        first += chunk.length
    embed_at = torch.tensor(at, dtype=torch.int64)
    ids[embed_at] = 0
    inputs = StepInputs(
        ids.to(device),
        _positions(family, chunks).to(device),
        metadata,
        (),
        embed_at.to(device) if at else None,
        None,
    )
    return inputs, torch.stack(rows) if rows else None


def _spans_both_ways(family: GeneralTextFamily, chunk: Chunk) -> list[tuple[int, int]]:
    if isinstance(family, GeneralMediaFamily) and family.bidirectional_prompts:
        causal = family.causal_texts and not chunk.prompt.features
        return [] if causal else [(0, chunk.end)]
    return [
        (feature.offset, feature.end)
        for feature in chunk.prompt.features
        if feature.modality in family.unsplittable
        and chunk.start <= feature.offset
        and feature.end <= chunk.end
    ]


def _positions(family: GeneralTextFamily, chunks: Sequence[Chunk]) -> Tensor:
    """[1, T], or [axes, 1, T] with multi-axis rope."""
    if family.position_axes == 1:
        return torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])[None]
    parts = []
    for chunk in chunks:
        part = np.empty((family.position_axes, chunk.length), np.int64)
        part[0] = np.arange(chunk.start, chunk.end)
        kind = NumberedPictures if family.numbers_pictures else MropePositions
        kind(chunk.prompt.features).fill(chunk.start, part[-3:])
        parts.append(torch.from_numpy(part))
    return torch.cat(parts, 1)[:, None]


def comparison(family: GeneralTextFamily, error: float, dtype: torch.dtype) -> Comparison:
    """What `prove` and `prove_media` found; `error` is the largest of theirs."""
    common: dict[str, Any] = {
        "error": error,
        "allowed": LARGEST_ERROR[dtype],
        "states_by_token": family.mixes_by_token,
        "logit_scale": family.logit_scale,
    }
    if not isinstance(family, GeneralMediaFamily):
        return Comparison(**common)
    return Comparison(
        **common,
        modalities=family.modalities,
        encoder="forward" if family.merges else "features",
        attention=family.sees_both_ways,
        causal_texts=family.causal_texts,
    )


def _largest_error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return largest(_error(one, other) for one, other in zip(ours, theirs, strict=True))


def largest(errors: Iterable[float]) -> float:
    """The largest of some errors, NaN if one of them is: `max` may pass it over."""
    return float(np.max(list(errors)))


def _scale(family: GeneralTextFamily, ours: Tensor, theirs: Tensor) -> float:
    """The factor that transformers applies to what the output head gives.

    It is found by least squares, of what a softcap was given where there is one; a number of the
    config (or its inverse) that is as large within rounding is taken instead.
    """
    if (cap := family.final_softcap) is not None:
        ours, theirs = (_before_softcap(logits, cap) for logits in (ours, theirs))
    found = float((ours * theirs).sum() / (ours * ours).sum().clamp_min(1e-30))
    stated = [v for v in vars(family.text_config).values() if isinstance(v, int | float) and v]
    known = [1.0, *map(float, stated), *(1 / value for value in stated)]
    nearest = min(known, key=lambda value: abs(value - found))
    return nearest if abs(nearest - found) <= SAME_SCALE * abs(found) else found


def _before_softcap(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.atanh((logits / cap).clamp(-0.999, 0.999))


def _error(ours: Tensor, theirs: Tensor) -> float:
    spread = (theirs - theirs.mean()).square().mean().sqrt()
    return float((ours - theirs).square().mean().sqrt() / spread)


@contextmanager
def _short_windows(family: GeneralTextFamily, length: int) -> Iterator[None]:
    """In this block every sliding window of the text model has at most `length` tokens."""
    holders: dict[int, Any] = {id(module): module for module in family.decoder.modules()}
    configs = [getattr(module, "config", None) for module in family.decoder.modules()]
    holders |= {
        id(config): config for config in (*configs, family.text_config) if config is not None
    }
    saved = [
        (holder, name, value)
        for holder in holders.values()
        for name, value in list(vars(holder).items())
        if WINDOW_NAME.fullmatch(name) and type(value) is int and value > length
    ]
    for holder, name, _ in saved:
        setattr(holder, name, length)
    try:
        yield
    finally:
        for holder, name, value in saved:
            setattr(holder, name, value)
