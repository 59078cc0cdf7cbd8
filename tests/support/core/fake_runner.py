"""A runner without a model, that computes honestly and objects to every plan that is wrong.

The "K/V" of a position is a digest of the K/V before it and of its input (token, or encoder row).
With states beside keys and values a sequence's state is that digest, too: it begins as none or as
the copy of a snapshot, and must be the digest before the next position.
It is read back from the block the plan's tables name, so a clobbered block, a wrong prefix hit, a
wrong row or a skipped position changes every token that is sampled after it. With an
encoder-decoder model every position reads all inputs of its sequence. `reference` computes the same
tokens without any scheduling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from lookonce.core.mm_features import EncoderInputs, MultiModalFeatures
from lookonce.core.request import AdaptedKeys
from lookonce.errors import LookOnceError, RequestFailedError
from lookonce.types.media import MediaFeature
from lookonce.types.request import GenerateRequest, PromptLogprob
from lookonce.types.step import (
    DropTokens,
    Extension,
    NewSequence,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from tests.support.core.builders import ROW_BYTES, VOCAB, Limits


class PlanError(AssertionError):
    """A plan broke a rule."""


def require(condition: object, rule: str) -> None:
    if not condition:
        raise PlanError(rule)


@dataclass
class _Known:
    tokens: list[int]
    features: MultiModalFeatures
    sample_index: int
    scored: range
    """Positions after which the log-probability of the prompt's next token is asked for."""
    blocks: list[int] = field(default_factory=list)
    computed: int | None = None
    """None until its first chunk says how much the prefix cache covers."""
    sampled: bool = False
    shift: int = 0
    """Of positions over indices."""
    state: bytes = b""
    """After the last computed token, of a model that keeps states."""
    adapter: bytes = b""
    """Digest of its LoRA adapter, on which everything depends that is computed."""
    num_prompt_tokens: int = 0
    failed: bool = False


class FakeRunner:
    """Implements `types.ports.ModelRunner`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.block_size = limits.block_size
        self.unsplittable = limits.model.unsplittable
        self.known: dict[int, _Known] = {}
        self.kv: dict[tuple[int, int], bytes] = {}
        """(block, slot) → what was computed there."""
        self.outputs: dict[bytes, int] = {}
        """Key → rows of the encoder output."""
        self.copies: dict[bytes, int] = {}
        """Key → rows of the host's copy of an encoder output."""
        self.losing_copies = False
        self.allows_unanswered = False
        """Live sessions may compute their last token and sample none."""
        self.row_seconds, self.run_seconds = 0.001, 0.0
        """What encoding takes by row, and in a step whatever it encodes."""
        self.device_seconds: tuple[tuple[int, float], ...] | None = None
        self.failing_items: set[bytes] = set()
        self.failing_sequences: set[int] = set()
        self.encoded: list[bytes] = []
        """Every key that was encoded, in order."""
        self.received: list[bytes] = []
        """Every key whose output came from an external tier, in order."""
        self.lost: set[bytes] = set()
        self.snapshots: dict[int, bytes] = {}
        """Slot → the state that it holds."""
        self.computed_tokens = 0
        self._pooled: dict[int, bytes] = {}
        """Of this step: the state after the last token, of models that pool."""

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Computes at once, and tells later."""
        result = self.execute(plan)
        return lambda: result

    def execute(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.finished:
            require(self.known.pop(seq_id, None), "only a known sequence is forgotten")
        for new in plan.new:
            self._learn(new)
        for change in plan.extended:
            if isinstance(change, DropTokens):
                self._drop(change)
            else:
                self._extend(change)
        failed: dict[bytes, LookOnceError] = {}
        lost_copies = self._move_outputs(plan, failed)
        self._receive(plan, failed)
        self._encode(plan, failed)
        self._check_budgets(plan)
        self._check_snapshots(plan)
        broken: dict[int, LookOnceError] = {}
        self._pooled = {}
        prompt_logprobs = {chunk.seq_id: self._score(chunk) for chunk in plan.scheduled}
        tokens = [
            token
            for chunk in plan.scheduled
            if (token := self._compute(chunk, failed, broken)) is not None
        ]
        shared = self.run_seconds / max(1, len(plan.encode))
        seconds = {
            e.key: shared + self.row_seconds * e.item.expansion.num_embeds for e in plan.encode
        }
        return StepResult(
            token_ids=tuple(tokens),
            prompt_logprobs={s: scored for s, scored in prompt_logprobs.items() if scored},
            pooled=self._pooled,
            failed_items=failed,
            failed_sequences=broken,
            lost_copies=tuple(lost_copies),
            encode_seconds={k: s for k, s in seconds.items() if k not in failed},
            device_seconds=self.device_seconds,
        )

    def _learn(self, new: NewSequence) -> None:
        require(new.seq_id not in self.known, "a known sequence is not announced again")
        require(not new.token_ids.flags.writeable, "the runner cannot write the tokens")
        features = collect(new.features, encoder_decoder=self.limits.model.encoder_decoder)
        asked = new.sampling.prompt_logprobs is not None and new.sample_index == 0
        scored = range(new.num_prompt_tokens - 1 if asked else 0)
        sequence = _Known(new.token_ids.tolist(), features, new.sample_index, scored)
        sequence.adapter = sequence.state = new.adapter
        sequence.num_prompt_tokens = new.num_prompt_tokens
        self.known[new.seq_id] = sequence
        if new.snapshot is not None:
            require(
                new.snapshot in self.snapshots, "a sequence begins with a snapshot that is held"
            )
            sequence.state = self.snapshots[new.snapshot]
        require(len(self.known) <= self.limits.max_num_seqs, "no more sequences than max_num_seqs")

    def _extend(self, extension: Extension) -> None:
        require(extension.seq_id in self.known, "only a known sequence is extended")
        sequence = self.known[extension.seq_id]
        require(extension.start == len(sequence.tokens), "nothing lies between")
        sequence.tokens += extension.token_ids.tolist()
        for feature in extension.features:
            sequence.features.append(feature)
        sequence.sampled = False

    def _drop(self, change: DropTokens) -> None:
        """K/V hold everything before them, so tokens that are dropped change no answer."""
        require(change.seq_id in self.known, "only a known sequence loses tokens")
        sequence, size = self.known[change.seq_id], self.block_size
        stop = change.start + change.num_tokens
        require(change.num_tokens > 0, "something is dropped")
        require(change.length == len(sequence.tokens), "the runner knows as many tokens")
        require(change.start % size == 0 and change.num_tokens % size == 0, "whole blocks")
        require((sequence.computed or 0) >= stop, "only computed tokens are dropped")
        window = self.limits.model.sliding_window
        if window:
            behind = stop <= (sequence.computed or 0) - window + 1
            require(change.start == 0 and behind, "what the next token attends to stays")
        del sequence.tokens[change.start : stop]
        del sequence.blocks[change.start // size : stop // size]
        sequence.computed -= change.num_tokens
        sequence.features.move_back(change.num_tokens, 0)
        first = change.start // size
        if not change.reanchor:
            require(not change.moved, "keys are rotated only to start positions again")
            sequence.shift += change.num_tokens
            return
        kept = sequence.blocks[first : -(-sequence.computed // size)]
        require([source for source, _ in change.moved] == kept, "all kept keys are rotated")
        for source, target in change.moved:
            users = [s for s in self.known.values() if s is not sequence and target in s.blocks]
            require(not users, "no block is rotated that another sequence uses")
            for row in range(size):
                if (source, row) in self.kv:
                    self.kv[target, row] = self.kv[source, row]
        sequence.blocks[first : first + len(kept)] = [target for _, target in change.moved]
        sequence.shift = 0

    def _move_outputs(self, plan: StepPlan, failed: dict[bytes, LookOnceError]) -> list[bytes]:
        """Offloaded outputs of which no copy was made."""
        lost = []
        for key in plan.dropped_host:
            known = self.copies.pop(key, None) is not None or key in self.lost
            require(known, "only a copy there is is dropped")
        for key in plan.offload:
            require(key in self.outputs or key in self.lost, "only an output there is is copied")
            require(key in plan.dropped_outputs, "a copy is made of what leaves the device")
            if self.losing_copies or key not in self.outputs:
                self.lost.add(key)
                lost.append(key)
            else:
                self.copies[key] = self.outputs[key]
        within = sum(self.copies.values()) <= self.limits.host_rows
        require(within, "copies stay within the host tier")
        for key in plan.dropped_outputs:
            known = self.outputs.pop(key, None) is not None or key in self.lost
            require(known, "only an output that is held is dropped")
        for key in plan.restore:
            require(key not in self.outputs, "an output that is held is not restored")
            if key in self.copies:
                self.outputs[key] = self.copies[key]
            else:
                require(key in self.lost, "only a copy there is is restored")
                failed[key] = RequestFailedError("the copy is lost")
        return lost

    def _receive(self, plan: StepPlan, failed: dict[bytes, LookOnceError]) -> None:
        for received in plan.received:
            key, (rows, _) = received.key, received.output.shape
            require(key not in self.outputs, "an output that is held is not received")
            require(key not in [e.key for e in plan.encode], "what is received is not encoded")
            wrong = bytes(received.output.data) != output_bytes(key, rows)
            require(not wrong, "what is received is what was encoded")
            if key in self.failing_items:
                failed[key] = RequestFailedError("no memory")
                self.lost.add(key)
            else:
                self.outputs[key] = rows
                self.received.append(key)

    def _encode(self, plan: StepPlan, failed: dict[bytes, LookOnceError]) -> None:
        rows = [e.item.expansion.num_embeds for e in plan.encode]
        within = sum(rows) <= self.limits.max_encoder_tokens or len(rows) == 1
        require(within, "encoder rows stay within the budget, or one item runs alone")
        for encode in plan.encode:
            require(encode.key not in self.outputs, "an output that is held is not encoded again")
            if encode.key in self.failing_items:
                failed[encode.key] = RequestFailedError("the encoder failed")
                self.lost.add(encode.key)
            else:
                self.outputs[encode.key] = encode.item.expansion.num_embeds
                self.encoded.append(encode.key)
        fits = sum(self.outputs.values()) <= self.limits.encoder_rows
        require(fits, "outputs stay within the encoder cache")

    def _check_budgets(self, plan: StepPlan) -> None:
        within = plan.num_tokens <= self.limits.max_num_batched_tokens
        require(within, "tokens stay within the budget")
        seq_ids = [chunk.seq_id for chunk in plan.scheduled]
        require(len(set(seq_ids)) == len(seq_ids), "a sequence is scheduled once a step")
        decodes = [self.known[seq_id].sampled for seq_id in seq_ids]
        require(decodes == sorted(decodes, reverse=True), "decodes come first")

    def _check_snapshots(self, plan: StepPlan) -> None:
        slots = [slot for chunk in plan.scheduled for _, slot in chunk.snapshots]
        require(len(set(slots)) == len(slots), "a slot takes one state in a step")
        for chunk in plan.scheduled:
            points = [num_tokens for num_tokens, _ in chunk.snapshots]
            require(points == sorted(set(points)), "snapshots of a chunk ascend")
            within = all(0 < point <= chunk.num_tokens for point in points)
            require(within, "snapshots are taken of the chunk's own tokens")

    def _compute(
        self,
        chunk: ScheduledSequence,
        failed: Collection[bytes],
        broken: dict[int, LookOnceError],
    ) -> int | None:
        """The sampled token, -1 where it failed, None where nothing is sampled."""
        sequence = self.known[chunk.seq_id]
        self._check_chunk(chunk, sequence)
        sequence.blocks += chunk.new_block_ids
        if sequence.failed:  # its end was not told yet when this step was planned
            return -1 if chunk.sample else None
        if chunk.seq_id in self.failing_sequences:
            broken[chunk.seq_id] = RequestFailedError("the forward pass failed")
        read = (*(e.key for e in chunk.embeds), *attended(sequence.features))
        for _, slot in chunk.snapshots:
            require(slot < self.limits.num_snapshots, "snapshots stay within their slots")
            self.snapshots.pop(slot, None)  # a step that fails leaves no state there
        failed = failed.keys() | (self.lost - self.outputs.keys())
        if chunk.seq_id in broken or any(key in failed for key in read):
            sequence.failed = True
            sequence.computed = chunk.start + chunk.num_tokens
            sequence.tokens += [0] * chunk.sample
            sequence.sampled |= chunk.sample
            return -1 if chunk.sample else None
        self._write(chunk, sequence)
        sequence.computed = chunk.start + chunk.num_tokens
        self.computed_tokens += chunk.num_tokens
        if self.limits.model.pooling is not None and sequence.computed == len(sequence.tokens):
            self._pooled[chunk.seq_id] = self._read(sequence, sequence.computed - 1)
        if not chunk.sample:
            return None
        state = self._read(sequence, sequence.computed - 1)
        token = sample(state, sequence.sample_index)
        sequence.tokens.append(token)
        sequence.sampled = True
        return token

    def _score(self, chunk: ScheduledSequence) -> list[PromptLogprob]:
        """Each names its position and the token after it."""
        sequence, end = self.known[chunk.seq_id], chunk.start + chunk.num_tokens
        positions = sequence.scored[chunk.start : end]
        return [PromptLogprob(-float(at), sequence.tokens[at + 1]) for at in positions]

    def _check_chunk(self, chunk: ScheduledSequence, sequence: _Known) -> None:
        end = chunk.start + chunk.num_tokens
        require(chunk.num_tokens > 0, "a chunk has at least one token")
        if sequence.computed is None:
            require(chunk.start % self.block_size == 0, "a prefix hit covers whole blocks")
            pooling = self.limits.model.pooling
            from_start = pooling is not None and not pooling.reuses_prefixes
            require(chunk.start == 0 or not from_start, "what needs all positions computes them")
        else:
            require(chunk.start == sequence.computed, "positions are computed exactly in order")
        require(end <= len(sequence.tokens), "only known tokens are computed")
        at_end = end == len(sequence.tokens)
        unanswered = at_end and not chunk.sample and self.allows_unanswered
        pools = self.limits.model.pooling is not None
        require(not (pools and chunk.sample), "a model that pools samples nothing")
        uncut = at_end or not self.limits.model.encoder_only
        require(uncut, "a prompt that is computed whole is not cut")
        unanswered = unanswered or (pools and at_end)
        require(unanswered or chunk.sample == at_end, "sampled exactly after the last")
        touched = [sequence.features[i] for i in sequence.features.overlapping(chunk.start, end)]
        whole = [f for f in touched if f.modality in self.unsplittable]
        require(all(f.end <= end for f in whole), "an unsplittable item is not cut")
        spans = tuple((f.offset, f.end) for f in whole)
        if self.limits.model.bidirectional_limit(len(sequence.features)):
            length = sequence.num_prompt_tokens
            require(end >= length, "a prompt whose tokens see all of it is not cut")
            spans = ((0, length),) if chunk.start < length else ()
        require(chunk.bidirectional == spans, "bidirectional names the unsplittable items touched")

    def _write(self, chunk: ScheduledSequence, sequence: _Known) -> None:
        rows, inputs = self._delivered_rows(chunk), attended(sequence.features)
        require(all(key in self.outputs for key in inputs), "what every position reads is held")
        end = chunk.start + chunk.num_tokens
        require(end <= len(sequence.blocks) * self.block_size, "every position has a block")
        positions = self.limits.model.max_positions or self.limits.model.max_model_len
        require(end + sequence.shift <= positions, "the model has every position")
        for position in range(chunk.start, end):
            block = sequence.blocks[position // self.block_size]
            users = [s for s in self.known.values() if block in s.blocks]
            require(len(users) == 1, "no block is written while another sequence uses it")
            expected = row_at(sequence.features, position)
            require(rows.get(position) == expected, "each embed position gets its own row")
            before = self._read(sequence, position - 1) if position else sequence.adapter
            slot = (block, position % self.block_size)
            self.kv[slot] = advance(before, sequence.tokens[position], expected, inputs)
            if self.limits.model.state_bytes:
                require(sequence.state == before, "the state is that after all tokens before")
                sequence.state = self.kv[slot]
                done = position + 1 - chunk.start
                kept = [slot for at, slot in chunk.snapshots if at == done]
                self.snapshots |= dict.fromkeys(kept, sequence.state)

    def _delivered_rows(self, chunk: ScheduledSequence) -> dict[int, tuple[bytes, int]]:
        rows: dict[int, tuple[bytes, int]] = {}
        for part in chunk.embeds:
            require(part.key in self.outputs, "a delivered row has been encoded and is held")
            require(part.end <= self.outputs[part.key], "a delivered row exists")
            for count, row in enumerate(range(part.start, part.end)):
                position = chunk.start + part.row + count
                require(position not in rows, "a position gets one row")
                rows[position] = (part.key, row)
        within = all(chunk.start <= p < chunk.start + chunk.num_tokens for p in rows)
        require(within, "rows go to positions of the chunk")
        return rows

    def _read(self, sequence: _Known, position: int) -> bytes:
        slot = (sequence.blocks[position // self.block_size], position % self.block_size)
        require(slot in self.kv, "what is read has been computed")
        return self.kv[slot]


def output_bytes(key: bytes, rows: int) -> bytes:
    """The bytes of an encoder output."""
    return hashlib.shake_128(key).digest(rows * ROW_BYTES)


def collect(features: tuple[MediaFeature, ...], *, encoder_decoder: bool) -> MultiModalFeatures:
    """By the rule of where the model's items are."""
    return EncoderInputs(features) if encoder_decoder else MultiModalFeatures(features)


def attended(features: MultiModalFeatures) -> tuple[bytes, ...]:
    """The inputs that cross-attention reads at every position."""
    return tuple(features.keys) if isinstance(features, EncoderInputs) else ()


def advance(
    before: bytes, token: int, row: tuple[bytes, int] | None, inputs: tuple[bytes, ...] = ()
) -> bytes:
    """The "K/V" of the next position."""
    entry = token.to_bytes(4, "little") if row is None else row[0] + row[1].to_bytes(4, "little")
    return hashlib.blake2b(b"".join((before, entry, *inputs)), digest_size=16).digest()


def pooled_reference(request: GenerateRequest) -> bytes:
    """What a model that pools gives, without any scheduling."""
    features, state = MultiModalFeatures(request.features), b""
    for position, token in enumerate(np.frombuffer(request.prompt.data, "<i4").tolist()):
        state = advance(state, token, row_at(features, position))
    return state


def sample(state: bytes, sample_index: int) -> int:
    """A token that depends on everything before it, and on which sample it is for."""
    digest = hashlib.blake2b(state + bytes([sample_index]), digest_size=4).digest()
    return int.from_bytes(digest, "little") % (VOCAB - 1)


def row_at(features: MultiModalFeatures, position: int) -> tuple[bytes, int] | None:
    """Which encoder row a position takes, found by plain scanning."""
    if isinstance(features, EncoderInputs):
        return None
    found = [f for f in features.as_tuple() if f.offset <= position < f.end]
    return _row_in(found[0], position - found[0].offset) if found else None


def _row_in(feature: MediaFeature, at: int) -> tuple[bytes, int] | None:
    ranges = feature.is_embed or ((0, feature.length),)
    positions = [p for first, last in ranges for p in range(first, last)]
    return (feature.key, positions.index(at)) if at in positions else None


def prompt_scores(request: GenerateRequest) -> list[PromptLogprob]:
    """What a request that asked for its prompt's log-probabilities must get."""
    tokens = np.frombuffer(request.prompt.data, dtype="<i4").tolist()
    return [PromptLogprob(-float(at), token) for at, token in enumerate(tokens[1:])]


def reference(
    request: GenerateRequest,
    num_tokens: int,
    sample_index: int = 0,
    *,
    encoder_decoder: bool = False,
) -> list[int]:
    """The tokens the request must get, computed in one go without a scheduler."""
    adapted, sent = AdaptedKeys.of(request.adapter), request.features
    features = collect(
        sent if adapted is None else adapted.features(sent), encoder_decoder=encoder_decoder
    )
    inputs = attended(features)
    tokens = np.frombuffer(request.prompt.data, dtype="<i4").tolist()
    state = b"" if request.adapter is None else request.adapter.digest
    for position, token in enumerate(tokens):
        state = advance(state, token, row_at(features, position), inputs)
    generated: list[int] = []
    while len(generated) < num_tokens:
        generated.append(sample(state, sample_index))
        state = advance(state, generated[-1], None, inputs)
    return generated
