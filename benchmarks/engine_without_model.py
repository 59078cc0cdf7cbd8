"""A scheduler and the runner's bookkeeping without a model, for `lookonce bench items`.

The encoder returns a slice of a constant. So what is timed is what every model pays: planning,
gathering tokens, positions, block tables and encoder rows, and applying the result.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.config import SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerState
from lookonce.model.device import StepReads
from lookonce.model.encoder_runner import EncoderRunner
from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.model.input_batch import InputBatch
from lookonce.model.step_inputs import StepInputBuilder
from lookonce.types.media import Array, Expansion, MediaFeature, Modality, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import ExtendOptions, GenerateRequest
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import DropTokens, StepPlan, StepResult

CPU = torch.device("cpu")
INTERRUPT = ExtendOptions(interrupt=True)
BLOCK_SIZE = 16
PLACEHOLDER = 999
ROW_WIDTH = 64
RAW_BYTES = 4096
"""Bytes of one item before it is encoded: 8 mel frames of 128 bins, 80 ms of sound."""


class ConstantFamily(ModelFamily):
    """Every row of every item is the same."""

    modalities = ("audio",)

    def __init__(self, longest: int) -> None:
        self._rows = torch.ones(longest, ROW_WIDTH)

    @property
    def row_width(self) -> int:
        return ROW_WIDTH

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return modality

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        return [self._rows[: int(item["num_rows"])].clone() for item in items]


@dataclass(slots=True)
class Times:
    """CPU milliseconds of each step, by phase."""

    extend: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    gather: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)

    @property
    def plan_and_apply(self) -> list[float]:
        return [a + b for a, b in zip(self.plan, self.apply, strict=True)]


class EngineWithoutModel:
    """A scheduler with room for one request of `max_tokens` tokens, and what executes its plans."""

    def __init__(
        self,
        *,
        max_tokens: int,
        chunk: int,
        rows_cached: int,
        longest_item: int,
        rows_on_host: int = 0,
        gather: bool = True,
        position_axes: int = 1,
    ) -> None:
        """Without `gather` a step skips gathering encoder rows, which is quicker."""
        row_bytes = ROW_WIDTH * 4
        info = _model_info(max_tokens, row_bytes)
        self.scheduler = Scheduler(
            SchedulerState(
                BlockPool(-(-max_tokens // BLOCK_SIZE) + 64, BLOCK_SIZE),
                EncoderCache(rows_cached * row_bytes, row_bytes, rows_on_host * row_bytes),
                prefix_caching=True,
            ),
            info,
            SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=chunk, max_encoder_tokens=chunk),
        )
        self._position_axes = position_axes
        self.table = InputBatch(max_num_seqs=1, max_model_len=max_tokens, block_size=BLOCK_SIZE)
        self._inputs = StepInputBuilder(
            self.table,
            position_axes=position_axes,
            max_num_seqs=1,
            max_num_tokens=chunk,
            block_size=BLOCK_SIZE,
            device=CPU,
        )
        self._encoder = EncoderRunner(ConstantFamily(longest_item), torch.float32, CPU)
        self._embeds = torch.zeros(chunk, ROW_WIDTH)
        self._gathers = gather

    @torch.inference_mode()
    def step(self, times: Times) -> bool:
        """Run one step of the only request. False when there is nothing to compute."""
        started = _now()
        plan = self.scheduler.plan()
        planned = _now()
        if plan is None:
            return False
        result, gathering = self._execute(plan)
        executed = _now()
        self.scheduler.update_from_output(plan, result)
        times.plan.append((planned - started) / 1e6)
        times.gather.append(gathering)
        times.apply.append((_now() - executed) / 1e6)
        return True

    def _execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        """Execute a plan as the runner does, without the model.

        Returns the result, and the milliseconds of everything but encoding.
        """
        started = _now()
        self.table.remove(plan.finished)
        for new in plan.new:
            self.table.add(new, mrope=self._position_axes > 1)
        for change in plan.extended:
            if isinstance(change, DropTokens):
                self.table.drop(change)
            else:
                self.table.extend(change)
        added = _now()
        report = self._encoder.execute(plan, StepReads(torch.device("cpu")))
        self._encoder.check(report)
        encoded = _now()
        if plan.scheduled:
            self._gather(plan)
        gathering = (added - started + _now() - encoded) / 1e6
        sampled = tuple(7 for chunk in plan.scheduled if chunk.sample)
        result = StepResult(
            token_ids=sampled,
            failed_items=report.failed,
            lost_copies=tuple(report.lost_copies),
            encode_seconds=report.seconds,
        )
        return result, gathering

    def _gather(self, plan: StepPlan) -> None:
        for chunk in plan.scheduled:
            self.table.append_blocks(self.table.row_of(chunk.seq_id), chunk.new_block_ids)
        inputs = self._inputs.build(plan.scheduled)
        if self._gathers and inputs.embed_at is not None:
            self._embeds.index_copy_(0, inputs.embed_at, self._encoder.rows(inputs.embeds))
        sampled = [chunk for chunk in plan.scheduled if chunk.sample]
        for chunk in sampled:
            self.table.write_tokens([chunk.seq_id], [chunk.start + chunk.num_tokens], [7])


class LiveSession:
    """A session that gets one item of one row in each step, and generates one token after it."""

    def __init__(
        self,
        num_items: int,
        *,
        rows_cached: int = 512,
        gather: bool = True,
        grid: tuple[int, int, int] | None = None,
    ) -> None:
        """`grid`: the grid of each item, for a model that numbers positions on three axes."""
        self._keys, self._grid = _keys(), grid
        self._placeholder = np.array([PLACEHOLDER], np.int32)
        self._engine = EngineWithoutModel(
            max_tokens=2 * num_items + 4096,
            chunk=256,
            rows_cached=rows_cached,
            longest_item=1,
            gather=gather,
            position_axes=1 if grid is None else 3,
        )
        self._open()

    def _open(self) -> None:
        prompt = request((), num_tokens=4, max_tokens=1)
        self._engine.scheduler.add(prompt, {}, live=True)
        self._engine.step(Times())

    def restart(self) -> None:
        """End the session and open another in the same engine."""
        self.end()
        self._engine.scheduler.reset_prefix_cache()
        self._open()

    def run(self, num_items: int) -> Times:
        """The times of `num_items` more items."""
        times = Times()
        for _ in range(num_items):
            key = next(self._keys)
            feature = MediaFeature(key, "audio", 0, 1, 1, grid=self._grid)
            item = _item(1)
            started = _now()
            tokens, items = self._placeholder, {key: item}
            self._engine.scheduler.extend("live", tokens, (feature,), items, INTERRUPT)
            times.extend.append((_now() - started) / 1e6)
            self._engine.step(times)
        return times

    @property
    def kept(self) -> tuple[object, ...]:
        """All objects that remember something of the session."""
        return self._engine.scheduler, self._engine.table

    def stats(self) -> dict[str, float]:
        return self._engine.scheduler.stats()

    def end(self) -> float:
        """End the session. The milliseconds that freeing everything of it took."""
        started = _now()
        self._engine.scheduler.abort("live")
        self._engine.step(Times())
        return (_now() - started) / 1e6


def request(
    features: tuple[MediaFeature, ...], *, num_tokens: int, max_tokens: int
) -> GenerateRequest:
    """A request whose prompt is text wherever `features` leave room."""
    prompt = np.full(num_tokens, 5, dtype="<i4")
    for feature in features:
        prompt[feature.offset : feature.end] = PLACEHOLDER
    return GenerateRequest(
        request_id="live",
        scope=b"s" * 32,
        prompt=Array("int32", prompt.shape, prompt.tobytes()),
        features=features,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        arrival=0.0,
    )


def items_in_a_row(
    num_items: int, length: int
) -> tuple[tuple[MediaFeature, ...], dict[bytes, ProcessedItem]]:
    """Items of `length` positions, one after the other."""
    keys = _keys()
    features = tuple(
        MediaFeature(next(keys), "audio", index * length, length, length)
        for index in range(num_items)
    )
    return features, {feature.key: _item(length) for feature in features}


def _keys() -> Iterator[bytes]:
    number = 0
    while True:
        yield hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
        number += 1


def _item(rows: int) -> ProcessedItem:
    raw: NDArray[np.uint8] = np.zeros(RAW_BYTES, np.uint8)
    arrays = {
        "num_rows": Array("int64", (), rows.to_bytes(8, "little")),
        "features": Array("float32", (8, 128), raw.data),
    }
    return ProcessedItem("audio", arrays, Expansion(((PLACEHOLDER, rows),), PLACEHOLDER))


def _model_info(max_tokens: int, row_bytes: int) -> ModelInfo:
    return ModelInfo(
        name="none",
        model_type="none",
        vocab_size=1000,
        max_model_len=max_tokens,
        eos_token_ids=(2,),
        modalities=("audio",),
        dtype="float32",
        encoder_row_bytes=row_bytes,
    )


def _now() -> int:
    return time.thread_time_ns()
