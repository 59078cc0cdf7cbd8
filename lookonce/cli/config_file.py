"""`--config FILE`: options in a YAML file. The command line and the environment come first.

command line > environment (LOOKONCE_PORT) > file (port: 8000) > default
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from lookonce.config import Options
from lookonce.errors import ConfigError

PREFIX = "LOOKONCE_"
LINK = re.compile("(tcp|udp|sctp)://")
"""What Kubernetes sets `LOOKONCE_PORT` to, where a service is called lookonce."""
SERVICE = re.compile(r"LOOKONCE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_\w+)$")
"""What else Kubernetes sets for services whose names begin so."""
OTHERS = frozenset({f"{PREFIX}CONFIG", f"{PREFIX}COMPILE", f"{PREFIX}CPU_KERNELS"})
"""Variables of LookOnce that are no fields of `Options`."""
MAX_FILE_BYTES = 1 << 20


def variable_of(name: str) -> str:
    """The environment variable of an option."""
    return PREFIX + name.upper()


def drop_service_links(environment: MutableMapping[str, str]) -> None:
    """Remove a variable that Kubernetes has set and that looks like an option."""
    name = variable_of("port")
    if LINK.match(environment.get(name, "")):
        del environment[name]


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """What to say of each variable that looks like an option's and is none."""
    known = {variable_of(field.name) for field in dataclasses.fields(Options)} | OTHERS
    said = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and not SERVICE.match(name):
            close = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            said.append(
                f"the environment variable {name[:80]} is no option and has no effect{meant}"
            )
    return said


def read_config_file(path: str) -> dict[str, str | list[str]]:
    """Option → its value, written as on a command line. Raises `ConfigError` naming the key."""
    return as_options(f"--config: {path}", read_yaml(path, "--config"))


def read_yaml(path: str, what: str) -> dict[Any, Any]:
    """A file's mapping; empty for an empty file. Raises `ConfigError`, which names `what`."""
    import yaml  # type: ignore[import-untyped]  # takes as long as the rest of the command line

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Names the line of a value that its own type cannot hold, and of a key given twice."""

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except ValueError as error:  # 2026-99-99 is read as a date
                raise yaml.constructor.ConstructorError(
                    None, None, str(error), node.start_mark
                ) from None

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            names: set[str] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key.value, str) and key.value in names:
                    raise ConfigError(
                        f"{what}: {path} has {key.value[:60]!r} twice, the second time in line "
                        f"{key.start_mark.line + 1}"
                    )
                names.add(str(key.value))
            return node

    try:
        with Path(path).open(encoding="utf-8") as file:
            content = yaml.load(file.read(MAX_FILE_BYTES), Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{what}: {path} cannot be read: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{what}: {path} is not YAML{where}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{what}: {path} is not a list of OPTION: VALUE")
    return content


def as_options(where: str, content: dict[Any, Any]) -> dict[str, str | list[str]]:
    """Options of `lookonce serve` as on a command line. Raises `ConfigError` naming the key."""
    return dict(_entries(where, content))


def _entries(where: str, content: dict[Any, Any]) -> Iterable[tuple[str, str | list[str]]]:
    known = [field.name for field in dataclasses.fields(Options)]
    read: set[str] = set()
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"{where}: there is no option {str(key)[:60]!r}{meant}")
        if name in read:
            raise ConfigError(f"{where}: {name} is there twice, with _ and with -")
        read.add(name)
        if value is not None:
            yield name, _text(where, name, value)


def _text(where: str, name: str, value: Any) -> str | list[str]:
    match value:
        case list() if all(isinstance(each, str | int | float) for each in value):
            return [str(each) for each in value]
        case dict() if name == "limit_mm_per_prompt" and all(
            isinstance(count, int) for count in value.values()
        ):
            return ",".join(f"{modality}={count}" for modality, count in value.items())
        case str() | int() | float():
            return [str(value)] if _is_repeatable(name) else str(value)
    raise ConfigError(f"{where}: {name} is not a value as on the command line")


def _is_repeatable(name: str) -> bool:
    return isinstance(getattr(Options(), name), tuple)
