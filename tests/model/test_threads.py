"""Threads that share out a loop of compiled code: the same results, nobody waits for the absent."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from lookonce.model.int8_weights import Int8Weight, quantize
from lookonce.model.native import compiled

pytestmark = pytest.mark.skipif(compiled.kernels is None, reason="kernels are not compiled here")

INPUTS, OUTPUTS = 333, 1203
"""No vector divides them, and one token's product is worth sharing out."""


@pytest.fixture(scope="module")
def weight() -> Int8Weight:
    return quantize(noise(OUTPUTS, INPUTS))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(rows: torch.Tensor, weight: Int8Weight, threads: int) -> torch.Tensor:
    assert compiled.kernels is not None
    output = torch.full((len(rows), OUTPUTS), float("nan"))
    compiled.kernels.linear_rows(rows, weight.values, weight.scales, None, output, threads)
    return output


@pytest.mark.usefixtures("each_build")
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 31, 300])
def test_any_number_of_threads_computes_the_same(weight: Int8Weight, count: int) -> None:
    rows = noise(count, INPUTS, seed=1)
    alone = product(rows, weight, 1)
    assert not alone.isnan().any()
    for threads in (2, 5):
        for _ in range(20):
            assert torch.equal(product(rows, weight, threads), alone)


@pytest.mark.usefixtures("each_build")
def test_callers_with_more_threads_than_cores_all_finish(weight: Int8Weight) -> None:
    rows = noise(2, INPUTS, seed=2)
    alone = product(rows, weight, 1)
    equal: list[bool] = []

    def call() -> None:
        equal.append(all(torch.equal(product(rows, weight, 8), alone) for _ in range(100)))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert equal == [True] * 4


@pytest.mark.usefixtures("each_build")
def test_threads_without_a_loop_sleep(weight: Int8Weight) -> None:
    product(noise(1, INPUTS), weight, 4)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1  # one thread that spins would have taken 0.2


@pytest.mark.usefixtures("each_build")
def test_an_argument_that_is_refused_leaves_the_threads_usable(weight: Int8Weight) -> None:
    rows = noise(9, INPUTS)
    expected = product(rows, weight, 2)
    with pytest.raises(ValueError, match="sizes do not fit"):
        product(noise(9, INPUTS + 1), weight, 2)
    assert torch.equal(product(rows, weight, 2), expected)


FORKS = """
import os, sys, torch
from lookonce.model.native import compiled
kernels = compiled.kernels
values, rows = torch.ones((1203, 333), dtype=torch.int8), torch.ones(1, 333)
def computes():
    output = torch.zeros(1, 1203)
    kernels.linear_rows(rows, values, torch.ones(1203), None, output, 3)
    return bool((output - 333).abs().max() < 0.1)
assert computes()
child = os.fork()
if not child:
    os._exit(0 if computes() else 1)
assert os.waitpid(child, 0)[1] == 0
child = os.fork()
if not child:
    sys.exit()  # it has computed nothing, and ends as a process does
assert os.waitpid(child, 0)[1] == 0
assert computes()
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)
