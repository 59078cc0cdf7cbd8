"""What tenants and keys may use, as a file of `--limits` says, in YAML or in TOML.

default:                      # of every tenant, where its own section says nothing else
  requests_per_second: 20
  tokens_per_minute: 200_000
tenants:
  team-a:
    weight: 4
    tokens_per_minute: .inf   # no limit
keys:
  "3f0a9c51d2e4":             # the first digits of a key's SHA-256, beside its tenant's limits
    concurrent_requests: 2
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from lookonce.errors import ConfigError

Amount = Annotated[float, msgspec.Meta(gt=0)]
LEAST_DIGITS = 12
DIGEST = re.compile(rf"[0-9a-f]{{{LEAST_DIGITS},64}}")
S = TypeVar("S", bound=msgspec.Struct)


class UsageLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant or key over all API processes together; None: none."""

    requests_per_second: Amount | None = None
    tokens_per_minute: Amount | None = None
    """Of prompts and answers."""
    media_per_minute: Amount | None = None
    """Media parts of prompts, whether cached or not, and injected items."""
    concurrent_requests: Amount | None = None
    max_tokens: Amount | None = None
    """Of one answer."""


class TenantLimits(UsageLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    """How many times another one's share the tenant gets of what tenants take turns at."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a file of limits."""

    default: TenantLimits = TenantLimits()
    tenants: dict[str, TenantLimits] = {}
    """With what they have from `default`."""
    keys: dict[str, UsageLimits] = {}
    """By the first digits of the SHA-256 of a key."""

    def of_tenant(self, tenant: str) -> TenantLimits:
        return self.tenants.get(tenant, self.default)

    def of_key(self, digest: str) -> UsageLimits | None:
        """None for a key without a section."""
        return next((own for start, own in self.keys.items() if digest.startswith(start)), None)


def parse_limits(data: bytes, suffix: str) -> Limits:
    """The limits of a file whose name ends in `suffix`: .yaml, .yml or .toml.

    Raises `ConfigError` naming the entry at fault: `tenants.team-a.weight`.
    """
    if suffix not in READERS:
        raise ConfigError(f"its name must end in one of {', '.join(READERS)}")
    given = READERS[suffix](data)
    unknown = given.keys() - set(Limits.__struct_fields__)
    if unknown:
        raise ConfigError(f"{min(unknown)}: a section is default, tenants.NAME or keys.DIGEST")
    default = _section(given.get("default", {}), "default", TenantLimits)
    return Limits(
        default=_without_infinite(default),
        tenants={
            name: _without_infinite(
                _completed(_section(value, f"tenants.{name}", TenantLimits), default)
            )
            for name, value in _table(given, "tenants").items()
        },
        keys={
            _digest(name): _without_infinite(_section(value, f"keys.{name}", UsageLimits))
            for name, value in _table(given, "keys").items()
        },
    )


def _read_toml(data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError
        raise ConfigError(f"not valid TOML: {str(error)[:200]}") from None


def _read_yaml(data: bytes) -> dict[str, Any]:
    """Names that YAML takes for numbers or truth values, and names given twice, are refused."""
    import yaml  # type: ignore[import-untyped]  # takes as long as all else that a start imports

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            names = [name for name, _ in node.value if not name.tag.endswith(":merge")]
            for name in names:
                if not name.tag.endswith(":str"):
                    raise ConfigError(f"{name.value[:60]}: YAML takes this for no text: quote it")
            once = {name.value for name in names}
            if len(once) < len(names):
                twice = next(each for each in once if sum(n.value == each for n in names) > 1)
                raise ConfigError(f"{twice[:60]}: is there twice")
            mapping: dict[str, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        given = yaml.load(data.decode(), Loader)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError
        raise ConfigError(f"not valid YAML: {str(error)[:200]}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"not valid YAML{where}") from None
    if given is not None and not isinstance(given, dict):
        raise ConfigError("not a list of default, tenants and keys")
    return given or {}


READERS: dict[str, Callable[[bytes], dict[str, Any]]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".toml": _read_toml,
}
"""By the end of the file's name."""


def _completed(own: TenantLimits, default: TenantLimits) -> TenantLimits:
    """`own`, with what it leaves out from `default`."""
    given = {
        name: value for name, value in msgspec.structs.asdict(own).items() if value is not None
    }
    return msgspec.structs.replace(default, **given)


def _without_infinite(limits: S) -> S:
    """No limit as None: JSON has no infinity."""
    infinite = {name: None for name, v in msgspec.structs.asdict(limits).items() if v == math.inf}
    return msgspec.structs.replace(limits, **infinite)


def _table(given: dict[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: a table of sections is expected")
    return value


def _digest(name: str) -> str:
    if not DIGEST.fullmatch(name):
        raise ConfigError(
            f"keys.{name}: a key is named by the first {LEAST_DIGITS} or more hex digits of its "
            "SHA-256"
        )
    return name


def _section(value: object, path: str, kind: type[S]) -> S:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        unknown = re.search("unknown field `(.+)`", message)
        if unknown is not None:
            known = ", ".join(kind.__struct_fields__)
            raise ConfigError(f"{path}.{unknown[1]}: no such limit; there are {known}") from None
        message = message[:1].lower() + message[1:]
        raise ConfigError(f"{path}{where.rstrip('`')}: {message}") from None
