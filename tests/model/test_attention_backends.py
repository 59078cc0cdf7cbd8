"""Every backend gives the dense answer, writes where it is told, and touches nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from lookonce.model.attention.backend import AttentionBackend
from lookonce.model.attention.cpu import KernelBackend, kernel_available
from lookonce.model.attention.reference import ReferenceBackend
from tests.support.model.attention_world import Problem, build, dense_answer, problems

pytestmark = pytest.mark.usefixtures("each_build")
needs_kernel = pytest.mark.skipif(not kernel_available(), reason="the C++ kernel is not built")
BACKENDS = [
    pytest.param(KernelBackend(), id="kernel", marks=needs_kernel),
    pytest.param(ReferenceBackend(), id="reference"),
]
MIXED = Problem([(1, 100), (1, 0), (70, 9), (1, 31), (5, 64)], block_size=16, head_dim=64)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_equals_dense_attention(backend: AttentionBackend, problem: Problem) -> None:
    scene = build(problem)
    torch.testing.assert_close(scene.run(backend), dense_answer(scene), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=problems(dtype=torch.bfloat16))
@settings(max_examples=15, deadline=None)
def test_bf16_pages_equal_dense_attention_of_the_same_values(
    backend: AttentionBackend, problem: Problem
) -> None:
    scene = build(problem)
    output = scene.run(backend)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), dense_answer(scene), atol=4e-2, rtol=4e-2)


@needs_kernel
@pytest.mark.parametrize("head_dim", [8, 17, 33, 40, 64, 96, 128])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"]
)
def test_heads_of_any_size(dtype: torch.dtype, tolerance: float, head_dim: int) -> None:
    """Direct and packed rows, with tails of heads, of keys and of rows."""
    problem = Problem([(1, 100), (7, 30), (9, 0), (33, 5), (101, 40)], head_dim=head_dim)
    scene = build(replace(problem, dtype=dtype, sliding_window=70, group=1))
    output = scene.run(KernelBackend()).float()
    torch.testing.assert_close(output, dense_answer(scene), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [1, 3, 16])
def test_one_long_chunk_and_many_decodes(backend: AttentionBackend, group: int) -> None:
    scene = build(replace(MIXED, group=group))
    torch.testing.assert_close(scene.run(backend), dense_answer(scene), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_keys_and_values_go_to_their_slots_and_nothing_else_changes(
    backend: AttentionBackend,
) -> None:
    scene = build(MIXED)
    expected = [page.flatten(0, 1).clone() for page in scene.layer]
    for page, new in zip(expected, (scene.key, scene.value), strict=True):
        page[scene.metadata.slot_mapping] = new
    scene.run(backend)
    for page, wanted in zip(scene.layer, expected, strict=True):
        torch.testing.assert_close(page.flatten(0, 1), wanted, rtol=0, atol=0, equal_nan=True)


CONTROLS: dict[str, tuple[Problem, dict[str, Any]]] = {
    "sliding window": (replace(MIXED, sliding_window=20), {"sliding_window": None}),
    "window off by one": (replace(MIXED, sliding_window=20), {"sliding_window": 21}),
    "softcap": (replace(MIXED, softcap=1.0), {"softcap": None}),
    "sinks": (replace(MIXED, sinks=True), {"sinks": None}),
    "scale": (MIXED, {"scale": 1.0}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature", CONTROLS)
def test_control_an_ignored_feature_is_noticed(backend: AttentionBackend, feature: str) -> None:
    problem, ignored = CONTROLS[feature]
    scene = build(problem)
    assert (scene.run(backend, **ignored) - dense_answer(scene)).abs().max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_control_ignored_bidirectional_items_are_noticed(backend: AttentionBackend) -> None:
    scene = build(Problem([(40, 7)], spans=[[(10, 30)]]))
    scene.metadata = replace(scene.metadata, visible_end=None)
    assert (scene.run(backend) - dense_answer(scene)).abs().max() > 1e-2


@needs_kernel
def test_two_threads_give_what_one_gives(two_threads: None) -> None:
    scene = build(replace(MIXED, sliding_window=50, sinks=True, num_kv_heads=3))
    torch.testing.assert_close(
        scene.run(KernelBackend()), dense_answer(scene), atol=2e-5, rtol=1e-5
    )


@needs_kernel
@pytest.mark.parametrize("new", [2, 70], ids=["direct", "packed"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_a_token_does_not_see_cannot_reach_it_be_it_nan(new: int, broken: float) -> None:
    """Else one broken picture would poison the cached blocks of the text before it."""
    scene = build(Problem([(new, 30)], head_dim=64))
    clean = scene.run(KernelBackend())
    scene.key[-1] = broken
    scene.value[-1] = broken
    output = scene.run(KernelBackend())
    torch.testing.assert_close(output[:-1], clean[:-1], atol=1e-6, rtol=1e-6)
    assert output[-1].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_one_sequence_stays_there(backend: AttentionBackend) -> None:
    scene = build(Problem([(1, 20), (3, 9), (60, 0)]))
    scene.query[1] = torch.nan
    output = scene.run(backend)
    assert output[1].isnan().all()
    assert output[[0, *range(4, 64)]].isfinite().all()


@needs_kernel
def test_large_scores_do_not_overflow() -> None:
    scene = build(Problem([(1, 90), (50, 0)]))
    scene.query *= 1e4
    assert scene.run(KernelBackend()).isfinite().all()


@needs_kernel
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {"query": s.query[1:], "key": s.key[1:], "value": s.value[1:]},
            "tokens in the metadata",
        ),
        (lambda s: {"query": s.query[1:]}, "do not fit"),
        (lambda s: {"query": s.query.bfloat16()}, "queries are"),
        (lambda s: {"key": s.key[:, :1], "value": s.value[:, :1]}, "do not fit"),
        (lambda s: {"query": s.query[:, :3]}, "multiple"),
        (lambda s: {"query": s.query[..., :32]}, "do not fit"),
        (lambda s: {"value": s.value.mT.contiguous().mT}, "contiguous"),
    ],
    ids=["step", "token count", "dtype", "heads", "group", "head size", "layout"],
)
def test_the_kernel_refuses_shapes_that_do_not_fit(change: Any, message: str) -> None:
    scene = build(MIXED)
    for name, tensor in change(scene).items():
        setattr(scene, name, tensor)
    with pytest.raises(ValueError, match=message):
        scene.run(KernelBackend())


@needs_kernel
@pytest.mark.parametrize(
    ("field", "value"), [("slot_mapping", 10**6), ("block_tables", 10**6), ("kv_lens", 0)]
)
def test_the_kernel_refuses_addresses_outside_the_pages(field: str, value: int) -> None:
    scene = build(MIXED)
    getattr(scene.metadata, field)[0] = value
    with pytest.raises(ValueError, match=r"outside the pages|among its keys"):
        scene.run(KernelBackend())
