"""Live sessions of a loaded model in an engine core, one token of answer at a time, and what plain
Hugging Face computes of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lookonce.config import SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerState
from lookonce.core.state_snapshots import StateSnapshots
from lookonce.engine.process.engine_core import EngineCore
from lookonce.model.attention.select import select_backend
from lookonce.model.loader import LoadedModel
from lookonce.types.media import MediaFeature, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import GenerateRequest, SessionOptions
from lookonce.types.sampling import SamplingParams
from tests.support.model.cases import array
from tests.support.model.serving import CapturingRunner, PlanEdit

SNAPSHOTS = 8
"""Of states, for models that keep any."""
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class LiveModel:
    """An engine core with a runner that keeps the logits of every sampled token."""

    def __init__(
        self,
        loaded: LoadedModel,
        info: ModelInfo,
        *,
        budget: int = 32,
        num_blocks: int = 256,
        block_size: int = 4,
        edit: PlanEdit = lambda plan: plan,
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerState(
                BlockPool(num_blocks, block_size),
                EncoderCache(1 << 20, info.encoder_row_bytes),
                prefix_caching=True,
                snapshots=StateSnapshots(SNAPSHOTS, info.state_bytes) if info.state_bytes else None,
            ),
            info,
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
        )
        features = loaded.family.attention_features(loaded.dtype)
        self.runner = CapturingRunner(
            loaded,
            kv_pages=loaded.kv_pages(num_blocks, block_size),
            backend=select_backend("cpu", features),
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            edit=edit,
            num_snapshots=SNAPSHOTS,
        )
        self.core = EngineCore(self.scheduler, self.runner)
        self.deltas: list[Any] = []

    def run(self) -> None:
        while self.core.has_work:
            output = self.core.step()
            self.core.check_integrity()
            for delta in output.deltas if output else ():
                assert delta.error is None, delta.error
                self.deltas.append(delta)

    def state(self, name: str) -> Any:
        """The sequence of a session."""
        return self.scheduler._state.queues.requests[name].sequences[0]


class LiveCase:
    """One session: what it was given and what it answered, token by token."""

    def __init__(
        self,
        model: LiveModel,
        name: str,
        prompt: Sequence[int],
        options: SessionOptions | None = None,
        *,
        features: tuple[MediaFeature, ...] = (),
        items: dict[bytes, ProcessedItem] | None = None,
    ) -> None:
        self.model, self.name = model, name
        self.tokens = list(prompt)
        """All tokens of the session, whether they were dropped or not."""
        self.sampled_after: list[int] = []
        """The lengths of `tokens` at which one was sampled."""
        request = GenerateRequest(
            request_id=name,
            scope=bytes(32),
            prompt=array(np.array(prompt, np.int32)),
            features=features,
            sampling=ONE,
            arrival=0.0,
        )
        options = options or SessionOptions()
        model.core.add(request, items or {}, live=True, options=options)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.model.core.extend(self.name, np.array(token_ids, np.int32), (), {})
        self.tokens += token_ids

    def take_answer(self) -> None:
        """Note the token that was sampled last, before anything is given again."""
        self.sampled_after.append(len(self.tokens))
        mine = [d for d in self.model.deltas if d.request_id == self.name and d.token_ids]
        self.tokens += mine[-1].token_ids

    @property
    def logits(self) -> torch.Tensor:
        """[answers, V]."""
        seq_id = self.model.state(self.name).seq_id
        return torch.stack(self.model.runner.captured[seq_id])


@torch.no_grad()
def whole_logits(reference: Any, case: LiveCase) -> torch.Tensor:
    """[answers, V]: all tokens in one forward of plain Hugging Face, nothing dropped."""
    logits = reference(torch.tensor([case.tokens])).logits[0].float()
    return torch.stack([logits[length - 1] for length in case.sampled_after])


def converse(
    model: LiveModel, cases: Sequence[LiveCase], turns: int, given: Callable[[int, int], list[int]]
) -> None:
    """`turns` extensions of every session, side by side; `given(case, turn)` are their tokens."""
    model.run()
    for case in cases:
        case.take_answer()
    for turn in range(turns):
        for index, case in enumerate(cases):
            case.extend(given(index, turn))
        model.run()
        for case in cases:
            case.take_answer()
