"""Prompts through a scheduler and a runner that pools, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lookonce.config import ModelConfig, SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerState
from lookonce.engine.process.engine_core import EngineCore
from lookonce.model.attention.select import select_backend
from lookonce.model.loader import LoadedModel, load_model
from lookonce.model.runner import Runner
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.model.cases import Case, array

BLOCK = 4
Vectors = NDArray[np.float32]


def load_pooled(folder: Path, pooling: str | None = None) -> LoadedModel:
    return load_model(ModelConfig(folder=str(folder), served_name="m", pooling=pooling))


def text_case(token_ids: Sequence[int]) -> Case:
    ids = np.array(token_ids, np.int32)
    return Case(ids, (), {}, {"input_ids": torch.tensor([list(token_ids)])})


@dataclass
class Pooled:
    """What all prompts gave, [n, width] each, and what the engine counted."""

    vectors: list[Vectors]
    cached_tokens: list[int]
    core: EngineCore

    @property
    def stats(self) -> dict[str, float]:
        return self.core.stats()


class PooledEngine:
    """A scheduler and a runner in the test's own thread."""

    def __init__(self, loaded: LoadedModel, *, budget: int, num_blocks: int = 512) -> None:
        self._loaded = loaded
        scheduler = Scheduler(
            SchedulerState(
                BlockPool(num_blocks, BLOCK),
                EncoderCache(1 << 20, loaded.info.encoder_row_bytes),
                prefix_caching=True,
            ),
            loaded.info,
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
        )
        features = loaded.family.attention_features(loaded.dtype)
        runner = Runner(
            loaded,
            kv_pages=loaded.kv_pages(num_blocks, BLOCK),
            backend=select_backend("cpu", features),
            max_num_seqs=8,
            max_num_batched_tokens=budget,
        )
        self.core = EngineCore(scheduler, runner)
        self._count = 0

    def pool(self, cases: Sequence[Case]) -> Pooled:
        """One prompt comes every step, so that chunks of several are computed together."""
        first, waiting = self._count, list(cases)
        found: dict[str, Vectors] = {}
        cached: dict[str, int] = {}
        width = self._loaded.info.pooling.width  # type: ignore[union-attr]
        while waiting or self.core.has_work:
            if waiting:
                case = waiting.pop(0)
                self.core.add(_request(str(self._count), case), case.items)
                self._count += 1
            output = self.core.step()
            for delta in output.deltas if output else ():
                assert delta.error is None, delta.error
                assert delta.finish_reason == "stop"
                assert not delta.token_ids
                assert delta.pooled is not None
                assert delta.reuse_stats is not None
                found[delta.request_id] = np.frombuffer(delta.pooled, "<f4").reshape(-1, width)
                cached[delta.request_id] = delta.reuse_stats.prefix_cached_tokens
        self.core.check_integrity()
        names = [str(number) for number in range(first, self._count)]
        return Pooled([found[n] for n in names], [cached[n] for n in names], self.core)


def _request(request_id: str, case: Case) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        scope=bytes(32),
        prompt=array(case.token_ids),
        features=case.features,
        sampling=SamplingParams(max_tokens=1),
        arrival=float(request_id),
    )
