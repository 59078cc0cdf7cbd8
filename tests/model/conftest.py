"""Folders loaded once per session, with cases and Hugging Face's answers to them; builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.support.model.builds import OTHER_CPUS, Build, build_for, in_use
from tests.support.model.serving import Subject, make_subject


@pytest.fixture(scope="session")
def subjects(folder) -> Callable[[str], Subject]:
    made: dict[str, Subject] = {}

    def get(kind: str) -> Subject:
        if kind not in made:
            made[kind] = make_subject(folder(kind))
        return made[kind]

    return get


@pytest.fixture(scope="session")
def other_build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Build]:
    root = tmp_path_factory.mktemp("builds")
    return cache(lambda machine: build_for(machine, root))


@pytest.fixture(scope="module", params=("this CPU", *OTHER_CPUS))
def each_build(
    request: pytest.FixtureRequest, other_build: Callable[[str], Build]
) -> Iterator[None]:
    """A module's tests with compiled code as it is on one CPU after the other."""
    if request.param == "this CPU":
        yield
        return
    with in_use(other_build(request.param)):
        yield


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how often greedy answers parted from Hugging Face's at a tie of float precision."""
    ties = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "near_ties"
    ]
    if ties:
        terminalreporter.write_line(
            f"parity: {len(ties)} runs compared with Hugging Face, {sum(ties)} near ties"
        )
