"""Input items of `/v1/responses` → the messages a chat is rendered from.

instructions                     system
message                          the same role; parts renamed
function_call                    a call of the assistant's message before it, or of a new one
function_call_output             tool
reasoning                        nothing: it was another model's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lookonce.errors import BadRequestError

Json = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")


@dataclass(slots=True)
class ReadInput:
    messages: list[Json] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    """Of each message, what the request calls it."""

    def add(self, message: Json, origin: str) -> None:
        self.messages.append(message)
        self.origins.append(origin)

    def renamed(self, param: str) -> str:
        """A message's name in the request's own terms: `messages[1].content` → `input[0].content`.

        A part that lies elsewhere keeps its name.
        """
        head, bracket, rest = param.partition("]")
        number = head.removeprefix("messages[")
        if bracket and number.isdecimal() and int(number) < len(self.origins):
            return self.origins[int(number)] + rest
        return "input" if param == "messages" else param


def read_input(given: str | list[Json], instructions: str | None) -> ReadInput:
    """Raises `BadRequestError` naming the item at fault; parts are judged by the renderer."""
    read = ReadInput()
    if instructions:
        read.add({"role": "system", "content": instructions}, "instructions")
    if isinstance(given, str):
        read.add({"role": "user", "content": given}, "input")
        return read
    for number, item in enumerate(given):
        _item(item, f"input[{number}]", read)
    return read


def _item(item: Json, param: str, read: ReadInput) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    readers: dict[object, Callable[[Json, str, ReadInput], None]] = {
        "message": _message,
        "function_call": _call,
        "function_call_output": _output,
        "reasoning": lambda item, param, read: None,
    }
    reader = readers.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise BadRequestError(
            f"{param}.type: {str(kind)[:50]!r} is none of message, function_call, "
            "function_call_output",
            param=f"{param}.type",
        )
    reader(item, param, read)


def _message(item: Json, param: str, read: ReadInput) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise BadRequestError(
            f"{param}.role: must be one of {', '.join(ROLES)}", param=f"{param}.role"
        )
    read.add({"role": role, "content": _content(item.get("content"), f"{param}.content")}, param)


def _content(content: object, param: str) -> object:
    if not isinstance(content, list):
        return content
    return [_part(part, f"{param}[{number}]") for number, part in enumerate(content)]


def _part(part: object, param: str) -> object:
    if not isinstance(part, Mapping):
        return part
    match part.get("type"):
        case "input_text" | "output_text" as kind:
            if not isinstance(part.get("text"), str):
                raise BadRequestError(f"{param}.text: must be a text", param=f"{param}.text")
            return {"type": "text", "text": part["text"]} if kind else None
        case "input_image":
            return _image(part, param)
        case "input_file":
            raise BadRequestError(
                f"{param}: files are not supported", param=param, code="unsupported_parameter"
            )
    return part


def _image(part: Mapping[str, Any], param: str) -> Json:
    if part.get("file_id") is not None:
        param = f"{param}.file_id"
        raise BadRequestError(
            f"{param}: there are no files; use image_url", param=param, code="unsupported_parameter"
        )
    kept = {name: value for name, value in part.items() if name == "uuid"}
    url = part.get("image_url")
    return {"type": "image_url", "image_url": None if url is None else {"url": url}, **kept}


def _call(item: Json, param: str, read: ReadInput) -> None:
    for name in ("call_id", "name", "arguments"):
        _require_text(item, name, param)
    call = {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }
    if read.messages and read.messages[-1]["role"] == "assistant":
        read.messages[-1].setdefault("tool_calls", []).append(call)
    else:
        read.add({"role": "assistant", "tool_calls": [call]}, param)


def _output(item: Json, param: str, read: ReadInput) -> None:
    _require_text(item, "call_id", param)
    content = _content(item.get("output"), f"{param}.output")
    read.add({"role": "tool", "tool_call_id": item["call_id"], "content": content}, param)


def _require_text(item: Json, name: str, param: str) -> None:
    if not isinstance(item.get(name), str):
        raise BadRequestError(f"{param}.{name}: must be a text", param=f"{param}.{name}")
