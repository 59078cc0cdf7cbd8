"""Folders loaded once per session, with cases and Hugging Face's answers to them; builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.model.builds import VARIANTS, in_use
from tests.support.model.serving import Subject, make_general_subject, make_subject
from tests.support.model_folders.make import GENERAL_MEDIA


@pytest.fixture(scope="session")
def subjects(folder) -> Callable[[str], Subject]:
    made: dict[str, Subject] = {}

    def get(kind: str) -> Subject:
        if kind not in made:
            make = make_general_subject if kind.startswith(GENERAL_MEDIA) else make_subject
            made[kind] = make(folder(kind))
        return made[kind]

    return get


@pytest.fixture(scope="module", params=VARIANTS)
def each_build(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's tests with the kernels of one variant after the other."""
    with in_use(request.param):
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
