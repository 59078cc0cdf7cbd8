"""Fields of a request that no route declares: ignored, and told to the client and once to the log.

Clients send fields of other servers, and misspell ours. An ignored field may change nothing, as a
label does, or much, as `temprature` would: so the answer names it in the header
`X-LookOnce-Warning`. With `--strict-requests` it is a 400.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request

from lookonce.errors import BadRequestError
from lookonce.frontend.requests import (
    ACCEPTED_FIELDS,
    HARMLESS_VALUES,
    USUAL_VALUES,
    RefusesUnsupported,
    asks_nothing,
)

logger = logging.getLogger("lookonce.server")

MAX_NAMED = 8
MAX_NAME = 60
"""Unknown fields that a warning names, and characters of each."""
MAX_LOGGED = 100
"""Different fields that a process logs: clients can think of as many as they like."""
LOGGED_NAME = re.compile(r"([a-z_.]|\[\])+")
"""What a log may show, positions left out: clients could put anything into a name, and keys and
codes have digits."""
POSITION = re.compile(r"\[\d+\]")
LIKENESS = 0.75
"""How alike a field must be to be the one that was meant."""
PART_FIELDS: dict[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "refusal": frozenset({"type", "refusal"}),
    "image_url": frozenset({"type", "image_url", "uuid"}),
    "input_audio": frozenset({"type", "input_audio", "uuid"}),
    "audio_url": frozenset({"type", "audio_url", "uuid"}),
    "file": frozenset({"type", "file"}),
    "video_url": frozenset({"type", "video_url", "uuid"}),
    "input_video": frozenset({"type", "input_video", "uuid"}),
    "video": frozenset({"type", "video", "fps", "uuid"}),
    "input_text": frozenset({"type", "text"}),
    "output_text": frozenset({"type", "text", "annotations", "logprobs"}),
    "input_image": frozenset({"type", "image_url", "file_id", "detail", "uuid"}),
    "input_file": frozenset({"type", "file_data", "file_id", "file_url", "filename", "detail"}),
}
"""Type of a content part, of a chat or a response → its fields. Other fields of messages are given
to the chat template."""
MEDIA_FIELDS: dict[str, frozenset[str]] = {
    "image_url": frozenset({"url", "detail"}),
    "input_audio": frozenset({"data", "format"}),
    "audio_url": frozenset({"url"}),
    "file": frozenset({"file_data", "file_id", "file_url", "filename"}),
    "video_url": frozenset({"url", "fps"}),
    "input_video": frozenset({"url", "data", "format", "fps"}),
}
"""The same of the object that such a part has under its own name."""


class UnknownFields:
    """What one API process does with fields that it does not know."""

    def __init__(self, *, strict: bool = False) -> None:
        """`strict`: they are refused."""
        self._strict = strict
        self._logged: set[str] = set()

    def judge(self, names: Sequence[str], kind: type[msgspec.Struct]) -> str:
        """The warning for a request of this kind; raises `BadRequestError` where it is refused.

        The log has each name once, wherever it stood in a list."""
        described = [_described(name, kind) for name in names[:MAX_NAMED]]
        if self._strict:
            raise BadRequestError(
                f"{described[0]} is not a field of this request",
                param=names[0][:MAX_NAME],
                code="unknown_parameter",
            )
        for name, text in zip(names[:MAX_NAMED], described, strict=True):
            self._log(name[:MAX_NAME], text)
        more = len(names) - len(described)
        listed = ", ".join(described) + (f" and {more} more" if more else "")
        return f"ignored unknown fields: {listed}"

    def ignore(self, names: Sequence[str]) -> str:
        """The warning about known fields that have no effect here: they are never refused."""
        for name in names:
            self._log(name, name)
        return f"ignored: {', '.join(names)}"

    def _log(self, name: str, described: str) -> None:
        name, described = POSITION.sub("[]", name), POSITION.sub("[]", described)
        if name in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(name)
        shown = described if LOGGED_NAME.fullmatch(name) else "(not a field's name)"
        logger.warning("a field of a request was ignored (logged once): %s", shown)


def note_ignored(request: Request, fields: UnknownFields, names: Sequence[str]) -> None:
    """Have the answer's header name known fields that are ignored, beside what it names already."""
    earlier = getattr(request.state, "warning", None)
    request.state.warning = "; ".join(filter(None, [earlier, fields.ignore(names)]))


def ignored_fields(request: msgspec.Struct) -> list[str]:
    """Names of `ACCEPTED_FIELDS` that ask for something and that nothing reads. `request` was
    decoded by `strict_kind` or `noting_kind`, or has none."""
    found = []
    for name in _accepted(type(request)):
        value = getattr(request, name)
        if not asks_nothing(value) and value not in USUAL_VALUES.get(name, ()):
            found.append(name)
    return found


@cache
def _accepted(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Those that `strict_kind` or `noting_kind` has added to `kind`."""
    types_of = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return tuple(sorted(n for n in ACCEPTED_FIELDS if types_of.get(n) is Any))


def unknown_fields(body: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Names of the fields in a body, which can be decoded as `kind`, that ask for something and
    that nothing reads: `temprature`, `stream_options.foo`."""
    return list(_unknown(body, kind, ""))


def _unknown(body: bytes, kind: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    declared = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        raw = bytes(value)
        if name in declared:
            inner = _member(declared[name])
            if inner is not None and raw.lstrip().startswith(b"{"):
                yield from _unknown(raw, inner, f"{prefix}{name}.")
            listed = _listed(declared[name])
            if listed is not None and raw.lstrip().startswith(b"["):
                for index, entry in enumerate(msgspec.json.decode(raw, type=list[msgspec.Raw])):
                    yield from _unknown(bytes(entry), listed, f"{prefix}{name}[{index}].")
        elif raw not in HARMLESS_VALUES and (prefix or name not in ACCEPTED_FIELDS):
            yield prefix + name


def unknown_part_fields(request: msgspec.Struct) -> list[str]:
    """Names of the fields of content parts that nothing reads: `messages[0].content[1].detial`, or
    `input[0]` of a response's."""
    found = list(_unknown_in_parts("messages", getattr(request, "messages", None) or ()))
    items = getattr(request, "input", None)
    if isinstance(items, list) and items and isinstance(items[0], dict):  # not token ids
        found += _unknown_in_parts("input", items)
    return found


def _unknown_in_parts(field: str, messages: Sequence[object]) -> Iterator[str]:
    """What is no message or part is the renderer's to refuse."""
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        for index, part in enumerate(content):
            known = _known_fields(part)
            if known is None or (part.keys() <= known and part["type"] not in MEDIA_FIELDS):
                continue
            where = f"{field}[{number}].content[{index}]."
            yield from (where + name for name in part.keys() - known if part[name] is not None)
            inner = part.get(part["type"])
            if isinstance(inner, dict):
                of_media = inner.keys() - MEDIA_FIELDS.get(part["type"], inner.keys())
                yield from (f"{where}{part['type']}.{name}" for name in of_media)


def _known_fields(part: object) -> frozenset[str] | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return PART_FIELDS.get(kind) if isinstance(kind, str) else None


@cache
def noting_kind(kind: type[msgspec.Struct]) -> Any:
    """`kind` as a struct that has the accepted fields, too, and passes over unknown ones."""
    added = _missing(kind, ACCEPTED_FIELDS)
    return msgspec.defstruct(kind.__name__, added, bases=(kind,), kw_only=True)


@cache
def strict_kind(
    kind: type[msgspec.Struct], accepted: frozenset[str] = ACCEPTED_FIELDS
) -> type[msgspec.Struct]:
    """`kind` as a struct that refuses to decode unknown fields, but for those that are `accepted`.

    Decoding with it finds out at no cost that there are none.
    """
    added = _missing(kind, accepted)
    for each in msgspec.structs.fields(kind):
        inner = _member(each.type)
        if inner is not None:
            added.append((each.encode_name, strict_kind(inner, frozenset()) | None, None))
        listed = _listed(each.type)
        if listed is not None:
            many = types.GenericAlias(list, (strict_kind(listed, frozenset()),))
            added.append((each.encode_name, many | None, None))
    return msgspec.defstruct(
        kind.__name__, added, bases=(kind,), kw_only=True, forbid_unknown_fields=True
    )


def _missing(kind: type[msgspec.Struct], names: frozenset[str]) -> list[tuple[str, Any, Any]]:
    """Those of the fields that `kind` does not declare: optional, and of any type."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return [(name, Any, None) for name in names if name not in known]


def _member(declared: Any) -> type[msgspec.Struct] | None:
    """The struct that an optional field holds; None for any other field."""
    if typing.get_origin(declared) not in (typing.Union, types.UnionType):
        return None
    members = [each for each in typing.get_args(declared) if each is not type(None)]
    return _plain_struct(members[0]) if len(members) == 1 else None


def _listed(declared: Any) -> type[msgspec.Struct] | None:
    """The struct of which an optional field holds a list; None for any other field."""
    if typing.get_origin(declared) not in (typing.Union, types.UnionType):
        return None
    members = [each for each in typing.get_args(declared) if each is not type(None)]
    if len(members) != 1 or typing.get_origin(members[0]) is not list:
        return None
    return _plain_struct(typing.get_args(members[0])[0])


def _plain_struct(kind: Any) -> type[msgspec.Struct] | None:
    """`kind` if it is a struct and no member of a tagged union."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return None if kind.__struct_config__.tag is not None else kind
    return None


def _described(name: str, kind: type[msgspec.Struct]) -> str:
    """The name in ASCII, with the field that was probably meant."""
    shown = json.dumps(name[:MAX_NAME])[1:-1]
    unsupported = kind.unsupported_fields() if issubclass(kind, RefusesUnsupported) else ()
    likely = [field for field in kind.__struct_fields__ if field not in unsupported]
    if name.startswith("messages["):
        likely = sorted(frozenset().union(*PART_FIELDS.values(), *MEDIA_FIELDS.values()))
    meant = name.rpartition(".")[2] if "[" in name else name
    return shown + suggestion(meant, likely)


def suggestion(name: str, known: Collection[str]) -> str:
    """` (did you mean …?)` where a name that is `known` is like `name`, else nothing."""
    close = difflib.get_close_matches(name[:MAX_NAME], known, 1, LIKENESS)
    return f" (did you mean {close[0]}?)" if close else ""
