"""What the parts of the scheduler share: request queues, caches, pending output, and counters.

Each transition of a sequence is one method of `SchedulerState`, which keeps the sequence's state,
its KV blocks, its encoder outputs and what the runner knows of it consistent. `request` draws the
transitions.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.pooled_outputs import PooledOutputs
from lookonce.core.request import BlockHashCache, Request, Sequence, SequenceState
from lookonce.core.state_snapshots import SnapshotPlanner, StateSnapshots
from lookonce.errors import LookOnceError, error_to_wire
from lookonce.types.fair_queue import DeficitRoundRobin
from lookonce.types.kv import ExternalCacheStats
from lookonce.types.ports import Clock
from lookonce.types.request import FinishReason, TokenDelta
from lookonce.types.step import DropTokens, Extension


class SchedulerState:
    """The state of one scheduler. `clock` measures how long live sessions have been idle."""

    def __init__(
        self,
        block_pool: BlockPool,
        encoder_cache: EncoderCache,
        *,
        prefix_caching: bool,
        clock: Clock = time.monotonic,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.block_pool = block_pool
        self.snapshots = snapshots
        """Of a model with states beside keys and values."""
        self.snapshot_planner: SnapshotPlanner | None = None
        if snapshots is not None and prefix_caching:
            self.snapshot_planner = SnapshotPlanner(snapshots, block_pool.block_size)
        self.block_hash_cache = BlockHashCache(block_pool.num_blocks)
        self.encoder_cache = encoder_cache
        self.prefix_caching = prefix_caching
        self.pooled_outputs = PooledOutputs() if prefix_caching else PooledOutputs(0)
        self.clock = clock
        self.queues = RequestQueues()
        self.counters = Counters()
        self.output = SchedulerOutput()
        """What to report next."""
        self.finished: list[int] = []
        """Ids of sequences that the runner knows and must forget."""
        self.extensions: list[Extension | DropTokens] = []
        """What was appended to, and dropped from, sequences that the runner knows."""
        self.on_end: list[Callable[[Request], None]] = []
        """Called with every request that has ended, whatever state it was in."""

    # --- transitions of a sequence --------------------------------------------------------------

    def admit(
        self,
        sequence: Sequence,
        blocks: list[int],
        num_cached_blocks: int,
        external: ExternalCacheStats | None = None,
    ) -> None:
        """WAITING → PREFILLING with `blocks`, of which the first `num_cached_blocks` are computed.

        `external`: what external KV tiers loaded, at a request's first admission.
        """
        self.queues.move(sequence, SequenceState.PREFILLING)
        sequence.block_ids = blocks
        sequence.num_computed = num_cached_blocks * self.block_pool.block_size
        sequence.num_planned = sequence.num_computed
        sequence.num_registered = num_cached_blocks
        sequence.cache_generation = self.block_pool.generation
        if self.snapshots is not None and num_cached_blocks:
            block_hash = sequence.block_hashes[num_cached_blocks - 1]
            sequence.pinned_snapshot = block_hash, self.snapshots.pin(block_hash)
        stats = sequence.request.reuse_stats
        if not stats.admitted:
            stats.admitted_at = self.clock()
        stats.note_admission(sequence.num_computed, external)

    def begin_decode(self, sequence: Sequence) -> None:
        """PREFILLING → DECODING: every token but the last sampled one is computed."""
        self.queues.move(sequence, SequenceState.DECODING)

    def pause(self, sequence: Sequence) -> None:
        """PREFILLING or DECODING → IDLE: a live session keeps its blocks until it is extended."""
        self.queues.move(sequence, SequenceState.IDLE)
        sequence.idle_since = self.clock()

    def resume_prefill(self, sequence: Sequence) -> None:
        """IDLE or DECODING → PREFILLING: a live session was extended."""
        self.queues.move(sequence, SequenceState.PREFILLING)

    def release_siblings(self, leader: Sequence) -> None:
        """WAITING_FOR_SIBLING → WAITING for the other samples: `leader` has computed the prompt.

        They get the leader's hashes of the prompt's blocks, and so find these in the prefix cache.
        """
        request = leader.request
        request.prefilled = True
        num_prompt_blocks = request.num_prompt_tokens // self.block_pool.block_size
        for sibling in request.sequences:
            if sibling.state is SequenceState.WAITING_FOR_SIBLING:
                sibling.block_hashes = leader.block_hashes[:num_prompt_blocks]
                self.queues.move(sibling, SequenceState.WAITING)

    def preempt(self, sequence: Sequence) -> None:
        """PREFILLING or DECODING → WAITING: all that is computed is given up."""
        self._release(sequence)
        self.queues.move(sequence, SequenceState.WAITING)

    def wait_for_items(self, sequence: Sequence, keys: tuple[bytes, ...]) -> None:
        """WAITING or PREFILLING → WAITING_FOR_ITEMS: all that is computed is given up.

        The client is asked for `keys`, except those that another sample has requested already.
        """
        self._release(sequence)
        self.queues.move(sequence, SequenceState.WAITING_FOR_ITEMS)
        request = sequence.request
        new = tuple(key for key in keys if key not in request.requested_keys)
        if new:
            request.requested_keys.update(new)
            asked = new if request.adapted is None else request.adapted.sent(new)
            self.output.needs.append((request.request_id, asked))

    def resume(self, request: Request) -> None:
        """WAITING_FOR_ITEMS → WAITING for all samples: items have come."""
        request.requested_keys.clear()
        for sequence in request.sequences:
            if sequence.state is SequenceState.WAITING_FOR_ITEMS:
                self.queues.move(sequence, SequenceState.WAITING)

    def begin_loading(self, sequence: Sequence) -> None:
        """WAITING → LOADING: the blocks that are loaded belong to the load, not the sequence."""
        self.queues.move(sequence, SequenceState.LOADING)

    def end_loading(self, request: Request) -> None:
        """LOADING → WAITING for all samples: the external tiers have answered or loaded."""
        for sequence in request.sequences:
            if sequence.state is SequenceState.LOADING:
                self.queues.move(sequence, SequenceState.WAITING)

    def finish(self, sequence: Sequence) -> None:
        """Any state → FINISHED. The request ends with its last sequence."""
        self._release(sequence)
        for key in sequence.prefetched.values():
            self.encoder_cache.stop_awaiting(key)
        self.queues.move(sequence, SequenceState.FINISHED)
        request = sequence.request
        if request.session is None:  # a session's tokens are charged as they are generated
            self.queues.turns.charge(request, sequence.num_generated)
        if request.finished:
            self.queues.forget(request)
            request.release_items()
            self.output.released.append(request.request_id)
            for call in self.on_end:
                call(request)
        elif not request.prefilled:
            self._promote_sibling(request)

    def finish_pooled(self, sequence: Sequence, output: bytes) -> None:
        """Any state → FINISHED with the result of its prompt."""
        request = sequence.request
        delta = TokenDelta(request.request_id, sequence.index, [], finish_reason="stop")
        delta.pooled = output
        delta.reuse_stats = request.reuse_stats.freeze(self.clock())
        self.output.deltas.append(delta)
        self.finish(sequence)

    def try_finish_known(self, sequence: Sequence) -> bool:
        """Finish a waiting sequence whose pooled output is held; counts it as a cached prefix."""
        request = sequence.request
        if request.pooling is None:
            return False
        output = self.pooled_outputs.get(request)
        if output is None:
            return False
        if not request.reuse_stats.admitted:
            request.reuse_stats.admitted_at = self.clock()
            self.count_admission(request, request.num_prompt_tokens)
        request.reuse_stats.note_admission(request.num_prompt_tokens)
        self.counters.pooled_cache_hits += 1
        self.finish_pooled(sequence, output)
        return True

    def count_admission(self, request: Request, num_cached: int) -> None:
        """Count a request at its first admission, so that totals equal its statistics."""
        self.counters.prompt_tokens += request.num_prompt_tokens
        self.counters.pooled_cache_queries += request.pooling is not None
        if self.prefix_caching and request.prompt_logprobs is None:
            self.counters.prefix_cache_queries += request.num_prompt_tokens
            self.counters.prefix_cache_hits += num_cached

    def end(
        self, request: Request, reason: FinishReason, error: LookOnceError | None = None
    ) -> None:
        """Every unfinished sample → FINISHED, each with a last delta that gives the reason."""
        for sequence in request.unfinished_sequences():
            self.end_sample(sequence, reason, error)

    def end_sample(
        self, sequence: Sequence, reason: FinishReason, error: LookOnceError | None = None
    ) -> None:
        """One sample → FINISHED, with a last delta that gives the reason."""
        wire = None if error is None else error_to_wire(error)
        delta = TokenDelta(
            sequence.request.request_id, sequence.index, [], finish_reason=reason, error=wire
        )
        self.output.deltas.append(delta)
        self.finish(sequence)

    def _promote_sibling(self, request: Request) -> None:
        """If the sample that computed the prompt has ended, let the next one compute it."""
        live = request.unfinished_sequences()
        if all(s.state is SequenceState.WAITING_FOR_SIBLING for s in live):
            self.queues.move(live[0], SequenceState.WAITING)

    def _release(self, sequence: Sequence) -> None:
        """Give back the sequence's blocks and encoder outputs, and let the runner forget it."""
        self.encoder_cache.release_all(sequence.seq_id)
        if sequence.block_ids:
            self.block_pool.release(sequence.block_ids)
        if sequence.announced:
            self.finished.append(sequence.seq_id)
        if self.snapshot_planner is not None:
            self.snapshot_planner.release(sequence)
        sequence.clear_computed()

    # --- KV blocks and cached prefixes ----------------------------------------------------------

    def try_grow(self, sequence: Sequence, num_blocks: int) -> bool:
        """Give a sequence `num_blocks` more blocks; False where not so many are free."""
        blocks = self.block_pool.try_allocate(num_blocks)
        if blocks is None:
            return False
        sequence.block_ids += blocks
        return True

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest cached prefix that the sequence may use."""
        if not self.prefix_caching:
            return []
        limit = self.max_reused_blocks(sequence)
        found = self.block_pool.match(sequence.hashes(self.block_pool.block_size, limit))
        if self.snapshots is not None:
            sequence.num_shared_blocks = len(found)
            del found[self.snapshots.longest(sequence.block_hashes[: len(found)]) :]
        return found

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that a cached prefix covers.

        The search continues where the last one ended, so a sequence that waits for many steps costs
        the same in each, whatever its length.
        """
        block_size, found = self.block_pool.block_size, sequence.num_matched
        limit = self.max_reused_blocks(sequence)
        while found < limit:
            if found == len(sequence.block_hashes):
                sequence.hash_ahead(block_size, limit)
            if not self.block_pool.holds(sequence.block_hashes[found]):
                break
            found += 1
        sequence.num_matched = found
        if self.snapshots is not None:
            found = self.snapshots.longest(sequence.block_hashes[:found])
        return found * block_size

    def max_reused_blocks(self, sequence: Sequence) -> int:
        """Most blocks that the sequence may take from the prefix cache.

        Log-probabilities of the prompt, where wanted, are results of computing it: positions
        without them are computed although their K/V may be cached.
        """
        num_tokens = len(sequence.tokens)
        if sequence.request.frames is not None:
            num_tokens = min(num_tokens, sequence.request.frames.total)
        if sequence.request.needs_every_position:
            return 0
        limit = self.max_cached_blocks(num_tokens)
        scored = sequence.request.prompt_logprobs
        if scored is None or sequence.index:
            return limit
        return min(limit, len(scored) // self.block_pool.block_size)

    def max_cached_blocks(self, num_tokens: int) -> int:
        """Most blocks of so many tokens that may be reused: at least one token is computed."""
        return (num_tokens - 1) // self.block_pool.block_size if self.prefix_caching else 0

    # --- output ---------------------------------------------------------------------------------

    def accept_once_covered(self, sequence: Sequence) -> None:
        """Report the request as accepted once no position that needs a missing item is left."""
        request = sequence.request
        if not request.accepted and sequence.num_computed >= request.last_missing_end:
            request.accepted = True
            self.output.accepted.append(request.request_id)

    @property
    def has_runner_updates(self) -> bool:
        """Whether the runner must forget a sequence, extend one, or move encoder outputs."""
        return bool(self.finished or self.extensions or self.encoder_cache.has_moves)

    def take_output(self) -> SchedulerOutput:
        """Remove and return what there is to report."""
        output, self.output = self.output, SchedulerOutput()
        return output

    def take_finished(self) -> tuple[int, ...]:
        finished = tuple(self.finished)
        self.finished.clear()
        return finished

    def take_extensions(self) -> tuple[Extension | DropTokens, ...]:
        """Remove and return the extensions of sequences that have not ended; before `finished`."""
        if not self.extensions:
            return ()
        ended = set(self.finished)
        extensions = tuple(e for e in self.extensions if e.seq_id not in ended)
        self.extensions.clear()
        return extensions

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where queues, sequences and encoder outputs disagree."""
        self.queues.check_integrity()
        self.encoder_cache.check_integrity()
        if self.snapshots is not None:
            self.snapshots.check_integrity()
        sequences = self.queues.sequences.values()
        for sequence in sequences:
            planned, known = sequence.num_planned, len(sequence.tokens)
            if not sequence.num_computed <= planned <= known + 1:
                raise RuntimeError(f"{planned} of {known} tokens are planned of a sequence")
            features = sequence.request.features
            held = {features[index].key for index in sequence.held}
            if held != set(self.encoder_cache.held_keys(sequence.seq_id)):
                raise RuntimeError(f"sequence {sequence.seq_id} holds other outputs than it says")
        if self.encoder_cache.num_holders > len(sequences):
            raise RuntimeError("an ended sequence still holds encoder outputs")


class SchedulerOutput(msgspec.Struct, gc=False):
    """What happened since the last output."""

    deltas: list[TokenDelta] = []
    accepted: list[str] = []
    """Ids of requests that have computed all positions that need missing items, so that the client
    need not send these unless the request is preempted."""
    needs: list[tuple[str, tuple[bytes, ...]]] = []
    """(request id, keys) of requests that wait until these items are supplied."""
    released: list[str] = []
    """Ids of requests that have ended."""

    def __bool__(self) -> bool:
        return bool(self.deltas or self.accepted or self.needs or self.released)


_order = attrgetter("order")
_ACTIVE = frozenset({SequenceState.PREFILLING, SequenceState.DECODING, SequenceState.IDLE})
_COMPUTING = frozenset({SequenceState.PREFILLING, SequenceState.DECODING})
_PROMPTS = frozenset({SequenceState.WAITING, SequenceState.PREFILLING})
QUANTUM = 64
"""Tokens that a tenant of weight 1 may compute in one round; a step may be many rounds."""


class SequenceQueue(list[Sequence]):
    """Sequences of one state, earliest arrival first."""

    __slots__ = ()

    @property
    def first(self) -> Sequence | None:
        return self[0] if self else None

    def head(self, count: int) -> list[Sequence]:
        """A copy of the first `count`: the queue may change while a caller iterates."""
        return self[:count]

    def add(self, sequence: Sequence) -> None:
        insort(self, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        del self[bisect_left(self, sequence.order, key=_order)]


class PromptTurns:
    """Whose prompts are computed next, where those of several tenants wait.

    Tenants take turns by the tokens that are computed for them (`DeficitRoundRobin`); each tenant's
    sequences keep their order. What is computed while one tenant is alone costs it nothing.
    """

    def __init__(self) -> None:
        self._turns = DeficitRoundRobin(QUANTUM)
        self._prompts: Counter[str] = Counter()
        """Sequences whose prompts are computed or wait to be, by tenant."""

    @property
    def several(self) -> bool:
        """Whether there are prompts of more than one tenant."""
        return len(self._prompts) > 1

    def add(self, request: Request) -> None:
        """A sequence of this request has a prompt to compute."""
        tenant, prompts = request.tenant, self._prompts
        known = prompts.get(tenant, 0)  # a Counter's own answer for what is missing is slow
        if not known:
            self._turns.join(tenant, request.weight)
        else:
            self._turns.reweigh(tenant, request.weight)
        prompts[tenant] = known + 1

    def remove(self, request: Request) -> None:
        tenant, prompts = request.tenant, self._prompts
        left = prompts[tenant] - 1
        if left:
            prompts[tenant] = left
        else:
            prompts.pop(tenant)
            self._turns.leave(tenant)

    def choose(self, heads: dict[str, float]) -> str:
        """The tenant whose turn it is: `heads` has the tokens that each would compute next. Others
        keep the credit they have."""
        return self._turns.choose(heads, {tenant: heads.get(tenant, 0) for tenant in self._prompts})

    def first(self, sequences: list[Sequence]) -> Sequence | None:
        """The first of the tenant whose turn is the next one."""
        if not self.several or not sequences:
            return sequences[0] if sequences else None
        firsts: dict[str, Sequence] = {}
        for sequence in sequences:
            firsts.setdefault(sequence.request.tenant, sequence)
        return firsts[self._turns.peek(dict.fromkeys(firsts, QUANTUM))]

    def charge(self, request: Request, num_tokens: int) -> None:
        """`num_tokens` are computed for this request."""
        if self.several:
            self._turns.charge(request.tenant, num_tokens)
            if request.tenant not in self._prompts:
                self._turns.leave(request.tenant)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise `RuntimeError` where these are not the sequences with prompts to compute."""
        if Counter(sequence.request.tenant for sequence in sequences) != self._prompts:
            raise RuntimeError("the prompts of tenants are counted wrong")


class RequestQueues:
    """Every unfinished sequence, in the queue of its state."""

    def __init__(self) -> None:
        self.turns = PromptTurns()
        self._waiting_of: Counter[str] = Counter()
        self.active_of: Counter[str] = Counter()
        """Tenant → its part of `num_active`."""
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self._by_state: dict[SequenceState, SequenceQueue] = {
            state: SequenceQueue() for state in SequenceState if state is not SequenceState.FINISHED
        }
        self.waiting = self._by_state[SequenceState.WAITING]
        self.loading = self._by_state[SequenceState.LOADING]
        self.prefilling = self._by_state[SequenceState.PREFILLING]
        self.decoding = self._by_state[SequenceState.DECODING]
        self.idle = self._by_state[SequenceState.IDLE]
        self.num_running_requests = 0
        """Requests with a sequence that holds KV blocks."""
        self.num_landing = 0
        """Sequences that compute, of requests with `lands_each_step`."""

    @property
    def num_waiting_requests(self) -> int:
        return len(self.requests) - self.num_running_requests

    def num_waiting_of(self, tenant: str) -> int:
        """Of `num_waiting_requests`, those of one tenant."""
        return self._waiting_of[tenant]

    @property
    def has_prompts(self) -> bool:
        """Whether any sequence computes its prompt, or waits to."""
        return bool(self.prefilling or self.waiting)

    @property
    def num_active(self) -> int:
        """Sequences that hold KV blocks."""
        return len(self.prefilling) + len(self.decoding) + len(self.idle)

    @property
    def num_computing(self) -> int:
        """Sequences that have positions to compute, and the blocks for them."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        _count(self._waiting_of, request.tenant, 1)
        for sequence in request.sequences:
            self.sequences[sequence.seq_id] = sequence
            self._by_state[sequence.state].add(sequence)
            if sequence.state in _PROMPTS:
                self.turns.add(request)

    def move(self, sequence: Sequence, state: SequenceState) -> None:
        """Change a sequence's state and queue; a finished one is in no queue."""
        if sequence.request.lands_each_step:
            self.num_landing += (state in _COMPUTING) - (sequence.state in _COMPUTING)
        was_active = sequence.state in _ACTIVE
        had_prompt = sequence.state in _PROMPTS
        queue = self._by_state[sequence.state]
        sequence.move_to(state)
        queue.remove(sequence)
        if state is SequenceState.FINISHED:
            del self.sequences[sequence.seq_id]
        else:
            self._by_state[state].add(sequence)
        if (state in _PROMPTS) != had_prompt:
            if had_prompt:
                self.turns.remove(sequence.request)
            else:
                self.turns.add(sequence.request)
        is_active = state in _ACTIVE
        if was_active != is_active:
            self._count_active(sequence.request, 1 if is_active else -1)

    def forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._count_waiting(request, -1)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where queues, states and counts disagree."""
        listed = {s.seq_id: s for queue in self._by_state.values() for s in queue}
        if listed != self.sequences:
            raise RuntimeError("queues and sequences disagree")
        for state, queue in self._by_state.items():
            if any(s.state is not state for s in queue):
                raise RuntimeError(f"a sequence in the queue {state.value!r} is in another state")
            if [s.order for s in queue] != sorted(s.order for s in queue):
                raise RuntimeError(f"the queue {state.value!r} is out of order")
        self.turns.check_integrity([*self.waiting, *self.prefilling])
        computing = [*self.prefilling, *self.decoding]
        if self.num_landing != sum(s.request.lands_each_step for s in computing):
            raise RuntimeError("the sequences that wait for each step's result are counted wrong")
        waiting = Counter(r.tenant for r in self.requests.values() if not r.num_active)
        if waiting != self._waiting_of:
            raise RuntimeError("the waiting requests of tenants are counted wrong")
        if self.active_of != Counter(
            s.request.tenant for s in listed.values() if s.state in _ACTIVE
        ):
            raise RuntimeError("the active sequences of tenants are counted wrong")
        active = {s.request.request_id for s in listed.values() if s.state in _ACTIVE}
        if len(active) != self.num_running_requests:
            raise RuntimeError("the count of running requests is wrong")
        if {s.request.request_id for s in listed.values()} != self.requests.keys():
            raise RuntimeError("a request without sequences is still listed")

    def active(self) -> list[Sequence]:
        """The sequences that hold KV blocks."""
        return [*self.prefilling, *self.decoding, *self.idle]

    def first_waiting_by_tenant(self) -> list[Sequence]:
        """Of each tenant the waiting sequence that arrived first."""
        firsts: dict[str, Sequence] = {}
        for sequence in self.waiting:
            firsts.setdefault(sequence.request.tenant, sequence)
        return list(firsts.values())

    def _count_active(self, request: Request, change: int) -> None:
        _count(self.active_of, request.tenant, change)
        before = request.num_active > 0
        request.num_active += change
        begun = (request.num_active > 0) - before
        if begun:
            self.num_running_requests += begun
            self._count_waiting(request, -begun)

    def _count_waiting(self, request: Request, change: int) -> None:
        _count(self._waiting_of, request.tenant, change)


def _count(counts: Counter[str], tenant: str, change: int) -> None:
    """Change a count, which is left out where it is 0. A `Counter` does both in Python."""
    left = counts.get(tenant, 0) + change
    if left:
        counts[tenant] = left
    else:
        counts.pop(tenant, None)


@dataclass(slots=True)
class Counters:
    """What the scheduler did since it was built; the fields are named after the metrics."""

    prefix_cache_queries: int = 0
    """Prompt tokens of requests at their first admission."""
    prefix_cache_hits: int = 0
    """Of `prefix_cache_queries`, tokens whose K/V were cached."""
    encoder_cache_queries: int = 0
    """Times a sequence needed an encoder output that it did not hold."""
    encoder_cache_hits: int = 0
    """Of `encoder_cache_queries`, outputs that were held, cached or being computed."""
    encoder_cache_restores: int = 0
    """Outputs copied back from host memory."""
    encoder_prefetches: int = 0
    """Outputs computed before a chunk needed them; also counted in `encoder_runs`."""
    encoder_runs: int = 0
    """Outputs computed."""
    num_preemptions: int = 0
    session_extensions: int = 0
    """Extensions of live sessions that were appended."""
    session_tokens_dropped: int = 0
    """Tokens of live sessions that were dropped behind windows or by compaction."""
    session_compactions: int = 0
    session_reanchors: int = 0
    """Times that a session's positions began again."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    pooled_cache_queries: int = 0
    """Requests of a model that pools."""
    pooled_cache_hits: int = 0
    """Of `pooled_cache_queries`, those whose whole result was held."""
