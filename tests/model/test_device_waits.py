"""Steps on an accelerator enqueue their work and wait once, at the end: shown on a device in name,
whose values are computed on the CPU. Answers are those of a CPU, token for token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lookonce.config import ModelConfig
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.device import CopyStream, DeviceTimes, StepReads, to_device
from lookonce.model.encoder_runner import EncoderRunner, OutputCopier
from lookonce.model.families.base import ModelFamily
from lookonce.model.loader import load_model
from lookonce.model.runner import Runner
from lookonce.model.sampler import PromptLogprobScorer, Sampler, SamplerOutput, _Part
from lookonce.model.step_inputs import CopyFence, StaticBuffer
from lookonce.types.sampling import SamplingParams, TokenRules
from tests.support.device import ON_CUDA
from tests.support.grammars import Spelled
from tests.support.model.cases import ALL_MODELS, Case, CaseMaker
from tests.support.model.serving import (
    Served,
    blocks_for_preemption,
    loaded_with_cases,
    media_cases,
    serve,
    text_cases,
)
from tests.support.simulated_device import (
    CudaWatch,
    DeviceWaitError,
    Stream,
    Watch,
    accelerator,
    simulated_device,
    watch,
)

ALL_KINDS = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma2", "gemma3_text"),
    *(
        "llava",
        "pixtral",
        "mistral3",
        "gemma3",
        "idefics3",
        "smolvlm",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "nano",
    ),
    *("qwen3_omni", "qwen2_audio", "voxtral"),
)
VOCAB, EOS = 700, 3
ASKED = {
    "plain": SamplingParams(temperature=0.0),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "drawn": SamplingParams(temperature=1.0, seed=1),
    "top-k": SamplingParams(temperature=0.8, top_k=5, seed=2),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8, seed=3, logprobs=0),
    "min-p": SamplingParams(temperature=1.3, min_p=0.2, top_p=0.95, top_k=40, seed=4),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25
    ),
    "named": SamplingParams(temperature=0.0, logit_bias={9: 5.0, 11: -2.0}, min_tokens=2),
    "allowed": SamplingParams(temperature=0.7, seed=5, allowed_token_ids=(5, 6, 7)),
    "grammar": SamplingParams(temperature=0.0),
    "speech": SamplingParams(
        temperature=0.0,
        logprobs=1,
        token_rules=TokenRules(
            suppressed=(4, 5), suppressed_first=(6,), timestamp_begin=500, text_end=400
        ),
    ),
}


@dataclass
class Steps:
    count: int = 0


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Steps refuse what waits, from now on; counts them."""
    execute, counted = Runner.execute, Steps()
    seen = CudaWatch() if ON_CUDA else watch()

    def watched(self: Runner, plan):
        counted.count += 1
        with seen.refusing():
            return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", watched)
    return counted


def cases_of(folder, family_config) -> list[Case]:
    maker = CaseMaker(folder, family_config)
    return media_cases(maker) if maker.sees or maker.hears else text_cases(maker)


def on_cpu_and_device(folder, steps: Steps, **options) -> tuple[Served, Served, list[Case]]:
    def served(device: str, cases: list[Case] | None) -> tuple[Served, list[Case]]:
        loaded = load_model(ModelConfig(folder=str(folder), served_name="test", device=device))
        cases = cases or cases_of(folder, loaded.family.config)
        answers = serve(loaded, cases, backend=ReferenceBackend(), num_tokens=6, **options)
        return answers, cases

    expected, cases = served("cpu", None)
    steps.count = 0
    with accelerator() as (device, seen):
        before = seen.num_waits
        found, _ = served(str(device), cases)
        assert ON_CUDA or 0 < seen.num_waits - before <= steps.count
    return found, expected, cases


@pytest.mark.parametrize("kind", ALL_KINDS if ALL_MODELS else ["nano"])
def test_whole_steps_wait_once_and_answer_as_on_a_cpu(kind, folder, steps):
    """Chunked prefill, mixed batches, encoder runs and prompt log-probabilities."""
    scored = {0: 2, 1: 0}
    budget = 300 if kind == "gemma3" else 32
    found, expected, _ = on_cpu_and_device(
        folder(kind), steps, budget=budget, prompt_logprobs=scored
    )
    assert [a.token_ids for a in found.answers] == [a.token_ids for a in expected.answers]
    assert found.scored.keys() == expected.scored.keys() == scored.keys()
    for case in scored:
        for ours, theirs in zip(found.scored[case], expected.scored[case], strict=True):
            assert (ours.rank, len(ours.top)) == (theirs.rank, len(theirs.top))
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_outputs_that_were_offloaded_come_back_without_a_wait(folder, steps):
    """The device has room for two pictures: an earlier one of a prompt is copied to the host, and
    back for the next prompt, on a stream of its own."""
    made = folder("llava")
    info = load_model(ModelConfig(str(made), "t")).info
    found, expected, _ = on_cpu_and_device(
        made,
        steps,
        budget=24,
        apart=True,
        encoder_cache=(32 * info.encoder_row_bytes, 1 << 20),
    )
    assert found.stats["encoder_cache_restores_total"] > 0
    assert [a.token_ids for a in found.answers] == [a.token_ids for a in expected.answers]


def test_a_model_s_device_is_the_current_one(folder):
    """Events are recorded to its stream."""
    with simulated_device() as (device, _):
        module = torch.get_device_module(device)
        module.chosen = None
        load_model(ModelConfig(str(folder("llama")), "t", device=str(device)))
        assert module.chosen == device


def taken_and_brought_back(values: torch.Tensor) -> torch.Tensor:
    """A copy to the host that is read on the device again."""
    copies = CopyStream(values.device)
    return copies.to_device(copies.to_host(values))


def test_what_a_copy_stream_brings_is_what_it_took():
    with accelerator() as (device, seen), seen.refusing():
        values = torch.arange(4, device=device)
        back = taken_and_brought_back(values)
        values.zero_()
        reads = StepReads(device)
        host = reads.later(back)
        reads.wait()
        assert host.tolist() == [0, 1, 2, 3]


def test_an_output_for_a_tier_is_copied_beside_the_steps():
    with accelerator() as (device, seen):
        encoder = EncoderRunner(ModelFamily, torch.float32, device)  # type: ignore[arg-type]
        output = to_device(torch.arange(8.0).view(2, 4), device)
        encoder._outputs[b"a"] = output
        copier, out = OutputCopier(encoder), bytearray(32)
        with nullcontext() if ON_CUDA else seen.refusing():  # torch refuses any wait for a stream
            copier.copy(copier.pin(b"a"), memoryview(out))
        assert np.frombuffer(out, np.float32).tolist() == list(range(8))


def test_a_copy_that_is_not_waited_for_would_be_found(monkeypatch):
    """The control: streams that wait for nothing."""
    monkeypatch.setattr(Stream, "wait_stream", lambda *_: None)
    with simulated_device() as (device, _):
        values = torch.arange(4, device=device)
        with pytest.raises(DeviceWaitError, match="another stream"):
            taken_and_brought_back(values).sum()


def test_preempted_sequences_wait_no_more_often(folder, steps):
    made = folder("llama")
    cases = text_cases(CaseMaker(made, load_model(ModelConfig(str(made), "t")).family.config))
    found, expected, _ = on_cpu_and_device(
        made, steps, budget=64, num_blocks=blocks_for_preemption(cases, 4)
    )
    assert [a.token_ids for a in found.answers] == [a.token_ids for a in expected.answers]


def test_the_time_of_a_step_is_told_with_no_result_before_its_own():
    """The next step may have ended when the result of the one before is made."""

    class Ended:
        def __init__(self, **_: object) -> None: ...
        def record(self) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, _: object) -> float:
            return 1000.0

    device = SimpleNamespace(type="fast")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookonce.model.device.new_event", lambda *_, **options: Ended(**options))
        times = DeviceTimes(device)  # type: ignore[arg-type]
        for step_id in (1, 2):
            times.begin()
            times.end(step_id)
        assert [times.take(step_id) for step_id in (1, 2, 3)] == [((1, 1.0),), ((2, 1.0),), ()]


def test_the_device_tells_what_each_step_took_though_some_are_not_waited_for(folder, monkeypatch):
    """A chunk within a prompt is told with the result of a later step."""
    begin, results = Runner.begin, []

    def noting(self: Runner, plan):
        finish = begin(self, plan)

        def finished():
            results.append((plan, finish()))
            return results[-1][1]

        return finished

    with accelerator() as (device, _):
        loaded, cases = loaded_with_cases(folder("llama"), str(device))
        monkeypatch.setattr(Runner, "begin", noting)
        serve(loaded, cases[:1], backend=ReferenceBackend(), budget=32, overlapped=True)
    computing = [(plan.step_id, plan, result) for plan, result in results if plan.scheduled]
    told = [each for _, _, result in computing for each in result.device_seconds or ()]
    assert [step for step, _ in told] == [step for step, _, _ in computing]
    assert all(seconds >= 0 for _, seconds in told)
    samples = [any(chunk.sample for chunk in plan.scheduled) for _, plan, _ in computing]
    assert not samples[0]
    assert samples[-1]
    for (step, _, result), is_read in zip(computing, samples, strict=True):
        assert (step in dict(result.device_seconds)) == is_read or ON_CUDA


def sampled(
    device: torch.device, names: list[str], seen: Watch | CudaWatch | None = None
) -> list[SamplerOutput]:
    """Four tokens for each of the requests, which share every step."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(len(names), VOCAB, generator=generator) * 3 for _ in range(4)]
    steps[2][0, 7] = torch.nan
    sampler = Sampler(VOCAB, [EOS])
    for row, name in enumerate(names):
        grammar = Spelled([[8, 9, 8], [8, 12, 40]]) if name == "grammar" else None
        sampler.add(row, ASKED[name], 0, [5, 9, 9], [], grammar)
    outputs = []
    for at, logits in enumerate(steps):
        scores = to_device(logits, device)
        reads = StepReads(device)
        with nullcontext() if seen is None else seen.refusing():
            told = sampler.begin(scores, range(len(names)), [3 + at] * len(names), reads)
            reads.wait()
        outputs.append(told())
    return outputs


@pytest.mark.parametrize("names", [[name] for name in ASKED] + [list(ASKED)], ids="+".join)
def test_whatever_is_asked_of_the_sampler_waits_once(names):
    expected = sampled(torch.device("cpu"), names)
    with accelerator() as (device, seen):
        before = seen.num_waits
        found = sampled(device, names, seen)
        assert ON_CUDA or seen.num_waits - before == len(found)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]


def item(values: torch.Tensor) -> object:
    return values.sum().item()


def branch(values: torch.Tensor) -> object:
    return bool((values > 0).any())


def listed(values: torch.Tensor) -> object:
    return values.tolist()


def masked(values: torch.Tensor) -> object:
    return values[values > 0]


def masked_write(values: torch.Tensor) -> object:
    values[values > 0] = 1.0
    return values


def nonzero(values: torch.Tensor) -> object:
    return values.nonzero()


def repeated(values: torch.Tensor) -> object:
    return values.repeat_interleave(torch.ones_like(values, dtype=torch.long))


def read_whole(values: torch.Tensor) -> object:
    return values.cpu()


def read_unpinned(values: torch.Tensor) -> object:
    return torch.empty(values.shape).copy_(values, non_blocking=True)


def pageable(values: torch.Tensor) -> object:
    return torch.ones(3).to(values.device, non_blocking=True)


def pageable_write(values: torch.Tensor) -> object:
    return values.copy_(torch.ones(values.shape), non_blocking=True)


def pinned_but_waited_for(values: torch.Tensor) -> object:
    return torch.ones(3, pin_memory=True).to(values.device)


def by_host_index(values: torch.Tensor) -> object:
    return values[torch.tensor([0, 1])]


def whole_device(values: torch.Tensor) -> object:
    return torch.get_device_module(values.device).synchronize()


@pytest.mark.parametrize(
    "waits",
    [
        *(item, branch, listed, masked, masked_write, nonzero, repeated, read_whole),
        *(read_unpinned, pageable, pageable_write, pinned_but_waited_for, by_host_index),
        whole_device,
    ],
)
def test_each_kind_of_wait_is_refused(waits: Callable[[torch.Tensor], object]):
    with simulated_device() as (device, seen):
        values = torch.arange(-2.0, 2.0, device=device)
        waits(values)  # outside of a step anything may wait
        with seen.refusing(), pytest.raises(DeviceWaitError):
            waits(values)


@pytest.mark.skipif(ON_CUDA, reason="torch does not say which wait it refused")
@pytest.mark.parametrize("waits", [item, masked, pageable])
def test_a_wait_put_into_a_model_is_found(waits, folder, steps, monkeypatch):
    logits = Runner.logits

    def waiting(self, inputs, *rest):
        found = logits(self, inputs, *rest)
        if found.device.type != "cpu":
            waits(found)
        return found

    monkeypatch.setattr(Runner, "logits", waiting)
    with pytest.raises(AssertionError, match="DeviceWaitError"):
        on_cpu_and_device(folder("llama"), steps, budget=64)


def test_what_is_read_is_there_after_the_wait_and_not_before():
    with simulated_device() as (device, seen), seen.refusing():
        values = torch.arange(4, device=device)
        reads = StepReads(device)
        host = reads.later(values)
        values.zero_()
        assert host.tolist() != [0, 1, 2, 3]
        reads.wait()
        assert host.tolist() == [0, 1, 2, 3], "as it was when it was asked for"


def test_a_buffer_that_is_filled_again_too_early_is_found():
    with simulated_device() as (device, seen), seen.refusing():
        buffer, fence = StaticBuffer((4,), torch.int64, device), CopyFence(device)
        buffer.host[:] = 1
        pushed = buffer.push(4)
        fence.mark()
        fence.wait()
        buffer.host[:] = 2
        assert pushed.sum() is not None
        buffer.push(4)
        fence.mark()
        buffer.host[:] = 3
        with pytest.raises(DeviceWaitError, match="written while"):
            fence.wait()


def test_a_buffer_is_pushed_by_one_copy_whatever_part_of_it_is_used():
    """A copy for each row of block tables would cost the host more than the rest of a step."""
    with simulated_device() as (device, seen):
        buffer = StaticBuffer((6, 5), torch.int32, device)
        buffer.host[:] = np.arange(30).reshape(6, 5)
        for used in ((3, 5), (4, 2), (2,), (6, 5), (4, 2)):
            before, rows = seen.num_uploads, used[0] if len(used) > 1 else 6
            with seen.refusing():
                pushed = buffer.push(*used)
            assert pushed.tolist() == buffer.host[:rows, : used[-1]].tolist()
            assert seen.num_uploads - before == 1


def test_memory_to_pack_rows_in_is_pinned_when_rows_are_packed():
    with simulated_device() as (device, seen):
        before = len(seen._pinned)
        flat, table = (StaticBuffer(shape, torch.int32, device) for shape in ((6,), (6, 5)))
        flat.push(3)
        table.push(3, 5)
        assert len(seen._pinned) == before + 2
        table.push(4, 2)
        table.push(3, 2)
        assert len(seen._pinned) == before + 3


def test_prompt_scores_of_several_slices_are_read_once(monkeypatch):
    monkeypatch.setattr("lookonce.model.sampler.SLICE_ELEMENTS", 2 * 50)
    head = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(7, 8, generator=torch.Generator().manual_seed(2))
    token_ids = torch.tensor([4, 9, 49, 0, 7, 60])

    def scores(device: torch.device, seen: Watch | CudaWatch | None = None):
        scorer = PromptLogprobScorer(None, 50)  # type: ignore[arg-type]
        weights, rows = to_device(head, device), to_device(hidden, device)
        reads = StepReads(device)
        with nullcontext() if seen is None else seen.refusing():
            told = scorer.score(rows, [_Part(1, 1, token_ids, 2)], lambda h: h @ weights, reads)
            reads.wait()
        return told()[1]

    expected = scores(torch.device("cpu"))
    with simulated_device() as (device, seen):
        before = seen.num_waits
        assert scores(device, seen) == expected
        assert seen.num_waits - before == 1
    assert len(expected) == len(token_ids)
    assert np.isneginf(expected[-1].logprob)
