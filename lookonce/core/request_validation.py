"""Refuses requests that could never be served, before they take a place in the queue."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.frame_digests import FrameDigests
from lookonce.core.mm_features import EncoderInputs, FrameInputs, MultiModalFeatures
from lookonce.core.request import AdaptedKeys, Request, SessionInput, whole_prompt_root
from lookonce.errors import BadRequestError, TooLargeError
from lookonce.types.media import Array, MediaFeature, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import EXTEND, ExtendOptions, GenerateRequest
from lookonce.types.request_validation import check_prompt_capacity, check_token_array
from lookonce.types.sampling import SamplingParams


class RequestValidator:
    """Checks requests and builds them; raises `BadRequestError` or `TooLargeError`.

    Reads only limits that never change, so it may be used in any thread.
    """

    def __init__(
        self, pool: BlockPool, encoder_cache: EncoderCache, model: ModelInfo, token_budget: int
    ) -> None:
        self._encoder_cache = encoder_cache
        self._model = model
        self.token_budget = token_budget
        """Tokens that one step computes at most."""
        self._kv_tokens = pool.num_blocks * pool.block_size

    def build_request(self, request: GenerateRequest, items: dict[bytes, ProcessedItem]) -> Request:
        """The checked request. Keeps the dict `items`: those of its items that the engine holds."""
        prompt = _prompt_array(request)
        if request.sampling.alignment is not None and not self._model.encoder_decoder:
            raise BadRequestError(
                "alignment is by cross-attention, which this model does not have",
                param="alignment",
            )
        adapted = AdaptedKeys.of(request.adapter)
        sent = request.features
        if adapted is not None:
            sent, items = adapted.features(sent), adapted.items(items)
        features = self._collect(sent)
        pools = self._model.pooling is not None
        if pools:
            _check_pooled(request.sampling)
        # A token that is generated needs room; a pooled prompt generates none.
        limit = self._model.max_model_len
        if self._model.encoder_only:
            limit = min(limit, self.token_budget)
        whole = self._model.bidirectional_limit(len(features))
        if whole:
            limit = min(limit, self.token_budget + 1, whole + 1)
        check_prompt_capacity(len(prompt), limit + pools, self._kv_tokens)
        _check_end(features, len(prompt))
        self._check_items(features)
        check_token_array(prompt, self._model.vocab_size, features.covered)
        in_order = check_rows(features, items)
        if request.frames is not None:
            self.check_frames(request.frames)
        eos_token_ids = self._model.eos_token_ids
        built = Request(request, prompt, features, items, eos_token_ids, in_order)
        built.adapted = adapted
        built.pooling = self._model.pooling
        built.uncut = bool(whole) or self._model.encoder_only
        if whole:
            built.sees_whole_prompt = True
            built.root_hash = whole_prompt_root(built.root_hash, prompt, features)
        if request.frames is not None:
            built.frames = FrameDigests()
            built.frames.extend(request.frames)
        return built

    def check_frames(self, frames: Array) -> None:
        """Refuse frames of sound that this model does not take."""
        shape, dtype = self._model.frame_shape, self._model.dtype
        if not shape:
            raise BadRequestError("this model takes no frames of sound", param="frames")
        if frames.dtype != dtype or frames.shape[1:] != shape or not frames.shape[0]:
            wanted = ", ".join(map(str, shape))
            raise BadRequestError(
                f"the frames are {frames.dtype} of shape {frames.shape}; this model takes {dtype} "
                f"of shape (n, {wanted})",
                param="frames",
            )

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def longest_sequence(self) -> int:
        """Most tokens of one sequence, prompt and generated; the last one needs no K/V."""
        return min(self._model.max_model_len, self._kv_tokens + 1)

    def build_session_input(
        self,
        token_ids: NDArray[np.int32],
        features: tuple[MediaFeature, ...],
        items: Mapping[bytes, ProcessedItem],
        options: ExtendOptions = EXTEND,
    ) -> SessionInput:
        """What is appended to a live session; offsets count from its first token.

        Copies `token_ids`.
        """
        if options.max_tokens is not None and options.max_tokens < 1:
            raise BadRequestError("an answer has at least one token", param="max_tokens")
        tokens, checked = _copy_tokens(token_ids), MultiModalFeatures(features)
        brought = dict(items)
        if checked.end > len(tokens):
            raise BadRequestError(
                f"an item ends at position {checked.end} of {len(tokens)} tokens",
                param="features",
            )
        absent = [index for index, key in enumerate(checked.keys) if key not in brought]
        if absent:
            raise BadRequestError(f"item {absent[0]} does not come along", param="features")
        refuse_unused_items(checked, brought)
        self._check_items(checked)
        check_token_array(tokens, self._model.vocab_size, checked.covered)
        check_rows(checked, brought)
        return SessionInput(tokens, checked, brought, options)

    def token_limit(self, request: Request) -> int:
        """Prompt plus generated tokens at which a sequence of the request ends."""
        limit = self.longest_sequence
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.num_prompt_tokens + request.sampling.max_tokens)
        if isinstance(request.features, FrameInputs) and request.features.end:
            limit = min(limit, request.features.end)  # the sound's end
        return limit

    def _collect(self, features: tuple[MediaFeature, ...]) -> MultiModalFeatures:
        if self._model.frame_shape:
            return FrameInputs(features)
        if not self._model.encoder_decoder:
            return MultiModalFeatures(features)
        if len(features) > 1:  # two requests that each hold one of two would wait for ever
            raise BadRequestError(
                f"the request has {len(features)} items; an encoder-decoder request has one input",
                param="features",
            )
        return EncoderInputs(features)

    def _check_items(self, features: MultiModalFeatures) -> None:
        """Check the items as a whole, and each only where one is wrong: there may be thousands."""
        if self._model.longest_bidirectional_prompt and len(features) > 1:
            # Two prompts that each hold one of two outputs could wait for each other for ever.
            raise BadRequestError(
                f"the request has {len(features)} items; this model takes one in a prompt",
                param="features",
            )
        known, unsplittable = self._model.modalities, self._model.unsplittable
        used = features.modalities
        limit = min(self._encoder_cache.max_rows, self.token_budget)
        if features.longest > limit or not used <= set(known) or used & set(unsplittable):
            for index, feature in enumerate(features.as_tuple()):
                self._check_item(index, feature)

    def _check_item(self, index: int, feature: MediaFeature) -> None:
        modalities, limit = self._model.modalities, self.token_budget
        if feature.modality not in modalities:
            raise BadRequestError(
                f"item {index} is {feature.modality}; this model takes "
                f"{', '.join(modalities) or 'text only'}",
                param="features",
            )
        self._encoder_cache.refuse_oversize(feature.num_embeds, f"item {index}")
        if feature.length > limit and feature.modality in self._model.unsplittable:
            raise TooLargeError(
                f"item {index} has {feature.length} tokens that must be computed in one "
                f"step; the limit is {limit}",
                param="features",
            )


def _check_pooled(sampling: SamplingParams) -> None:
    """Refuse what only generated tokens could have."""
    asked = {
        "n": sampling.n > 1,
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "grammar": sampling.grammar is not None,
    }
    for name, value in asked.items():
        if value:
            raise BadRequestError(
                f"{name}: this model gives embeddings or scores and generates nothing", param=name
            )


def _check_end(features: MultiModalFeatures, num_tokens: int) -> None:
    if isinstance(features, FrameInputs):
        if features.end and features.end <= num_tokens:
            raise BadRequestError(
                f"the sound has {features.end} frames; a prompt of {num_tokens} tokens needs more",
                param="features",
            )
        return
    if features.end > num_tokens:
        raise BadRequestError(
            f"item {len(features) - 1} ends at position {features.end}; the prompt has "
            f"{num_tokens} tokens",
            param="features",
        )


def _copy_tokens(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """A copy of the tokens of an extension, which the caller does not write."""
    given = np.asarray(token_ids)
    if given.dtype != np.int32 or given.ndim != 1 or not len(given):
        raise BadRequestError(
            f"the tokens of an extension are {given.dtype} of shape {given.shape}; they are int32 "
            "with one dimension and at least one token",
            param="prompt",
        )
    return given.copy()


def refuse_unused_items(features: MultiModalFeatures, items: Mapping[bytes, ProcessedItem]) -> None:
    """Raise `BadRequestError` for items without a feature: a live session would never drop them."""
    num_unused = len(items.keys() - set(features.keys))
    if num_unused:
        raise BadRequestError(
            f"{num_unused} of the {len(items)} items that came along have no place among the "
            "tokens",
            param="features",
        )


def check_rows(
    features: MultiModalFeatures, items: dict[bytes, ProcessedItem]
) -> list[ProcessedItem] | None:
    """Raise `BadRequestError` for an item that has not as many rows as its feature.

    Returns the item of each feature where checking found them in order, else None.
    """
    found = features.fitting(items) if items else None
    if found is None and items:
        _check_rows_one_by_one(features, items)
    return found


def _check_rows_one_by_one(features: MultiModalFeatures, items: dict[bytes, ProcessedItem]) -> None:
    for index, feature in enumerate(features.as_tuple()):
        item = items.get(feature.key)
        if item is not None and _num_rows(item) != feature.num_embeds:
            raise BadRequestError(
                f"item {index} takes {feature.num_embeds} embed positions; its encoder output "
                f"has {_num_rows(item)} rows",
                param="features",
            )


def _num_rows(item: ProcessedItem) -> int:
    """Rows of the item's encoder output. Most expansions are one run, which has a fast path."""
    expansion = item.expansion
    if len(expansion.runs) == 1:
        token, count = expansion.runs[0]
        return count if expansion.is_embed(token) else 0
    return expansion.num_embeds


def _prompt_array(request: GenerateRequest) -> NDArray[np.int32]:
    """A copy of the prompt as an array."""
    prompt = request.prompt
    if prompt.dtype != "int32" or len(prompt.shape) != 1 or not prompt.shape[0]:
        raise BadRequestError(
            f"the prompt is {prompt.dtype} of shape {prompt.shape}; it is int32 with one "
            "dimension and at least one token",
            param="prompt",
        )
    return np.frombuffer(prompt.data, dtype="<i4").astype(np.int32)
