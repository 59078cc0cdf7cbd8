"""A model that several ranks compute answers as one that is whole, and refuses what they cannot.

The ranks are threads here, whose sums a barrier makes; `make test-tensor-parallel` has processes
and a server. Plans reach the ranks as messages, as they do there.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from lookonce.config import ModelConfig
from lookonce.engine.process.tensor_parallel import ParallelRunner
from lookonce.errors import DeviceLostError, ModelLoadError
from lookonce.ipc.rank_messages import RankEncoder, rank_decoder, rank_plan, step_plan
from lookonce.model.device import StepReads, to_device
from lookonce.model.encoder_runner import EncodeReport, EncoderRunner
from lookonce.model.families.base import ModelFamily
from lookonce.model.loader import LoadedModel, load_model
from lookonce.model.tensor_parallel import TensorParallelGroup, divide
from lookonce.types.media import Expansion, ProcessedItem
from lookonce.types.step import DropTokens, EncodeItem, StepPlan, StepResult
from tests.support.model import serving
from tests.support.model.cases import ALL_MODELS
from tests.support.model.serving import (
    answers,
    blocks_for_preemption,
    loaded_with_cases,
    make_core,
    serve,
)
from tests.support.simulated_device import simulated_device

PATIENCE = 60.0


class Meeting:
    """Where the threads of one group give each other tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.given: list[torch.Tensor | None] = [None] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.given[rank] = tensor
        self.barrier.wait()
        found = [each.clone() for each in self.given if each is not None]
        self.barrier.wait()
        return found


class ThreadGroup:
    """As `TensorParallelGroup`, of threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part.copy_(sum(self._meeting.exchange(self.rank, part)))

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meeting.exchange(self.rank, part), dim=-1)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self._meeting.exchange(self.rank, values)[0])

    is_same = TensorParallelGroup.is_same


class RankThreads:
    """As `Ranks`: the ranks 1 and higher execute plans in threads."""

    def __init__(self, runners: list) -> None:
        self._encoder = RankEncoder()
        self._queues: list[queue.Queue] = [queue.Queue() for _ in runners]
        self.failed: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._run, args=pair, daemon=True)
            for pair in zip(runners, self._queues, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def send(self, plan: StepPlan) -> None:
        frames = [bytes(frame) for frame in self._encoder.encode(rank_plan(plan))]
        for each in self._queues:
            each.put(frames)

    def _run(self, runner, plans: queue.Queue) -> None:
        decoder = rank_decoder()
        under_way: Callable[[], StepResult] | None = None
        try:
            while (frames := plans.get()) is not None:
                begun = runner.begin(step_plan(decoder.decode(frames)))
                if under_way is not None:
                    under_way()
                under_way = begun
        except BaseException as error:  # noqa: BLE001  the test fails with it
            self.failed.append(error)

    def stop(self) -> None:
        for each in self._queues:
            each.put(None)
        for thread in self.threads:
            thread.join(PATIENCE)
        assert not self.failed, self.failed


def load_ranks(folder, size: int) -> list[LoadedModel]:
    meeting = Meeting(size)

    def load(rank: int) -> LoadedModel:
        config = ModelConfig(folder=str(folder), served_name="test")
        return load_model(config, group=ThreadGroup(rank, meeting))  # type: ignore[arg-type]

    # One after the other: transformers changes classes of its own while it loads.
    return [load(rank) for rank in range(size)]


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch):
    """`serve` on all ranks, of which rank 0 is the first of the loaded models."""

    def serve_ranks(ranks: list[LoadedModel], cases, **options):
        made: list[RankThreads] = []

        def make(loaded: LoadedModel, **given):
            with ThreadPoolExecutor(len(ranks)) as pool:
                cores = list(pool.map(lambda each: make_core(each, **given), ranks))
            made.append(RankThreads([runner for _, runner in cores[1:]]))
            core, runner = cores[0]
            core._runner = ParallelRunner(runner, made[-1])  # type: ignore[arg-type]
            return core, runner

        monkeypatch.setattr(serving, "make_core", make)
        try:
            return serve(ranks[0], cases, **options)
        finally:
            monkeypatch.undo()
            for each in made:
                each.stop()

    return serve_ranks


RANKS = [("qwen2_5_vl", 2), ("qwen3", 4), *([("llama", 2), ("llava", 2)] if ALL_MODELS else ())]


@pytest.mark.parametrize(("kind", "size"), RANKS)
def test_answers_are_those_of_one_process(kind, size, folder, parallel):
    """Heads of keys and values are divided, or shared; queries have a bias, or norms."""
    whole, cases = loaded_with_cases(folder(kind))
    expected = serve(whole, cases, budget=48, prompt_logprobs={0: 1})
    ranks = load_ranks(folder(kind), size)
    assert ranks[0].info.vocab_size == whole.info.vocab_size
    blocks = [each.kv_pages(4, 4).num_bytes for each in (*ranks, whole)]
    heads = whole.family.num_kv_heads
    assert blocks == [blocks[-1] * max(1, heads // size) // heads] * size + [blocks[-1]]
    options = {"num_blocks": blocks_for_preemption(cases, 4)} if kind == "qwen3" else {}
    for overlapped in (False, True):
        found = parallel(
            ranks, cases, budget=48, prompt_logprobs={0: 1}, overlapped=overlapped, **options
        )
        assert answers(found) == answers(expected)
        assert found.scored.keys() == {0}


@pytest.mark.parametrize(
    ("kind", "size", "says"),
    [
        ("llama", 3, "attention heads"),
        ("gemma2", 2, "plain decoders"),
        ("voxtral_realtime", 2, "one process"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(kind, size, says, folder):
    with pytest.raises(ModelLoadError, match=says):
        load_model(
            ModelConfig(folder=str(folder(kind)), served_name="test"),
            group=ThreadGroup(0, Meeting(size)),  # type: ignore[arg-type]
        )


def test_a_vocabulary_that_cannot_be_divided_evenly_has_all_its_logits():
    config = SimpleNamespace(num_attention_heads=2, hidden_size=8, intermediate_size=4)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: config))
    hidden, whole = torch.randn(3, 8), torch.nn.Linear(8, 321)
    meeting = Meeting(2)

    def logits(rank: int) -> torch.Tensor:
        head = copy.deepcopy(whole)
        decoder = torch.nn.Module()
        decoder.layers = torch.nn.ModuleList()
        divide(model, decoder, head, ThreadGroup(rank, meeting))  # type: ignore[arg-type]
        assert len(head.weight) == 161
        return head(hidden)

    with torch.inference_mode():
        expected = whole(hidden)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(logits, range(2)):
            assert torch.allclose(found, expected, atol=1e-6)


def test_what_is_added_to_a_sum_of_parts_goes_to_the_device_with_the_model():
    """The bias of the layers whose inputs are divided, which Llama may have."""

    def layer() -> torch.nn.Module:
        made = torch.nn.Module()
        made.self_attn, made.mlp = torch.nn.Module(), torch.nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(made.self_attn, name, torch.nn.Linear(8, 8))
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(made.mlp, name, torch.nn.Linear(8, 8))
        return made

    config = SimpleNamespace(num_attention_heads=2, hidden_size=8, intermediate_size=8)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: config))
    whole, hidden = layer(), torch.randn(3, 8)
    with torch.inference_mode():
        expected = whole.self_attn.o_proj(hidden)
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList([whole])
    divide(model, decoder, torch.nn.Linear(8, 8), ThreadGroup(0, Meeting(1)))  # type: ignore[arg-type]
    with simulated_device() as (device, seen):
        decoder.to(device)
        there = to_device(hidden, device)
        with seen.refusing():
            found = whole.self_attn.o_proj(there)
        assert torch.allclose(found.cpu(), expected, atol=1e-6)


class OneRankFails(ModelFamily):
    """Its encoder fails on the ranks that are named."""

    modalities = ("image",)
    row_width = 4

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.rank = 0

    def batch_key(self, modality, item):
        return modality

    def encode(self, modality, items):
        if self.rank in self.failing:
            raise torch.OutOfMemoryError("no memory")
        return [torch.zeros(2, 4) for _ in items]


def encoded_by_two(*failing: int) -> list[EncodeReport | BaseException]:
    meeting = Meeting(2)
    item = ProcessedItem("image", {}, Expansion(((7, 2),), 7))
    plan = StepPlan(1, encode=(EncodeItem(b"k" * 32, item),))

    def encode(rank: int) -> EncodeReport | BaseException:
        family = OneRankFails(*failing)
        family.rank, cpu = rank, torch.device("cpu")
        encoder = EncoderRunner(family, torch.float32, cpu, ThreadGroup(rank, meeting))  # type: ignore[arg-type]
        try:
            return encoder.execute(plan, StepReads(cpu))
        except DeviceLostError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(encode, range(2)))


def test_an_item_that_one_rank_alone_cannot_encode_ends_the_engine_on_all_of_them():
    for rank, found in enumerate(encoded_by_two(1)):
        assert isinstance(found, DeviceLostError)
        reason = "OutOfMemoryError" if rank == 1 else "nothing failed"
        assert f"on rank {rank}: " in found.message
        assert reason in found.message


def test_an_item_that_no_rank_can_encode_fails_alone():
    for found in encoded_by_two(0, 1):
        assert isinstance(found, EncodeReport)
        assert found.failed.keys() == {b"k" * 32}


def test_what_failed_is_known_while_the_next_step_is_computed_and_no_longer():
    """That step may have been planned before the failure was known."""
    cpu = torch.device("cpu")
    encoder = EncoderRunner(OneRankFails(0), torch.float32, cpu)
    item = ProcessedItem("image", {}, Expansion(((7, 2),), 7))
    encoder.execute(StepPlan(1, encode=(EncodeItem(b"k" * 32, item),)), StepReads(cpu))
    known = []
    for step_id in (2, 3):
        known.append(encoder.failed)
        encoder.execute(StepPlan(step_id), StepReads(cpu))
    assert (known[0], encoder.failed) == ({b"k" * 32}, frozenset())
    assert known[1] == {b"k" * 32}


def test_a_step_that_fails_on_a_rank_ends_the_engine():
    class Broken:
        def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
            raise RuntimeError("Connection closed by peer")

    class NoRanks:
        def send(self, plan: StepPlan) -> None:
            pass

    runner = ParallelRunner(Broken(), NoRanks())  # type: ignore[arg-type]
    with pytest.raises(DeviceLostError):
        runner.execute(StepPlan(1))


def test_what_a_session_drops_reaches_the_ranks_as_it_is():
    drop = DropTokens(7, 4, 8, 40, reanchor=True, moved=((1, 2), (3, 3)))
    plan = StepPlan(9, finished=(1, 2), dropped_outputs=(b"a" * 32,), extended=(drop,))
    frames = [bytes(frame) for frame in RankEncoder().encode(rank_plan(plan))]
    found = step_plan(rank_decoder().decode(frames))
    assert msgspec.structs.asdict(found) == msgspec.structs.asdict(plan)
    assert np.array_equal(found.extended[0].moved, drop.moved)
