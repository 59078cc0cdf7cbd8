"""A request's `tools` and `tool_choice`, read and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from lookonce.errors import BadRequestError

MAX_TOOLS = 1024
LONGEST_NAME = 256


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; None: no arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str
    function: Function | None = None


class NamedFunction(msgspec.Struct):
    name: str


class NamedChoice(msgspec.Struct, kw_only=True):
    type: str
    function: NamedFunction | None = None


ToolChoice = str | NamedChoice | None


@dataclass(frozen=True, slots=True)
class AskedTools:
    """`forced`: at least one call must come, of one of `functions`."""

    functions: tuple[Function, ...]
    """Those that may be called."""
    params: tuple[str, ...]
    """What the request calls the parameters of each of them."""
    declared: tuple[Function, ...]
    """Those the model is told of."""
    forced: bool
    parallel: bool
    """More than one call may come."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    @property
    def strict(self) -> bool:
        """Arguments must conform whenever a call comes."""
        return any(function.strict for function in self.functions)

    def described(self) -> AskedTools:
        """With a description, if an empty one, for every function."""
        declared = tuple(replace(f, description=f.description or "") for f in self.declared)
        return dataclasses.replace(self, declared=declared)

    def for_template(self) -> list[dict[str, Any]] | None:
        """In OpenAI's form, which templates expect; without what was not given."""
        if not self.declared:
            return None
        return [{"type": "function", "function": _described(f)} for f in self.declared]


NO_TOOLS = AskedTools((), (), (), forced=False, parallel=True)
"""For formats that answers are written in with or without tools."""


def read_tools(
    tools: Sequence[Tool] | None, choice: ToolChoice, parallel: bool | None
) -> AskedTools | None:
    """None where no tool may be used. Raises `BadRequestError` naming the part at fault."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequestError("tool_choice needs tools", param="tool_choice")
        return None
    declared = _functions(tools)
    if choice == "none":
        return None
    if choice not in (None, "auto", "required") and isinstance(choice, str):
        raise BadRequestError(
            f"tool_choice: {choice[:50]!r} is none of none, auto, required or a function",
            param="tool_choice",
        )
    functions = _named(declared, choice) if isinstance(choice, NamedChoice) else declared
    numbers = {function.name: number for number, function in enumerate(declared)}
    return AskedTools(
        functions=functions,
        params=tuple(f"tools[{numbers[f.name]}].function.parameters" for f in functions),
        declared=declared,
        forced=choice == "required" or isinstance(choice, NamedChoice),
        parallel=parallel is not False and not isinstance(choice, NamedChoice),
    )


def _functions(tools: Sequence[Tool]) -> tuple[Function, ...]:
    if len(tools) > MAX_TOOLS:
        raise BadRequestError(f"{len(tools)} tools; {MAX_TOOLS} are allowed", param="tools")
    functions = [_function(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    names: set[str] = set()
    for number, function in enumerate(functions):
        if function.name in names:
            param = f"tools[{number}].function.name"
            raise BadRequestError(f"{param}: {function.name[:50]!r} comes twice", param=param)
        names.add(function.name)
    return tuple(functions)


def _function(tool: Tool, param: str) -> Function:
    if tool.type != "function":
        raise BadRequestError(
            f"{param}.type: only functions are served", param=f"{param}.type",
            code="unsupported_parameter",
        )  # fmt: skip
    if tool.function is None:
        raise BadRequestError(f"{param}.function is missing", param=f"{param}.function")
    if not 0 < len(tool.function.name) <= LONGEST_NAME:
        param = f"{param}.function.name"
        raise BadRequestError(f"{param}: must have 1 to {LONGEST_NAME} characters", param=param)
    return tool.function


def _named(functions: tuple[Function, ...], choice: NamedChoice) -> tuple[Function, ...]:
    if choice.type != "function" or choice.function is None:
        raise BadRequestError(
            "tool_choice: only a function can be named", param="tool_choice",
            code="unsupported_parameter",
        )  # fmt: skip
    name = choice.function.name
    found = tuple(function for function in functions if function.name == name)
    if not found:
        raise BadRequestError(
            f"tool_choice: {name[:50]!r} is not among the tools", param="tool_choice"
        )
    return found


def _described(function: Function) -> dict[str, Any]:
    fields = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    return {name: value for name, value in fields.items() if value is not None}
