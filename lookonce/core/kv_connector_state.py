"""Prefixes that are held outside the device: who waits for one, and which blocks that occupies.

    try_admit ─▶ lookup pending ─▶ LOADING ─(answered)─▶ WAITING ─▶ try_admit
                 lookup hit: blocks taken, load begun ─▶ LOADING ─(LoadReport)─▶ WAITING ─▶ ...

A load's blocks belong to the load, not to the sequence. What arrived is remembered under its hash
like any computed block, and the sequence then finds it as a prefix hit. The references of a load or
a store are given back only when its ticket is acknowledged: until then a worker may still write or
read them, even if the request is long gone (quarantine).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lookonce.core.block_pool import BlockPool
from lookonce.core.request import Request, Sequence
from lookonce.core.scheduler_state import RequestQueues, SchedulerState
from lookonce.errors import UnavailableError
from lookonce.types.kv import ExternalFacts, LoadReport
from lookonce.types.ports import ExternalPrefixCache


class LoadDecision(Enum):
    """What a waiting sequence does about its external prefix."""

    NONE = "none"
    """Go on and compute."""
    LOADING = "loading"
    """It left the waiting lane until the tiers have answered."""
    NO_ROOM = "no room"
    """There is one, but not the blocks to compute the rest of the prompt."""


@dataclass(frozen=True, slots=True)
class _Load:
    request_id: str
    block_ids: list[int]
    """The local prefix, then the blocks to load."""
    hashes: list[bytes]
    num_local: int
    generation: int


class KVConnectorState:
    """The scheduler's dealings with `ExternalPrefixCache`; nothing here waits."""

    def __init__(
        self,
        cache: ExternalPrefixCache,
        pool: BlockPool,
        roster: RequestQueues,
        lifecycle: SchedulerState,
        *,
        fail_on_loss: bool,
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._roster = roster
        self._lifecycle = lifecycle
        self._fail_on_loss = fail_on_loss
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, list[int]] = {}
        self._completed: list[tuple[bytes, int]] = []
        """(hash, block) completed since the last flush."""

    # --- before a sequence is admitted ----------------------------------------------------------

    def add(self, request: Request) -> None:
        self._cache.on_request_added(request.request_id, request.num_prompt_tokens)

    def consider(self, sequence: Sequence, cached: list[int], reserve: int) -> LoadDecision:
        """For a sequence that is about to compute its prompt, `cached` blocks of it being here."""
        request, block_size = sequence.request, self._pool.block_size
        limit = (request.num_prompt_tokens - 1) // block_size
        answer = self._cache.lookup(
            request.request_id, lambda: list(sequence.hashes(block_size, limit)), len(cached)
        )
        if answer.state == "pending":
            self._lifecycle.begin_loading(sequence)
            return LoadDecision.LOADING
        if answer.state != "hit":
            return LoadDecision.NONE
        return self._begin_load(sequence, cached, min(answer.num_blocks, limit), reserve)

    def _begin_load(
        self, sequence: Sequence, cached: list[int], num_blocks: int, reserve: int
    ) -> LoadDecision:
        """Takes the blocks of the load, if those of the rest of the prompt are free beside them."""
        rest = self._pool.blocks_for(len(sequence.tokens)) - num_blocks
        blocks = self._pool.try_allocate(num_blocks - len(cached), cached, reserve=reserve + rest)
        if blocks is None:
            return LoadDecision.NO_ROOM
        request_id, num_local = sequence.request.request_id, len(cached)
        ticket = self._cache.on_allocated(request_id, blocks, num_local)
        sequence.extend_chain(self._pool.block_size, num_blocks)  # another sample may have asked
        hashes = sequence.chain[:num_blocks]
        self._loads[ticket] = _Load(request_id, blocks, hashes, num_local, self._pool.generation)
        self._lifecycle.begin_loading(sequence)
        return LoadDecision.LOADING

    def admitted(self, request: Request, cached: list[int]) -> ExternalFacts:
        """At a request's first admission, with `cached` blocks of any origin."""
        num_cached = len(cached) * self._pool.block_size
        return self._cache.on_admitted(request.request_id, num_cached, frozenset(cached))

    def finished(self, request: Request) -> None:
        self._cache.on_request_finished(request.request_id)

    # --- stores ---------------------------------------------------------------------------------

    def completed(self, block_hash: bytes, block: int) -> None:
        """A block was computed to its end and is remembered under its hash."""
        self._completed.append((block_hash, block))

    def flush(self) -> None:
        """Offer what a step completed; a full queue drops it."""
        if not self._completed:
            return
        hashes = [block_hash for block_hash, _ in self._completed]
        blocks = [block for _, block in self._completed]
        self._completed.clear()
        ticket = self._cache.try_store(hashes, blocks)
        if ticket is not None:
            self._pool.try_allocate(0, blocks)
            self._stores[ticket] = blocks

    # --- what came back -------------------------------------------------------------------------

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
        request = self._roster.requests.get(request_id)
        if request is not None:
            self._lifecycle.end_loading(request)

    def _end_load(self, report: LoadReport) -> None:
        load = self._loads.get(report.ticket)
        if load is not None and load.generation == self._pool.generation:
            for index in range(load.num_local, load.num_local + report.num_loaded):
                self._pool.register(load.block_ids[index], load.hashes[index])
        request = self._roster.requests.get(report.request_id)
        if request is None:
            return
        if report.failure is not None and self._fail_on_loss:
            error = UnavailableError(
                "a part of the prompt that an external KV tier held could not be loaded "
                f"({report.failure}); the server is configured not to compute it again"
            )
            self._lifecycle.end(request, "error", error)
            return
        self._lifecycle.end_loading(request)

    def _acknowledge(self, ticket: int) -> None:
        load = self._loads.pop(ticket, None)
        blocks = load.block_ids if load is not None else self._stores.pop(ticket, None)
        if blocks:
            self._pool.release(blocks)

    # --- what there is to know ------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether some worker still has blocks in hand."""
        return bool(self._loads or self._stores)

    def block_tables(self) -> list[list[int]]:
        """Blocks held for transfers, for `BlockPool.check_integrity`."""
        return [load.block_ids for load in self._loads.values()] + list(self._stores.values())

    def stats(self) -> dict[str, float]:
        live = self._roster.requests
        abandoned = [load for load in self._loads.values() if load.request_id not in live]
        return self._cache.stats() | {
            "kv_transfer_blocks_held": sum(map(len, self.block_tables())),
            "kv_transfer_blocks_quarantined": sum(len(load.block_ids) for load in abandoned),
            "kv_transfer_requests_loading": len(self._roster.loading),
        }

    def close(self) -> None:
        self._cache.close()
