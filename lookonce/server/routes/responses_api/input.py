"""What `/v1/responses` takes: the body, and its input items as messages of a chat.

instructions             a system message
message                  a message of the same role; its parts get a chat's names
function_call            a tool call of the assistant message before it, else of a new one
function_call_output     a tool message
reasoning                `reasoning_content` of the assistant's message that follows
item_reference           the stored item of this id
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lookonce.errors import BadRequestError
from lookonce.frontend.requests import (
    NOTHING,
    GenerationFields,
    JsonSchemaFormat,
    Raw,
    Reasoning,
    Schema,
)
from lookonce.frontend.sampling_params import schema_grammar
from lookonce.frontend.tools.calls import (
    Function,
    NamedChoice,
    NamedFunction,
    RequestedTools,
    Tool,
    ToolFields,
    check_num_tools,
    read_tools,
)
from lookonce.render.prompt.placeholders import refuse_reserved
from lookonce.server.http.body import message_place
from lookonce.types.sampling import Grammar

LOGPROBS = "message.output_text.logprobs"
FIELDS = ToolFields(function="")
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""Values of `include`. The second is accepted and adds nothing: no reasoning is hidden here."""


class TextFormat(msgspec.Struct, kw_only=True):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Any = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function. A chat's tool has these fields one level deeper, under `function`."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str = ""


class ConversationReference(msgspec.Struct):
    id: str


class ResponsesRequest(GenerationFields, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    """A text, or items: messages, function calls and their outputs."""
    previous_response_id: str | None = None
    """A stored response, whose input and output come before `input`."""
    conversation: str | ConversationReference | None = None
    """A stored conversation, whose items come before `input`."""
    store: bool | None = None
    """None: as true."""
    enable_response_messages: bool | None = None
    """vLLM's: the response has the prompt and the answer as text and token ids."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Any = None
    verbosity: Any = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    prompt_logprobs: Raw = NOTHING
    max_completion_tokens: Raw = NOTHING
    chat_template: Raw = NOTHING
    documents: Raw = NOTHING
    functions: Raw = NOTHING
    function_call: Raw = NOTHING
    modalities: Raw = NOTHING
    echo: Raw = NOTHING
    image: Raw = NOTHING
    prompt: Raw = NOTHING
    background: Raw = NOTHING
    max_tool_calls: Raw = NOTHING
    context_management: Raw = NOTHING
    moderation: Raw = NOTHING

    def asked_controls(self) -> dict[str, Any]:
        return {
            "reasoning_effort": self.reasoning_effort,
            "reasoning.effort": self.reasoning and self.reasoning.effort,
            "verbosity": self.verbosity,
            "text.verbosity": self.text and self.text.verbosity,
        }


def check_response(body: ResponsesRequest) -> None:
    """Raises `BadRequestError` for parameters that are not supported."""
    refused = {
        "n": body.n not in (None, 1),
        "truncation": body.truncation not in (None, "disabled"),
        "max_tokens": body.max_tokens is not None,
        "response_format": body.response_format is not None,
    }
    instead = {"max_tokens": "max_output_tokens", "response_format": "text.format"}
    for name, wrong in refused.items():
        if wrong:
            hint = f"; use {instead[name]}" if name in instead else ""
            raise BadRequestError(
                f"{name} is not supported here{hint}", param=name, code="unsupported_parameter"
            )
    for number, included in enumerate(body.include or ()):
        if included not in INCLUDABLE:
            param = f"include[{number}]"
            raise BadRequestError(f"{param}: {included[:60]!r} is not supported", param=param)


def text_grammar(body: ResponsesRequest, *, close: bool) -> Grammar | None:
    """The grammar of `text.format`; None for free text. Raises `BadRequestError`.

    `close`: objects of a schema are closed (see `closed_schemas`).
    """
    asked = (body.text and body.text.format) or TextFormat()
    match asked.type:
        case "text":
            return None
        case "json_object":
            return Grammar(kind="json_schema", source='{"type":"object"}', param="text.format")
        case "json_schema":
            format = JsonSchemaFormat(schema=asked.schema)
            return schema_grammar(format, "text.format", close=close)
    raise BadRequestError(
        f"text.format.type: {asked.type[:50]!r} is none of text, json_object, json_schema",
        param="text.format.type",
        code="unsupported_parameter",
    )


def response_tools(body: ResponsesRequest, *, close: bool) -> RequestedTools | None:
    """The tools of a request, read as a chat's; a tool's fields are its own, not a function's.

    Raises `BadRequestError` naming the part at fault.
    """
    choice: str | NamedChoice | None
    if isinstance(body.tool_choice, ResponseToolChoice):
        function = NamedFunction(body.tool_choice.name)
        choice = NamedChoice(type=body.tool_choice.type, function=function)
    else:
        choice = body.tool_choice
    check_num_tools(len(body.tools or ()))
    tools = [_chat_tool(tool) for tool in body.tools or ()]
    return read_tools(tools, choice, body.parallel_tool_calls, close=close, fields=FIELDS)


def _chat_tool(tool: ResponseTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type=tool.type, function=function)


# --- input items --------------------------------------------------------------------------------

Json = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")


ITEM_FIELDS = {
    ".tool_call_id": ".call_id",
    ".function.arguments": ".arguments",
    ".function": "",
    ".id": ".call_id",
}
"""See `ReadInput.fields`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a message of a chat was in the request: names for errors about it."""

    message: str
    """`input[N]`, or the field of a text: `instructions` or `input`."""
    content: str
    parts: Sequence[str] = ()
    """Of the content, where their names are others than in a chat."""
    calls: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ReadInput:
    """Input items as messages."""

    fields: Mapping[str, str]
    """Of a chat's tool message or tool call → their names in the request."""
    messages: list[Json] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    """One per message."""
    thoughts: list[str] = field(default_factory=list)
    """What the model thought before the next message of the assistant, in parts."""

    def add(self, message: Json, origin: Origin) -> None:
        thought = "".join(self.thoughts)
        self.thoughts.clear()
        if thought and message["role"] == "assistant":
            message["reasoning_content"] = thought
        self.messages.append(message)
        self.origins.append(origin)

    def add_call(self, call: Json, param: str) -> None:
        """To the last message if that is the assistant's, else to a new one."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages[-1].setdefault("tool_calls", []).append(call)
            self.origins[-1].calls.append(param)
        else:
            message = {"role": "assistant", "tool_calls": [call]}
            self.add(message, Origin(param, f"{param}.content", calls=[param]))

    def renamed(self, param: str) -> str:
        """The name in the request of a part of `messages`: `messages[1].content` →
        `input[0].content`. Other names stay as they are."""
        place = message_place(param)
        if place is None or place[0] >= len(self.origins):
            return "input" if param == "messages" else param
        number, rest = place
        origin = self.origins[number]
        name, bracket, more = rest.partition("[")
        index, _, inside = more.partition("]")
        named = {".content": origin.parts, ".tool_calls": origin.calls}.get(name, ())
        if index.isdecimal() and int(index) < len(named):
            return named[int(index)] + self._own(inside)
        if name == ".tool_calls" and origin.calls:
            return origin.calls[0]
        if name == ".content":
            return origin.content + bracket + more
        return origin.message + self._own(rest)

    def _own(self, field_name: str) -> str:
        """What the request calls a field of a chat."""
        for name, own in self.fields.items():
            if field_name.startswith(name):
                return own + field_name.removeprefix(name)
        return field_name


def read_input(
    given: str | list[Json],
    instructions: str | None,
    before: Sequence[Json] = (),
    before_name: str = "",
) -> ReadInput:
    """The messages of a chat: `instructions`, the stored items `before`, which errors call by
    `before_name`, and `given`. Raises `BadRequestError` naming the item at fault; parts are checked
    by the renderer."""
    read = ReadInput(ITEM_FIELDS)
    if instructions:
        origin = Origin("instructions", "instructions")
        read.add({"role": "system", "content": instructions}, origin)
    for number, item in enumerate(before):
        _item(item, f"{before_name}.items[{number}]", read)
    if isinstance(given, str):
        read.add({"role": "user", "content": given}, Origin("input", "input"))
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
        "reasoning": _reasoning,
    }
    reader = readers.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise BadRequestError(
            f"{param}.type: {str(kind)[:50]!r} is none of message, function_call, "
            "function_call_output, item_reference",
            param=f"{param}.type",
        )
    reader(item, param, read)


def _reasoning(item: Json, param: str, read: ReadInput) -> None:
    """Its text; of other models' there may be none, or only an encrypted one."""
    parts = item.get("content")
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            where = f"{param}.content[{number}].text"
            raise BadRequestError(f"{where}: must be a text", param=where)
        refuse_reserved(text, f"{param}.content[{number}].text")
        read.thoughts.append(text)


def _message(item: Json, param: str, read: ReadInput) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise BadRequestError(
            f"{param}.role: must be one of {', '.join(ROLES)}", param=f"{param}.role"
        )
    where = f"{param}.content"
    read.add({"role": role, "content": _content(item.get("content"), where)}, Origin(param, where))


def _content(content: object, param: str) -> object:
    if not isinstance(content, list):
        return content
    return [_part(part, f"{param}[{number}]") for number, part in enumerate(content)]


def _part(part: object, param: str) -> object:
    if not isinstance(part, Mapping):
        return part
    match part.get("type"):
        case "input_text" | "output_text":
            if not isinstance(part.get("text"), str):
                raise BadRequestError(f"{param}.text: must be a text", param=f"{param}.text")
            return {"type": "text", "text": part["text"]}
        case "input_image":
            return _image(part, param)
        case "input_file":
            return _file(part, param)
    return part


def _file(part: Mapping[str, Any], param: str) -> Json:
    """A chat's file part has the same fields one level deeper."""
    _refuse_file_id(part, param, "file_data or file_url")
    names = ("file_data", "file_url", "filename")
    given = {name: part[name] for name in names if part.get(name) is not None}
    if not given.keys() & {"file_data", "file_url"}:
        raise BadRequestError(f"{param}: a file needs file_data or file_url", param=param)
    return {"type": "file", "file": given}


def _refuse_file_id(part: Mapping[str, Any], param: str, instead: str) -> None:
    if part.get("file_id") is not None:
        param = f"{param}.file_id"
        raise BadRequestError(
            f"{param}: no files are kept here; use {instead}",
            param=param,
            code="unsupported_parameter",
        )


def _image(part: Mapping[str, Any], param: str) -> Json:
    _refuse_file_id(part, param, "image_url")
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
    read.add_call(call, param)


def _output(item: Json, param: str, read: ReadInput) -> None:
    _require_text(item, "call_id", param)
    output, where = item.get("output"), f"{param}.output"
    if not isinstance(output, str | list):
        raise BadRequestError(f"{where}: must be a text or a list of parts", param=where)
    message = {"role": "tool", "tool_call_id": item["call_id"], "content": _content(output, where)}
    parts = (
        [f"{where}[{number}]" for number in range(len(output))] if isinstance(output, list) else ()
    )
    read.add(message, Origin(param, where, parts))


def _require_text(item: Json, name: str, param: str) -> None:
    if not isinstance(item.get(name), str):
        raise BadRequestError(f"{param}.{name}: must be a text", param=f"{param}.{name}")
