"""Executes step plans on one device: update the batch, encode media, compute, sample."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lookonce.errors import DeviceLostError, LookOnceError, RequestFailedError
from lookonce.model.alignment import Aligner
from lookonce.model.attention.backend import AttentionBackend
from lookonce.model.attention.cross import CrossStates, Recording
from lookonce.model.decode_graphs import (
    SCRATCH_BLOCKS,
    Capture,
    DecodeGraphs,
    is_plain_decode,
)
from lookonce.model.device import DeviceTimes, StepReads
from lookonce.model.encoder_runner import (
    COMPUTE_ERRORS,
    EncodeReport,
    EncoderRunner,
    OutputCopier,
)
from lookonce.model.families.base import ModelFamily
from lookonce.model.frame_rows import FrameRows
from lookonce.model.input_batch import InputBatch
from lookonce.model.key_rotation import key_rotation
from lookonce.model.kv_pages import AheadMapper, KVPages, PageCopier
from lookonce.model.loader import LoadedModel
from lookonce.model.logits_processors import FAILED
from lookonce.model.lora import RunnerLoRA
from lookonce.model.lora_files import adaptable_layers, why_no_adapters
from lookonce.model.pooling import Pooler
from lookonce.model.sampled_tokens import SampledTokens
from lookonce.model.sampler import PromptLogprobScorer, Sampler, SamplerOutput
from lookonce.model.state import SnapshotCopier, StateChunk, StepStates
from lookonce.model.step_inputs import StepInputBuilder, StepInputs
from lookonce.model.streaming_encoder import StreamingEncoder
from lookonce.model.tensor_parallel import SharedSampler
from lookonce.model.text_model import TextModel, sampled_rows
from lookonce.types.cpu import usable_cores
from lookonce.types.request import PromptLogprob, TokenLogprob
from lookonce.types.step import (
    DropTokens,
    Extension,
    NewSequence,
    ScheduledSequence,
    StepPlan,
    StepResult,
)

logger = logging.getLogger(__name__)
NO_RECORDINGS: Mapping[int, Recording] = MappingProxyType({})


class Runner:
    """Implements `types.ports.ModelRunner` for a loaded Hugging Face model.

    The runner holds the KV pages, the encoder outputs and one row of state per running sequence.
    The scheduler alone decides what is stored there, and for how long.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_pages: KVPages,
        backend: AttentionBackend,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        threads: ThreadCounts | None = None,
        num_snapshots: int = 0,
        adapters: bool = False,
        decode_sizes: Sequence[int] = (),
        capture: Capture | None = None,
    ) -> None:
        """`threads` None leaves torch's number of threads as it is. `num_snapshots`: room for
        states of cached prefixes, of a model with states. `adapters`: LoRA adapters may be loaded.
        `decode_sizes`: decode steps are padded to the next of these numbers of sequences, and
        captured where there is a `capture`; then the last of the `kv_pages` is no block of the
        scheduler's.
        """
        self._threads = threads or ThreadCounts(1, 1)
        self._family = family = loaded.family
        self._is_large = _weight_bytes(family) >= HEAVY_BYTES
        self._kv_pages = kv_pages
        self._ahead_mapper = AheadMapper(kv_pages)
        self._device = loaded.device
        self._states = loaded.state_pool(max_num_seqs, num_snapshots)
        self.lora: RunnerLoRA | None = None
        """None: no adapters are served, or none can be for this family."""
        if adapters and why_no_adapters(family) is None:
            self.lora = RunnerLoRA(adaptable_layers(family))
        self.text_model = TextModel(
            family,
            loaded.dtype,
            loaded.device,
            backend,
            kv_pages,
            None if self.lora is None else self.lora.hooks,
        )
        self._rotation = key_rotation(family)
        self._encoder = EncoderRunner(family, loaded.dtype, loaded.device, loaded.group)
        self._encoder.lora = self.lora
        self.frame_rows: FrameRows | None = None
        """Where a row of sound is added to each token."""
        if family.frame_encoder is not None:
            streaming = StreamingEncoder(family.frame_encoder, loaded.dtype, loaded.device)
            self.frame_rows = FrameRows(streaming, self._encoder, loaded.dtype)
        self._sampled = SampledTokens(loaded.device)
        sampler = Sampler(loaded.info.vocab_size, loaded.info.eos_token_ids, self._sampled)
        self._group = loaded.group
        self._sampler = sampler if self._group is None else SharedSampler(sampler, self._group)
        self._batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=loaded.info.max_model_len,
            block_size=kv_pages.block_size,
        )
        self._aligner = Aligner()
        pooling = loaded.info.pooling
        self._pooler = None if pooling is None else Pooler(pooling.kind, loaded.head)
        self._prompt_logprobs = PromptLogprobScorer(self._batch, loaded.info.vocab_size)
        # Two on an accelerator, in turn: the host fills one while the other is still copied.
        self._inputs, self._next_inputs = (
            StepInputBuilder(
                self._batch,
                position_axes=family.position_axes,
                max_num_seqs=max_num_seqs,
                max_num_tokens=max(max_num_batched_tokens, family.largest_unsplittable),
                block_size=kv_pages.block_size,
                device=loaded.device,
                encoder_decoder=family.encoder_decoder,
                sampled=self._sampled,
            )
            for _ in range(2)
        )
        self._times: DeviceTimes | None = DeviceTimes(loaded.device)
        if loaded.device.type == "cpu":
            self._next_inputs, self._times = self._inputs, None
        self._graphs: DecodeGraphs | None = None
        if decode_sizes and (capture is None or self.text_model.is_capturable):
            self._graphs = DecodeGraphs(
                lambda inputs: self.text_model(inputs, None),
                decode_sizes,
                position_axes=family.position_axes,
                block_size=kv_pages.block_size,
                max_blocks=self._batch.block_tables.shape[1],
                scratch_block=kv_pages.num_blocks - SCRATCH_BLOCKS,
                device=loaded.device,
                capture=capture,
            )

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture decode steps of each size, where the runner has a `capture`."""
        if self._graphs is not None:
            self._graphs.capture()

    def page_copier(self) -> PageCopier:
        """Copies whole KV blocks to and from the external tiers, beside the steps."""
        return PageCopier(self._kv_pages)

    def state_copier(self) -> SnapshotCopier | None:
        """Copies snapshots of states to and from the external tiers; None without states."""
        return None if self._states is None else SnapshotCopier(self._states)

    def output_copier(self) -> OutputCopier:
        """Copies encoder outputs to the external tiers, beside the steps."""
        return OutputCopier(self._encoder)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. The result names items and sequences that failed; the others go on."""
        with self._threads.working_on(plan, is_large=self._is_large):
            return self._begin(plan)()

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Enqueue one step (`types.ports.ModelRunner.begin`); on a CPU it is computed at once."""
        with self._threads.working_on(plan, is_large=self._is_large):
            return self._begin(plan)

    def _begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._inputs, self._next_inputs = self._next_inputs, self._inputs
        step, times = self._sampled.begin_step(), self._times
        if times is not None:
            times.begin()
        if plan.finished:
            self._remove(plan.finished)
        for new in plan.new:
            self._add(new)
        for change in plan.extended:
            if isinstance(change, DropTokens):
                self._drop(change)
            else:
                self._extend(change)
        reads = StepReads(self._device)
        if plan.encode or plan.restore or plan.offload or plan.received:
            self._working()
        report = self._encoder.execute(plan, reads)
        for chunk in plan.scheduled:
            if chunk.new_block_ids:
                self._ahead_mapper.reach(chunk.new_block_ids)
                self._batch.append_blocks(self._batch.row_of(chunk.seq_id), chunk.new_block_ids)
        output = _StepOutput(reads)
        computable = self._computable(plan.scheduled, report.failed, output)
        if self.frame_rows is not None:  # rows of what is not finite are not added to a session's
            self._working()
            reads.wait()
            self._encoder.check(report)
            computable = self._with_rows(self.frame_rows, computable, report.failed, output)
        self._compute(computable, output)
        if times is not None:
            times.end(plan.step_id)  # before what is waited for, so that its time is known then
        reads.close()
        keys_read: dict[int, list[bytes]] = {}
        if report.made:
            keys_read = {chunk.seq_id: self._keys_read(chunk) for chunk in computable}

        def finish() -> StepResult:
            reads.wait()
            output.finish()
            self._sampled.told(step)
            if self._encoder.check(report):
                for seq_id, keys in keys_read.items():
                    if any(key in report.failed for key in keys):
                        output.discard(seq_id)
            return output.result(plan, report, None if times is None else times.take(plan.step_id))

        return finish

    def _working(self) -> None:
        """The device's work on the step begins, unless it has."""
        if self._times is not None:
            self._times.working()

    def _remove(self, seq_ids: Sequence[int]) -> None:
        self._sampled.remove(seq_ids)
        self._batch.remove(seq_ids)
        self._prompt_logprobs.remove(seq_ids)
        self._aligner.remove(seq_ids)
        if self._pooler is not None:
            self._pooler.remove(seq_ids)
        for seq_id in seq_ids:
            self._sampler.remove(seq_id)
        if self.frame_rows is not None:
            self.frame_rows.remove(seq_ids)
        if self.lora is not None:
            self.lora.remove(seq_ids)

    def _add(self, new: NewSequence) -> None:
        self._batch.add(
            new,
            mrope=self._family.position_axes > 1,
            text_after_film_time=self._family.text_after_film_time,
            numbers_pictures=self._family.numbers_pictures,
            encoder_decoder=self._family.encoder_decoder,
        )
        if self._states is not None:
            self._states.begin(self._batch.row_of(new.seq_id), new.snapshot)
        self._prompt_logprobs.add(new)
        self._aligner.add(new)
        if self._pooler is not None:
            self._pooler.add(new)
        prompt = new.token_ids[: new.num_prompt_tokens]
        output = new.token_ids[new.num_prompt_tokens :]
        self._sampler.add(new.seq_id, new.sampling, new.sample_index, prompt, output, new.grammar)
        if self.frame_rows is not None:
            self.frame_rows.add(new)
        if self.lora is not None:
            self.lora.add(new.seq_id, new.adapter)

    def _extend(self, extension: Extension) -> None:
        if extension.frames is not None and self.frame_rows is not None:
            self.frame_rows.extend(extension.seq_id, extension.frames)
            return
        row = self._batch.row_of(extension.seq_id)
        self._batch.extend(extension)
        start = extension.start + self._batch.num_dropped[row]
        self._sampler.extend(extension.seq_id, start, extension.token_ids)

    def _drop(self, change: DropTokens) -> None:
        if self.frame_rows is not None:
            self.frame_rows.drop(change)
        rotated = self._batch.drop(change)
        if change.reanchor and self._rotation is not None:
            self._working()
            self._rotation.move(self._kv_pages, change.moved, rotated)

    def _computable(
        self,
        scheduled: Sequence[ScheduledSequence],
        failed_items: Container[bytes],
        output: _StepOutput,
    ) -> list[ScheduledSequence]:
        """The sequences whose encoder outputs are all held; the others fail. Raises
        `DeviceLostError` where other ranks may hold them."""
        if not any(chunk.embeds for chunk in scheduled) and not self._family.encoder_decoder:
            return list(scheduled)
        kept = []
        for chunk in scheduled:
            keys = self._keys_read(chunk)
            if self._family.encoder_decoder and not keys:
                output.fail(chunk.seq_id, "this model answers no text alone: it needs a sound")
                continue
            missing = [key for key in keys if key not in self._encoder]
            if not missing:
                kept.append(chunk)
            elif not any(key in failed_items or key in self._encoder.failed for key in missing):
                if self._group is not None:
                    raise DeviceLostError(f"rank {self._group.rank} lacks an encoder output")
                output.fail(chunk.seq_id, "an encoder output is missing")
        return kept

    @staticmethod
    def _with_rows(
        frame_rows: FrameRows,
        scheduled: Sequence[ScheduledSequence],
        failed_items: Container[bytes],
        output: _StepOutput,
    ) -> list[ScheduledSequence]:
        """The sequences for which every row of sound is at hand; the others fail."""
        failed = frame_rows.prepare(scheduled, failed_items)
        for seq_id, reason in failed.items():
            if reason is not None:
                output.fail(seq_id, reason)
        return [chunk for chunk in scheduled if chunk.seq_id not in failed]

    def _keys_read(self, chunk: ScheduledSequence) -> list[bytes]:
        """The encoder outputs that a chunk needs."""
        heard = self._batch.input_keys[self._batch.row_of(chunk.seq_id)]
        return [part.key for part in chunk.embeds] if heard is None else [heard]

    def _compute(self, chunks: Sequence[ScheduledSequence], output: _StepOutput) -> None:
        """Compute all chunks in one call; if that fails, each alone, so that only faulty ones fail.

        Computing a chunk twice is safe: it writes the same keys and values to the same slots, and
        states only once all else has succeeded.
        """
        if not chunks:
            return
        try:
            self._compute_batch(chunks, output)
        except torch.AcceleratorError:
            raise  # the device is lost, not the sequence
        except COMPUTE_ERRORS as error:
            if self._group is not None:
                raise  # other ranks may not have failed, and do not compute it again
            logger.warning("a step failed", extra={"sequences": len(chunks)}, exc_info=error)
            if len(chunks) == 1:
                output.fail(chunks[0].seq_id, f"computing failed ({type(error).__name__})")
                return
            for chunk in chunks:
                self._compute([chunk], output)

    def _compute_batch(self, chunks: Sequence[ScheduledSequence], output: _StepOutput) -> None:
        inputs = self._build_inputs(chunks)
        self._compute_inputs(inputs, chunks, output)
        if inputs.states is not None:
            inputs.states.commit()

    def _compute_inputs(
        self, inputs: StepInputs, chunks: Sequence[ScheduledSequence], output: _StepOutput
    ) -> None:
        if self._pooler is not None:
            self._working()
            output.add_pooled(self._pooler.pool(self._hidden_states(inputs), chunks, output.reads))
            return
        sampled = [chunk for chunk in chunks if chunk.sample]
        seq_ids = [chunk.seq_id for chunk in sampled]
        hidden, parts = None, self._prompt_logprobs.parts(chunks)
        if parts:
            self._working()
            recordings = self._aligner.recordings(chunks)
            hidden = self.text_model.hidden_states(
                inputs, self._encoder_rows(inputs), self._cross_states(inputs, recordings)
            )
            output.add_alignments(self._aligner.align(chunks, recordings, output.reads))
            output.add_prompt_logprobs(
                self._prompt_logprobs.score(
                    hidden, parts, self.text_model.compute_logits, output.reads
                )
            )
        logits = self.logits(inputs, seq_ids, hidden)
        if not sampled:
            return
        positions = [chunk.start + chunk.num_tokens for chunk in sampled]
        num_dropped, row_of = self._batch.num_dropped, self._batch.row_of
        drawn_at = [
            at + num_dropped[row_of(seq_id)] for seq_id, at in zip(seq_ids, positions, strict=True)
        ]
        drawn = self._sampler.begin(logits, seq_ids, drawn_at, output.reads)
        self._sampled.note(seq_ids, drawn.tokens)

        def told() -> None:
            sampled_tokens = drawn()
            self._batch.write_tokens(seq_ids, positions, sampled_tokens.token_ids)
            output.add(seq_ids, sampled_tokens)

        output.later(told)

    def _hidden_states(self, inputs: StepInputs) -> Tensor:
        """Last hidden states [T, H] of all tokens."""
        rows = self._encoder_rows(inputs)
        if not self._family.encoder_only:
            return self.text_model.hidden_states(inputs, rows)
        lengths = inputs.metadata.query_lens
        hidden = self._family.encode_prompts(inputs.token_ids, lengths)
        if rows is not None and inputs.embed_at is not None:
            hidden.index_copy_(0, inputs.embed_at, rows)
        return hidden

    def _build_inputs(self, chunks: Sequence[ScheduledSequence]) -> StepInputs:
        inputs = self._inputs.build(chunks)
        if self.lora is not None and self.lora.in_use:
            seq_ids = [chunk.seq_id for chunk in chunks]
            lora = self.lora.step(seq_ids, inputs.metadata.query_lens)
            if lora is not None:
                inputs = dataclasses.replace(inputs, lora=lora)
        if self._states is not None:
            parts = [
                StateChunk(
                    self._batch.row_of(chunk.seq_id),
                    chunk.num_tokens,
                    chunk.snapshots,
                    is_first=chunk.start == 0,
                )
                for chunk in chunks
            ]
            inputs = dataclasses.replace(
                inputs, states=StepStates(self._states, parts, by_token=self._family.mixes_by_token)
            )
        found = None if self.frame_rows is None else self.frame_rows.rows(chunks)
        if found is None:
            return inputs
        rows, at = found
        return dataclasses.replace(inputs, embed_at=at, frame_rows=rows)

    def logits(
        self, inputs: StepInputs, seq_ids: Sequence[int], hidden: Tensor | None = None
    ) -> Tensor:
        """Logits [S, V] float32 after the last token of each sampled sequence.

        `hidden` [T, H] are the last hidden states if they were computed before.
        """
        if hidden is not None:
            return self.text_model.compute_logits(sampled_rows(hidden, inputs))
        if self._graphs is not None and is_plain_decode(inputs):
            logits = self._graphs.logits(inputs, self._working)
            if logits is not None:
                return logits
        self._working()
        return self.text_model(inputs, self._encoder_rows(inputs), self._cross_states(inputs))

    def _cross_states(
        self, inputs: StepInputs, recordings: Mapping[int, Recording] = NO_RECORDINGS
    ) -> CrossStates | None:
        """What the step's tokens cross-attend to; None for a model without cross-attention."""
        if not inputs.readers:
            return None
        states = {
            each.key: self._family.cross_states(self._encoder.output(each.key))
            for each in inputs.readers
        }
        heard = self._batch.input_keys
        return CrossStates(
            [(each.at, states[each.key]) for each in inputs.readers],
            [
                (recording, states[key])
                for seq_id, recording in recordings.items()
                if (key := heard[self._batch.row_of(seq_id)]) is not None
            ],
        )

    def _encoder_rows(self, inputs: StepInputs) -> Tensor | None:
        """[N, W] encoder rows for the tokens `inputs.embed_at`; None without any."""
        if inputs.frame_rows is not None:
            return inputs.frame_rows
        return None if inputs.embed_at is None else self._encoder.rows(inputs.embeds)


class _StepOutput:
    """The results of one step so far, by sequence. What is read from the device comes last."""

    def __init__(self, reads: StepReads) -> None:
        self.reads = reads
        self._later: list[Callable[[], None]] = []
        self._tokens: dict[int, int] = {}
        self._logprobs: dict[int, TokenLogprob | None] = {}
        self._failed: dict[int, LookOnceError] = {}
        self._alignments: dict[int, list[int]] = {}
        self._prompt_logprobs: dict[int, list[PromptLogprob]] = {}
        self._pooled: dict[int, bytes] = {}

    def later(self, told: Callable[[], None]) -> None:
        """Call `told` once `reads` were waited for."""
        self._later.append(told)

    def finish(self) -> None:
        """`reads` were waited for."""
        for told in self._later:
            told()

    def discard(self, seq_id: int) -> None:
        """An item that this sequence read had failed."""
        self._tokens.pop(seq_id, None)
        self._failed.pop(seq_id, None)
        self._pooled.pop(seq_id, None)
        self._prompt_logprobs.pop(seq_id, None)
        self._alignments.pop(seq_id, None)

    def fail(self, seq_id: int, reason: str) -> None:
        self._failed[seq_id] = RequestFailedError(reason)

    def add_alignments(self, told: Callable[[], dict[int, list[int]]]) -> None:
        self.later(lambda: self._alignments.update(told()))

    def add_prompt_logprobs(self, told: Callable[[], dict[int, list[PromptLogprob]]]) -> None:
        self.later(lambda: self._prompt_logprobs.update(told()))

    def add_pooled(self, told: Callable[[], Mapping[int, Tensor]]) -> None:
        self.later(lambda: self._take_pooled(told()))

    def _take_pooled(self, pooled: Mapping[int, Tensor]) -> None:
        for seq_id, result in pooled.items():
            if bool(torch.isfinite(result).all()):
                self._pooled[seq_id] = result.contiguous().numpy().astype("<f4").tobytes()
            else:
                self.fail(seq_id, "the model's output was not a number")

    def add(self, seq_ids: Sequence[int], sampled: SamplerOutput) -> None:
        self._tokens.update(zip(seq_ids, sampled.token_ids, strict=True))
        if sampled.logprobs is not None:
            self._logprobs.update(zip(seq_ids, sampled.logprobs, strict=True))
        if FAILED not in sampled.token_ids:
            return
        for row, (seq_id, token) in enumerate(zip(seq_ids, sampled.token_ids, strict=True)):
            if token == FAILED and row in sampled.errors:
                self._failed[seq_id] = sampled.errors[row]
            elif token == FAILED:
                self.fail(seq_id, "the model's output was not a number")

    def result(
        self,
        plan: StepPlan,
        report: EncodeReport,
        device_seconds: tuple[tuple[int, float], ...] | None,
    ) -> StepResult:
        order = [chunk.seq_id for chunk in plan.scheduled if chunk.sample]
        logprobs = None
        if self._logprobs:
            logprobs = tuple([self._logprobs.get(seq_id) for seq_id in order])
        return StepResult(
            token_ids=tuple([self._tokens.get(seq_id, FAILED) for seq_id in order]),
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
            alignments=self._alignments,
            pooled=self._pooled,
            failed_items=report.failed,
            failed_sequences=self._failed,
            lost_copies=tuple(report.lost_copies),
            encode_seconds=report.seconds,
            device_seconds=device_seconds,
        )


HEAVY_TOKENS = 256
"""A step of at least this many tokens is worth the cost of waking more threads."""
HEAVY_KEYS = 4096
"""So are few tokens that attend to at least this many keys, which are split between threads."""
HEAVY_BYTES = 64 << 20
"""So is every step of a model with at least so many bytes of weights: they are read in each."""
_NO_CHANGE = nullcontext()


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """How many CPU threads torch uses, by the kind of step.

    If torch was told a number (`OMP_NUM_THREADS`), it is used for both kinds.
    """

    light: int
    """For decode steps and short prompts: one core is left to the API process."""
    heavy: int
    """For steps that encode media, compute a long chunk or the end of a prompt over a long prefix,
    or are a few decodes over long contexts, and for all steps of a large model: every core, because
    all requests wait for them."""

    @classmethod
    def of_machine(cls) -> ThreadCounts:
        """The counts for this machine. Sets torch's number of threads to `light`."""
        cores = usable_cores()
        given = min(torch.get_num_threads(), cores)
        threads = cls(cores - 1, cores) if given == cores > 1 else cls(given, given)
        torch.set_num_threads(threads.light)
        return threads

    def working_on(self, plan: StepPlan, *, is_large: bool = False) -> AbstractContextManager[None]:
        """A block in which torch uses as many threads as the step, of a large model, is worth."""
        if self.light == self.heavy or not (is_large or _is_heavy(plan, self.heavy)):
            return _NO_CHANGE
        return self._all()

    @contextmanager
    def _all(self) -> Iterator[None]:
        torch.set_num_threads(self.heavy)
        try:
            yield
        finally:
            torch.set_num_threads(self.light)


def _weight_bytes(family: ModelFamily) -> int:
    """Of the decoder and the output head; a model that only encodes has neither."""
    modules = [getattr(family, name, None) for name in ("decoder", "lm_head")]
    weights = {weight for module in modules if module is not None for weight in module.parameters()}
    return sum(weight.nbytes for weight in weights)


def _is_heavy(plan: StepPlan, threads: int) -> bool:
    """Whether a step is worth so many threads.

    Decodes over long contexts are only where there are fewer than threads: a large batch would keep
    all cores from the API process for as long as it lasts.
    """
    if plan.encode or sum(chunk.num_tokens for chunk in plan.scheduled) >= HEAVY_TOKENS:
        return True
    is_small = len(plan.scheduled) < threads
    return any(
        chunk.start + chunk.num_tokens >= HEAVY_KEYS and (is_small or chunk.num_tokens > 1)
        for chunk in plan.scheduled
    )
