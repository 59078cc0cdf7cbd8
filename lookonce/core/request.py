"""A request inside the engine, and its n samples as sequences with an explicit state machine.

                    ┌──────────── preempt ────────────┐
                    ▼                                 │
    WAITING_FOR_SIBLING ─▶ WAITING ─ admit ─▶ PREFILLING ─ begin_decode ─▶ DECODING
                  ▲   │  │             │    ▲                       │
           resume │   │  └─ wait_for_items ─┤    └─ resume_prefill ─┐    │ pause (from PREFILLING too)
                  │   │                ▼                       │    ▼
                  ├───┼───────────── WAITING_FOR_ITEMS                     └── IDLE
                  │   ▼
                  └ LOADING                            FINISHED from every state

WAITING_FOR_SIBLING: a sibling that waits until the request's leader has computed the prompt.
WAITING_FOR_ITEMS: media items the engine lacks were asked for; supplying them resumes it.
LOADING: external KV tiers are asked for its prefix, or load it.
IDLE: a live session that has computed and generated all it should, until it is extended.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from lookonce.core.mm_features import MultiModalFeatures
from lookonce.types.grammar import CompiledGrammar
from lookonce.types.kv import ExternalFacts
from lookonce.types.media import MediaFeature, ProcessedItem
from lookonce.types.request import (
    MAX_LISTED_ITEMS,
    EncoderOutcome,
    GenerateRequest,
    PrefillFacts,
    PromptLogprob,
)

HASHED_AHEAD = 8
"""Blocks hashed beyond the one asked for; a prompt that is not cached is not hashed at once."""


class SequenceState(Enum):
    WAITING_FOR_SIBLING = "held back"
    WAITING = "waiting"
    WAITING_FOR_ITEMS = "aside"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    IDLE = "idle"
    FINISHED = "finished"

    __hash__ = object.__hash__
    """By identity: states key the scheduler's lanes, and Enum's own hash is slow."""


ALLOWED: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING_FOR_SIBLING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.WAITING: frozenset(
        {SequenceState.PREFILLING, SequenceState.WAITING_FOR_ITEMS, SequenceState.LOADING, SequenceState.FINISHED}
    ),
    SequenceState.WAITING_FOR_ITEMS: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.LOADING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.PREFILLING: frozenset(
        {SequenceState.DECODING, SequenceState.IDLE, SequenceState.WAITING, SequenceState.WAITING_FOR_ITEMS, SequenceState.FINISHED}
    ),
    SequenceState.DECODING: frozenset(
        {SequenceState.PREFILLING, SequenceState.IDLE, SequenceState.WAITING, SequenceState.FINISHED}
    ),
    SequenceState.IDLE: frozenset({SequenceState.PREFILLING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
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
        features: MultiModalFeatures,
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
        self.facts = ReuseStats(len(features))
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
        return all(s.state is SequenceState.FINISHED for s in self.sequences)

    def live_sequences(self) -> list[Sequence]:
        return [s for s in self.sequences if s.state is not SequenceState.FINISHED]


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
        self.state = SequenceState.WAITING if index == 0 else SequenceState.WAITING_FOR_SIBLING
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

    def move_to(self, state: SequenceState) -> None:
        """Change state; an illegal transition is a bug in the scheduler and raises."""
        if state not in ALLOWED[self.state]:
            raise RuntimeError(
                f"sequence {self.seq_id} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state


_ROOT = b"lookonce.kv-block.1\0"


_PLAIN_ITEM = struct.Struct("<32sBqqq")


_SHAPED_ITEM = struct.Struct("<32sBqqqqqqq")


_RANGE = struct.Struct("<qq")


_PLAIN, _SHAPED = 0, 1


def root_hash(scope: bytes) -> bytes:
    """Parent of the first block of every prompt of one scope, 32 bytes."""
    return blake3(_ROOT + scope).digest()


def extend_chain(
    chain: list[bytes],
    root: bytes,
    tokens: TokenBuffer,
    features: MultiModalFeatures,
    block_size: int,
    num_blocks: int,
) -> None:
    """Append hashes until `chain` covers `num_blocks` full blocks; earlier ones are not read."""
    parent = chain[-1] if chain else root
    for block in range(len(chain), num_blocks):
        start, end = block * block_size, (block + 1) * block_size
        parts = [parent, tokens.raw(start, end)]
        parts += [_describe(features[i], start, end) for i in features.overlapping(start, end)]
        parent = blake3(b"".join(parts)).digest()
        chain.append(parent)


def _describe(feature: MediaFeature, start: int, end: int) -> bytes:
    """Self-delimiting bytes of one item as the block `[start, end)` sees it."""
    base, length, rows = feature.offset - start, feature.length, feature.num_embeds
    if feature.is_embed is None and feature.grid is None:
        return _PLAIN_ITEM.pack(feature.key, _PLAIN, base, length, rows)
    ranges = [
        _RANGE.pack(base + first, base + last)
        for first, last in feature.is_embed or ()
        if base + first < end - start and base + last > 0
    ]
    grid = feature.grid or (-1, -1, -1)
    head = _SHAPED_ITEM.pack(feature.key, _SHAPED, base, length, rows, *grid, len(ranges))
    return head + b"".join(ranges)


_INT32 = "i"


class TokenBuffer:
    """Token ids as int32: the prompt, never written, and what has been appended since.

    The samples of one request share the prompt.
    """

    __slots__ = ("_appended", "_num_prompt", "_prompt", "append")

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self._prompt = prompt
        self._num_prompt = len(prompt)
        self._appended = array(_INT32)
        self.append = self._appended.append
        """Add one token; amortised O(1)."""

    def __len__(self) -> int:
        return self._num_prompt + len(self._appended)

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        self._appended.frombytes(token_ids.tobytes())

    def view(self) -> NDArray[np.int32]:
        """All tokens, `[num_tokens]`, read-only; a copy where any were appended."""
        view = self._prompt.view()
        if self._appended:
            view = np.concatenate((view, np.array(self._appended, dtype=np.int32)))
        view.flags.writeable = False
        return view

    def raw(self, start: int, stop: int) -> bytes:
        """Little-endian bytes of tokens `[start, stop)`."""
        in_prompt = self._prompt[start:stop].tobytes()
        first = max(0, start - self._num_prompt)
        return in_prompt + self._appended[first : max(0, stop - self._num_prompt)].tobytes()


class ReuseStats:
    """Collects what a request reused, from its first admission to its first token."""

    __slots__ = ("_encode_ms", "_external", "_outcomes", "prefix_cached_tokens")

    def __init__(self, num_features: int) -> None:
        listed = min(num_features, MAX_LISTED_ITEMS)
        self.prefix_cached_tokens: int | None = None
        """What the first admission found on the device; None before it."""
        self._external: ExternalFacts | None = None
        self._outcomes: list[EncoderOutcome] = ["skipped"] * listed
        self._encode_ms = [0.0] * listed

    @property
    def admitted(self) -> bool:
        return self.prefix_cached_tokens is not None

    def note_admission(self, num_cached: int, external: ExternalFacts | None = None) -> None:
        """Only the first admission counts; one after preemption finds the request's own blocks.

        Of `num_cached` tokens, external tiers loaded `external.loaded`.
        """
        if self.prefix_cached_tokens is None:
            self._external = external
            loaded = 0 if external is None else external.loaded
            self.prefix_cached_tokens = num_cached - loaded

    def listed(self, indices: range) -> range:
        """Those of the features that the receipt lists one by one."""
        return range(indices.start, min(indices.stop, len(self._outcomes)))

    def note(self, index: int, outcome: EncoderOutcome) -> None:
        """The first use of a feature's output decides its outcome."""
        if index < len(self._outcomes) and self._outcomes[index] == "skipped":
            self._outcomes[index] = outcome

    def note_encoding(self, index: int, seconds: float) -> None:
        if index < len(self._encode_ms):
            self._encode_ms[index] += 1000.0 * seconds

    def freeze(self) -> PrefillFacts:
        return PrefillFacts(
            prefix_cached_tokens=self.prefix_cached_tokens or 0,
            external_cached_tokens=0 if self._external is None else self._external.loaded,
            encoder=tuple(self._outcomes),
            encode_ms=tuple(self._encode_ms),
            external=self._external,
        )


@dataclass(frozen=True, slots=True)
class SessionInput:
    """What one `extend` brings; offsets count from its first token."""

    token_ids: NDArray[np.int32]
    """Of its own, so that whoever gave them may use the memory again."""
    features: MultiModalFeatures
    items: Mapping[bytes, ProcessedItem]


@dataclass(slots=True)
class Session:
    """What a request has beside others when it is live."""

    limit: int
    """Tokens the session may have in all, given and generated."""
    turn_tokens: int | None
    """Tokens generated after each extension; None: up to a stop token."""
    block_size: int = 1
    """Positions that are hashed together, with the items among them, once all are computed."""
    inbox: deque[SessionInput] = field(default_factory=deque)
    num_coming: int = 0
    """Tokens in the inbox."""
    num_passed: int = 0
    """Leading features whose K/V are computed."""
    unpassed: Counter[bytes] = field(default_factory=Counter)
    """Of each key, how many of the other features have it."""

    def put(self, appendix: SessionInput) -> None:
        """Into the inbox."""
        self.inbox.append(appendix)
        self.num_coming += len(appendix.token_ids)

    def take(self) -> SessionInput:
        """The oldest in the inbox. Raises `IndexError` where there is none."""
        appendix = self.inbox.popleft()
        self.num_coming -= len(appendix.token_ids)
        return appendix

    def turn_limit(self, num_tokens: int) -> int:
        """Where generation pauses that begins with `num_tokens` tokens."""
        wanted = self.limit if self.turn_tokens is None else num_tokens + self.turn_tokens
        return min(self.limit, wanted)

    def let_go(
        self, features: MultiModalFeatures, items: dict[bytes, ProcessedItem], computed: int
    ) -> None:
        """Drop the arrays of items whose positions are all computed; O(1) for each, once.

        Their places too, but for those in the block that will be hashed once it is full.
        """
        while self.num_passed < len(features) and features[self.num_passed].end <= computed:
            key = features[self.num_passed].key
            self.num_passed += 1
            self.unpassed[key] -= 1
            if not self.unpassed[key]:
                del self.unpassed[key]
                items.pop(key, None)
        features.forget_before(computed - computed % self.block_size)
