"""State machines whose steps are drawn by Hypothesis, or many times faster by numbered seeds.

Hypothesis makes a failing sequence short. Where a failure is expected, as in a machine over broken
code, a plain random generator finds it in a fraction of the time, and the same one in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule


class Choice(Protocol):
    def strategy(self) -> st.SearchStrategy[Any]: ...

    def draw(self, random: Random) -> Any: ...


@dataclass(frozen=True)
class OneOf:
    """One of these values, each as likely as another."""

    values: tuple[Any, ...]

    def strategy(self) -> st.SearchStrategy[Any]:
        return st.sampled_from(self.values)

    def draw(self, random: Random) -> Any:
        return random.choice(self.values)


@dataclass(frozen=True)
class ListOf:
    """One to `most` values of the same choice."""

    choice: OneOf
    most: int

    def strategy(self) -> st.SearchStrategy[Any]:
        return st.lists(self.choice.strategy(), min_size=1, max_size=self.most)

    def draw(self, random: Random) -> Any:
        return [self.choice.draw(random) for _ in range(random.randint(1, self.most))]


BOOLEAN = OneOf((False, True))


def one_of(*values: Any) -> OneOf:
    return OneOf(values)


def _strategies(choices: dict[str, Choice]) -> dict[str, Any]:
    return {name: choice.strategy() for name, choice in choices.items()}


def first(**choices: Choice) -> Callable[[Any], Any]:
    """Marks the method that begins a machine's run."""

    def mark(method: Any) -> Any:
        marked: Any = initialize(**_strategies(choices))(method)
        marked.first_choices = choices
        return marked

    return mark


def step(**choices: Choice) -> Callable[[Any], Any]:
    """Marks a method that is a step of a machine, with the choices of its arguments."""

    def mark(method: Any) -> Any:
        marked: Any = rule(**_strategies(choices))(method)
        marked.choices = choices
        return marked

    return mark


class DrawnSteps(RuleBasedStateMachine):
    """A machine of `first` and `step` methods. Each step is followed by `check`."""

    def check(self) -> None:
        raise NotImplementedError


def run_seeds(machine_type: type[DrawnSteps], num_seeds: int, most_steps: int) -> None:
    """Run the machine once for each of the seeds 0, 1 and so on.

    Each run leaves out steps at random, so that those that undo others' work are absent at times.
    What a step, a check or the teardown raises is raised, with a note that names the seed.
    """
    methods = [getattr(machine_type, name) for name in sorted(dir(machine_type))]
    (begin,) = (each for each in methods if hasattr(each, "first_choices"))
    steps = [each for each in methods if hasattr(each, "choices")]
    for seed in range(num_seeds):
        try:
            _run_seed(machine_type(), begin, steps, most_steps, Random(seed))
        except Exception as error:
            error.add_note(f"with seed {seed}")
            raise


def _run_seed(
    machine: DrawnSteps, begin: Any, steps: list[Any], most_steps: int, random: Random
) -> None:
    share = random.uniform(0.3, 1.0)
    chosen = [each for each in steps if random.random() < share] or steps
    _call(machine, begin, begin.first_choices, random)
    for _ in range(random.randint(1, most_steps)):
        method = random.choice(chosen)
        _call(machine, method, method.choices, random)
    machine.teardown()


def _call(machine: DrawnSteps, method: Any, choices: dict[str, Choice], random: Random) -> None:
    method(machine, **{name: choice.draw(random) for name, choice in choices.items()})
    machine.check()
