"""The scheduler's half of the external tiers: who asked for what, and what came of it.

Used by the step thread alone; workers put their events into a queue. The events wait until the
scheduler polls, so nothing changes in the middle of a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from lookonce.kv.accounting import ExternalAccount
from lookonce.kv.chain import TierChain
from lookonce.kv.transfer import (
    NO_STATES,
    Acknowledged,
    Answered,
    Event,
    HeldStates,
    Loaded,
    Measured,
    Transfers,
)
from lookonce.types.kv import (
    ExternalCacheStats,
    KVLoadPolicy,
    LoadReport,
    Lookup,
    StatePieces,
    TransferReport,
)
from lookonce.types.ports import KVPageCopier, StateCopier

MISS = Lookup("miss")
ERROR = Lookup("error")


@dataclass(slots=True)
class _Prompt:
    """One request between its addition and its end."""

    record: ExternalAccount
    keys: Sequence[bytes] = ()
    pending: Lookup | None = None
    ticket: int | None = None
    """Of the lookup or load under way."""
    sources: tuple[int, ...] | None = None
    """Tier of each leading block held there; leased until `released`."""
    states: HeldStates = NO_STATES
    """Leased until `released`, too."""
    answered: bool = False
    released: bool = True
    loaded: Sequence[tuple[int, int]] = ()
    """(block id, tier) of each block a load has put in place, or has made usable by a state."""
    block_ids: Sequence[int] = ()
    num_local: int = 0
    num_resident: int = 0
    with_state: bool = False
    """Of a load: it ends with a state."""


class KVConnector:
    """Implements `types.ports.ExternalPrefixCache` over a chain of tiers.

    `wake` is called, from any thread, when there is something to poll.
    """

    def __init__(
        self,
        chain: TierChain,
        pages: KVPageCopier,
        *,
        states: StateCopier | None = None,
        policy: KVLoadPolicy = "auto",
        wake: Callable[[], None] = lambda: None,
        transfers: Callable[..., Transfers] = Transfers,
        **limits: float,
    ) -> None:
        """`states`: of a model that keeps states beside keys and values. `transfers` makes the
        workers; a simulation has others."""
        self.wake = wake
        self._chain = chain
        self._policy = policy
        self._block_size = pages.layout.block_size
        self._events: deque[Event] = deque()
        pieces = 0
        if states is not None:
            pieces = StatePieces(states.state_bytes, pages.layout.block_bytes).num_pieces
        self._cost = CostModel(len(chain.tiers), self._block_size, pieces)
        self._prompts: dict[str, _Prompt] = {}
        self._owners: dict[int, str] = {}
        """Ticket of a lookup or load → its request."""
        self._num_tickets = 0
        self._queries = self._hits = self._matched = 0
        self._num_unknown = 0
        self._has_states = states is not None
        kept = {} if states is None else {"states": states}
        self._workers = transfers(chain, pages, self._tell, **kept, **limits)

    # --- a request's way ------------------------------------------------------------------------

    def on_request_added(self, request_id: str, num_prompt_tokens: int) -> None:
        self._prompts[request_id] = _Prompt(ExternalAccount(num_prompt_tokens, self._block_size))

    def lookup(
        self, request_id: str, hashes: Callable[[], Sequence[bytes]], num_local: int
    ) -> Lookup:
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return MISS
        if prompt.answered:
            return self._weigh(prompt, num_local)
        if prompt.pending is None:
            keys = tuple(hashes())
            if num_local >= len(keys):
                return MISS
            prompt.keys = keys
            prompt.ticket = self._new_ticket(request_id)
            deadline = self._workers.submit_lookup(prompt.ticket, keys)
            prompt.pending = Lookup("pending", deadline=deadline)
        return prompt.pending

    def on_allocated(
        self,
        request_id: str,
        block_ids: Sequence[int],
        num_local: int,
        *,
        num_resident: int | None = None,
        snapshot: int | None = None,
    ) -> int:
        ticket = self._new_ticket(request_id)
        prompt = self._prompts[request_id]
        first = num_local if num_resident is None else num_resident
        keys, sources, end = prompt.keys, prompt.sources or (), len(block_ids)
        prompt.ticket, prompt.released = ticket, True  # the load gives its leases back
        prompt.block_ids, prompt.num_local, prompt.num_resident = block_ids, num_local, first
        prompt.with_state = snapshot is not None
        prompt.record.begin_load()
        self._workers.release(keys[end : len(sources)], sources[end:])
        if snapshot is None:
            self._workers.submit_load(ticket, keys[:end], sources[:end], block_ids, first)
        else:
            self._workers.submit_load(
                ticket,
                keys[:end],
                sources[:end],
                block_ids,
                first,
                states=prompt.states,
                num_local=num_local,
                snapshot=snapshot,
            )
        return ticket

    def on_admitted(
        self, request_id: str, num_cached: int, used: Container[int]
    ) -> ExternalCacheStats:
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return ExternalCacheStats()
        self._release(prompt)
        if prompt.record.reuse_stats is not None:
            return prompt.record.reuse_stats
        names = [self._chain.tiers[tier].name for block, tier in prompt.loaded if block in used]
        local = num_cached - len(names) * self._block_size
        reuse_stats = prompt.record.freeze(names, local)
        self._queries += prompt.record.num_prompt_tokens - local
        self._matched += reuse_stats.matched
        self._hits += reuse_stats.loaded
        return reuse_stats

    def on_request_finished(self, request_id: str) -> None:
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        prompt.record.abort()
        self._release(prompt)
        if prompt.ticket is not None:
            self._workers.cancel(prompt.ticket)

    # --- stores and figures ---------------------------------------------------------------------

    def try_store(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int | None:
        self._num_tickets += 1
        ticket = self._num_tickets
        return ticket if self._workers.submit_store(ticket, hashes, block_ids) else None

    def try_store_state(self, block_hash: bytes, snapshot: int) -> int | None:
        self._num_tickets += 1
        ticket = self._num_tickets
        return ticket if self._workers.submit_state_store(ticket, block_hash, snapshot) else None

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._cost.observe_prefill(num_tokens, seconds)

    def stats(self) -> dict[str, float]:
        stats = {
            "external_prefix_cache_queries_total": float(self._queries),
            "external_prefix_cache_matched_total": float(self._matched),
            "external_prefix_cache_hits_total": float(self._hits),
            "kv_transfer_unknown_completions_total": float(self._num_unknown),
        }
        stats |= self._workers.stats()
        for tier in self._chain.tiers:
            stats |= tier.stats(self._block_size)
            if self._has_states:
                stats |= tier.state_stats()
        return stats

    def close(self) -> None:
        self._workers.close()

    # --- what workers report --------------------------------------------------------------------

    def poll(self) -> TransferReport:
        if not self._events:
            return NOTHING
        answered: list[str] = []
        loads: list[LoadReport] = []
        acknowledged: list[int] = []
        while self._events:
            match self._events.popleft():
                case Answered() as event:
                    answered += self._take_answer(event)
                case Loaded() as event:
                    loads += self._take_load(event)
                case Acknowledged(ticket):
                    acknowledged.append(ticket)
                case Measured(tier, num_blocks, seconds):
                    self._cost.observe_load(tier, num_blocks, seconds)
        return TransferReport(tuple(answered), tuple(loads), tuple(acknowledged))

    def _take_answer(self, event: Answered) -> list[str]:
        request_id, prompt = self._owner(event.ticket)
        if prompt is None:
            self._num_unknown += 1
            held_there = event.sources or ()
            self._workers.release(event.keys[: len(held_there)], held_there)
            self._workers.release(event.states.keys, event.states.sources)
            return []
        prompt.ticket, prompt.answered, prompt.sources = None, True, event.sources
        prompt.states = event.states
        prompt.released = not event.sources
        held = None if event.sources is None else len(event.sources) * self._block_size
        prompt.record.answered(held)
        return [request_id]

    def _take_load(self, event: Loaded) -> list[LoadReport]:
        request_id, prompt = self._owner(event.ticket)
        if prompt is None:
            self._num_unknown += 1
            return []
        prompt.ticket = None
        end = prompt.num_resident + event.num_loaded
        sources = list((prompt.sources or ())[:end])
        if prompt.with_state:
            end = event.state_after
            sources[prompt.num_local : prompt.num_resident] = [event.state_tier] * (
                prompt.num_resident - prompt.num_local
            )
        loaded = zip(prompt.block_ids[:end], sources[:end], strict=True)
        prompt.loaded = list(loaded)[prompt.num_local :]
        prompt.sources = ()
        prompt.record.end_load(failed=event.reason is not None)
        report = LoadReport(
            request_id, event.ticket, event.num_loaded, event.reason, event.state_after
        )
        return [report]

    def _owner(self, ticket: int) -> tuple[str, _Prompt | None]:
        request_id = self._owners.pop(ticket, "")
        prompt = self._prompts.get(request_id)
        return request_id, prompt if prompt is not None and prompt.ticket == ticket else None

    # --- inside ---------------------------------------------------------------------------------

    def _weigh(self, prompt: _Prompt, num_local: int) -> Lookup:
        """What is worth loading of an answered lookup, as things are now."""
        num_shared = prompt.states.num_shared
        miss = Lookup("miss", num_shared=num_shared) if num_shared else MISS
        if prompt.loaded or prompt.released:  # loaded once already, or nothing to load
            return miss if prompt.sources is not None else ERROR
        sources = prompt.sources or ()
        if prompt.record.weigh(num_local * self._block_size) == 0:
            return miss
        end = len(sources)
        if self._policy == "auto":
            ends = prompt.states.after if self._has_states else None
            end = self._cost.worth_loading(sources, num_local, ends)
        return Lookup("hit", end, num_shared=num_shared) if end > num_local else miss

    def _release(self, prompt: _Prompt) -> None:
        if not prompt.released:
            prompt.released = True
            sources, states = prompt.sources or (), prompt.states
            self._workers.release(prompt.keys[: len(sources)], sources)
            self._workers.release(states.keys, states.sources)

    def _new_ticket(self, request_id: str) -> int:
        self._num_tickets += 1
        self._owners[self._num_tickets] = request_id
        return self._num_tickets

    def _tell(self, event: Event) -> None:
        """Called by workers."""
        self._events.append(event)
        if not isinstance(event, Measured):
            self.wake()


NOTHING = TransferReport()
DECAY = 0.9
"""Weight of the observations so far when the next one comes."""
PROBE_EVERY = 8
"""One in so many decisions against loading loads all the same, to measure the tier again."""


class Rate:
    """Seconds per unit, weighted by size and recency; None before the first observation."""

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def observe(self, units: float, seconds: float) -> None:
        self._seconds = DECAY * self._seconds + seconds
        self._units = DECAY * self._units + units

    @property
    def seconds_per_unit(self) -> float | None:
        return self._seconds / self._units if self._units else None


class CostModel:
    """Compares seconds per block of loading and of prefill. A tier that was never measured counts
    as free, since only a load measures it.

    Computing grows faster than linearly with position, and spares encoder runs besides; both are
    left out, so a prefix near the break-even point may be computed though loading were cheaper.
    """

    def __init__(self, num_tiers: int, block_size: int, num_state_pieces: int = 0) -> None:
        """`num_state_pieces`: pieces, as large as blocks, that a load ends with: a state."""
        self._block_size = block_size
        self._num_state_pieces = num_state_pieces
        self._prefill = Rate()
        self._loads = [Rate() for _ in range(num_tiers)]
        self._refusals = 0

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._prefill.observe(num_tokens / self._block_size, seconds)

    def observe_load(self, tier: int, num_blocks: int, seconds: float) -> None:
        self._loads[tier].observe(num_blocks, seconds)

    def worth_loading(
        self, sources: Sequence[int], num_local: int, ends: Container[int] | None = None
    ) -> int:
        """Up to which of the prompt's leading blocks to load; `num_local`: none of them.

        `sources` names the tier of each leading block, local ones included. `ends`: of a model with
        states, where a load may end, with a state that is taken to be in its last block's tier.
        """
        compute = self._prefill.seconds_per_unit
        if compute is None:
            return len(sources)
        best, best_gain, gain = num_local, 0.0, 0.0
        for index in range(num_local, len(sources)):
            block = self._loads[sources[index]].seconds_per_unit or 0.0
            gain += compute - block
            state = block * self._num_state_pieces
            if gain - state > best_gain and (ends is None or index + 1 in ends):
                best, best_gain = index + 1, gain - state
        if best > num_local:
            return best
        self._refusals += 1
        return len(sources) if self._refusals % PROBE_EVERY == 0 else num_local
