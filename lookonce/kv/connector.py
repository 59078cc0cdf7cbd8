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
from lookonce.kv.transfer import Acknowledged, Answered, Event, Loaded, Measured, Transfers
from lookonce.types.kv import ExternalCacheStats, KVLoadPolicy, LoadReport, Lookup, TransferReport
from lookonce.types.ports import KVPageCopier

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
    answered: bool = False
    released: bool = True
    loaded: Sequence[tuple[int, int]] = ()
    """(block id, tier) of each block a load has put in place."""
    block_ids: Sequence[int] = ()
    num_local: int = 0


class KVConnector:
    """Implements `types.ports.ExternalPrefixCache` over a chain of tiers.

    `wake` is called, from any thread, when there is something to poll.
    """

    def __init__(
        self,
        chain: TierChain,
        pages: KVPageCopier,
        *,
        policy: KVLoadPolicy = "auto",
        wake: Callable[[], None] = lambda: None,
        transfers: Callable[..., Transfers] = Transfers,
        **limits: float,
    ) -> None:
        """`transfers` makes the workers; a simulation has others."""
        self.wake = wake
        self._chain = chain
        self._policy = policy
        self._block_size = pages.layout.block_size
        self._events: deque[Event] = deque()
        self._cost = CostModel(len(chain.tiers), self._block_size)
        self._prompts: dict[str, _Prompt] = {}
        self._owners: dict[int, str] = {}
        """Ticket of a lookup or load → its request."""
        self._num_tickets = 0
        self._queries = self._hits = self._matched = 0
        self._num_unknown = 0
        self._workers = transfers(chain, pages, self._tell, **limits)

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

    def on_allocated(self, request_id: str, block_ids: Sequence[int], num_local: int) -> int:
        ticket = self._new_ticket(request_id)
        prompt = self._prompts[request_id]
        keys, sources, end = prompt.keys, prompt.sources or (), len(block_ids)
        prompt.ticket, prompt.released = ticket, True  # the load gives its leases back
        prompt.block_ids, prompt.num_local = block_ids, num_local
        prompt.record.begin_load()
        self._workers.release(keys[end : len(sources)], sources[end:])
        self._workers.submit_load(ticket, keys[:end], sources[:end], block_ids, num_local)
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
            return []
        prompt.ticket, prompt.answered, prompt.sources = None, True, event.sources
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
        end = prompt.num_local + event.num_loaded
        blocks, sources = prompt.block_ids[:end], (prompt.sources or ())[:end]
        prompt.loaded = list(zip(blocks, sources, strict=True))[prompt.num_local :]
        prompt.sources = ()
        prompt.record.end_load(failed=event.reason is not None)
        return [LoadReport(request_id, event.ticket, event.num_loaded, event.reason)]

    def _owner(self, ticket: int) -> tuple[str, _Prompt | None]:
        request_id = self._owners.pop(ticket, "")
        prompt = self._prompts.get(request_id)
        return request_id, prompt if prompt is not None and prompt.ticket == ticket else None

    # --- inside ---------------------------------------------------------------------------------

    def _weigh(self, prompt: _Prompt, num_local: int) -> Lookup:
        """What is worth loading of an answered lookup, as things are now."""
        if prompt.loaded or prompt.released:  # loaded once already, or nothing to load
            return MISS if prompt.sources is not None else ERROR
        sources = prompt.sources or ()
        if prompt.record.weigh(num_local * self._block_size) == 0:
            return MISS
        end = len(sources)
        if self._policy == "auto":
            end = self._cost.worth_loading(sources, num_local)
        return Lookup("hit", end) if end > num_local else MISS

    def _release(self, prompt: _Prompt) -> None:
        if not prompt.released:
            prompt.released = True
            sources = prompt.sources or ()
            self._workers.release(prompt.keys[: len(sources)], sources)

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

    def __init__(self, num_tiers: int, block_size: int) -> None:
        self._block_size = block_size
        self._prefill = Rate()
        self._loads = [Rate() for _ in range(num_tiers)]
        self._refusals = 0

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._prefill.observe(num_tokens / self._block_size, seconds)

    def observe_load(self, tier: int, num_blocks: int, seconds: float) -> None:
        self._loads[tier].observe(num_blocks, seconds)

    def worth_loading(self, sources: Sequence[int], num_local: int) -> int:
        """Up to which of the prompt's leading blocks to load; `num_local`: none of them.

        `sources` names the tier of each leading block, local ones included.
        """
        compute = self._prefill.seconds_per_unit
        if compute is None:
            return len(sources)
        best, best_gain, gain = num_local, 0.0, 0.0
        for index in range(num_local, len(sources)):
            gain += compute - (self._loads[sources[index]].seconds_per_unit or 0.0)
            if gain > best_gain:
                best, best_gain = index + 1, gain
        if best > num_local:
            return best
        self._refusals += 1
        return len(sources) if self._refusals % PROBE_EVERY == 0 else num_local
