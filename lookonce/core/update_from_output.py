"""Updates the scheduler's state from what a step computed."""

from __future__ import annotations

from collections.abc import Iterable

from lookonce.core.encoder_scheduling import EncodeOwners
from lookonce.core.kv_connector_state import KVConnectorState
from lookonce.core.request import Sequence, SequenceState
from lookonce.core.scheduler_state import SchedulerState
from lookonce.errors import LookOnceError
from lookonce.types.request import FinishReason, TokenDelta, TokenLogprob
from lookonce.types.step import StepPlan, StepResult


class UpdateFromOutput:
    """Advances every scheduled sequence by what the runner computed for it."""

    def __init__(self, state: SchedulerState, kv_connector: KVConnectorState | None) -> None:
        self._state = state
        self._kv_connector = kv_connector

    def update(self, plan: StepPlan, result: StepResult, encode_owners: EncodeOwners) -> None:
        """Update all sequences of `plan` except those that have ended since it was made.

        `encode_owners`: the requests that the items of `plan.encode` were encoded for.
        """
        if plan.encode or result.lost_copies:
            self._update_encodings(plan, result, encode_owners)
        if result.failed_items or result.failed_sequences:
            self._end_failed(result)
        if result.prompt_logprobs:
            self._note_prompt_logprobs(plan, result)
        sequences, token_ids = self._state.queues.sequences, result.token_ids
        logprobs = result.logprobs
        block_size, decoding = self._state.block_pool.block_size, SequenceState.DECODING
        sampled = 0
        for entry in plan.scheduled:
            sequence = sequences.get(entry.seq_id)
            if sequence is not None:
                sequence.num_computed = entry.start + entry.num_tokens
                if sequence.num_computed % block_size == 0 or sequence.state is not decoding:
                    self._advance(sequence)
                if entry.sample:
                    logprob = None if logprobs is None else logprobs[sampled]
                    self._append_token(sequence, token_ids[sampled], logprob)
            sampled += entry.sample
        if self._kv_connector is not None:
            self._kv_connector.store_registered()

    def _update_encodings(
        self, plan: StepPlan, result: StepResult, encode_owners: EncodeOwners
    ) -> None:
        encoder_cache = self._state.encoder_cache
        owners = ((stats, index) for stats, indices in encode_owners for index in indices)
        for encoded, (stats, index) in zip(plan.encode, owners, strict=True):
            if encoded.key in result.failed_items:
                continue
            self._state.counters.encoder_runs += 1
            seconds = result.encode_seconds.get(encoded.key)
            if seconds is not None:
                encoder_cache.record_cost(encoded.key, seconds)
                stats.note_encoding(index, seconds)
        for key in result.lost_copies:
            encoder_cache.host.lose(key)

    def _note_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for entry in plan.scheduled:
            sequence = self._state.queues.sequences.get(entry.seq_id)
            scored = result.prompt_logprobs.get(entry.seq_id)
            if sequence is not None and scored is not None:
                sequence.request.note_prompt_logprobs(entry.start, scored)

    def _end_failed(self, result: StepResult) -> None:
        """End every request that needed a failed item or had a failed sequence, and no other."""
        for key, error in result.failed_items.items():
            holders = self._state.encoder_cache.holders(key)
            self._state.encoder_cache.remove_failed(key)
            self._end_requests(holders, error)
        for seq_id, error in result.failed_sequences.items():
            self._end_requests((seq_id,), error)

    def _end_requests(self, seq_ids: Iterable[int], error: LookOnceError) -> None:
        for seq_id in seq_ids:
            sequence = self._state.queues.sequences.get(seq_id)
            if sequence is not None:
                self._state.end(sequence.request, "error", error)

    def _advance(self, sequence: Sequence) -> None:
        """Update what depends on computed positions; in a decode, only full blocks do."""
        self._register_blocks(sequence)
        if sequence.held:
            self._release_passed_items(sequence)
        request = sequence.request
        if request.session is not None:
            request.session.release_computed(request.features, request.items, sequence.num_computed)
        if sequence.state is SequenceState.PREFILLING:
            self._state.accept_once_covered(sequence)

    def _register_blocks(self, sequence: Sequence) -> None:
        """Register full blocks under their hashes, unless a reset made their K/V outdated."""
        pool = self._state.block_pool
        num_full = sequence.num_computed // pool.block_size
        if num_full <= sequence.num_registered or not self._state.prefix_caching:
            return
        if sequence.cache_generation == pool.generation:
            sequence.hash_blocks(pool.block_size, num_full)
            for index in range(sequence.num_registered, num_full):
                block, block_hash = sequence.block_ids[index], sequence.block_hashes[index]
                if pool.register(block, block_hash) and self._kv_connector is not None:
                    self._kv_connector.note_registered(block_hash, block)
        sequence.num_registered = num_full

    def _release_passed_items(self, sequence: Sequence) -> None:
        """Release the outputs of items that end at or before the last computed position."""
        features, held = sequence.request.features, sequence.held
        coming, passed = features.next_index(sequence.num_computed), []
        while held and held[0] < coming:
            passed.append(held.popleft())
        keys = [features[index].key for index in passed]
        self._state.encoder_cache.release_many(sequence.seq_id, keys)

    def _append_token(
        self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None
    ) -> None:
        """Append the sampled token, report it, and end the sequence if it was the last."""
        state, request = self._state, sequence.request
        sequence.tokens.append(token_id)
        state.counters.generation_tokens += 1
        reason, stop_token_id = finish_reason(sequence, token_id)
        pausing = reason is not None and _awaits_extension(sequence)
        if pausing:
            reason = stop_token_id = None
        delta = TokenDelta(request.request_id, sequence.index, [token_id], reason, stop_token_id)
        if logprob is not None:
            delta.logprobs = [logprob]
        state.output.deltas.append(delta)
        prefilling = sequence.state is SequenceState.PREFILLING
        if prefilling:
            self._end_prompt(sequence, delta)
        if pausing:
            state.pause(sequence)
        elif reason is not None:
            state.finish(sequence)
        elif prefilling:
            state.begin_decode(sequence)

    def _end_prompt(self, sequence: Sequence, delta: TokenDelta) -> None:
        """Add to `delta`, of the first token, what is reported once about a prompt."""
        request = sequence.request
        if sequence.index == 0 and sequence.num_generated == 1:
            delta.facts = request.reuse_stats.freeze()
            delta.prompt_logprobs = request.take_prompt_logprobs()
        if not request.prefilled:
            self._state.release_siblings(sequence)


def finish_reason(sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
    """Why the token just appended ends the sequence, and the stop token if one did.

    The model's EOS tokens take precedence over `stop_token_ids`, and both over the length.
    """
    request = sequence.request
    if token_id in request.eos_token_ids:
        return "stop", None
    if token_id in request.stop_token_ids:
        return "stop", token_id
    if sequence.num_computed + 1 >= sequence.token_limit:  # all but the new token are computed
        return "length", None
    return None, None


def _awaits_extension(sequence: Sequence) -> bool:
    """Whether the sequence pauses instead of ending: a live session with room for more tokens."""
    session = sequence.request.session
    return session is not None and len(sequence.tokens) < session.limit
