"""Helpers of tests are in tests/support: no test imports another test module or a conftest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
IMPORT = re.compile(r"^\s*(?:from|import) (tests\.(?!support\b)\S+)", re.MULTILINE)


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS))
)
def test_nothing_is_imported_from_tests_but_their_helpers(path: Path) -> None:
    assert IMPORT.findall(path.read_text(encoding="utf-8")) == []
