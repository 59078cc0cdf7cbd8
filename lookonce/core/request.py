"""A request inside the engine, and its n samples as sequences with an explicit state machine.

                    ┌──────────── preempt ────────────┐
                    ▼                                 │
    HELD_BACK ─▶ WAITING ─ admit ─▶ PREFILLING ─ begin_decode ─▶ DECODING
                  ▲   │  │             │    ▲                       │
           resume │   │  └─ set_aside ─┤    └─ resume_prefill ─┐    │ pause (from PREFILLING too)
                  │   │                ▼                       │    ▼
                  ├───┼───────────── ASIDE                     └── IDLE
                  │   ▼
                  └ LOADING                            FINISHED from every state

HELD_BACK: a sibling that waits until the request's leader has computed the prompt.
ASIDE: media items the engine lacks were asked for; supplying them resumes it.
LOADING: external KV tiers are asked for its prefix, or load it.
IDLE: a live session that has computed and generated all it should, until it is extended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from lookonce.core.block_hashes import extend_chain, root_hash
from lookonce.core.mm_features import Features
from lookonce.core.reuse_stats import FactsRecord
from lookonce.core.session import Session
from lookonce.core.tokens import TokenBuffer
from lookonce.types.media import ProcessedItem
from lookonce.types.request import GenerateRequest, PromptLogprob
from lookonce.types.sampling import CompiledGrammar

HASHED_AHEAD = 8
"""Blocks hashed beyond the one asked for; a prompt that is not cached is not hashed at once."""


class State(Enum):
    HELD_BACK = "held back"
    WAITING = "waiting"
    ASIDE = "aside"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    IDLE = "idle"
    FINISHED = "finished"

    __hash__ = object.__hash__
    """By identity: states key the scheduler's lanes, and Enum's own hash is slow."""


ALLOWED: dict[State, frozenset[State]] = {
    State.HELD_BACK: frozenset({State.WAITING, State.FINISHED}),
    State.WAITING: frozenset(
        {State.PREFILLING, State.ASIDE, State.LOADING, State.FINISHED}
    ),
    State.ASIDE: frozenset({State.WAITING, State.FINISHED}),
    State.LOADING: frozenset({State.WAITING, State.FINISHED}),
    State.PREFILLING: frozenset(
        {State.DECODING, State.IDLE, State.WAITING, State.ASIDE, State.FINISHED}
    ),
    State.DECODING: frozenset(
        {State.PREFILLING, State.IDLE, State.WAITING, State.FINISHED}
    ),
    State.IDLE: frozenset({State.PREFILLING, State.FINISHED}),
    State.FINISHED: frozenset(),
}  # fmt: skip


class Request:
    """What all samples share. Built once per request, by `door.Door`."""

    __slots__ = (
        "accepted",
        "arrival",
        "asked",
        "eos_token_ids",
        "facts",
        "features",
        "grammar",
        "in_order",
        "items",
        "last_missing_end",
        "missing",
        "num_active",
        "num_prompt_tokens",
        "prefilled",
        "prompt",
        "prompt_logprobs",
        "recoverable",
        "request_id",
        "root",
        "sampling",
        "sequences",
        "session",
        "stop_token_ids",
    )

    def __init__(
        self,
        request: GenerateRequest,
        prompt: NDArray[np.int32],
        features: Features,
        items: dict[bytes, ProcessedItem],
        eos_token_ids: tuple[int, ...],
        in_order: list[ProcessedItem] | None = None,
    ) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.arrival = request.arrival
        self.sampling = sampling
        self.prompt = prompt
        self.num_prompt_tokens = len(prompt)
        self.features = features
        self.root = root_hash(request.scope)
        self.items = items
        """Every item the engine holds for this request; kept for recompute after preemption."""
        self.in_order = in_order
        """The item of each feature, where none is missing and none is let go."""
        self.missing: set[bytes] = set()
        """Keys of items the engine lacks."""
        self.asked: set[bytes] = set()
        """Of those, what was asked for since items last came."""
        self.recoverable = True
        """Its sender can make any item again."""
        self.last_missing_end = 0
        """Position after which no missing item is needed."""
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self.prompt_logprobs: list[PromptLogprob] | None = None
        """One per position computed so far; None where nobody asked or all are delivered."""
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self.grammar: CompiledGrammar | None = None
        """Set, once compiled, before the scheduler takes the request in."""
        self.session: Session | None = None
        """What a live session has beside other requests."""
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.sequences: list[Sequence] = []
        self.num_active = 0
        """Sequences that hold KV blocks."""
        self.accepted = False
        self.prefilled = False
        """Some sample has computed the whole prompt: siblings need not wait any more."""
        self.facts = FactsRecord(len(features))
        if in_order is None:
            self.update_missing()

    def update_missing(self) -> None:
        """Recount what the engine lacks: O(items), only when items come or the request is new."""
        found = self.features.found_in(self.items)
        if found is not None:
            self.in_order = found
            self.missing, self.last_missing_end = set(), 0
            return
        self.in_order = None
        self.missing = set(self.features.keys) - self.items.keys()
        last = self.features.needed_until(self.missing)
        self.last_missing_end = min(last, self.num_prompt_tokens)

    def items_of(self, indices: range) -> list[ProcessedItem] | None:
        """The items of a range of features; None unless all are here."""
        if self.in_order is not None:
            return self.in_order[indices.start : indices.stop]
        keys = self.features.keys_of(indices)
        found = [item for item in map(self.items.get, keys) if item is not None]
        return found if len(found) == len(keys) else None

    def note_prompt_logprobs(self, start: int, entries: list[PromptLogprob]) -> None:
        """Of positions from `start` on; those computed again replace what was there."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs[start:] = entries

    def take_prompt_logprobs(self) -> list[PromptLogprob] | None:
        """All of them, once the prompt is computed."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    @property
    def self_sufficient(self) -> bool:
        """Every item is here: the request can be recomputed without asking anyone."""
        return not self.missing

    @property
    def irreplaceable(self) -> bool:
        """What it computes while it lacks items must not be given up: nobody can bring them."""
        return not self.recoverable and bool(self.missing)

    @property
    def finished(self) -> bool:
        return all(s.state is State.FINISHED for s in self.sequences)

    def live_sequences(self) -> list[Sequence]:
        return [s for s in self.sequences if s.state is not State.FINISHED]


class Sequence:
    """One sample: its tokens, how far they are computed, and the KV blocks that hold the result."""

    __slots__ = (
        "admissible_with",
        "announced",
        "block_ids",
        "cache_generation",
        "chain",
        "held",
        "idle_since",
        "index",
        "looked_at",
        "next_hash",
        "num_computed",
        "num_delivered",
        "num_matched",
        "num_registered",
        "order",
        "prefetched",
        "request",
        "seq_id",
        "state",
        "token_limit",
        "tokens",
    )

    def __init__(self, seq_id: int, request: Request, index: int, token_limit: int) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.order = (request.arrival, seq_id)
        """First come, first served."""
        self.state = State.WAITING if index == 0 else State.HELD_BACK
        self.tokens = TokenBuffer(request.prompt)
        self.token_limit = token_limit
        """Prompt plus generated tokens at which it ends with "length"."""
        self.prefetched: dict[int, bytes] = {}
        """Features whose output was encoded ahead for this sequence and not used yet → key."""
        self.looked_at = 0
        """Features before this one need not be looked at any more for encoding ahead."""
        self.num_matched = 0
        """Leading blocks that were found cached while it waited."""
        self.chain: list[bytes] = []
        """Hashes of its first full blocks, as far as anyone asked."""
        self.idle_since = 0.0
        """When it became IDLE last, by the scheduler's clock."""
        self.clear_computed()

    def clear_computed(self) -> None:
        """Forget everything computed; tokens and their hashes stay."""
        self.num_computed = 0
        self.num_registered = 0
        """Full blocks already registered under their hash."""
        self.cache_generation = -1
        self.block_ids: list[int] = []
        self.num_delivered = 0
        """Of those, how many the runner has been told of."""
        self.held: deque[int] = deque()
        """Features whose encoder output this sequence holds, ascending."""
        self.announced = False
        """The runner knows this sequence."""
        self.admissible_with = 0
        """Free blocks below which trying to admit again is in vain, unless..."""
        self.next_hash: bytes | None = None
        """...the block after the cached prefix has become cached meanwhile."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    def deliver_blocks(self) -> tuple[int, ...]:
        """The blocks the runner has not been told of; from now on it has."""
        known, self.num_delivered = self.num_delivered, len(self.block_ids)
        return tuple(self.block_ids[known:])

    def extend_chain(self, block_size: int, num_blocks: int) -> None:
        """Hash the first `num_blocks` full blocks, as far as they are not hashed yet."""
        request = self.request
        extend_chain(
            self.chain, request.root, self.tokens, request.features, block_size, num_blocks
        )

    def hashes(self, block_size: int, limit: int) -> Iterator[bytes]:
        """Hashes of the first `limit` blocks, computed as they are asked for."""
        for index in range(limit):
            if index == len(self.chain):
                self.extend_chain(block_size, min(limit, index + HASHED_AHEAD))
            yield self.chain[index]

    def move_to(self, state: State) -> None:
        """Change state; an illegal transition is a bug in the scheduler and raises."""
        if state not in ALLOWED[self.state]:
            raise RuntimeError(
                f"sequence {self.seq_id} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state
