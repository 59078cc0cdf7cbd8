"""Which types of model transformers knows, read from its source: importing it takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

CONFIGS = "CONFIG_MAPPING_NAMES"
TEXT_MODELS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
CONFIG_FILES = ("auto_mappings.py", "configuration_auto.py")
TEXT_MODEL_FILES = ("modeling_auto.py",)


class KnownTypes(NamedTuple):
    """What a version of transformers knows."""

    version: str
    configs: Collection[str]
    """Types that it has a config of."""
    text_models: Collection[str]
    """Types that it has a text model of that generates."""


@cache
def known_types() -> KnownTypes | None:
    """None where that cannot be read: then loading finds it out."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "models" / "auto"
    try:
        configs = frozenset(_names(folder, CONFIG_FILES, CONFIGS))
        text_models = frozenset(_names(folder, TEXT_MODEL_FILES, TEXT_MODELS))
        found = version("transformers")
    except (OSError, SyntaxError, PackageNotFoundError):
        return None
    return KnownTypes(found, configs, text_models) if configs and text_models else None


def _names(folder: Path, files: Collection[str], table: str) -> Iterator[str]:
    """The keys of a table, which is written as a dict or a list of pairs, and updated."""
    for file in files:
        for statement in ast.parse((folder / file).read_bytes()).body:
            if _is_of(statement, table):
                yield from _keys(statement)


def _is_of(statement: ast.stmt, table: str) -> bool:
    """Whether it assigns the table, or calls a method of it."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == table
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name == table
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name == table
    return False


def _keys(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(key)), _]):
                yield key
            case ast.Dict(keys=keys):
                for each in keys:
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        yield each.value
