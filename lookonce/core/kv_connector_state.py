"""Prefixes held by external KV tiers: sequences that wait for them, and the blocks of transfers.

    try_admit ─▶ lookup pending ─▶ LOADING ─ answered ───▶ WAITING ─▶ try_admit
                 lookup hit: blocks allocated, load begun ─▶ LOADING ─ LoadReport ─▶ WAITING ─▶ ...

The blocks of a load belong to the load, not to the sequence. Loaded blocks are registered under
their hashes like computed ones, and the sequence then finds them in the prefix cache. The blocks of
a load or a store are released only when its ticket is acknowledged: until then a worker may still
write or read them, even if the request has ended (quarantine).
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
    num_local: int
    generation: int
    contents: list[BlockContent] = field(default_factory=list)
    """Of each block from `num_local` on, where events are published."""


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
        request, block_size = sequence.request, self._pool.block_size
        limit = (request.num_prompt_tokens - 1) // block_size
        answer = self._cache.lookup(
            request.request_id, lambda: list(sequence.hashes(block_size, limit)), len(cached)
        )
        if answer.state == "pending":
            self._state.begin_loading(sequence)
            return LoadDecision.LOADING
        if answer.state != "hit":
            return LoadDecision.COMPUTE
        return self._begin_load(sequence, cached, min(answer.num_blocks, limit), reserve)

    def _begin_load(
        self, sequence: Sequence, cached: list[int], num_blocks: int, reserve: int
    ) -> LoadDecision:
        rest = self._pool.blocks_for(len(sequence.tokens)) - num_blocks
        blocks = self._pool.try_allocate(num_blocks - len(cached), cached, reserve=reserve + rest)
        if blocks is None:
            return LoadDecision.NO_ROOM
        request_id, num_local = sequence.request.request_id, len(cached)
        ticket = self._cache.on_allocated(request_id, blocks, num_local)
        # The lookup, and with it the hashing, may have been made for another sample.
        sequence.hash_blocks(self._pool.block_size, num_blocks)
        hashes = sequence.block_hashes[:num_blocks]
        load = _Load(request_id, blocks, hashes, num_local, self._pool.generation)
        if self._pool.events is not None:
            size = self._pool.block_size
            indices = range(num_local, num_blocks)
            load.contents.extend(block_content(sequence, index, size) for index in indices)
        self._loads[ticket] = load
        self._state.begin_loading(sequence)
        return LoadDecision.LOADING

    def note_admission(self, request: Request, cached: list[int]) -> ExternalCacheStats:
        """At a request's first admission with `cached` blocks. Returns what the tiers loaded."""
        num_cached = len(cached) * self._pool.block_size
        return self._cache.on_admitted(request.request_id, num_cached, frozenset(cached))

    def _finish(self, request: Request) -> None:
        self._cache.on_request_finished(request.request_id)

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
            for index in range(load.num_local, load.num_local + report.num_loaded):
                registered = self._pool.register(load.block_ids[index], load.hashes[index])
                if registered and self._pool.events is not None and load.contents:
                    content = load.contents[index - load.num_local]
                    self._pool.events.stored(load.hashes[index], *content)
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
        load = self._loads.pop(ticket, None)
        blocks = load.block_ids if load is not None else self._stores.pop(ticket, None)
        if blocks:
            self._pool.release(blocks)

    # --- figures --------------------------------------------------------------------------------

    def block_tables(self) -> list[list[int]]:
        """The blocks of each transfer, for `BlockPool.check_integrity`."""
        return [load.block_ids for load in self._loads.values()] + list(self._stores.values())

    def stats(self) -> dict[str, float]:
        live = self._state.queues.requests
        abandoned = [load for load in self._loads.values() if load.request_id not in live]
        return self._cache.stats() | {
            "kv_transfer_blocks_held": sum(map(len, self.block_tables())),
            "kv_transfer_blocks_quarantined": sum(len(load.block_ids) for load in abandoned),
            "kv_transfer_requests_loading": len(self._state.queues.loading),
        }
