"""Decode steps in buffers of a few sizes, padded: the answers are those of steps as they come.

On a CPU their operations run one by one. A simulated device captures them and computes them again,
with the tensors that they had then: what the host decided at capture would stay.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lookonce.config import KVConfig, ModelConfig
from lookonce.engine.process.load_engine import attention_of
from lookonce.model import runner as runner_module
from lookonce.model.attention.backend import AttentionCall, AttentionMetadata
from lookonce.model.attention.reference import ReferenceBackend, write_pages
from lookonce.model.decode_graphs import CudaGraphs, DecodeGraphs, decode_sizes
from lookonce.model.kv_pages import LayerPages
from lookonce.model.loader import load_model
from lookonce.model.runner import Runner
from lookonce.model.step_inputs import StepInputBuilder
from lookonce.model.text_model import TextModel
from tests.support.device import ON_CUDA
from tests.support.model.cases import ALL_MODELS, CaseMaker
from tests.support.model.serving import (
    answers,
    assert_same_in_bfloat16,
    blocks_for_preemption,
    loaded_with_cases,
    media_cases,
    serve,
    text_cases,
)
from tests.support.simulated_device import (
    DeviceWaitError,
    SimulatedGraphs,
    accelerator,
    simulated_device,
)

SIZES = (1, 2, 4, 8)


class PaddedBackend(ReferenceBackend):
    """Decode steps over all blocks that a table has room for, with a mask: nothing in it depends
    on a length that the host knows."""

    is_capturable = True

    def forward(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        call: AttentionCall,
    ) -> Tensor:
        if metadata.num_decodes != metadata.num_tokens:
            return super().forward(layer, query, key, value, metadata, call)
        write_pages(layer, key, value, metadata.slot_mapping)
        tables = metadata.block_tables.long()
        keys = layer.keys[tables].flatten(1, 2).transpose(1, 2)
        values = layer.values[tables].flatten(1, 2).transpose(1, 2)
        at = torch.arange(keys.shape[2], device=query.device)
        seen = at < metadata.kv_lens[:, None]
        if call.sliding_window is not None:
            seen &= at >= metadata.kv_lens[:, None] - call.sliding_window
        found = functional.scaled_dot_product_attention(
            query.unsqueeze(2),
            keys,
            values,
            attn_mask=seen[:, None, None],
            scale=call.scale,
            enable_gqa=True,
        )
        return found.squeeze(2)


def test_sizes_end_with_the_largest_batch():
    assert decode_sizes(6) == (1, 2, 4, 6)
    assert decode_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert decode_sizes(256)[-6:] == (96, 128, 160, 192, 224, 256)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2_5_vl", "gemma3_text"] if ALL_MODELS else ["qwen2_5_vl"]
)
def test_padded_steps_on_a_cpu_give_the_same_answers(kind, folder):
    loaded, cases = loaded_with_cases(folder(kind))
    expected = serve(loaded, cases, budget=48)
    for options in ({"overlapped": True}, {"num_blocks": blocks_for_preemption(cases, 4)}):
        found = serve(loaded, cases, budget=48, decode_sizes=SIZES, **options)
        assert answers(found) == answers(expected)


def test_steps_larger_than_every_size_are_computed_as_they_come(folder):
    loaded, cases = loaded_with_cases(folder("llama"))
    expected = serve(loaded, cases, budget=512)
    assert answers(serve(loaded, cases, budget=512, decode_sizes=(1, 2))) == answers(expected)


def test_padding_that_had_no_block_of_its_own_would_be_found(folder, monkeypatch):
    """The control: rows of padding write to the first block, which a sequence has."""
    loaded, cases = loaded_with_cases(folder("llama"))
    expected = serve(loaded, cases, budget=48, num_blocks=64)
    monkeypatch.setattr(runner_module, "SCRATCH_BLOCKS", 65)
    found = serve(loaded, cases, budget=48, num_blocks=64, decode_sizes=(8,))
    assert answers(found) != answers(expected)


@pytest.mark.parametrize("overlapped", [False, True] if ALL_MODELS else [True])
def test_captured_steps_give_the_same_answers(folder, overlapped):
    loaded, cases = loaded_with_cases(folder("llama"))
    options = {"backend": PaddedBackend(), "num_tokens": 8, "budget": 48}
    expected = serve(loaded, cases, **options)
    with simulated_device() as (device, seen):
        graphs = SimulatedGraphs(seen)
        there, _ = loaded_with_cases(folder("llama"), str(device))
        found = serve(
            there, cases, decode_sizes=SIZES, capture=graphs, overlapped=overlapped, **options
        )
        assert graphs.num_captured == len(SIZES)
        assert graphs.num_replayed > 5
    assert answers(found) == answers(expected)


def test_what_the_host_reads_cannot_be_captured(folder, monkeypatch):
    """The control: a decoder that looks at a value."""
    compute = TextModel.compute_logits

    def looking(self, hidden):
        logits = compute(self, hidden)
        assert logits.sum().item() is not None
        return logits

    with simulated_device() as (device, seen):
        there, cases = loaded_with_cases(folder("llama"), str(device))
        monkeypatch.setattr(TextModel, "compute_logits", looking)
        with pytest.raises(DeviceWaitError):
            serve(
                there,
                cases,
                backend=PaddedBackend(),
                budget=48,
                decode_sizes=SIZES,
                capture=SimulatedGraphs(seen),
            )


def test_sizes_without_memory_are_computed_one_operation_after_the_other(folder):
    loaded, cases = loaded_with_cases(folder("llama"))
    options = {"backend": PaddedBackend(), "num_tokens": 6, "budget": 48}
    expected = serve(loaded, cases, **options)
    found = serve(loaded, cases, decode_sizes=SIZES, capture=lambda body: None, **options)
    assert answers(found) == answers(expected)


def test_the_time_of_a_step_has_none_of_what_the_host_prepares(folder, monkeypatch):
    """The device may be idle while inputs are built and buffers filled: here that takes an hour."""
    hours, begin, told = 0, Runner.begin, []

    def an_hour(inner):
        def taking(*args):
            nonlocal hours
            hours += 1
            return inner(*args)

        return taking

    def noting(self, plan):
        finish = begin(self, plan)

        def finished():
            result = finish()
            told.extend(seconds for _, seconds in result.device_seconds)
            return result

        return finished

    with simulated_device() as (device, seen):
        there, cases = loaded_with_cases(folder("llama"), str(device))
        monkeypatch.setattr(StepInputBuilder, "build", an_hour(StepInputBuilder.build))
        monkeypatch.setattr(DecodeGraphs, "_fill", an_hour(DecodeGraphs._fill))
        monkeypatch.setattr(Runner, "begin", noting)
        monkeypatch.setattr(time, "perf_counter", lambda: 3600.0 * hours)
        graphs = SimulatedGraphs(seen)
        options = {"num_tokens": 4, "budget": 48, "decode_sizes": SIZES, "capture": graphs}
        serve(there, cases, backend=PaddedBackend(), overlapped=True, **options)
    assert graphs.num_replayed > 0
    assert len(told) > graphs.num_replayed
    assert set(told) == {0.0}


@pytest.mark.skipif(not ON_CUDA, reason="only a GPU has them: make test-cuda")
@pytest.mark.parametrize("overlapped", [False, True])
def test_cuda_graphs_give_the_same_answers(folder, overlapped):
    loaded, cases = loaded_with_cases(folder("llama"))
    options = {"backend": PaddedBackend(), "num_tokens": 8, "budget": 48}
    expected = serve(loaded, cases, **options)
    with accelerator() as (device, _):
        there, _ = loaded_with_cases(folder("llama"), str(device))
        graphs = CudaGraphs(device, 1 << 30)
        found = serve(
            there, cases, decode_sizes=SIZES, capture=graphs, overlapped=overlapped, **options
        )
    assert answers(found) == answers(expected)


@pytest.mark.skipif(not ON_CUDA, reason="only a GPU has them: make test-cuda")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2_5_vl"])
def test_what_a_server_computes_is_the_same_with_graphs_and_without(kind, folder):
    """bfloat16 and torch's paged attention, in blocks of its own size."""
    with accelerator() as (device, _):
        made = folder(kind)
        loaded = load_model(ModelConfig(str(made), "test", device=str(device), dtype="bfloat16"))
        maker = CaseMaker(made, loaded.family.config)
        cases = media_cases(maker) if maker.sees else text_cases(maker)
        backend, block_size = attention_of(loaded, KVConfig())
        assert backend.is_capturable
        options = {"backend": backend, "block_size": block_size, "num_blocks": 64, "budget": 64}
        expected = serve(loaded, cases, **options)
        for overlapped in (False, True):
            graphs = CudaGraphs(device, 1 << 30)
            found = serve(
                loaded, cases, decode_sizes=SIZES, capture=graphs, overlapped=overlapped, **options
            )
            assert_same_in_bfloat16(found.answers, expected.answers)


def test_in_bfloat16_padding_changes_no_more_than_rounding_and_a_wrong_page_more(
    folder, monkeypatch
):
    """What the comparison above takes for the same, and the control."""
    loaded = load_model(ModelConfig(str(folder("llama")), "test", dtype="bfloat16"))
    _, cases = loaded_with_cases(folder("llama"))
    options = {"backend": ReferenceBackend(), "budget": 48, "num_blocks": 64, "overlapped": False}
    expected = serve(loaded, cases, **options)
    found = serve(loaded, cases, decode_sizes=(8,), **options)
    assert_same_in_bfloat16(found.answers, expected.answers)
    monkeypatch.setattr(runner_module, "SCRATCH_BLOCKS", 65)
    found = serve(loaded, cases, decode_sizes=(8,), **options)
    with pytest.raises(AssertionError):
        assert_same_in_bfloat16(found.answers, expected.answers)
