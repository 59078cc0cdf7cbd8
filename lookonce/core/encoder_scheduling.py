"""Sees to it that every encoder output a chunk touches will be there: held, restored or encoded.

on the device ──────▶ hold
on the host ────────▶ make room, hold, copy back
nowhere ────────────▶ make room, hold, encode        (needs the item and encoder budget)
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from lookonce.core.budget import StepPass
from lookonce.core.counters import Counters
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.mm_features import MANY, next_embed
from lookonce.core.request import Sequence
from lookonce.types.media import MediaFeature, Modality
from lookonce.types.step import EncodeItem


class Shortage(Enum):
    """Why a sequence got nothing in a step."""

    TOKENS = "token budget"
    ENCODER_BUDGET = "encoder budget"
    ROOM = "room in the encoder cache"
    ITEM = "an item the engine lacks"


class Acquirer:
    """Holds outputs for sequences; what it holds is what the planned chunks need."""

    def __init__(
        self, encoder_cache: EncoderCache, counters: Counters, unsplittable: Collection[Modality]
    ) -> None:
        self._encoder_cache = encoder_cache
        self._counters = counters
        self._unsplittable = frozenset(unsplittable)

    def acquire(
        self, sequence: Sequence, start: int, end: int, step: StepPass
    ) -> tuple[int, Shortage | None]:
        """Hold the outputs of items in `[start, end)`; up to where they could be had, and why."""
        features, held = sequence.request.features, sequence.held
        indices = features.overlapping(start, end)
        if held:
            indices = range(max(indices.start, held[-1] + 1), indices.stop)
        many = len(indices) >= MANY and not step.room_kept
        if many and self._acquire_new(sequence, indices, step):
            return end, None
        for index, feature in zip(indices, features.window(indices), strict=True):
            if feature.is_embed is not None:
                needed_from = next_embed(feature, start)
                if needed_from is None or needed_from >= end:
                    continue
            shortage = self._acquire_one(sequence, index, feature, step)
            if shortage is not None:
                return self._end_before(feature, start, end), shortage
            held.append(index)
        return end, None

    def _end_before(self, feature: MediaFeature, start: int, end: int) -> int:
        """Where a chunk from `start` ends that must do without the feature's rows."""
        if feature.modality in self._unsplittable:
            return max(feature.offset, start)
        return next_embed(feature, start) or start

    def _acquire_one(
        self, sequence: Sequence, index: int, feature: MediaFeature, step: StepPass
    ) -> Shortage | None:
        """Hold one output: found, brought back or about to be encoded; what is short if none."""
        cache, facts, key = self._encoder_cache, sequence.request.facts, feature.key
        if step.room_kept:
            return Shortage.ROOM
        prefetched = index in sequence.prefetched
        if cache.try_hold(sequence.seq_id, key):
            hit = not prefetched
        elif key in cache.host.copies:
            if cache.try_restore(key, feature.num_embeds, sequence.seq_id) is None:
                return Shortage.ROOM
            self._counters.encoder_cache_restores += 1
            hit = not prefetched
        else:
            shortage = self._encode(sequence, index, feature, step)
            if shortage is not None:
                return shortage
            hit = False
        if prefetched:
            del sequence.prefetched[index]
        self._counters.encoder_cache_queries += 1
        self._counters.encoder_cache_hits += hit
        facts.note(index, "hit" if hit else "miss")
        return None

    def _encode(
        self, sequence: Sequence, index: int, feature: MediaFeature, step: StepPass
    ) -> Shortage | None:
        """Plan an encoder run and hold its output."""
        key, rows = feature.key, feature.num_embeds
        item = sequence.request.items.get(key)
        if item is None:
            return Shortage.ITEM
        if not step.encoder.affords(rows):
            return Shortage.ENCODER_BUDGET
        if self._encoder_cache.try_allocate(key, rows, sequence.seq_id) is None:
            return Shortage.ROOM
        step.add_encode(key, item, rows, sequence.request.facts, index)
        return None

    def _acquire_new(self, sequence: Sequence, indices: range, step: StepPass) -> bool:
        """Encode them all; False, with nothing changed, unless all are new and all can be had.

        The common case of many items in one chunk, without a round of questions for each.
        """
        request, cache = sequence.request, self._encoder_cache
        if not request.features.all_plain:
            return False
        keys = request.features.keys_of(indices)
        items = request.items_of(indices)
        if items is None:
            return False
        rows = request.features.rows(indices)
        total = sum(rows)
        if total > step.encoder.left or not cache.try_allocate_many(keys, rows, sequence.seq_id):
            return False
        step.encoder.spend(total)
        step.encode += map(EncodeItem, keys, items)
        step.encode_owners.add_many(request.facts, indices)
        for index in request.facts.listed(indices):
            request.facts.note(index, "miss")
        self._counters.encoder_cache_queries += len(keys)
        sequence.held.extend(indices)
        return True
