"""How many of the machine's cores a step takes.

light   decode steps, short prompts: one core is left to those who answer, parse and decode media
heavy   encoders and long chunks: every core; tens of milliseconds of one thread would be waited
        for by all requests

Where torch was told how many threads to use (`OMP_NUM_THREADS`), it uses those for both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from lookonce.types.step import StepPlan

HEAVY_TOKENS = 256
"""Tokens of a step that are worth the cost of waking more threads."""

_NO_CHANGE = nullcontext()


@dataclass(frozen=True, slots=True)
class Threads:
    light: int
    heavy: int

    @classmethod
    def of_machine(cls) -> Threads:
        """Also sets the light number, which holds outside of `working_on`."""
        given, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        threads = cls(cores - 1, cores) if given >= cores > 1 else cls(given, given)
        torch.set_num_threads(threads.light)
        return threads

    def working_on(self, plan: StepPlan) -> AbstractContextManager[None]:
        """As many threads as this step is worth, until the block ends."""
        if self.light == self.heavy or not is_heavy(plan):
            return _NO_CHANGE
        return self._all()

    @contextmanager
    def _all(self) -> Iterator[None]:
        torch.set_num_threads(self.heavy)
        try:
            yield
        finally:
            torch.set_num_threads(self.light)


def is_heavy(plan: StepPlan) -> bool:
    return bool(plan.encode) or sum(chunk.num_tokens for chunk in plan.scheduled) >= HEAVY_TOKENS
