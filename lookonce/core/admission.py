"""At the door: is a request servable at all, and does it fit now?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lookonce.core.blocks import BlockPool
from lookonce.core.counters import Counters
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.features import Features
from lookonce.core.lifecycle import Lifecycle
from lookonce.core.request import Request, Sequence
from lookonce.core.roster import Roster
from lookonce.errors import BadRequestError, TooLargeError
from lookonce.types.media import ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import GenerateRequest


class Door:
    """Builds requests and refuses, before anything is spent, what could never be served."""

    def __init__(
        self, pool: BlockPool, encoder_cache: EncoderCache, model: ModelInfo, token_budget: int
    ) -> None:
        self._encoder_cache = encoder_cache
        self._model = model
        self._token_budget = token_budget
        self._kv_tokens = pool.num_blocks * pool.block_size

    def build_request(
        self, request: GenerateRequest, items: Mapping[bytes, ProcessedItem]
    ) -> Request:
        """Raises `BadRequestError` or `TooLargeError` saying what is wrong and what is allowed."""
        prompt = _prompt_array(request)
        features = Features(request.features)
        self._check_lengths(len(prompt), features)
        self._check_items(features)
        self._check_token_ids(prompt, features)
        check_rows(features, items)
        return Request(request, prompt, features, dict(items), self._model.eos_token_ids)

    def max_tokens(self, request: Request) -> int:
        """Prompt plus generated tokens one sequence may have; the last one needs no K/V."""
        limit = min(self._model.max_model_len, self._kv_tokens + 1)
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.num_prompt_tokens + request.sampling.max_tokens)
        return limit

    def _check_lengths(self, num_tokens: int, features: Features) -> None:
        limit = self._model.max_model_len - 1
        if num_tokens > limit:
            raise TooLargeError(
                f"the prompt has {num_tokens} tokens; this model takes at most {limit}",
                param="prompt",
            )
        if num_tokens > self._kv_tokens:
            raise TooLargeError(
                f"the prompt has {num_tokens} tokens; the KV cache holds {self._kv_tokens}",
                param="prompt",
            )
        if features.end > num_tokens:
            raise BadRequestError(
                f"item {len(features) - 1} ends at position {features.end}; the prompt has "
                f"{num_tokens} tokens",
                param="features",
            )

    def _check_items(self, features: Features) -> None:
        for index, feature in enumerate(features.as_tuple()):
            if feature.modality not in self._model.modalities:
                raise BadRequestError(
                    f"item {index} is {feature.modality}; this model takes "
                    f"{', '.join(self._model.modalities) or 'text only'}",
                    param="features",
                )
            self._encoder_cache.refuse_oversize(feature.num_embeds, f"item {index}")
            whole = feature.modality in self._model.unsplittable
            if whole and feature.length > self._token_budget:
                raise TooLargeError(
                    f"item {index} has {feature.length} tokens that must be computed in one "
                    f"step; the limit is {self._token_budget}",
                    param="features",
                )

    def _check_token_ids(self, prompt: NDArray[np.int32], features: Features) -> None:
        """Ids outside the vocabulary are allowed only where an item's rows replace them."""
        outside = np.flatnonzero((prompt < 0) | (prompt >= self._model.vocab_size))
        if not len(outside):
            return
        replaced = np.zeros(len(prompt), dtype=np.bool_)
        for feature in features.as_tuple():
            for first, last in feature.is_embed or ((0, feature.length),):
                replaced[feature.offset + first : feature.offset + last] = True
        wrong = outside[~replaced[outside]]
        if len(wrong):
            raise BadRequestError(
                f"token id {prompt[wrong[0]]} at position {wrong[0]} is outside the vocabulary "
                f"of {self._model.vocab_size}",
                param="prompt",
            )


class Admission:
    """Admits waiting sequences in order of arrival, with all blocks their tokens need."""

    def __init__(
        self,
        pool: BlockPool,
        encoder_cache: EncoderCache,
        roster: Roster,
        lifecycle: Lifecycle,
        counters: Counters,
        *,
        prefix_caching: bool,
    ) -> None:
        self._pool = pool
        self._encoder_cache = encoder_cache
        self._roster = roster
        self._lifecycle = lifecycle
        self._counters = counters
        self._prefix_caching = prefix_caching

    def try_admit(self, sequence: Sequence) -> bool:
        """True when the sequence left the waiting lane: admitted, or put aside to ask for items.

        The blocks of all known tokens are taken at once, so that a prefill never stops half way;
        one more per running sequence stays free, so that its decodes do not undo the admission.
        """
        headroom = self._roster.num_active
        if not self._worth_trying(sequence, headroom):
            return False
        cached = self._cached_blocks(sequence)
        needed = self.needed_keys(sequence, len(cached) * self._pool.block_size)
        if needed:
            self._lifecycle.set_aside(sequence, needed)
            return True
        fresh = self._pool.blocks_for(len(sequence.tokens)) - len(cached)
        blocks = self._pool.try_allocate(fresh, cached, reserve=headroom)
        if blocks is None:
            self._remember_failure(sequence, cached, fresh)
            return False
        self._count_prefix(sequence, len(cached))
        self._lifecycle.admit(sequence, blocks, len(cached))
        return True

    def needed_keys(self, sequence: Sequence, computed: int) -> tuple[bytes, ...]:
        """Missing items without which the positions from `computed` on cannot be computed."""
        request = sequence.request
        if not request.missing:
            return ()
        features = request.features
        anew = self._recomputed_by_siblings(request)
        window = features.overlapping(min(computed, anew), request.num_prompt_tokens)
        needed = {
            features[i].key: None
            for i in window
            if features[i].key in request.missing
            and (features[i].end > anew or features[i].key not in self._encoder_cache)
        }
        return tuple(needed)

    def _recomputed_by_siblings(self, request: Request) -> int:
        """Position from which each further sample computes the prompt again for itself."""
        if len(request.sequences) == 1:
            return request.num_prompt_tokens
        return self._max_cached(request.num_prompt_tokens) * self._pool.block_size

    def _max_cached(self, num_tokens: int) -> int:
        """Blocks a prefix hit may cover: at least one token is computed."""
        return (num_tokens - 1) // self._pool.block_size if self._prefix_caching else 0

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        if not self._prefix_caching:
            return []
        sequence.extend_chain(self._pool.block_size)
        return self._pool.match(sequence.chain, self._max_cached(len(sequence.tokens)))

    def _worth_trying(self, sequence: Sequence, headroom: int) -> bool:
        """Keeps the cost of a blocked queue constant: no walk over the prompt in every step."""
        if self._pool.num_free >= sequence.admissible_with + headroom:
            return True
        return sequence.next_hash is not None and self._pool.holds(sequence.next_hash)

    def _remember_failure(self, sequence: Sequence, cached: list[int], fresh: int) -> None:
        sequence.admissible_with = fresh + self._pool.count_free(cached)
        limit = min(len(sequence.chain), self._max_cached(len(sequence.tokens)))
        sequence.next_hash = sequence.chain[len(cached)] if len(cached) < limit else None

    def _count_prefix(self, sequence: Sequence, num_cached: int) -> None:
        """Counts a request once, at its first admission, so that totals equal the receipts."""
        if sequence.request.facts is None:
            self._counters.prompt_tokens += sequence.request.num_prompt_tokens
            if self._prefix_caching:
                self._counters.prefix_cache_queries += sequence.request.num_prompt_tokens
                self._counters.prefix_cache_hits += num_cached * self._pool.block_size


def check_rows(features: Features, items: Mapping[bytes, ProcessedItem]) -> None:
    """Raises `BadRequestError` for an item that has not as many rows as its place in the prompt."""
    for index, feature in enumerate(features.as_tuple()):
        item = items.get(feature.key)
        if item is not None and item.expansion.num_embeds != feature.num_embeds:
            raise BadRequestError(
                f"item {index} takes {feature.num_embeds} embed positions; its encoder output "
                f"has {item.expansion.num_embeds} rows",
                param="features",
            )


def _prompt_array(request: GenerateRequest) -> NDArray[np.int32]:
    """The prompt as an array of its own, which nobody writes."""
    prompt = request.prompt
    if prompt.dtype != "int32" or len(prompt.shape) != 1 or not prompt.shape[0]:
        raise BadRequestError(
            f"the prompt is {prompt.dtype} of shape {prompt.shape}; it is int32 with one "
            "dimension and at least one token",
            param="prompt",
        )
    return np.frombuffer(prompt.data, dtype="<i4").astype(np.int32)
