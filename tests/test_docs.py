"""What the documentation says of models and families is what the code does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lookonce.cli.models import served_types
from lookonce.render.families.pixtral import PixtralProcessing
from lookonce.render.families.registry import FAMILIES
from lookonce.types.model import GENERAL_MEDIA, GENERAL_TEXT, SUPPORTED
from tools.structure import documented_walk

ROOT = Path(__file__).parents[1]
QUOTES = re.findall(
    r"```python\n# (lookonce/\S+)\n(.*?)```", (ROOT / "docs/adding-a-family.md").read_text(), re.S
)
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/models.md").read_text().splitlines()
    if line.startswith("| `")
][1:]
"""Rows of four cells, without the heading."""
PATHS = re.findall(
    r"`((?:lookonce|tests|docs|tools)/[\w/.]+)`", (ROOT / "docs/adding-a-family.md").read_text()
)


PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
PACKAGES = "|".join(sorted(path.name for path in (ROOT / "lookonce").iterdir() if path.is_dir()))
FILES = re.compile(rf"`((?:lookonce|tests|docs|tools|benchmarks|{PACKAGES})(?:/[\w.*-]+)+/?)`")
"""A path from the root of the repository or the package, with or without `.py`; may have `*`."""


def options_of(model_type: str) -> tuple[str, ...]:
    """What a family's requests may set; it depends on no folder."""
    family = FAMILIES.get(model_type)
    return family.option_names(object.__new__(family)) if family else ()


@pytest.mark.parametrize(("path", "code"), QUOTES, ids=[path for path, _ in QUOTES])
def test_quoted_code_is_in_the_file_it_names(path: str, code: str) -> None:
    assert code in (ROOT / path).read_text()


def test_the_guide_quotes_both_sides_of_the_shortest_family() -> None:
    assert {path for path, _ in QUOTES} >= {
        "lookonce/model/families/voxtral.py",
        "lookonce/render/families/voxtral.py",
    }


@pytest.mark.parametrize("path", sorted({path for path in PATHS if "*" not in path}))
def test_files_that_the_guide_names_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_table_lists_every_type_with_its_media() -> None:
    listed = {kind.strip("`"): media for kind, _, media, _ in TABLE}
    assert listed == {kind: ", ".join(media) for kind, media in SUPPORTED.items()}
    assert list(listed) == sorted(listed)


def test_the_readme_counts_the_types_that_are_served() -> None:
    types = served_types()
    media = sum(bool(row.media) for row in types)
    assert f"lists the {len(types)} types" in (ROOT / "README.md").read_text()
    assert f"served, {media} of them" in (ROOT / "README.md").read_text()


def test_the_types_of_the_general_family_are_listed() -> None:
    section = (ROOT / "docs" / "models.md").read_text().partition("one general family")[2]
    listed = section.partition("\n\n")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"`([^`]+)`", listed)) == GENERAL_TEXT


def test_the_types_with_media_of_the_general_family_are_listed() -> None:
    section = (ROOT / "docs" / "models.md").read_text().partition("## Other models with media")[2]
    listed = dict(re.findall(r"\* (\w+): ([^*]+)", section.partition("\n\n")[2]))
    found = {
        name: tuple(media.split("_and_"))
        for media, names in listed.items()
        for name in re.findall(r"`([^`]+)`", names.partition("\n\n")[0])
    }
    assert found == GENERAL_MEDIA


@pytest.mark.parametrize(("kind", "options"), [(row[0].strip("`"), row[3]) for row in TABLE])
def test_the_table_lists_the_options_of_each_type(kind: str, options: str) -> None:
    expected = options_of(kind)
    if kind == "llava":  # whose type has two families
        assert expected == ()
        assert options.startswith("Pixtral: ")
        expected = options_of(PixtralProcessing.model_types[0])
    assert tuple(re.findall(r"`(\w+)`", options)) == expected


@pytest.mark.parametrize(
    ("path", "function"), documented_walk((ROOT / "docs/architecture.md").read_text())
)
def test_functions_on_the_documented_way_exist(path: str, function: str) -> None:
    scope: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for name in function.split("."):
        found = [node for node in scope if getattr(node, "name", None) == name]
        assert len(found) == 1, f"{path} has no {function}"
        scope = found[0].body  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_files_and_packages_that_a_page_names_exist(page: Path) -> None:
    for name in FILES.findall(page.read_text()):
        path = name.rstrip("/")
        found = [
            *ROOT.glob(path),
            *ROOT.glob(f"lookonce/{path}"),
            *ROOT.glob(f"lookonce/{path}.py"),
        ]
        assert found, f"{page.name} names `{name}`"
