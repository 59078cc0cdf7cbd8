"""Keys of short chunks are split between tasks, and what each task computes of them is merged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lookonce.model.attention.cpu import KernelBackend, kernel_available
from tests.support.model.attention_world import Problem, Scene, build, dense_answer

pytestmark = [
    pytest.mark.skipif(not kernel_available(), reason="the C++ kernel is not built"),
    pytest.mark.usefixtures("each_build"),
]

STRETCH = 512
"""Keys from which on they are split, as step.h has it."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kernel(scene: Scene, num_threads: int) -> Tensor:
    with threads(num_threads):
        return scene.run(KernelBackend())


@st.composite
def long_problems(draw: st.DrawFn) -> Problem:
    """Short chunks after prefixes of about one, two and three stretches, beside other sequences."""
    edge = st.sampled_from([STRETCH, 2 * STRETCH, 3 * STRETCH])
    new = draw(st.one_of(st.just(1), st.integers(1, 9), st.integers(20, 40)))
    before = draw(st.one_of(st.builds(int.__add__, edge, st.integers(-3, 3)), st.integers(0, 1700)))
    others = draw(st.lists(st.sampled_from([(1, 0), (1, 600), (3, 1100), (50, 530)]), max_size=2))
    sequences = draw(st.permutations([(new, before), *others]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return Problem(
        sequences=list(sequences),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 7])),
        head_dim=draw(st.sampled_from([16, 17, 64, 80])),
        block_size=draw(st.sampled_from([1, 3, 16, 32])),
        dtype=dtype,
        sliding_window=draw(st.sampled_from([None, None, 5, 700])),
        softcap=draw(st.sampled_from([None, None, 2.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@given(problem=long_problems(), num_threads=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_equals_dense_attention_with_any_number_of_threads(
    problem: Problem, num_threads: int
) -> None:
    scene = build(problem)
    expected, tolerance = dense_answer(scene), TOLERANCE[problem.dtype]
    found = kernel(scene, num_threads).float()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("spans", [[], [[(1000, 1030)]]], ids=["causal", "bidirectional item"])
def test_results_depend_neither_on_threads_nor_on_the_batch(
    dtype: torch.dtype, spans: list[list[tuple[int, int]]]
) -> None:
    alone = Problem([(30, 1000)], group=3, head_dim=64, block_size=16, dtype=dtype, spans=spans)
    scene = build(alone)
    answer = kernel(scene, 1)
    tolerance = TOLERANCE[dtype]
    expected = dense_answer(scene)
    torch.testing.assert_close(answer.float(), expected, atol=tolerance, rtol=tolerance)
    for count in (2, 3, 4):
        assert torch.equal(kernel(scene, count), answer)


def test_the_longest_contexts() -> None:
    """More stretches than are kept apart: each is longer then."""
    scene = build(Problem([(2, 64 * STRETCH + 700)], num_kv_heads=1, head_dim=16, block_size=32))
    found = kernel(scene, 2)
    torch.testing.assert_close(found, dense_answer(scene), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_a_number_reaches_who_sees_it_and_nobody_else(broken: float) -> None:
    scene = build(Problem([(2, 1200), (1, 700)], head_dim=64))
    clean = kernel(scene, 2)
    scene.key[1] = scene.value[1] = broken
    found = kernel(scene, 2)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], clean[[0, 2]], atol=1e-6, rtol=1e-6)


# ---------------------------------------------------------------- control: wrong merges


class Part(NamedTuple):
    """What a decode gets of a stretch of keys, per head: maximum and total [H], values [H, D]."""

    maximum: Tensor
    total: Tensor
    values: Tensor


def parts_of(scene: Scene) -> list[Part]:
    """The definition on each stretch alone, for a problem of one decode and one query per head."""
    query = scene.query[0].double()
    keys, values = scene.keys[0].double(), scene.values[0].double()
    scores = torch.einsum("hd,khd->hk", query, keys) * scene.problem.head_dim**-0.5
    parts = []
    for begin in range(0, len(keys), STRETCH):
        stretch = scores[:, begin : begin + STRETCH]
        maximum = stretch.max(1).values
        weights = (stretch - maximum[:, None]).exp()
        summed = torch.einsum("hk,khd->hd", weights, values[begin : begin + STRETCH])
        parts.append(Part(maximum, weights.sum(1), summed))
    return parts


def merged(parts: list[Part], sinks: Tensor | None = None) -> Tensor:
    highest = torch.stack([part.maximum for part in parts]).amax(0)
    worth = [(part.maximum - highest).exp() for part in parts]
    total = sum(w * part.total for w, part in zip(worth, parts, strict=True))
    values = sum(w[:, None] * part.values for w, part in zip(worth, parts, strict=True))
    if sinks is not None:
        total = total + (sinks.double() - highest).exp()
    return (values / total[:, None]).float()  # type: ignore[operator, union-attr, index]


WRONG: dict[str, Callable[[list[Part]], Tensor]] = {
    "a mean": lambda parts: (
        torch.stack([part.values / part.total[:, None] for part in parts]).mean(0).float()
    ),
    "maxima ignored": lambda parts: merged(
        [part._replace(maximum=torch.zeros_like(part.maximum)) for part in parts]
    ),
    "a part lost": lambda parts: merged(parts[:-1]),
    "a part twice": lambda parts: merged([*parts, parts[0]]),
    "totals of neighbours": lambda parts: merged(
        [a._replace(total=b.total) for a, b in itertools.pairwise([*parts, parts[0]])]
    ),
}


@pytest.fixture(scope="module")
def decode() -> Scene:
    problem = Problem([(1, 1400)], num_kv_heads=3, group=1, head_dim=16, block_size=16)
    scene = build(problem)
    scene.query *= 3  # so that stretches differ in their maxima
    return scene


def test_the_kernel_merges_as_the_definition_does(decode: Scene) -> None:
    found = kernel(decode, 2)[0]
    torch.testing.assert_close(found, merged(parts_of(decode)), atol=2e-5, rtol=2e-5)
    sinks = torch.tensor([-1.0, 0.5, 4.0])
    with_sinks = replace(decode, sinks=sinks).run(KernelBackend())[0]
    torch.testing.assert_close(with_sinks, merged(parts_of(decode), sinks), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("wrong", WRONG)
def test_control_a_wrong_merge_is_noticed(decode: Scene, wrong: str) -> None:
    found = kernel(decode, 2)[0]
    assert (found - WRONG[wrong](parts_of(decode))).abs().max() > 1e-3
