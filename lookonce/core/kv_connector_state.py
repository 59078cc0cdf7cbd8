"""Prefixes held by external KV tiers: sequences that wait for them, and the blocks of transfers.

    try_admit ─▶ lookup pending ─▶ LOADING ─ answered ───▶ WAITING ─▶ try_admit
                 lookup hit: blocks allocated, load begun ─▶ LOADING ─ LoadReport ─▶ WAITING ─▶ ...

The blocks of a load belong to the load, not to the sequence. Loaded blocks are registered under
their hashes like computed ones, and the sequence then finds them in the prefix cache. The blocks of
a load or a store are released only when its ticket is acknowledged: until then a worker may still
write or read them, even if the request has ended (quarantine).

Of a model with states a load also has the slot of a snapshot, reserved until the state in it is
registered like one that was taken, or the ticket is acknowledged. Snapshots are stored when they
are taken, those of an answer when it has ended; they are pinned until they are copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lookonce.core.request import BlockContent, Request, Sequence, block_content
from lookonce.core.scheduler_state import SchedulerState
from lookonce.errors import UnavailableError
from lookonce.types.kv import ExternalCacheStats, LoadReport
from lookonce.types.ports import ExternalPrefixCache


class LoadDecision(Enum):
    """What a waiting sequence does about its external prefix."""

    COMPUTE = "compute"
    """There is nothing to load: compute what is not cached."""
    LOADING = "loading"
    """The sequence is LOADING until the tiers have answered or loaded."""
    NO_ROOM = "no room"
    """There is a prefix to load, but not enough free blocks for the whole prompt."""


@dataclass(frozen=True, slots=True)
class _Load:
    request_id: str
    block_ids: list[int]
    """The blocks of the local prefix, then those to load."""
    hashes: list[bytes]
    num_resident: int
    """Leading blocks that were on the device already."""
    generation: int
    snapshot: int | None = None
    """Slot that a state is loaded to."""
    contents: list[BlockContent] = field(default_factory=list)
    """Of each block from `num_resident` on, where events are published."""


class KVConnectorState:
    """The scheduler's side of `ExternalPrefixCache`; no method waits.

    With `fail_on_loss` a request ends with an error when a prefix could not be loaded; otherwise
    the prefix is computed.
    """

    def __init__(
        self, cache: ExternalPrefixCache, state: SchedulerState, *, fail_on_loss: bool
    ) -> None:
        self._cache = cache
        self._state = state
        self._pool = state.block_pool
        state.on_end.append(self._finish)
        self._fail_on_loss = fail_on_loss
        self._loads: dict[int, _Load] = {}
        self._snapshots = state.snapshots
        self._state_slots: dict[int, int] = {}
        """Ticket of a load → slot that is reserved for its state."""
        self._state_stores: dict[int, tuple[bytes, int]] = {}
        """Ticket → hash and slot of a snapshot that is copied to the tiers."""
        self._unstored: dict[bytes, None] = {}
        """Hashes of snapshots that are to be copied next, in order."""
        self._num_lost = 0
        """Snapshots that others took the place of before they were copied."""
        if state.snapshot_planner is not None:
            state.snapshot_planner.on_taken = self._store_state
        self._stores: dict[int, list[int]] = {}
        self._registered: list[tuple[bytes, int]] = []
        """(hash, block) registered since the last store."""

    # --- before a sequence is admitted ----------------------------------------------------------

    def add(self, request: Request) -> None:
        self._cache.on_request_added(request.request_id, request.num_prompt_tokens)

    def decide(self, sequence: Sequence, cached: list[int], reserve: int) -> LoadDecision:
        """For a sequence that could be admitted with the `cached` blocks of its prefix.

        A load leaves `reserve` blocks free beside those that the rest of the prompt needs.
        """
        if self._snapshots is not None and not self._snapshots.num_slots:
            return LoadDecision.COMPUTE  # no prefix can be used
        request, block_size = sequence.request, self._pool.block_size
        limit = (request.num_prompt_tokens - 1) // block_size
        answer = self._cache.lookup(
            request.request_id, lambda: list(sequence.hashes(block_size, limit)), len(cached)
        )
        if answer.state == "pending":
            self._state.begin_loading(sequence)
            return LoadDecision.LOADING
        if self._snapshots is not None:  # the next one that has as much can begin there
            sequence.num_shared_blocks = max(sequence.num_shared_blocks, answer.num_shared)
        if answer.state != "hit":
            return LoadDecision.COMPUTE
        return self._begin_load(sequence, cached, min(answer.num_blocks, limit), reserve)

    def _begin_load(
        self, sequence: Sequence, cached: list[int], num_blocks: int, reserve: int
    ) -> LoadDecision:
        rest = self._pool.blocks_for(len(sequence.tokens)) - num_blocks
        # The lookup, and with it the hashing, may have been made for another sample.
        sequence.hash_blocks(self._pool.block_size, num_blocks)
        hashes, resident = sequence.block_hashes[:num_blocks], cached
        if self._snapshots is not None:  # more may be here, without a state after it
            resident = self._pool.match(hashes)
        num_new = num_blocks - len(resident)
        blocks = self._pool.try_allocate(num_new, resident, reserve=reserve + rest)
        if blocks is None:
            return LoadDecision.NO_ROOM
        snapshot = None
        if (
            self._snapshots is not None
            and (snapshot := self._snapshots.reserve(at_once=True)) is None
        ):
            self._pool.release(blocks)
            return LoadDecision.COMPUTE
        request_id, num_local = sequence.request.request_id, len(cached)
        ticket = self._cache.on_allocated(
            request_id, blocks, num_local, num_resident=len(resident), snapshot=snapshot
        )
        load = _Load(request_id, blocks, hashes, len(resident), self._pool.generation, snapshot)
        if self._pool.events is not None:
            size = self._pool.block_size
            indices = range(len(resident), num_blocks)
            load.contents.extend(block_content(sequence, index, size) for index in indices)
        self._loads[ticket] = load
        if snapshot is not None:
            self._state_slots[ticket] = snapshot
        self._state.begin_loading(sequence)
        return LoadDecision.LOADING

    def note_admission(self, request: Request, cached: list[int]) -> ExternalCacheStats:
        """At a request's first admission with `cached` blocks. Returns what the tiers loaded."""
        num_cached = len(cached) * self._pool.block_size
        return self._cache.on_admitted(request.request_id, num_cached, frozenset(cached))

    def _finish(self, request: Request) -> None:
        self._cache.on_request_finished(request.request_id)
        for sequence in request.sequences:
            if sequence.answer_snapshot is not None:
                self._store_state(sequence.answer_snapshot)

    # --- stores ---------------------------------------------------------------------------------

    def note_registered(self, block_hash: bytes, block: int) -> None:
        """A block was computed and registered under its hash."""
        self._registered.append((block_hash, block))

    def store_registered(self) -> None:
        """Offer newly registered blocks to the tiers; dropped where their queue is full."""
        if not self._registered:
            return
        hashes = [block_hash for block_hash, _ in self._registered]
        blocks = [block for _, block in self._registered]
        self._registered.clear()
        ticket = self._cache.try_store(hashes, blocks)
        if ticket is not None:
            self._pool.try_allocate(0, blocks)
            self._stores[ticket] = blocks

    def _store_state(self, block_hash: bytes) -> None:
        """Offer a snapshot to the tiers."""
        self._unstored[block_hash] = None
        self._store_states()

    def _store_states(self) -> None:
        """At most a quarter of all snapshots are copied at a time: the others can make room for
        those that steps take."""
        snapshots = self._snapshots
        assert snapshots is not None
        while self._unstored and len(self._state_stores) < max(1, snapshots.num_slots // 4):
            block_hash = next(iter(self._unstored))
            del self._unstored[block_hash]
            if not snapshots.holds(block_hash):
                self._num_lost += 1
                continue
            slot = snapshots.keep(block_hash)
            ticket = self._cache.try_store_state(block_hash, slot)
            if ticket is None:
                snapshots.unpin(block_hash, slot)
            else:
                self._state_stores[ticket] = block_hash, slot

    # --- reports of the tiers -------------------------------------------------------------------

    def take_reports(self) -> None:
        report = self._cache.poll()
        if not report:
            return
        for request_id in report.answered:
            self._resume(request_id)
        for load in report.loads:
            self._end_load(load)
        for ticket in report.acknowledged:
            self._acknowledge(ticket)

    def _resume(self, request_id: str) -> None:
        request = self._state.queues.requests.get(request_id)
        if request is not None:
            self._state.end_loading(request)

    def _end_load(self, report: LoadReport) -> None:
        load = self._loads.get(report.ticket)
        if load is not None and load.generation == self._pool.generation:
            for index in range(load.num_resident, load.num_resident + report.num_loaded):
                registered = self._pool.register(load.block_ids[index], load.hashes[index])
                if registered and self._pool.events is not None and load.contents:
                    content = load.contents[index - load.num_resident]
                    self._pool.events.stored(load.hashes[index], *content)
            if report.state_after and self._snapshots is not None:
                slot = self._state_slots.pop(report.ticket)
                block_hash = load.hashes[report.state_after - 1]
                self._snapshots.register(slot, block_hash, loaded=True)
        request = self._state.queues.requests.get(report.request_id)
        if request is None:
            return
        if report.failure is not None and self._fail_on_loss:
            error = UnavailableError(
                "a part of the prompt that an external KV tier held could not be loaded "
                f"({report.failure}); the server is configured not to compute it again"
            )
            self._state.end(request, "error", error)
            return
        self._state.end_loading(request)

    def _acknowledge(self, ticket: int) -> None:
        self._acknowledge_state(ticket)
        load = self._loads.pop(ticket, None)
        blocks = load.block_ids if load is not None else self._stores.pop(ticket, None)
        if blocks:
            self._pool.release(blocks)

    def _acknowledge_state(self, ticket: int) -> None:
        if self._snapshots is None:
            return
        slot, stored = self._state_slots.pop(ticket, None), self._state_stores.pop(ticket, None)
        if slot is not None:
            self._snapshots.release(slot)
        if stored is not None:
            self._snapshots.unpin(*stored)
            self._store_states()

    # --- figures --------------------------------------------------------------------------------

    def block_tables(self) -> list[list[int]]:
        """The blocks of each transfer, for `BlockPool.check_integrity`."""
        return [load.block_ids for load in self._loads.values()] + list(self._stores.values())

    def stats(self) -> dict[str, float]:
        live = self._state.queues.requests
        abandoned = [load for load in self._loads.values() if load.request_id not in live]
        stats = self._cache.stats()
        if self._snapshots is not None:
            stats["kv_transfer_dropped_stores_total"] += self._num_lost
            under_way = len(self._state_slots) + len(self._state_stores) + len(self._unstored)
            stats["kv_transfer_states_held"] = under_way
        return stats | {
            "kv_transfer_blocks_held": sum(map(len, self.block_tables())),
            "kv_transfer_blocks_quarantined": sum(len(load.block_ids) for load in abandoned),
            "kv_transfer_requests_loading": len(self._state.queues.loading),
        }
