"""Worker threads that wait for KV tiers, so that the step loop does not.

    submit_lookup, submit_load ──▶ loaders ──▶ tiers ──▶ pages
    submit_store ──▶ gatherer (pages → host memory, then acknowledged) ──▶ a writer per tier

A lookup or load past its deadline is over for its request at once; the worker that is still at it
acknowledges later. Until then the blocks that it may write are given to no other request.

With a model that keeps states, a lookup also asks after which blocks a state is held, and a load
ends with a state: the newest one after blocks that are in place. Tiers hold a state in pieces of
the size of a block; its first piece is written last, so that where it is held the others were.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np

from lookonce.kv.chain import GuardedTier, TierChain
from lookonce.kv.objects import state_piece_key, state_piece_keys
from lookonce.kv.tier import Reason
from lookonce.types.kv import StatePieces
from lookonce.types.ports import KVPageCopier, StateCopier

logger = logging.getLogger(__name__)
NUM_LOADERS = 2
SLICE_BYTES = 4 << 20
"""Blocks are moved in slices of about this size: what a deadline and a cancellation wait for."""
LOOKUP_SECONDS = 0.5
LOAD_SECONDS = 5.0
MAX_QUEUED_BYTES = 256 << 20
"""Of stores not gathered yet, and of stores each tier has not written yet."""


@dataclass(frozen=True, slots=True)
class HeldStates:
    """The states of a prompt that tiers hold."""

    after: tuple[int, ...] = ()
    """Leading blocks after which one is held, most first. Of the first one all pieces are held; of
    others perhaps not."""
    keys: Sequence[bytes] = ()
    sources: Sequence[int] = ()
    """The pieces of the first one, and the tier of each, leased there."""
    num_shared: int = 0
    """Leading blocks whose K/V are held."""


NO_STATES = HeldStates()


@dataclass(frozen=True, slots=True)
class Answered:
    ticket: int
    keys: Sequence[bytes]
    sources: tuple[int, ...] | None
    """Tier of each leading block that is held, leased there; None: the lookup failed. With states:
    up to the newest one."""
    states: HeldStates = NO_STATES


@dataclass(frozen=True, slots=True)
class Loaded:
    ticket: int
    num_loaded: int
    reason: Reason | None
    state_after: int = 0
    """Leading blocks of the prompt after which the loaded state is; 0: none was loaded."""
    state_tier: int = 0
    """Which tier gave it; of several, the farthest."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    ticket: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What loading cost."""

    tier: int
    num_blocks: int
    seconds: float


Event: TypeAlias = Answered | Loaded | Acknowledged | Measured


@dataclass(slots=True)
class _Job:
    """A lookup or a load: settled once, by its worker or by its deadline."""

    ticket: int
    keys: Sequence[bytes]
    sources: Sequence[int] = ()
    block_ids: Sequence[int] = ()
    first: int = 0
    num_loaded: int = 0
    states: HeldStates = NO_STATES
    num_local: int = 0
    snapshot: int | None = None
    """Where a state is loaded to."""
    state_after: int = 0
    state_tier: int = 0
    settled: bool = False
    cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self) -> bool:
        """True for the first call."""
        with self.lock:
            first, self.settled = not self.settled, True
            return first


class Transfers:
    """Lookups, loads and stores, each done by a worker thread; `tell` gets every event.

    `tell` is called from any thread. A ticket that was cancelled is acknowledged all the same.
    """

    def __init__(
        self,
        chain: TierChain,
        pages: KVPageCopier,
        tell: Callable[[Event], None],
        *,
        states: StateCopier | None = None,
        lookup_seconds: float = LOOKUP_SECONDS,
        load_seconds: float = LOAD_SECONDS,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        """`states`: of a model that keeps states beside keys and values."""
        self._chain = chain
        self._pages = pages
        self._states = states
        self._tell = tell
        self._lookup_seconds = lookup_seconds
        self._load_seconds = load_seconds
        self._block_bytes = pages.layout.block_bytes
        self._slice_blocks = max(1, SLICE_BYTES // self._block_bytes)
        self._pieces = StatePieces(0 if states is None else states.state_bytes, self._block_bytes)
        self._loads: dict[int, _Job] = {}
        self._workers = TransferWorkers("kv", chain, self._block_bytes, max_queued_bytes)

    # --- the step thread's side -----------------------------------------------------------------

    def submit_lookup(self, ticket: int, keys: Sequence[bytes]) -> float:
        """Begin a lookup; its deadline, in monotonic seconds."""
        job = _Job(ticket, keys)
        deadline = time.monotonic() + self._lookup_seconds

        def expire() -> None:
            if job.settle():
                self._tell(Answered(ticket, keys, None))

        self._workers.deadlines.at(deadline, expire)
        self._workers.load(lambda: self._look_up(job))
        return deadline

    def submit_load(
        self,
        ticket: int,
        keys: Sequence[bytes],
        sources: Sequence[int],
        block_ids: Sequence[int],
        first: int = 0,
        *,
        states: HeldStates = NO_STATES,
        num_local: int = 0,
        snapshot: int | None = None,
    ) -> None:
        """Load blocks `first` on; `keys`, `sources`, `block_ids` begin at the prompt's start.

        With a `snapshot` also one of the `states`, after more than `num_local` blocks.
        """
        job = self._loads[ticket] = _Job(ticket, keys, sources, block_ids, first)
        job.states, job.num_local, job.snapshot = states, num_local, snapshot

        def expire() -> None:
            job.cancelled = True
            if job.settle():
                self._tell(_outcome(job, "timeout"))

        self._workers.deadlines.at(time.monotonic() + self._load_seconds, expire)
        self._workers.load(lambda: self._load(job))

    def submit_store(self, ticket: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> bool:
        """False, and counted, when the queue is full."""
        nbytes = len(keys) * self._block_bytes
        job = partial(self._store, ticket, keys, block_ids)
        return self._workers.gather(nbytes, job, count=len(keys))

    def submit_state_store(self, ticket: int, block_hash: bytes, snapshot: int) -> bool:
        """False, and counted, when the queue is full."""
        job = partial(self._store_state, ticket, block_hash, snapshot)
        return self._workers.gather(self._pieces.padded_bytes, job)

    def release(self, keys: Sequence[bytes], sources: Sequence[int]) -> None:
        """Give back the leases that a lookup took."""
        if keys:
            self._workers.load(lambda: self._chain.release(keys, sources))

    def cancel(self, ticket: int) -> None:
        job = self._loads.get(ticket)
        if job is not None:
            job.cancelled = True
            job.settle()

    def stats(self) -> dict[str, float]:
        return self._workers.stats()

    def close(self) -> None:
        self._workers.close()

    # --- loaders --------------------------------------------------------------------------------

    def _look_up(self, job: _Job) -> None:
        if job.settled:
            return
        sources, states = self._chain.lease(job.keys), NO_STATES
        if sources and self._states is not None:
            sources, states = self._to_newest_state(job.keys, sources)
        if job.settle():
            self._tell(Answered(job.ticket, job.keys, sources, states))
        elif sources:
            self._chain.release(job.keys[: len(sources)], sources)
            self._chain.release(states.keys, states.sources)

    def _to_newest_state(
        self, keys: Sequence[bytes], sources: tuple[int, ...]
    ) -> tuple[tuple[int, ...] | None, HeldStates]:
        """The leading blocks up to the newest state that is held; gives back the leases on others.

        None where no state was found and some tier could not say.
        """
        held = len(sources)
        firsts = [state_piece_key(key, 0) for key in keys[:held]]
        found, unsure = self._chain.locate(firsts, states=True)
        leased = [(key, tier) for key, tier in zip(firsts, found, strict=True) if tier is not None]
        self._chain.release([key for key, _ in leased], [tier for _, tier in leased])
        after = [count for count in range(held, 0, -1) if found[count - 1] is not None]
        pieces: list[bytes] = []
        tiers: list[int] = []
        while after:
            pieces = state_piece_keys(keys[after[0] - 1], self._pieces)
            tiers, located = self._locate_whole(pieces)
            unsure |= located is None
            if located:
                break
            del after[0]
        end = after[0] if after else 0
        self._chain.release(keys[end:held], sources[end:])
        if not end:
            return (None if unsure else ()), HeldStates(num_shared=held)
        return sources[:end], HeldStates(tuple(after), pieces, tiers, held)

    def _locate_whole(self, pieces: Sequence[bytes]) -> tuple[list[int], bool | None]:
        """The tier of each piece of a state, leased there, and whether all are held; otherwise none
        is leased. None: some tier could not say."""
        found, unsure = self._chain.locate(pieces, states=True)
        tiers = [tier for tier in found if tier is not None]
        if len(tiers) == len(pieces):
            return tiers, True
        held = [key for key, tier in zip(pieces, found, strict=True) if tier is not None]
        self._chain.release(held, tiers)
        return [], None if unsure else False

    def _load(self, job: _Job) -> None:
        reason: Reason | None = "io"
        try:
            reason = self._load_slices(job)
            if job.snapshot is not None:
                reason = self._load_newest_state(job, job.snapshot) or reason
        finally:
            self._loads.pop(job.ticket, None)
            if job.settle():
                self._tell(_outcome(job, reason))
            self._tell(Acknowledged(job.ticket))
            self._chain.release(job.keys, job.sources)
            self._chain.release(job.states.keys, job.states.sources)

    def _load_slices(self, job: _Job) -> Reason | None:
        staging = np.empty(self._slice_blocks * self._block_bytes, dtype=np.uint8)
        for start, stop in _slices(job.sources, job.first, self._slice_blocks):
            if job.cancelled:
                return "timeout"
            tier, keys = job.sources[start], job.keys[start:stop]
            into = staging.data[: len(keys) * self._block_bytes]
            outcome, seconds = self._chain.tiers[tier].read(keys, into)
            good = outcome.num_blocks
            if good:
                began = time.monotonic()
                payloads = into[: good * self._block_bytes]
                self._pages.scatter(job.block_ids[start : start + good], payloads)
                job.num_loaded += good
                seconds += time.monotonic() - began
                self._tell(Measured(tier, good, seconds))
                self._keep_nearer(tier, keys[:good], payloads)
            if outcome.reason is not None:
                return outcome.reason
        return None

    def _load_newest_state(self, job: _Job, snapshot: int) -> Reason | None:
        """Load the state after most blocks of those that are in place; why a newer one was not."""
        in_place, first_reason = job.first + job.num_loaded, None
        for after in job.states.after:
            if after <= job.num_local or job.cancelled:
                break
            if after > in_place:
                continue
            reason = self._load_state(job, after, snapshot)
            if reason is None:
                break
            first_reason = first_reason or reason
        return "timeout" if job.cancelled and not job.state_after else first_reason

    def _load_state(self, job: _Job, after: int, snapshot: int) -> Reason | None:
        """Load the state after so many blocks whole, verified before the device gets any of it."""
        assert self._states is not None
        size, pieces = self._pieces.piece_bytes, state_piece_keys(job.keys[after - 1], self._pieces)
        tiers, whole = self._locate_whole(pieces)
        if not whole:
            return "missing"
        buffer = np.empty(self._pieces.padded_bytes, dtype=np.uint8)
        try:
            for start, stop in _slices(tiers, 0, self._slice_blocks):
                if job.cancelled:
                    return "timeout"
                tier, into = tiers[start], buffer[start * size : stop * size].data
                outcome, seconds = self._chain.tiers[tier].read(
                    pieces[start:stop], into, states=True
                )
                if outcome.reason is not None:
                    return outcome.reason
                self._tell(Measured(tier, stop - start, seconds))
            self._states.scatter(snapshot, buffer[: self._pieces.state_bytes].data)
        finally:
            self._chain.release(pieces, tiers)
        job.state_tier, job.state_after = max(tiers), after
        self._chain.tiers[job.state_tier].count_states(loaded=1)
        if job.state_tier:
            self._workers.offer(pieces, buffer.data, nearer_than=job.state_tier, is_state=True)
        return None

    def _keep_nearer(self, tier: int, keys: Sequence[bytes], payloads: memoryview) -> None:
        """Store blocks of a farther tier in the nearer ones, as far as their queues have room."""
        if tier:
            copy = np.array(np.frombuffer(payloads, dtype=np.uint8))
            self._workers.offer(keys, copy.data, nearer_than=tier)

    # --- the gatherer ---------------------------------------------------------------------------

    def _store(self, ticket: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        try:
            batches = [
                (keys[at : at + self._slice_blocks], self._gather(block_ids, at))
                for at in range(0, len(keys), self._slice_blocks)
            ]
        finally:
            self._tell(Acknowledged(ticket))
            self._workers.note_gathered(len(keys) * self._block_bytes)
        for batch, payloads in batches:
            self._workers.offer(batch, payloads)

    def _store_state(self, ticket: int, block_hash: bytes, snapshot: int) -> None:
        assert self._states is not None
        pieces = self._pieces
        buffer = np.empty(pieces.padded_bytes, dtype=np.uint8)
        buffer[pieces.state_bytes :] = 0
        try:
            self._states.gather(snapshot, buffer[: pieces.state_bytes].data)
        finally:
            self._tell(Acknowledged(ticket))
            self._workers.note_gathered(pieces.padded_bytes)
        self._workers.offer(state_piece_keys(block_hash, pieces), buffer.data, is_state=True)

    def _gather(self, block_ids: Sequence[int], at: int) -> memoryview:
        wanted = block_ids[at : at + self._slice_blocks]
        payloads = np.empty(len(wanted) * self._block_bytes, dtype=np.uint8)
        self._pages.gather(wanted, payloads.data)
        return payloads.data


def _outcome(job: _Job, reason: Reason | None) -> Loaded:
    """What a load has come to. A state that is in place stays as it is, so it counts even where the
    deadline has passed meanwhile."""
    return Loaded(job.ticket, job.num_loaded, reason, job.state_after, job.state_tier)


def _slices(sources: Sequence[int], first: int, limit: int) -> Iterator[tuple[int, int]]:
    """`(start, stop)` runs of one tier, at most `limit` blocks long."""
    start = first
    while start < len(sources):
        stop = start + 1
        while stop < min(len(sources), start + limit) and sources[stop] == sources[start]:
            stop += 1
        yield start, stop
        start = stop


class TransferWorkers:
    """The threads that wait for a chain of tiers: loaders, a gatherer, and a writer for each tier.

    Stores that are not gathered yet take at most `max_queued_bytes`, and so do those that each tier
    has not written yet.
    """

    def __init__(
        self, name: str, chain: TierChain, block_bytes: int, max_queued_bytes: int
    ) -> None:
        """`name`: "kv" or "encoder", which threads and figures begin with."""
        self.deadlines = Deadlines()
        self._name = name
        self._chain = chain
        self._block_bytes = block_bytes
        self._max_queued_bytes = max_queued_bytes
        self._to_load: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._to_gather: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._gather_bytes = 0
        self._num_dropped = 0
        """Stores that found the queue full before any tier was asked."""
        self._writers = [TierWriter(tier, max_queued_bytes) for tier in chain.tiers]
        self._threads = [
            _start_worker(f"{name}-load-{n}", self._to_load) for n in range(NUM_LOADERS)
        ]
        self._threads.append(_start_worker(f"{name}-gather", self._to_gather))

    def load(self, job: Callable[[], None]) -> None:
        """Have a loader do the job."""
        self._to_load.put(job)

    def gather(self, nbytes: int, job: Callable[[], None], *, count: int = 1) -> bool:
        """Have the gatherer do the job, which calls `note_gathered(nbytes)`. False, and counted as
        `count` stores, when the queue is full."""
        with self._lock:
            room = self._gather_bytes + nbytes <= self._max_queued_bytes
            if room:
                self._gather_bytes += nbytes
            else:
                self._num_dropped += count
        if room:
            self._to_gather.put(job)
        return room

    def note_gathered(self, nbytes: int) -> None:
        with self._lock:
            self._gather_bytes -= nbytes

    def offer(
        self,
        keys: Sequence[bytes],
        payloads: memoryview,
        *,
        nearer_than: int | None = None,
        is_state: bool = False,
    ) -> None:
        """Queue blocks for the writer of each tier, or of those nearer than one. `payloads` has one
        after the other, and must not change. `is_state`: they are the pieces of one state."""
        size = self._block_bytes
        parts = [payloads[at : at + size] for at in range(0, payloads.nbytes, size)]
        for writer in self._writers[:nearer_than]:
            writer.offer(keys, parts, is_state=is_state)

    def stats(self) -> dict[str, float]:
        stats = {
            f"{self._name}_transfer_queue_bytes": float(self._gather_bytes),
            f"{self._name}_transfer_dropped_stores_total": float(self._num_dropped),
        }
        for writer, tier in zip(self._writers, self._chain.tiers, strict=True):
            stats[f"{self._name}_tier_queue_bytes:{tier.name}"] = float(writer.queued_bytes)
        return stats

    def close(self) -> None:
        """Ends the threads, and the tiers with them."""
        for _ in range(NUM_LOADERS):
            self._to_load.put(None)
        self._to_gather.put(None)
        for thread in self._threads:
            thread.join(timeout=2.0)
        for writer in self._writers:
            writer.close()
        self.deadlines.close()
        self._chain.close()


def _start_worker(
    name: str, jobs: queue.SimpleQueue[Callable[[], None] | None]
) -> threading.Thread:
    """A daemon thread that does the jobs, one after the other, until None."""
    thread = threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
    thread.start()
    return thread


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Until None. A job that raises is a bug or a lost device; its thread goes on."""
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            logger.exception("a transfer failed")
        del job


class _Write(NamedTuple):
    """What a tier's writer is to write."""

    keys: Sequence[bytes]
    payloads: Sequence[memoryview]
    is_state: bool
    """They are the pieces of one state."""


class TierWriter:
    """One thread that writes to one tier, behind a bounded queue: a slow tier only loses stores."""

    def __init__(self, tier: GuardedTier, max_queued_bytes: int) -> None:
        self._tier = tier
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-store-{tier.name}", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def offer(
        self, keys: Sequence[bytes], payloads: Sequence[memoryview], *, is_state: bool = False
    ) -> bool:
        """Queue blocks, or the pieces of one state, to be written; the payloads must not change.
        False: dropped and counted."""
        nbytes = sum(payload.nbytes for payload in payloads)
        with self._lock:
            room = self._queued_bytes + nbytes <= self._max_queued_bytes
            if room:
                self._queued_bytes += nbytes
        if room:
            self._queue.put(_Write(keys, payloads, is_state))
        else:
            self._tier.count_dropped(1 if is_state else len(keys))
        return room

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if job.is_state:
                    self._write_state(job)
                elif self._tier.write(job.keys, job.payloads) is None:
                    self._tier.count_dropped(len(job.keys))
            except Exception:
                logger.exception("storing in a tier failed")
            with self._lock:
                self._queued_bytes -= sum(payload.nbytes for payload in job.payloads)
            del job  # the last reference to the bytes

    def _write_state(self, job: _Write) -> None:
        """A few MiB in a call, from the last piece to the first, until the tier takes no more."""
        keys, payloads = job.keys[::-1], job.payloads[::-1]
        size = max(1, SLICE_BYTES // payloads[0].nbytes)
        is_new = False
        for at in range(0, len(keys), size):
            stored = self._tier.write(keys[at : at + size], payloads[at : at + size], states=True)
            if stored is None:
                self._tier.count_dropped(1)
                return
            is_new |= stored > 0
        self._tier.count_states(stored=int(is_new))


class Deadlines:
    """One thread that makes callbacks at given monotonic seconds. They cannot be cancelled: each
    must do nothing where it comes too late.

    Callbacks must be quick and must not raise.
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-deadlines", daemon=True)
        self._thread.start()

    def at(self, moment: float, call: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._numbers), call))
            if self._due[0][2] is call:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        """Waits for the earliest; None once closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._due and self._due[0][0] <= now:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(self._due[0][0] - now if self._due else None)
        return None
