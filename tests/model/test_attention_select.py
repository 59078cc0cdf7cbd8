"""Which attention backend serves a model, and with which block sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lookonce.errors import ConfigError
from lookonce.model.attention import cpu
from lookonce.model.attention.backend import AttentionFeatures
from lookonce.model.attention.cpu import KernelBackend
from lookonce.model.attention.cuda import VarlenBackend
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.attention.select import resolve_block_size, select_backend
from lookonce.model.native import compiled

PLAIN = AttentionFeatures(torch.float32, 64)
HALF = AttentionFeatures(torch.bfloat16, 64)
EVERYTHING = AttentionFeatures(torch.float32, 64, True, True, True, True)


@pytest.mark.skipif(not cpu.kernel_available(), reason="the C++ kernel is not built")
def test_on_the_cpu_the_kernel_serves_every_feature() -> None:
    assert isinstance(select_backend("cpu", EVERYTHING), KernelBackend)


def test_the_kernel_leaves_fp16_to_torch() -> None:
    features = AttentionFeatures(torch.float16, 64)
    assert isinstance(select_backend("cpu", features), ReferenceBackend)


def test_without_the_kernel_torch_serves_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "kernels", None)
    monkeypatch.setattr(compiled, "chosen", compiled.Choice(why="no compiler"))
    with caplog.at_level(logging.WARNING):
        assert isinstance(select_backend("cpu", PLAIN), ReferenceBackend)
    assert [record.getMessage() for record in caplog.records] == [
        "attention runs in plain torch, several times slower: "
        "the C++ kernel is missing (no compiler)"
    ]


@pytest.mark.skipif(not cpu.kernel_available(), reason="the C++ kernel is not built")
@pytest.mark.parametrize("features", [PLAIN, HALF, EVERYTHING], ids=["fp32", "bf16", "everything"])
@pytest.mark.parametrize(
    "is_wrong", [lambda new: new <= 16, lambda new: new > 16], ids=["few", "many"]
)
def test_a_kernel_that_is_wrong_for_few_or_for_many_rows_is_not_used(
    features: AttentionFeatures,
    is_wrong: Callable[[int], bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forward = KernelBackend.forward

    def broken(backend: KernelBackend, *arguments: Any) -> Tensor:
        output, metadata = forward(backend, *arguments), arguments[4]
        for rows, new in zip(output.split(metadata.query_lens), metadata.query_lens, strict=True):
            if is_wrong(new):
                rows += torch.nan
        return output

    monkeypatch.setattr(KernelBackend, "forward", broken)
    with caplog.at_level(logging.WARNING):
        assert isinstance(select_backend("cpu", features), ReferenceBackend)
    assert [record.getMessage() for record in caplog.records] == [
        "attention runs in plain torch, several times slower: the C++ kernel differs from it by nan"
    ]


def test_on_a_gpu_half_precision_runs_on_flash_attention() -> None:
    assert isinstance(select_backend("cuda:1", HALF), VarlenBackend)


@pytest.mark.parametrize(
    "features",
    [
        PLAIN,
        AttentionFeatures(torch.bfloat16, 512),
        AttentionFeatures(torch.bfloat16, 64, softcap=True),
        AttentionFeatures(torch.bfloat16, 64, sinks=True),
        AttentionFeatures(torch.bfloat16, 64, bidirectional=True),
    ],
    ids=["fp32", "large heads", "softcap", "sinks", "bidirectional"],
)
def test_what_flash_attention_lacks_runs_on_the_reference(features: AttentionFeatures) -> None:
    assert isinstance(select_backend("cuda", features), ReferenceBackend)


def test_block_sizes() -> None:
    assert resolve_block_size(KernelBackend(), None) == 16
    assert resolve_block_size(KernelBackend(), 3) == 3
    assert resolve_block_size(VarlenBackend(), None) == 256
    assert resolve_block_size(VarlenBackend(), 512) == 512
    with pytest.raises(ConfigError, match="multiple of 256"):
        resolve_block_size(VarlenBackend(), 16)
