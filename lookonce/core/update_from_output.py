"""Takes in what a step computed: tokens, completed blocks, passed items, failures, ends."""

from __future__ import annotations

from collections.abc import Iterable

from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.kv_connector_state import KVConnectorState
from lookonce.core.request import ReuseStats, Sequence, SequenceState
from lookonce.core.scheduler_state import Counters, PendingOutput, RequestQueues, SchedulerState
from lookonce.errors import LookOnceError
from lookonce.types.request import FinishReason, TokenDelta, TokenLogprob
from lookonce.types.step import StepPlan, StepResult


class UpdateFromOutput:
    """Moves every scheduled sequence on by what was computed for it."""

    def __init__(
        self,
        pool: BlockPool,
        encoder_cache: EncoderCache,
        roster: RequestQueues,
        lifecycle: SchedulerState,
        outbox: PendingOutput,
        counters: Counters,
        *,
        prefix_caching: bool,
        external: KVConnectorState | None = None,
    ) -> None:
        self._pool = pool
        self._encoder_cache = encoder_cache
        self._roster = roster
        self._lifecycle = lifecycle
        self._outbox = outbox
        self._counters = counters
        self._prefix_caching = prefix_caching
        self._external = external

    def apply(
        self,
        plan: StepPlan,
        result: StepResult,
        encode_owners: Iterable[tuple[ReuseStats, int]],
    ) -> None:
        """Sequences that ended since the plan was made are passed over.

        `encode_owners`: of each item encoded, the receipt and the feature that caused it.
        """
        if plan.encode or result.lost_copies:
            self._take_encodings(plan, result, encode_owners)
        if result.failed_items or result.failed_sequences:
            self._end_failed(result)
        if result.prompt_logprobs:
            self._take_prompt_logprobs(plan, result)
        sequences, token_ids, logprobs = self._roster.sequences, result.token_ids, result.logprobs
        block_size, decoding = self._pool.block_size, SequenceState.DECODING
        sampled = 0
        for entry in plan.scheduled:
            sequence = sequences.get(entry.seq_id)
            if sequence is not None:
                sequence.num_computed = entry.start + entry.num_tokens
                if sequence.num_computed % block_size == 0 or sequence.state is not decoding:
                    self._advance(sequence)
                if entry.sample:
                    logprob = None if logprobs is None else logprobs[sampled]
                    self._append(sequence, token_ids[sampled], logprob)
            sampled += entry.sample
        if self._external is not None:
            self._external.flush()

    def _take_encodings(
        self,
        plan: StepPlan,
        result: StepResult,
        encode_owners: Iterable[tuple[ReuseStats, int]],
    ) -> None:
        for encoded, (facts, index) in zip(plan.encode, encode_owners, strict=True):
            if encoded.key in result.failed_items:
                continue
            self._counters.encoder_runs += 1
            seconds = result.encode_seconds.get(encoded.key)
            if seconds is not None:
                self._encoder_cache.record_cost(encoded.key, seconds)
                facts.note_encoding(index, seconds)
        for key in result.lost_copies:
            self._encoder_cache.host.lose(key)

    def _take_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for entry in plan.scheduled:
            sequence = self._roster.sequences.get(entry.seq_id)
            scored = result.prompt_logprobs.get(entry.seq_id)
            if sequence is not None and scored is not None:
                sequence.request.note_prompt_logprobs(entry.start, scored)

    def _end_failed(self, result: StepResult) -> None:
        """End every request that needed what failed; the others never notice."""
        for key, error in result.failed_items.items():
            holders = self._encoder_cache.holders(key)
            self._encoder_cache.remove_failed(key)
            self._end_requests(holders, error)
        for seq_id, error in result.failed_sequences.items():
            self._end_requests((seq_id,), error)

    def _end_requests(self, seq_ids: Iterable[int], error: LookOnceError) -> None:
        for seq_id in seq_ids:
            sequence = self._roster.sequences.get(seq_id)
            if sequence is not None:
                self._lifecycle.end(sequence.request, "error", error)

    def _advance(self, sequence: Sequence) -> None:
        """All that new positions bring about; a decode's bring nothing until they fill a block."""
        self._register_blocks(sequence)
        if sequence.held:
            self._release_passed_items(sequence)
        request = sequence.request
        if request.session is not None:
            request.session.let_go(request.features, request.items, sequence.num_computed)
        if sequence.state is SequenceState.PREFILLING:
            self._lifecycle.accept_once_covered(sequence)

    def _register_blocks(self, sequence: Sequence) -> None:
        """Remember full blocks under their hashes, unless a reset made their K/V outdated."""
        full = sequence.num_computed // self._pool.block_size
        if full <= sequence.num_registered or not self._prefix_caching:
            return
        if sequence.cache_generation == self._pool.generation:
            sequence.extend_chain(self._pool.block_size, full)
            for index in range(sequence.num_registered, full):
                self._remember(sequence.block_ids[index], sequence.chain[index])
        sequence.num_registered = full

    def _remember(self, block: int, block_hash: bytes) -> None:
        if self._pool.register(block, block_hash) and self._external is not None:
            self._external.completed(block_hash, block)

    def _release_passed_items(self, sequence: Sequence) -> None:
        """Items that end at or before what is computed are not needed any more."""
        features, held = sequence.request.features, sequence.held
        coming, passed = features.next_index(sequence.num_computed), []
        while held and held[0] < coming:
            passed.append(held.popleft())
        keys = [features[index].key for index in passed]
        self._encoder_cache.release_many(sequence.seq_id, keys)

    def _append(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        """Add the sampled token, report it, and end the sequence if it was the last."""
        request = sequence.request
        sequence.tokens.append(token_id)
        self._counters.generation_tokens += 1
        reason, stop_token_id = finish_reason(sequence, token_id)
        pausing = reason is not None and _goes_on(sequence)
        if pausing:
            reason = stop_token_id = None
        delta = TokenDelta(request.request_id, sequence.index, [token_id], reason, stop_token_id)
        if logprob is not None:
            delta.logprobs = [logprob]
        self._outbox.output.deltas.append(delta)
        prefilling = sequence.state is SequenceState.PREFILLING
        if prefilling:
            self._end_prompt(sequence, delta)
        if pausing:
            self._lifecycle.pause(sequence)
        elif reason is not None:
            self._lifecycle.finish(sequence)
        elif prefilling:
            self._lifecycle.begin_decode(sequence)

    def _end_prompt(self, sequence: Sequence, delta: TokenDelta) -> None:
        """Its prompt is computed; `delta` is of the token sampled after it."""
        request = sequence.request
        if sequence.index == 0 and sequence.num_generated == 1:
            delta.facts = request.facts.freeze()
            delta.prompt_logprobs = request.take_prompt_logprobs()
        if not request.prefilled:
            self._lifecycle.release_siblings(sequence)


def _goes_on(sequence: Sequence) -> bool:
    """What would end another request only ends the turn of a live session."""
    session = sequence.request.session
    return session is not None and len(sequence.tokens) < session.limit


def finish_reason(sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
    """Why the token just appended ends the sequence, and the stop token if one did.

    An end token of the model wins over `stop_token_ids`, and both over length.
    """
    request = sequence.request
    if token_id in request.eos_token_ids:
        return "stop", None
    if token_id in request.stop_token_ids:
        return "stop", token_id
    if sequence.num_computed + 1 >= sequence.token_limit:  # all but the new token are computed
        return "length", None
    return None, None
