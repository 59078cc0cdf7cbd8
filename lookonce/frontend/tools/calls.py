"""Tool calls of one request: its tools, the grammar of the calls, and the calls in the answer.

tools, tool_choice ──read_tools──▶ RequestedTools ──tool_calling──▶ ToolCalling
                                                                      ├─ constrain: the grammar
                                                                      └─ reader: a CallReader
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from lookonce.errors import BadRequestError
from lookonce.frontend.closed_schemas import closed_schema
from lookonce.frontend.responses import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from lookonce.frontend.tools import harmony
from lookonce.frontend.tools.formats import NO_PLACE, ToolDialect
from lookonce.frontend.tools.json_calls import ARGS, END_TOOL_CALL, TOOL_CALL, TOOL_CALLS
from lookonce.frontend.tools.parser import (
    LONGEST_NAME,
    CallArguments,
    CallStart,
    ContentText,
    ReasoningText,
    joined,
)
from lookonce.render.prompt.messages import has_many_values
from lookonce.types.sampling import (
    JSON_SPACES,
    MAX_GRAMMAR_BYTES,
    Grammar,
    SamplingParams,
    too_large_grammar,
)

MAX_TOOLS = 1024
MAX_SCHEMA_VALUES = 1 << 16
"""JSON values in the parameters of all tools (a long text counts as several)."""

# --- the tools of a request -----------------------------------------------------------------------


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
class RequestedTools:
    """The tools of a request, checked."""

    functions: tuple[Function, ...]
    """Those that may be called."""
    params: tuple[str, ...]
    """The request's field with the parameters of each of `functions`."""
    declared: tuple[Function, ...]
    """Those that the model is shown."""
    forced: bool
    """At least one call of `functions` must come."""
    parallel: bool
    """More than one call may come."""
    name: str = "tools"
    """What the request calls them."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Function name → JSON schema of its parameters."""
        return {function.name: function.parameters or {} for function in self.functions}

    @property
    def strict(self) -> bool:
        """Arguments must conform whenever a call comes."""
        return any(function.strict for function in self.functions)

    def described(self) -> RequestedTools:
        """The same; a function without a description gets an empty one."""
        declared = tuple(replace(f, description=f.description or "") for f in self.declared)
        return dataclasses.replace(self, declared=declared)

    def for_template(self) -> list[dict[str, Any]] | None:
        """In OpenAI's form, which chat templates expect, without the fields that were not given."""
        if not self.declared:
            return None
        return [{"type": "function", "function": _described(f)} for f in self.declared]


NO_REQUESTED_TOOLS = RequestedTools((), (), (), forced=False, parallel=True)
"""For formats that answers are written in with or without tools."""


@dataclass(frozen=True, slots=True)
class ToolFields:
    """What a request calls its tools, for errors that name them."""

    tools: str = "tools"
    choice: str = "tool_choice"
    function: str = ".function"
    """A tool's part with name and parameters."""

    def function_of(self, number: int) -> str:
        return f"{self.tools}[{number}]{self.function}"


TOOL_FIELDS = ToolFields()


def read_tools(
    tools: Sequence[Tool] | None,
    choice: ToolChoice,
    parallel: bool | None,
    *,
    close: bool = True,
    fields: ToolFields = TOOL_FIELDS,
) -> RequestedTools | None:
    """None where no tool may be used. Raises `BadRequestError` naming the part at fault.

    `close`: calls have no arguments but those that are declared (see `closed_schemas`).
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequestError(f"{fields.choice} needs {fields.tools}", param=fields.choice)
        return None
    declared = _functions(tools, fields)
    if choice == "none":
        return None
    if choice not in (None, "auto", "required") and isinstance(choice, str):
        raise BadRequestError(
            f"{fields.choice}: {choice[:50]!r} is none of none, auto, required or a function",
            param=fields.choice,
        )
    functions = _named(declared, choice, fields) if isinstance(choice, NamedChoice) else declared
    numbers = {function.name: number for number, function in enumerate(declared)}
    params = tuple(f"{fields.function_of(numbers[f.name])}.parameters" for f in functions)
    return RequestedTools(
        functions=tuple(map(_closed, functions, params)) if close else functions,
        params=params,
        declared=declared,
        forced=choice == "required" or isinstance(choice, NamedChoice),
        parallel=parallel is not False and not isinstance(choice, NamedChoice),
        name=fields.tools,
    )


def _closed(function: Function, param: str) -> Function:
    if function.parameters is None:
        return function
    return replace(function, parameters=closed_schema(function.parameters, param))


def _functions(tools: Sequence[Tool], fields: ToolFields) -> tuple[Function, ...]:
    check_num_tools(len(tools), fields)
    functions = [_function(tool, number, fields) for number, tool in enumerate(tools)]
    names: set[str] = set()
    for number, function in enumerate(functions):
        if function.name in names:
            param = f"{fields.function_of(number)}.name"
            raise BadRequestError(f"{param}: {function.name[:50]!r} comes twice", param=param)
        names.add(function.name)
    if has_many_values([function.parameters for function in functions], most=MAX_SCHEMA_VALUES):
        raise BadRequestError(
            f"{fields.tools}: their parameters have more than {MAX_SCHEMA_VALUES} JSON values, "
            "which is the limit",
            param=fields.tools,
        )
    return tuple(functions)


def check_num_tools(count: int, fields: ToolFields = TOOL_FIELDS) -> None:
    """Raises `BadRequestError` for too many."""
    if count > MAX_TOOLS:
        raise BadRequestError(
            f"{count} {fields.tools}; {MAX_TOOLS} are allowed", param=fields.tools
        )


def _function(tool: Tool, number: int, fields: ToolFields) -> Function:
    if tool.type != "function":
        param = f"{fields.tools}[{number}].type"
        raise BadRequestError(
            f"{param}: only functions are served", param=param, code="unsupported_parameter"
        )
    param = fields.function_of(number)
    if tool.function is None:
        raise BadRequestError(f"{param} is missing", param=param)
    if not 0 < len(tool.function.name) <= LONGEST_NAME:
        param = f"{param}.name"
        raise BadRequestError(f"{param}: must have 1 to {LONGEST_NAME} characters", param=param)
    return tool.function


def _named(
    functions: tuple[Function, ...], choice: NamedChoice, fields: ToolFields
) -> tuple[Function, ...]:
    if choice.type != "function" or choice.function is None:
        raise BadRequestError(
            f"{fields.choice}: only a function can be named",
            param=fields.choice,
            code="unsupported_parameter",
        )
    name = choice.function.name
    found = tuple(function for function in functions if function.name == name)
    if not found:
        raise BadRequestError(
            f"{fields.choice}: {name[:50]!r} is not among the {fields.tools}", param=fields.choice
        )
    return found


def _described(function: Function) -> dict[str, Any]:
    fields = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    return {name: value for name, value in fields.items() if value is not None}


# --- the calls of an answer -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """A request's tools, if it has any, and how the served model writes calls."""

    asked: RequestedTools
    dialect: ToolDialect

    @property
    def markers(self) -> tuple[str, ...]:
        return self.dialect.format.markers

    def constrain(self, sampling: SamplingParams) -> SamplingParams:
        """The same with a grammar, where calls must come or must conform to their schemas.

        An answer without calls keeps the form that was asked for. Raises `BadRequestError`.
        """
        grammar = calls_grammar(self.asked, self.dialect, sampling.grammar)
        ends = () if sampling.ignore_eos else self.dialect.ends
        return msgspec.structs.replace(
            sampling,
            grammar=grammar or sampling.grammar,
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ends))),
        )

    def reader(self) -> CallReader:
        return CallReader(self)


def tool_calling(asked: RequestedTools | None, dialect: ToolDialect | None) -> ToolCalling | None:
    """None where answers are plain text.

    Raises `BadRequestError` where tools are asked for and the served model takes none.
    """
    if asked is None:
        if dialect is None or not dialect.format.always:
            return None
        return ToolCalling(NO_REQUESTED_TOOLS, dialect)
    if dialect is None or dialect.refusal:
        raise BadRequestError(
            NO_PLACE if dialect is None else dialect.refusal,
            param=asked.name,
            code="unsupported_parameter",
        )
    return ToolCalling(asked.described() if dialect.format.describes else asked, dialect)


AnswerDelta: TypeAlias = ContentText | ReasoningText | ToolCallDelta


class CallReader:
    """Splits one sample's text into content, reasoning and calls.

    Calls get their ids; calls beyond those that may come are dropped.
    """

    def __init__(self, tools: ToolCalling) -> None:
        self._format = tools.dialect.format
        self._parser = self._format.parser(tools.asked.schemas)
        self._most = None if tools.asked.parallel else 1
        self.calls: list[ToolCall] = []
        """The calls so far; the last may be incomplete."""

    @property
    def num_held(self) -> int:
        """How many of the last characters are held back: what follows decides what they are."""
        return self._parser.num_held

    def push(self, text: str, *, last: bool) -> list[AnswerDelta]:
        """What the text adds, in the order it was written; `last`: no more text comes."""
        deltas = self._parser.push(text) if text else []
        if last:
            deltas = joined(deltas + self._parser.finish())
        new: list[AnswerDelta] = []
        for delta in deltas:
            match delta:
                case CallStart(index, name) if self._may_come(index):
                    new.append(self._begin(index, name))
                case CallArguments(index, more) if self._may_come(index):
                    self._add_arguments(new, index, more)
                case ContentText() | ReasoningText():
                    new.append(delta)
        return new

    def _may_come(self, index: int) -> bool:
        return self._most is None or index < self._most

    def _begin(self, index: int, name: str) -> ToolCallDelta:
        call = ToolCall(id=self._format.call_id(), function=FunctionCall(name, ""))
        self.calls.append(call)
        function = FunctionDelta("", name)
        return ToolCallDelta(index=index, id=call.id, type="function", function=function)

    def _add_arguments(self, new: list[AnswerDelta], index: int, text: str) -> None:
        """Appends to the last delta if that is one of this call, else adds one."""
        self.calls[index].function.arguments += text
        last = new[-1] if new else None
        if not isinstance(last, ToolCallDelta):
            last = ToolCallDelta(index, FunctionDelta(""))
            new.append(last)
        last.function.arguments += text


class PlainTextReader:
    """Stands in for `CallReader` where answers are plain text."""

    num_held = 0

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []

    def push(self, text: str, *, last: bool) -> list[AnswerDelta]:
        return [ContentText(text)] if text else []


def reader_of(tools: ToolCalling | None) -> CallReader | PlainTextReader:
    """For one sample's text."""
    return PlainTextReader() if tools is None else tools.reader()


def content_of(deltas: Sequence[AnswerDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentText))


def reasoning_of(deltas: Sequence[AnswerDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningText))


def call_deltas_of(deltas: Sequence[AnswerDelta]) -> list[ToolCallDelta]:
    return [delta for delta in deltas if isinstance(delta, ToolCallDelta)]


Reason = TypeVar("Reason", str, str | None)


def finish_reason_shown(
    finish_reason: Reason, *, called: bool, as_called: str = "tool_calls"
) -> Reason:
    """A sample with calls that ended by itself ends with `as_called`."""
    return as_called if called and finish_reason == "stop" else finish_reason


# --- grammars of calls ----------------------------------------------------------------------------

CHOICE = "CHOICE"
"""The terminal of the choices that an answer without calls has."""
NO_OBJECT = r"/[^{<\s](.|\n)*/"
WITHOUT_CALLS = ("regex", "grammar", "lark")
"""Forms that constrain the whole answer, whatever it is."""
Json = dict[str, Any]


def calls_grammar(
    tools: RequestedTools, dialect: ToolDialect, form: Grammar | None
) -> Grammar | None:
    """The grammar of an answer with calls, in the format of the model; None: nothing is asked.

        start   the whole answer: calls, or text and perhaps calls, or calls or `form`
        calls   one or more of `call`
        call    markers, a function's name, and the JSON schema of its parameters, whose `$ref`s are
                resolved from the schema's own root

    `form` is what an answer without calls must look like. The grammar is Lark with JSON schemas
    inside; markers that are special tokens are named by their ids. Raises `BadRequestError`.
    """
    if form is None and not (tools.forced or tools.strict):
        return None
    _check_size(tools)
    if dialect.format.name == "harmony":
        return _harmony_grammar(tools, dialect, form)
    rules = _calls(tools, dialect)
    if tools.forced:
        rules["start"] = "calls"
    elif form is not None:
        rules["start"] = f"calls | {_form(form, dialect)}"
    elif dialect.format.name == "llama3":
        rules |= {"start": "TEXT | calls", "TEXT": NO_OBJECT}
    else:
        rules |= {"start": "TEXT* calls?", "TEXT": _free_text(dialect)}
    return _grammar(rules, tools, form)


def _check_size(tools: RequestedTools) -> None:
    """Refuse schemas that together are too large, before a grammar is written."""
    nbytes = 0
    for function, param in zip(tools.functions, tools.params, strict=True):
        try:
            nbytes += len(msgspec.json.encode(function.parameters))
        except RecursionError:
            raise BadRequestError(f"{param}: nested too deeply", param=param) from None
        if nbytes > MAX_GRAMMAR_BYTES:
            raise too_large_grammar(nbytes, param)


def _grammar(rules: Mapping[str, str], tools: RequestedTools, form: Grammar | None) -> Grammar:
    if form is not None and form.kind == "choice" and not tools.forced:
        # A terminal: as alternatives of a rule, more than 2,000 exceed a limit of the parser.
        rules = {**rules, CHOICE: " | ".join(map(_text, json.loads(form.source)))}
    lark = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
    parts = [
        Grammar(kind="json_schema", source=json.dumps(function.parameters), param=param)
        for function, param in zip(tools.functions, tools.params, strict=True)
        if function.parameters is not None
    ]
    if form is not None and not tools.forced:
        parts.append(form)
    param = tools.name if tools.functions or form is None else form.param
    return Grammar(kind="lark", source=lark, param=param, parts=tuple(parts))


def _harmony_grammar(
    tools: RequestedTools, dialect: ToolDialect, form: Grammar | None
) -> Grammar | None:
    """Reasoning, and then one call or the answer."""
    if form is not None and form.kind in WITHOUT_CALLS and not tools.functions:
        return None  # the form holds for all that is written, without channels
    channel, message = _marker(harmony.CHANNEL, dialect), _marker(harmony.MESSAGE, dialect)
    # Commentary before the answer would break the answer's form.
    before = f"{channel} " + ('("analysis" | "commentary")' if form is None else '"analysis"')
    end, start = _marker(harmony.END, dialect), _marker(harmony.START, dialect)
    constrain = _marker(harmony.CONSTRAIN, dialect)
    calls = [
        f"{channel} {_text(f'commentary to={harmony.FUNCTIONS}{f.name} ')} {constrain} "
        f'"json" {message} {_parameters(f)}'
        for f in tools.functions
    ]
    last = calls
    if not tools.forced:
        said = "TEXT?" if form is None else f"({_form(form, dialect)})"
        last = [*calls, f'{channel} "final" {message} {said}']
    rules = {
        "start": "thought* last",
        "thought": f'{before} {message} TEXT? {end} {start} "assistant"',
        "last": " | ".join(last),
        "TEXT": r"/(.|\n)+/" if harmony.CHANNEL in dialect.special else r"/([^<]|<[^|])+/",
    }
    return _grammar(rules, tools, form)


def _free_text(dialect: ToolDialect) -> str:
    """A piece of text without a marker: text without a marker's first character, or the beginning
    of a marker. The longest match wins, so a whole marker is never read as its beginning."""
    marker = TOOL_CALLS if dialect.format.name == "mistral" else TOOL_CALL
    if marker in dialect.special:
        return r"/(.|\n)+/"  # a special token is no text
    beginning = ""
    for character in reversed(marker[1:-1]):
        beginning = f"({re.escape(character)}{beginning})?"
    first = re.escape(marker[0])
    return f"/[^{first}]+|{first}{beginning}/"


def _calls(tools: RequestedTools, dialect: ToolDialect) -> dict[str, str]:
    """The rules `call` and `calls` of all formats but harmony."""
    objects = " | ".join(_object(f, dialect.format.arguments_key) for f in tools.functions)
    match dialect.format.name:
        case "hermes" | "qwen3_coder":
            opening, closing = _marker(TOOL_CALL, dialect), _marker(END_TOOL_CALL, dialect)
            call = f'{opening} "\\n" ({objects}) "\\n" {closing}'
            return {"call": call, "calls": _repeated('"\\n"', tools)}
        case "mistral" if dialect.writes_args:
            marker, args = _marker(TOOL_CALLS, dialect), _marker(ARGS, dialect)
            named = [f"{_text(f.name)} {args} {_parameters(f)}" for f in tools.functions]
            return {"call": f"{marker} ({' | '.join(named)})", "calls": _repeated("", tools)}
        case "mistral":
            calls = f'{_marker(TOOL_CALLS, dialect)} "[" {_repeated(_text(", "), tools)} "]"'
            return {"call": objects, "calls": calls}
        case _:
            return {"call": objects, "calls": _repeated('"; "', tools)}


def _repeated(separator: str, tools: RequestedTools) -> str:
    return f"call ({separator} call)*" if tools.parallel else "call"


def _object(function: Function, arguments_key: str) -> str:
    """A call as an object, spaced as the chat templates write it."""
    name = json.dumps(function.name, ensure_ascii=False)
    before = f'{{"name": {name}, "{arguments_key}": '
    return f"{_text(before)} {_parameters(function)} {_text('}')}"


def _parameters(function: Function) -> str:
    if function.parameters is None:
        return _json({"type": "object", "properties": {}, "additionalProperties": False})
    return _json({"type": "object", **function.parameters})


def _json(schema: Json) -> str:
    guided = {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACES}}
    try:
        return f"%json {json.dumps(guided)}"
    except RecursionError:
        raise BadRequestError("tools: a schema is nested too deeply", param="tools") from None


def _form(form: Grammar, dialect: ToolDialect) -> str:
    match form.kind:
        case "json_schema" if dialect.format.name != "llama3":
            return _json(_schema_of(form))
        case "choice" if dialect.format.name != "llama3":
            return CHOICE
    # A regex or grammar may begin as calls do, and so may any form where calls have no markers.
    raise BadRequestError(
        f"{form.param} cannot be used with tools here, unless tool_choice is none", param=form.param
    )


def _schema_of(form: Grammar) -> Json:
    try:
        schema: Json = json.loads(form.source)
    except RecursionError:
        raise BadRequestError(f"{form.param}: nested too deeply", param=form.param) from None
    return schema


def _text(text: str) -> str:
    return json.dumps(text)


def _marker(text: str, dialect: ToolDialect) -> str:
    return f"<[{dialect.special[text]}]>" if text in dialect.special else _text(text)
