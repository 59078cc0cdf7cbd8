"""A request inside the engine, and its samples: sequences with an explicit state machine.

    WAITING_FOR_SIBLING  ─ release_siblings ─▶ WAITING
    WAITING              ─ admit ────────────▶ PREFILLING ─ begin_decode ─▶ DECODING
    WAITING, PREFILLING  ─ wait_for_items ───▶ WAITING_FOR_ITEMS ─ resume ▶ WAITING
    WAITING              ─ begin_loading ────▶ LOADING ─ end_loading ─────▶ WAITING
    PREFILLING, DECODING ─ preempt ──────────▶ WAITING
    PREFILLING, DECODING ─ pause ────────────▶ IDLE                         live sessions only
    DECODING, IDLE       ─ resume_prefill ───▶ PREFILLING                   live sessions only
    every state          ─ finish ───────────▶ FINISHED

Each arrow is a method of `scheduler_state.SchedulerState`.

A full KV block is found again by its hash:

    root = H(version, scope [, adapter])
    hash[i] = H(hash[i-1], tokens of block i as int32 bytes, every item that overlaps block i)

The scope is in every hash through the root, so two tenants never share a block, and so is the
digest of a LoRA adapter: its keys and values are other ones. An adapter that changes the encoder
also gives items other keys in here (`AdaptedKeys`). An item is hashed
with its full key, its offset from the block's start and everything about its shape that changes
what is computed (length, rows, embed ranges within the block, grid): equal hashes mean equal K/V.
Where a live session adds a frame of sound to each token, the frames' digests are hashed too.
Digests are not truncated (32 bytes): two contents with one hash would give a wrong answer.

Hashing a block takes a microsecond, and a long prompt that is cached has thousands of them. So the
hashes of runs of blocks are kept (`BlockHashCache`), found by one digest of what they depend on.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from lookonce.core.frame_digests import FrameDigests
from lookonce.core.mm_features import MultiModalFeatures
from lookonce.types.kv import ExternalCacheStats
from lookonce.types.lora import LoRAIdentity, adapted_item_key
from lookonce.types.media import Array, MediaFeature, ProcessedItem
from lookonce.types.pooling import PoolingInfo
from lookonce.types.request import (
    EXTEND,
    MAX_LISTED_ITEMS,
    EncoderOutcome,
    ExtendOptions,
    GenerateRequest,
    PrefillStats,
    PrefillTimes,
    PromptLogprob,
    SessionOptions,
    SessionUpdate,
)
from lookonce.types.sampling import CompiledGrammar

HASHED_AHEAD = 8
"""Blocks hashed beyond the one asked for. A prompt that is not cached is not hashed at once."""
NEVER = 1 << 62
"""As a step's number: the runner knows nothing of a sequence."""
HASH_RUN = 32
"""Blocks of a run, whose hashes are found together; a multiple of `HASHED_AHEAD`."""


class Request:
    """What all samples of a request share. Built by `request_validation.RequestValidator`."""

    __slots__ = (
        "accepted",
        "adapted",
        "adapter",
        "alignment",
        "arrival",
        "encoder_adapter",
        "eos_token_ids",
        "features",
        "frames",
        "grammar",
        "initial_frames",
        "items",
        "items_in_order",
        "lands_each_step",
        "last_missing_end",
        "missing",
        "num_active",
        "num_prompt_tokens",
        "output_key",
        "pooling",
        "prefilled",
        "prompt",
        "prompt_logprobs",
        "recoverable",
        "request_id",
        "requested_keys",
        "reuse_stats",
        "root_hash",
        "sampling",
        "sees_whole_prompt",
        "sequences",
        "session",
        "stop_token_ids",
        "tenant",
        "uncut",
        "weight",
    )

    def __init__(
        self,
        request: GenerateRequest,
        prompt: NDArray[np.int32],
        features: MultiModalFeatures,
        items: dict[bytes, ProcessedItem],
        eos_token_ids: tuple[int, ...],
        items_in_order: list[ProcessedItem] | None = None,
    ) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.arrival = request.arrival
        self.tenant = request.tenant
        self.weight = request.weight
        self.sampling = sampling
        self.prompt = prompt
        self.num_prompt_tokens = len(prompt)
        self.features = features
        self.frames: FrameDigests | None = None
        """Of a live session that adds a frame of sound to each token: those that it has."""
        self.initial_frames = request.frames
        """The first of them, until the session is opened."""
        identity = request.adapter
        self.adapter = b"" if identity is None else identity.digest
        """Digest of its LoRA adapter; empty: none."""
        self.encoder_adapter = self.adapter if identity and identity.encoder_digest else b""
        """The same where it changes encoder outputs."""
        self.sees_whole_prompt = False
        """Every token of the prompt sees all of it; set by the validator."""
        self.uncut = False
        """The prompt is computed in one step; set there, too."""
        self.adapted: AdaptedKeys | None = None
        """Set there, too."""
        self.root_hash = root_hash(request.scope, self.adapter)
        self.items = items
        """Key → item, of those the engine holds; kept, since preemption computes them again."""
        self.items_in_order = items_in_order
        """The item of each feature; None where one is missing, and in a live session."""
        self.missing: set[bytes] = set()
        """Keys of the items that the engine lacks."""
        self.requested_keys: set[bytes] = set()
        """Missing keys that the client was asked for since it last sent items."""
        self.recoverable = True
        """The client can produce every item again."""
        self.last_missing_end = 0
        """Position from which on no missing item is needed."""
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self.prompt_logprobs: list[PromptLogprob] | None = None
        """One per position computed so far; None where not wanted or already delivered."""
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self.alignment: list[int] | None = None
        """Set with the prompt's last chunk, where it was asked for."""
        self.grammar: CompiledGrammar | None = None
        """Set before the scheduler takes the request in, once it is compiled."""
        self.lands_each_step = False
        """Its next step can be planned only once the result of the last one is there: what may be
        sampled, or what the session does, depends on it. Set when the scheduler takes it in."""
        self.session: Session | None = None
        """Set in live sessions only."""
        self.pooling: PoolingInfo | None = None
        """Set where the model pools: the request ends with its prompt, and generates nothing."""
        self.output_key: bytes | None = None
        """Digest of scope, tokens and items, by which a pooled output is found again."""
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.sequences: list[Sequence] = []
        self.num_active = 0
        """Sequences that hold KV blocks."""
        self.accepted = False
        self.prefilled = False
        """Some sample has computed the whole prompt, so its siblings need not wait any more."""
        self.reuse_stats = ReuseStats(len(features))
        if items_in_order is None:
            self.update_missing()

    def update_missing(self) -> None:
        """Find out which items the engine lacks. O(items): for new requests and when items come."""
        found = self.features.found_in(self.items)
        if found is not None:
            self.items_in_order = found
            self.missing, self.last_missing_end = set(), 0
            return
        self.items_in_order = None
        self.missing = set(self.features.keys) - self.items.keys()
        last = self.features.needed_until(self.missing)
        self.last_missing_end = min(last, self.num_prompt_tokens)

    def release_items(self) -> None:
        """It has ended. Without it they would live as long as it does: until the next collection of
        garbage, since a request and its sequences refer to each other."""
        self.items, self.items_in_order = {}, None

    def items_of(self, indices: range) -> list[ProcessedItem] | None:
        """The items of a range of features; None unless the engine has all of them."""
        if self.items_in_order is not None:
            return self.items_in_order[indices.start : indices.stop]
        keys = self.features.keys_of(indices)
        found = [item for item in map(self.items.get, keys) if item is not None]
        return found if len(found) == len(keys) else None

    def note_prompt_logprobs(self, start: int, entries: list[PromptLogprob]) -> None:
        """Set the log-probabilities of positions from `start` on, replacing any that are there."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs[start:] = entries

    def take_prompt_logprobs(self) -> list[PromptLogprob] | None:
        """Remove and return the log-probabilities; called once the whole prompt is computed."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    @property
    def needs_every_position(self) -> bool:
        """The result is made of the hidden states of the whole prompt: cached K/V do not help."""
        return self.pooling is not None and not self.pooling.reuses_prefixes

    @property
    def non_preemptible(self) -> bool:
        """Preempted, it could not be computed again: the client cannot send the items it lacks."""
        return not self.recoverable and bool(self.missing)

    @property
    def finished(self) -> bool:
        return all(s.state is SequenceState.FINISHED for s in self.sequences)

    def unfinished_sequences(self) -> list[Sequence]:
        return [s for s in self.sequences if s.state is not SequenceState.FINISHED]


class Sequence:
    """One sample: its tokens, how many are computed, and the KV blocks that hold their K/V."""

    __slots__ = (
        "admissible_with",
        "announced",
        "answer_snapshot",
        "block_hash_cache",
        "block_hashes",
        "block_ids",
        "cache_generation",
        "decode_turn",
        "held",
        "idle_since",
        "index",
        "known_since",
        "next_hash",
        "num_computed",
        "num_delivered",
        "num_matched",
        "num_planned",
        "num_registered",
        "num_shared_blocks",
        "order",
        "pending_snapshots",
        "pinned_snapshot",
        "prefetch_from",
        "prefetched",
        "request",
        "seq_id",
        "state",
        "token_limit",
        "tokens",
    )

    def __init__(
        self,
        seq_id: int,
        request: Request,
        index: int,
        token_limit: int,
        block_hash_cache: BlockHashCache | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.order = (request.arrival, seq_id)
        """Sequences are served in this order: first come, first served."""
        self.state = SequenceState.WAITING if index == 0 else SequenceState.WAITING_FOR_SIBLING
        self.tokens = TokenBuffer(request.prompt)
        self.token_limit = token_limit
        """Prompt plus generated tokens at which the sequence ends with "length"."""
        self.prefetched: dict[int, bytes] = {}
        """Index → key, of features encoded ahead for this sequence that no chunk has used yet."""
        self.prefetch_from = 0
        """Index of the first feature that may still have to be encoded ahead."""
        self.num_matched = 0
        """Leading blocks that were found in the prefix cache while the sequence waited."""
        self.block_hashes: list[bytes] = []
        """Of the first full blocks, as far as they were needed."""
        self.block_hash_cache = block_hash_cache
        """None: every block is hashed."""
        self.idle_since = 0.0
        """When the sequence became IDLE last, by the scheduler's clock."""
        self.decode_turn = 0
        """Number of its last turn where not all of its tenant's decode in a step (`DecodeShares`).
        """
        self.pending_snapshots: list[tuple[int, int]] = []
        """(tokens, slot) of states that the step under way keeps, of a model with states."""
        self.pinned_snapshot: tuple[bytes, int] | None = None
        """Hash and slot of the snapshot that the runner is to begin with."""
        self.answer_snapshot: bytes | None = None
        """Hash of the newest snapshot of this sequence's answer."""
        self.num_shared_blocks = 0
        """Leading blocks whose K/V were cached, though perhaps no state after them."""
        self.clear_computed()

    def clear_computed(self) -> None:
        """Forget everything computed; tokens and their hashes stay."""
        self.num_computed = 0
        """Leading tokens whose computation has ended."""
        self.num_planned = 0
        """Leading tokens that are computed, or will be by the steps that were planned so far. At
        `len(tokens)` a step under way samples the next token."""
        self.known_since = NEVER
        """Step that told the runner of this sequence: results of earlier ones are not its own."""
        self.num_registered = 0
        """Leading blocks that are registered in the block pool under their hash."""
        self.cache_generation = -1
        """`BlockPool.generation` at admission."""
        self.block_ids: list[int] = []
        self.num_delivered = 0
        """Leading entries of `block_ids` that the runner has been told of."""
        self.held: deque[int] = deque()
        """Indices of the features whose encoder output this sequence holds, ascending."""
        self.announced = False
        """Whether the runner knows this sequence."""
        self.admissible_with = 0
        """Free blocks that admission needs, as far as is known after a failed attempt. With fewer
        it is tried again only once the block of `next_hash` is cached."""
        self.next_hash: bytes | None = None
        """Hash of the block after the cached prefix, at the last failed admission."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def is_planned(self) -> bool:
        """Whether steps under way compute all tokens that are known."""
        return self.num_planned >= len(self.tokens)

    def deliver_blocks(self) -> tuple[int, ...]:
        """The blocks that the runner has not been told of; marks them as told."""
        known, self.num_delivered = self.num_delivered, len(self.block_ids)
        return tuple(self.block_ids[known:])

    def drop_tokens(self, block_size: int, first: int, count: int) -> list[int]:
        """Remove `count` computed blocks from block `first` on, with their tokens and features.

        All later indices become smaller. Returns the blocks, to be released.
        """
        start, stop = first * block_size, (first + count) * block_size
        request, blocks = self.request, self.block_ids[first : first + count]
        self.tokens.drop(start, stop)
        del self.block_ids[first : first + count]
        del self.block_hashes[first:]
        self.num_registered = min(self.num_registered, first)
        self.num_matched = 0
        self.num_delivered -= count
        self.num_computed -= stop - start
        self.num_planned -= stop - start
        request.num_prompt_tokens -= stop - start
        session = request.session
        num_computed_features = 0 if session is None else session.num_computed_features
        request.features.move_back(stop - start, num_computed_features)
        if request.frames is not None:
            request.frames.move_back(stop - start)
        return blocks

    def hash_blocks(self, block_size: int, num_blocks: int) -> None:
        """Extend `block_hashes` to the first `num_blocks` full blocks."""
        request, hashes = self.request, self.block_hashes
        known = len(hashes)
        extend_chain(
            hashes,
            request.root_hash,
            self.tokens,
            request.features,
            block_size,
            num_blocks,
            request.frames,
        )
        cache = self.block_hash_cache
        if cache is not None and request.session is None:  # a session forgets what was hashed
            for run in range(known // HASH_RUN, len(hashes) // HASH_RUN):
                first = run * HASH_RUN
                cache.put(self._run_key(block_size, first), hashes[first : first + HASH_RUN])

    def hash_ahead(self, block_size: int, limit: int) -> None:
        """Extend `block_hashes`, but not beyond `limit` blocks: by a run whose hashes are known,
        else by a few blocks."""
        hashes = self.block_hashes
        first, cache = len(hashes), self.block_hash_cache
        if self.request.frames is not None:
            cache = None  # a run's key does not name them
        if cache is not None and first % HASH_RUN == 0 and first + HASH_RUN <= limit:
            known = cache.get(self._run_key(block_size, first))
            if known is not None:
                hashes += known
                return
        self.hash_blocks(block_size, min(limit, first + HASHED_AHEAD))

    def _run_key(self, block_size: int, first: int) -> bytes:
        request = self.request
        parent = self.block_hashes[first - 1] if first else request.root_hash
        return run_key(parent, self.tokens, request.features, block_size, first)

    def hashes(self, block_size: int, limit: int) -> Iterator[bytes]:
        """Hashes of the first `limit` blocks, computed as the iterator reaches them."""
        for index in range(limit):
            if index == len(self.block_hashes):
                self.hash_ahead(block_size, limit)
            yield self.block_hashes[index]

    def move_to(self, state: SequenceState) -> None:
        """Change state. Raises `RuntimeError` for a transition that is not in `ALLOWED`."""
        if state not in ALLOWED[self.state]:
            raise RuntimeError(
                f"sequence {self.seq_id} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state


class SequenceState(Enum):
    """What a sequence does or waits for."""

    WAITING_FOR_SIBLING = "waiting for a sibling"
    """Until the request's first sample has computed the prompt."""
    WAITING = "waiting"
    WAITING_FOR_ITEMS = "waiting for items"
    """Until the client sends media items that the engine lacks."""
    LOADING = "loading"
    """Until external tiers have said whether they hold the prefix, or encoder outputs, or have
    loaded them."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    IDLE = "idle"
    """A live session that has computed and generated all it should, until it is extended."""
    FINISHED = "finished"

    __hash__ = object.__hash__
    """By identity: states are keys of the request queues, and Enum's own hash is slow."""


_S = SequenceState
ALLOWED: dict[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING_FOR_SIBLING: frozenset({_S.WAITING, _S.FINISHED}),
    _S.WAITING: frozenset({_S.PREFILLING, _S.WAITING_FOR_ITEMS, _S.LOADING, _S.FINISHED}),
    _S.WAITING_FOR_ITEMS: frozenset({_S.WAITING, _S.FINISHED}),
    _S.LOADING: frozenset({_S.WAITING, _S.FINISHED}),
    _S.PREFILLING: frozenset({_S.DECODING, _S.IDLE, _S.WAITING, _S.WAITING_FOR_ITEMS, _S.FINISHED}),
    _S.DECODING: frozenset({_S.PREFILLING, _S.IDLE, _S.WAITING, _S.FINISHED}),
    _S.IDLE: frozenset({_S.PREFILLING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}
"""State → the states that `Sequence.move_to` accepts."""


class TokenBuffer:
    """Token ids (int32) of one sequence: the prompt, which its samples share, and what follows."""

    __slots__ = ("_appended", "_num_prompt", "_prompt", "append")

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self._prompt = prompt
        self._num_prompt = len(prompt)
        self._appended = array("i")
        self.append = self._appended.append
        """Append one token; amortised O(1)."""

    def __len__(self) -> int:
        return self._num_prompt + len(self._appended)

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        self._appended.frombytes(token_ids.tobytes())

    def view(self) -> NDArray[np.int32]:
        """All tokens, `[num_tokens]`, read-only; a copy if any token was appended."""
        view = self._prompt.view()
        if self._appended:
            view = np.concatenate((view, np.array(self._appended, dtype=np.int32)))
        view.flags.writeable = False
        return view

    def drop(self, start: int, stop: int) -> None:
        """Remove tokens `[start, stop)`: O(tokens that stay)."""
        if self._num_prompt:
            self._appended[0:0] = array("i", self._prompt.tobytes())
            self._prompt, self._num_prompt = self._prompt[:0], 0
        del self._appended[start:stop]

    def raw(self, start: int, stop: int) -> bytes:
        """Little-endian bytes of tokens `[start, stop)`."""
        in_prompt = self._prompt[start:stop].tobytes()
        first = max(0, start - self._num_prompt)
        return in_prompt + self._appended[first : max(0, stop - self._num_prompt)].tobytes()


@dataclass(frozen=True, slots=True)
class SessionInput:
    """What one `Scheduler.extend` appends; offsets count from its first token."""

    token_ids: NDArray[np.int32]
    """A copy: the caller may use the memory again."""
    features: MultiModalFeatures
    items: Mapping[bytes, ProcessedItem]
    options: ExtendOptions = EXTEND


@dataclass(slots=True)
class Session:
    """The part of a request that only live sessions have."""

    limit: int
    """Tokens the session may have at a time, received and generated."""
    max_new_tokens: int | None
    """Tokens generated after each extension; None: up to a stop token."""
    block_size: int
    """Tokens of a KV block."""
    remaining_keys: Counter[bytes]
    """Key → how many features with that key have positions that are not computed."""
    options: SessionOptions = field(default_factory=SessionOptions)
    window: int = 0
    """Tokens that the next one attends to at most, itself included; 0: all."""
    max_positions: int = 0
    """Positions of the model are below."""
    relative_positions: bool = False
    """Keys may be rotated to other positions."""
    max_step_tokens: int = 0
    """Tokens that one step computes at most."""
    num_opening_tokens: int = 0
    inputs: deque[SessionInput] = field(default_factory=deque)
    """Extensions that are not appended yet, oldest first."""
    num_pending_tokens: int = 0
    """Tokens of all `inputs`."""
    num_interrupts: int = 0
    """Of the `inputs`, those that interrupt."""
    num_computed_features: int = 0
    """Leading features whose positions are all computed."""
    frame_inputs: deque[Array] = field(default_factory=deque)
    """Frames of sound that came and are not appended yet, oldest first."""
    unsent_frames: list[Array] = field(default_factory=list)
    """Frames that the runner gets with the sequence, which it does not know yet."""
    answering: bool = True
    """A token is sampled once all known tokens are computed."""
    answer_end: int | None = None
    """Token count at which the answer has as many tokens as were asked for; None: any number."""
    num_extensions: int = 0
    """Extensions that were appended."""
    computing: deque[tuple[int, int]] = field(default_factory=deque)
    """(end, tokens) of appended extensions that are not computed, oldest first; the end counts the
    dropped tokens, too."""
    shift: int = 0
    """A token's position is its index plus this (without multi-axis rope)."""
    num_dropped: int = 0
    """Tokens that were dropped from the sequence so far."""

    @property
    def compacts(self) -> bool:
        """It drops its middle where its context is full."""
        return not self.window and self.options.overflow == "compact"

    @property
    def has_no_end(self) -> bool:
        """There will be room for more, however much has come."""
        return bool(self.window) or self.compacts

    @property
    def largest_input(self) -> int:
        """Most tokens of one extension of a session without end: there is room for them once all
        before are computed."""
        kept = self.window if self.window else self.limit // 2
        return self.limit - kept - 2 * self.spare_tokens

    @property
    def spare_tokens(self) -> int:
        """Tokens that a session without end leaves free for its answer: it drops others when a
        block is full."""
        return 2 * self.block_size

    @property
    def num_kept_blocks(self) -> int:
        """Leading blocks that compaction keeps."""
        asked = self.options.keep_tokens
        wanted = self.num_opening_tokens if asked is None else max(0, asked)
        return min(-(-wanted // self.block_size), self.limit // (4 * self.block_size))

    def nears_last_position(self, num_computed: int) -> bool:
        """Whether a position that the model does not have might be reached before blocks are
        dropped again: after less than a block of tokens and one step."""
        reached = self.shift + num_computed + self.block_size + self.max_step_tokens
        return reached > self.max_positions

    def note_appended(self, added: SessionInput, num_tokens: int) -> None:
        """The input was appended; the sequence has `num_tokens` tokens now."""
        self.num_extensions += 1
        self.answering = added.options.answer
        self.begin_answer(num_tokens, added.options.max_tokens)
        self.computing.append((num_tokens + self.num_dropped, len(added.token_ids)))

    def add_input(self, added: SessionInput) -> None:
        self.inputs.append(added)
        self.num_interrupts += added.options.interrupt
        self.num_pending_tokens += len(added.token_ids)

    @property
    def may_append(self) -> bool:
        """Whether the oldest input need not wait for the end of an answer: none runs, or this input
        or one behind it interrupts."""
        return bool(self.inputs) and (self.num_interrupts > 0 or not self.answering)

    def take_input(self) -> SessionInput:
        """Remove and return the oldest input. Raises `IndexError` where there is none."""
        taken = self.inputs.popleft()
        self.num_interrupts -= taken.options.interrupt
        self.num_pending_tokens -= len(taken.token_ids)
        return taken

    def take_unsent_frames(self) -> tuple[Array, ...]:
        """Remove and return the frames that the runner gets with the sequence."""
        taken = tuple(self.unsent_frames)
        self.unsent_frames.clear()
        return taken

    def note_frames(self, total: int, added: int) -> None:
        """Frames were appended; there are `total` now, one for each position."""
        self.num_extensions += 1
        self.answering = True
        self.answer_end = total + 1
        self.computing.append((total + self.num_dropped, added))

    def begin_answer(self, num_tokens: int, max_tokens: int | None = None) -> None:
        """An answer of at most `max_tokens` tokens will begin after `num_tokens` tokens."""
        most = self.max_new_tokens if max_tokens is None else max_tokens
        self.answer_end = None if most is None else num_tokens + most

    @property
    def token_limit(self) -> int:
        """Token count at which generation pauses."""
        return self.limit if self.answer_end is None else min(self.limit, self.answer_end)

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens, or frames, of extensions whose credits were not given back."""
        waiting = self.num_pending_tokens + sum(each.shape[0] for each in self.frame_inputs)
        return waiting + sum(cost for _, cost in self.computing)

    def take_credits(self, num_computed: int) -> int:
        """Tokens of the extensions that are computed now; each is counted once."""
        taken, done = 0, num_computed + self.num_dropped
        while self.computing and self.computing[0][0] <= done:
            taken += self.computing.popleft()[1]
        return taken

    def update(self, **said: Any) -> SessionUpdate:
        """What a delta of this session says."""
        return SessionUpdate(self.num_extensions, **said)

    def note_dropped(self, num_tokens: int, *, reanchored: bool) -> None:
        """Computed tokens have left the sequence."""
        self.num_dropped += num_tokens
        if self.answer_end is not None:
            self.answer_end -= num_tokens
        self.shift = 0 if reanchored else self.shift + num_tokens

    def release_computed(
        self, features: MultiModalFeatures, items: dict[bytes, ProcessedItem], num_computed: int
    ) -> None:
        """Drop items whose positions are all computed: amortised O(1) for each item.

        Their features are forgotten too, except in the last block, which is hashed once full.
        """
        while (
            self.num_computed_features < len(features)
            and features[self.num_computed_features].end <= num_computed
        ):
            key = features[self.num_computed_features].key
            self.num_computed_features += 1
            self.remaining_keys[key] -= 1
            if not self.remaining_keys[key]:
                del self.remaining_keys[key]
                items.pop(key, None)
        features.forget_before(num_computed - num_computed % self.block_size)


class ReuseStats:
    """What a request reused: collected from its admission on, sent with its first token."""

    __slots__ = (
        "_encode_begun",
        "_encode_ended",
        "_encode_ms",
        "_external",
        "_outcomes",
        "_tiers",
        "admitted_at",
        "prefix_cached_tokens",
        "received_at",
    )

    def __init__(self, num_features: int) -> None:
        listed = min(num_features, MAX_LISTED_ITEMS)
        self.prefix_cached_tokens: int | None = None
        """Tokens found on the device at the first admission; None before it."""
        self._external: ExternalCacheStats | None = None
        self._outcomes: list[EncoderOutcome] = ["skipped"] * listed
        self._encode_ms = [0.0] * listed
        self._tiers: list[tuple[int, str]] = []
        self.received_at = self.admitted_at = 0.0
        """By the scheduler's clock."""
        self._encode_begun = self._encode_ended = 0.0

    @property
    def admitted(self) -> bool:
        return self.prefix_cached_tokens is not None

    def note_admission(self, num_cached: int, external: ExternalCacheStats | None = None) -> None:
        """Count the first admission only: after preemption the request finds its own blocks.

        Of the `num_cached` tokens, external tiers loaded `external.loaded`.
        """
        if self.prefix_cached_tokens is None:
            self._external = external
            loaded = 0 if external is None else external.loaded
            self.prefix_cached_tokens = num_cached - loaded

    def listed(self, indices: range) -> range:
        """Those feature indices that the statistics list one by one."""
        return range(indices.start, min(indices.stop, len(self._outcomes)))

    def note(self, index: int, outcome: EncoderOutcome) -> None:
        """Set the outcome of a feature; only its first use counts."""
        if index < len(self._outcomes) and self._outcomes[index] == "skipped":
            self._outcomes[index] = outcome

    def note_tier(self, index: int, tier: str) -> None:
        """An external tier gave the output of a feature."""
        if index < len(self._outcomes):
            self._tiers.append((index, tier))

    def note_encoding_time(self, begun: float, ended: float) -> None:
        """A step encoded an item for the request, from and to these times."""
        self._encode_begun = min(self._encode_begun or begun, begun)
        self._encode_ended = max(self._encode_ended, ended)

    def note_encoding(self, index: int, seconds: float) -> None:
        if index < len(self._encode_ms):
            self._encode_ms[index] += 1000.0 * seconds

    def freeze(self, now: float) -> PrefillStats:
        """`now`: the first token is there."""
        return PrefillStats(
            prefix_cached_tokens=self.prefix_cached_tokens or 0,
            external_cached_tokens=0 if self._external is None else self._external.loaded,
            encoder=tuple(self._outcomes),
            encode_ms=tuple(self._encode_ms),
            external=self._external,
            times=PrefillTimes(
                self.received_at,
                self.admitted_at,
                now,
                self._encode_begun,
                self._encode_ended,
            ),
            encoder_tiers=tuple(self._tiers),
        )


_ROOT = b"lookonce.kv-block.1\0"
_WHOLE = b"lookonce.kv-whole-prompt.1\0"
_RUN_KEY = struct.Struct("<24sqq")
_RUN_NAME = b"lookonce.kv-block-run.1\0"
_PLAIN_ITEM = struct.Struct("<32sBqqq")
_SHAPED_ITEM = struct.Struct("<32sBqqqqqqq")
_RANGE = struct.Struct("<qq")
_TIME = struct.Struct("<q")
_PLAIN, _SHAPED, _OF_FILM = 0, 1, 2
_FRAMES = b"frames\0"


def root_hash(scope: bytes, adapter: bytes = b"") -> bytes:
    """Parent of the first block of every prompt of one scope and adapter, 32 bytes."""
    return blake3(_ROOT + scope + adapter).digest()


class AdaptedKeys:
    """The keys of one request's items where an adapter changes their encoder outputs.

    A processed item is what it is without the adapter, so clients and the store have it under its
    own key. Inside the scheduler it has another one, under which its encoder output is found.
    """

    __slots__ = ("_digest", "_sent")

    def __init__(self, encoder_digest: bytes) -> None:
        self._digest = encoder_digest
        self._sent: dict[bytes, bytes] = {}

    @classmethod
    def of(cls, identity: LoRAIdentity | None) -> AdaptedKeys | None:
        """None for a request whose encoder outputs are those of all others."""
        found = identity is not None and identity.encoder_digest
        return cls(found) if found else None

    def key(self, sent: bytes) -> bytes:
        return adapted_item_key(self._digest, sent)

    def features(
        self, sent: Iterable[MediaFeature], *, live: bool = False
    ) -> tuple[MediaFeature, ...]:
        """Those of a live session are not remembered: it asks for none of its items."""
        adapted = []
        for feature in sent:
            key = self.key(feature.key)
            if not live:
                self._sent[key] = feature.key
            adapted.append(msgspec.structs.replace(feature, key=key))
        return tuple(adapted)

    def items(self, sent: Mapping[bytes, ProcessedItem]) -> dict[bytes, ProcessedItem]:
        return {self.key(key): item for key, item in sent.items()}

    def sent(self, keys: Iterable[bytes]) -> tuple[bytes, ...]:
        """The keys under which clients know these items."""
        return tuple([self._sent[key] for key in keys])


def whole_prompt_root(
    root: bytes, prompt: NDArray[np.int32], features: MultiModalFeatures
) -> bytes:
    """Parent of the first block of a prompt whose every token sees all of it: 32 bytes that depend
    on the scope's `root` and on all tokens and items."""
    chain: list[bytes] = []
    extend_chain(chain, _WHOLE + root, TokenBuffer(prompt), features, len(prompt), 1)
    return chain[0]


def extend_chain(
    chain: list[bytes],
    root: bytes,
    tokens: TokenBuffer,
    features: MultiModalFeatures,
    block_size: int,
    num_blocks: int,
    frames: FrameDigests | None = None,
) -> None:
    """Append hashes until `chain` covers `num_blocks` full blocks."""
    parent, known = chain[-1] if chain else root, len(chain)
    if num_blocks <= known:
        return
    begin, end = known * block_size, num_blocks * block_size
    raw = tokens.raw(begin, end)
    nbytes = len(raw) // (num_blocks - known)
    items = features.overlapping(begin, end)
    # A picture of hundreds of tokens is not looked up for each block.
    only = features.window(items)[0] if len(items) == 1 else None
    describe = partial(_describe_all, features) if only is None else partial(_describe_one, only)
    for block, start in enumerate(range(begin, end, block_size)):
        hashed = parent + raw[block * nbytes : (block + 1) * nbytes]
        if items:
            hashed += describe(start, start + block_size)
        if frames is not None:
            hashed += _FRAMES + frames.between(start, start + block_size)
        parent = blake3(hashed).digest()
        chain.append(parent)


def _describe_one(item: MediaFeature, start: int, end: int) -> bytes:
    """Of an item that may lie beside the block."""
    overlaps = item.offset < end and start < item.offset + item.length
    return _describe(item, start, end) if overlaps else b""


def run_key(
    parent: bytes, tokens: TokenBuffer, features: MultiModalFeatures, block_size: int, first: int
) -> bytes:
    """Digest of all that the hashes of the `HASH_RUN` blocks from block `first` on depend on."""
    start, end = first * block_size, (first + HASH_RUN) * block_size
    head = _RUN_KEY.pack(_RUN_NAME, HASH_RUN, block_size)
    hashed = head + parent + tokens.raw(start, end) + _describe_all(features, start, end)
    return blake3(hashed).digest()


class BlockContent(NamedTuple):
    """What a registered block holds, as `types.ports.BlockEvents.stored` is told."""

    parent: bytes | None
    tokens: bytes
    items: tuple[bytes, ...]
    adapter: bytes = b""


NO_CONTENT = BlockContent(None, b"", ())
"""Told of a block where nobody needs what it holds."""


def block_content(sequence: Sequence, index: int, block_size: int) -> BlockContent:
    """Of a block whose hash is known. Of live sessions, which forget their items, without these."""
    start, end = index * block_size, (index + 1) * block_size
    features = sequence.request.features
    remembered = sequence.request.session is None
    indices = features.overlapping(start, end) if remembered else range(0)
    items = tuple(features.keys_of(indices)) if indices else ()
    parent = sequence.block_hashes[index - 1] if index else None
    return BlockContent(parent, sequence.tokens.raw(start, end), items, sequence.request.adapter)


class BlockHashCache:
    """Key of a run of blocks (`run_key`) → the hashes of its blocks, least recently used first out.

    The hash before the run is in the key, and with it all tokens and items before and the scope.
    """

    __slots__ = ("_runs", "max_runs")

    def __init__(self, num_blocks: int) -> None:
        """Keeps the hashes of about `num_blocks` blocks, as many as the pool can hold."""
        self.max_runs = num_blocks // HASH_RUN + 1
        self._runs: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, key: bytes) -> list[bytes] | None:
        found = self._runs.get(key)
        if found is not None:
            self._runs.move_to_end(key)
        return found

    def put(self, key: bytes, hashes: list[bytes]) -> None:
        self._runs[key] = hashes
        self._runs.move_to_end(key)
        if len(self._runs) > self.max_runs:
            self._runs.popitem(last=False)


def _describe_all(features: MultiModalFeatures, start: int, end: int) -> bytes:
    """What is hashed of the items that overlap positions `[start, end)`."""
    indices = features.overlapping(start, end)
    return b"".join([_describe(features[index], start, end) for index in indices])


def _describe(feature: MediaFeature, start: int, end: int) -> bytes:
    """What the positions `[start, end)` hash of one item; self-delimiting. That of a run of blocks
    determines that of each of its blocks."""
    base, length, rows = feature.offset - start, feature.length, feature.num_embeds
    if feature.is_embed is None and feature.grid is None and feature.film_time is None:
        return _PLAIN_ITEM.pack(feature.key, _PLAIN, base, length, rows)
    ranges = [
        _RANGE.pack(base + first, base + last)
        for first, last in feature.is_embed or ()
        if base + first < end - start and base + last > 0
    ]
    grid = feature.grid or (-1, -1, -1)
    kind = _SHAPED if feature.film_time is None else _OF_FILM
    head = _SHAPED_ITEM.pack(feature.key, kind, base, length, rows, *grid, len(ranges))
    time = b"" if feature.film_time is None else _TIME.pack(feature.film_time)
    return head + time + b"".join(ranges)
