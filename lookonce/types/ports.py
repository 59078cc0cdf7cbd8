"""The seams between floors: small protocols, each with an in-process double in the tests."""

from __future__ import annotations

from typing import Protocol

from lookonce.types.media import Expansion
from lookonce.types.request import ProcessorOutcome
from lookonce.types.step import StepPlan, StepResult


class ModelRunner(Protocol):
    """Executes plans on a device. `model.runner.Runner` is the real one."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class ItemDirectory(Protocol):
    """What the renderer asks before it decodes anything.

    `lookup` answers the expansion of an item the engine holds for this sender and takes one pin;
    None means it must be fetched, decoded and processed (or its expansion is known from elsewhere,
    see `known_expansion`, which neither pins nor changes recency). Every answered lookup is given
    back once: by `unpin`, or by handing the pin on as `RenderedItem.pinned`. `count` is called
    once per media part when rendering resolves (never for resends or live sessions).
    """

    def lookup(self, key: bytes) -> Expansion | None: ...

    def unpin(self, key: bytes) -> None: ...

    def known_expansion(self, key: bytes) -> Expansion | None: ...

    def count(self, outcome: ProcessorOutcome) -> None: ...


class Clock(Protocol):
    """Seconds, monotonic."""

    def __call__(self) -> float: ...
