"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, answered as a chat.

system                   a system message, without Claude Code's line about billing
text, image              parts of the same message
document                 a file part, or its texts and pictures
tool_use                 a tool call of the assistant's message
tool_result              a tool message
thinking                 `reasoning_content` of the assistant's message

An assistant's message at the end is the beginning of the answer, which goes on from there.

`cache_control` promises nothing: every prefix is cached, and `usage.cache_read_input_tokens` says
how much of the prompt was found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import Piece, Sample
from lookonce.frontend.requests import ChatRequest, JsonSchemaFormat, ResponseFormat
from lookonce.frontend.responses import ReuseReceipt, ToolCallDelta
from lookonce.frontend.tools.calls import (
    Function,
    NamedChoice,
    NamedFunction,
    Tool,
    ToolCalling,
    ToolChoice,
    check_num_tools,
)
from lookonce.frontend.tools.parser import ContentText, ReasoningText
from lookonce.render.prompt.messages import check_count, has_many_values
from lookonce.render.prompt.placeholders import refuse_reserved
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.body import receive, renaming_errors
from lookonce.server.http.responses import (
    anthropic_error,
    encode,
    json_response,
    while_connected,
)
from lookonce.server.rate_limits import RequestUsage, count_media
from lookonce.server.routes.chat import ChatResponseBuilder, chat_options, checked_chat
from lookonce.server.routes.responses_api.input import Origin, ReadInput
from lookonce.server.routes.serving_base import (
    ServingContext,
    apply_controls,
    open_context,
    respond,
)
from lookonce.server.services import Services
from lookonce.types.sampling import Grammar, SamplingParams

Json = dict[str, Any]
NamedPart = tuple[str, Json]
"""A part of a chat, and the name of what it was in the request."""
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
BILLING = "x-anthropic-billing-header"
"""How a system text of Claude Code begins that has a digest of the request. In the prompt it would
keep every request from finding the prefix of the one before."""
THINKS = {"enabled": True, "adaptive": True, "disabled": False}
"""Type of `thinking` → whether the model thinks; any other is ignored."""


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Any = None
    format: AnthropicFormat | None = None
    """What the answer must look like."""


class Thinking(msgspec.Struct, kw_only=True):
    type: Any = None
    budget_tokens: Any = None
    display: Any = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`; blocks are checked when they are read."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: variables of the chat template, which come before those of `thinking`."""
    cache_salt: str | None = None
    """As of a chat: only requests with the same one find what this one leaves in the caches."""

    def asked_controls(self) -> dict[str, Any]:
        """How much the model thinks and says, by the request's names."""
        output, thinking = self.output_config or OutputConfig(), self.thinking or Thinking()
        kind = thinking.type
        return {
            "output_config.effort": output.effort,
            "thinking.type": THINKS.get(kind, kind) if isinstance(kind, str) else kind,
            "thinking.budget_tokens": thinking.budget_tokens,
        }


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    """The most; less where the context ends before."""
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None


class AnthropicUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Those that were computed; found ones are counted below."""
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Json]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage
    reuse_receipt: ReuseReceipt | UnsetType = UNSET
    """Ours, where the request asks for it (`X-Reuse-Receipt: 1`)."""


class AnthropicEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; which fields it has depends on its type."""

    type: str
    message: AnthropicMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Json | UnsetType = UNSET
    delta: Json | UnsetType = UNSET
    usage: AnthropicUsage | UnsetType = UNSET
    reuse_receipt: ReuseReceipt | UnsetType = UNSET
    """In `message_delta`, which tells how the message ended."""


class TokenCount(msgspec.Struct):
    input_tokens: int


async def create_message(request: Request) -> Response:
    arrival = time.monotonic()
    asked = await receive(request, MessagesRequest)
    read = await _read(request, asked)
    body = _chat_request(asked, read)
    body.max_tokens, body.stream = asked.max_tokens, asked.stream
    body.temperature, body.top_p, body.top_k = asked.temperature, asked.top_p, asked.top_k
    body.stop = asked.stop_sequences
    context = open_context(request, body, arrival)
    context.shortens_asked = True
    apply_controls(request, body, asked.asked_controls())
    with _own_names(read):
        sampling, tools = checked_chat(body, context.services)
    if sampling.grammar is not None:
        grammar = _own_grammar(sampling.grammar, read)
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
    builder = MessagesBuilder(context, body, sampling, tools, read)
    return await respond(request, context, builder, encoder=builder)


async def count_tokens(request: Request) -> Response:
    """The tokens that the engine would get, media placeholders included."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    asked = await receive(request, CountTokensRequest)
    read = await _read(request, asked)
    body = _chat_request(asked, read)
    services.require_model(body.model)
    apply_controls(request, body, asked.asked_controls())
    usage: RequestUsage = request.state.usage
    usage.take_media(count_media(body.messages))
    usage.take_tokens(0, 1)  # how many there will be is not known
    with _own_names(read):
        _, tools = checked_chat(body, services)
        work = services.readonly.render_chat(
            body.messages,
            tenant=principal.tenant,
            cache_salt=body.cache_salt,
            options=chat_options(body, tools),
        )
        rendered = await while_connected(request.receive, work)
    services.readonly.release(rendered)
    usage.generated(rendered.num_tokens)
    return json_response(TokenCount(rendered.num_tokens))


# --- the request ----------------------------------------------------------------------------------


async def _read(request: Request, asked: CountTokensRequest) -> ReadInput:
    """`read_messages`, in turn where it may take long. Raises `BadRequestError`, also for more
    than the model's context can hold."""
    services: Services = request.app.state.services
    most = services.max_model_len()
    if most is not None:
        check_count(asked.messages, most)
    check_num_tools(len(asked.tools or ()))
    large = has_many_values(asked.messages, asked.system)
    tenant = request.state.principal.tenant
    return await services.renderer.in_turn_if(large, tenant, lambda: read_messages(asked))


def _chat_request(asked: CountTokensRequest, read: ReadInput) -> ChatRequest:
    choice, parallel = _choice(asked.tool_choice)
    continues = _continues(read.messages)
    return ChatRequest(
        messages=read.messages,
        model=asked.model,
        tools=[_tool(tool, number) for number, tool in enumerate(asked.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_format(asked.output_config),
        chat_template_kwargs=asked.chat_template_kwargs,
        cache_salt=asked.cache_salt,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _continues(messages: Sequence[Json]) -> bool:
    """Whether the last message is the beginning of the answer: an assistant's text."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant" or "tool_calls" in last:
        return False
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(part["type"] == "text" for part in texts) and bool(texts[-1]["text"])


def _format(output: OutputConfig | None) -> ResponseFormat | None:
    """As a chat has it. Raises `BadRequestError`."""
    if output is None or output.format is None:
        return None
    if output.format.type != "json_schema":
        param = "output_config.format.type"
        raise BadRequestError(f"{param}: only json_schema is served", param=param)
    schema = JsonSchemaFormat(schema=output.format.schema)
    return ResponseFormat(type="json_schema", json_schema=schema)


def _tool(tool: AnthropicTool, number: int) -> Tool:
    if tool.type not in (None, "custom"):
        param = f"tools[{number}].type"
        raise BadRequestError(f"{param}: only tools of the client's own are served", param=param)
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _choice(choice: AnthropicToolChoice | None) -> tuple[ToolChoice, bool]:
    """As a chat has it, and whether several calls may come."""
    if choice is None:
        return None, True
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        named = NamedFunction(choice.name or "")
        return NamedChoice(type="function", function=named), parallel
    known: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in known:
        raise BadRequestError(
            f"tool_choice.type: {choice.type[:50]!r} is none of auto, any, tool, none",
            param="tool_choice.type",
        )
    return known[choice.type], parallel


def read_messages(asked: CountTokensRequest) -> ReadInput:
    """The messages of a chat. Raises `BadRequestError` naming the block at fault."""
    read = ReadInput(BLOCK_FIELDS)
    if system := _texts(asked.system or ""):
        read.add({"role": "system", "content": system}, Origin("system", "system"))
    for number, message in enumerate(asked.messages):
        param = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise BadRequestError(f"{param}.role: must be user or assistant", param=f"{param}.role")
        if isinstance(content, str):
            read.add({"role": role, "content": content}, Origin(param, f"{param}.content"))
        elif isinstance(content, list):
            _blocks(role, content, param, read)
        else:
            raise BadRequestError(
                f"{param}.content: must be a text or blocks", param=f"{param}.content"
            )
    return read


def _texts(system: str | list[Json]) -> str:
    if isinstance(system, str):
        return system
    texts = []
    for number, block in enumerate(system):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            param = f"system[{number}]"
            raise BadRequestError(f"{param}: only blocks of text are served", param=param)
        if not block["text"].startswith(BILLING):
            refuse_reserved(block["text"], f"system[{number}].text")
            texts.append(block["text"])
    return "\n".join(texts)


def _blocks(role: str, content: list[Any], param: str, read: ReadInput) -> None:
    """One message, and before it one for each result of a tool."""
    read.thoughts.clear()
    parts: list[NamedPart] = []
    calls: list[NamedPart] = []
    for number, block in enumerate(content):
        where = f"{param}.content[{number}]"
        match block.get("type") if isinstance(block, Mapping) else None:
            case "tool_result":
                _result(block, where, read)
            case "tool_use":
                calls.append((where, _call(block, where)))
            case "thinking":
                if role == "assistant":
                    read.thoughts.append(_thinking(block, where))
            case "redacted_thinking":
                pass
            case _:
                parts += _parts(block, where)
    if calls:
        for where, part in parts:
            if part["type"] != "text":
                raise BadRequestError(
                    f"{where}: beside tool_use a message has text alone", param=where
                )
            refuse_reserved(part["text"], where)
        said = "\n".join(part["text"] for _, part in parts)
        message = {"role": role, "content": said or None, "tool_calls": [c for _, c in calls]}
        named = [where for where, _ in calls]
        read.add(message, Origin(param, f"{param}.content", calls=named))
    elif parts:
        _add(role, parts, param, read)


def _thinking(block: Mapping[str, Any], param: str) -> str:
    thought = block.get("thinking", "")
    if not isinstance(thought, str):
        raise BadRequestError(f"{param}.thinking: must be a text", param=f"{param}.thinking")
    refuse_reserved(thought, f"{param}.thinking")
    return thought


def _add(role: str, parts: list[NamedPart], param: str, read: ReadInput, **fields: str) -> None:
    message = {"role": role, **fields, "content": [part for _, part in parts]}
    read.add(message, Origin(param, f"{param}.content", [where for where, _ in parts]))


def _parts(block: Any, param: str) -> list[NamedPart]:
    """The parts of a chat that a block becomes: several of a document."""
    if isinstance(block, Mapping) and block.get("type") == "document":
        return list(_document(block, param))
    return [(param, _part(block, param))]


def _document(block: Mapping[str, Any], param: str) -> Iterator[NamedPart]:
    """Its context, and the file or what it is given as; its title is its name."""
    citations = block.get("citations")
    if isinstance(citations, Mapping) and citations.get("enabled"):
        where = f"{param}.citations"
        raise BadRequestError(f"{where}: citations are not supported", param=where)
    for name in ("title", "context"):
        if not isinstance(block.get(name), str | None):
            raise BadRequestError(f"{param}.{name}: must be a text", param=f"{param}.{name}")
    title, context = block.get("title"), block.get("context")
    if context:
        yield f"{param}.context", {"type": "text", "text": f"{context}\n"}
    source, where = block.get("source"), f"{param}.source"
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("base64", "url", "text", "content"):
        raise BadRequestError(f"{where}: base64, url, text and content are served", param=where)
    if kind in ("base64", "url"):
        field = "file_data" if kind == "base64" else "file_url"
        yield param, {"type": "file", "file": {field: _url_of(source, where), "filename": title}}
        return
    if title:
        yield f"{param}.title", {"type": "text", "text": f"[{title}]\n"}
    field = "data" if kind == "text" else "content"
    if kind == "content" and isinstance(source.get(field), list):
        for number, each in enumerate(source[field]):
            inside = f"{where}.{field}[{number}]"
            yield inside, _part(each, inside)
        return
    text = _text(source, field, where).removesuffix("\n") + "\n"
    yield f"{where}.{field}", {"type": "text", "text": text}


def _part(block: Any, param: str) -> Json:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": _text(block, "text", param)}
    if kind == "image":
        source, where = block.get("source"), f"{param}.source"
        if not isinstance(source, Mapping) or source.get("type") not in ("base64", "url"):
            raise BadRequestError(f"{where}: base64 and url are served", param=where)
        return {"type": "image_url", "image_url": {"url": _url_of(source, where)}}
    raise BadRequestError(
        f"{param}: text, image (base64 or url), document, tool_use and tool_result are served",
        param=param,
    )


def _url_of(source: Mapping[str, Any], param: str) -> str:
    """Of a source of type url, or base64: then a data URL."""
    if source["type"] == "url":
        return _text(source, "url", param)
    return f"data:{source.get('media_type')};base64,{_text(source, 'data', param)}"


def _text(fields: Mapping[str, Any], name: str, param: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise BadRequestError(f"{param}.{name}: must be a text", param=f"{param}.{name}")
    return value


def _call(block: Mapping[str, Any], param: str) -> Json:
    for name, kind in (("id", str), ("name", str), ("input", dict)):
        if not isinstance(block.get(name), kind):
            raise BadRequestError(f"{param}.{name} is missing or odd", param=f"{param}.{name}")
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Mapping[str, Any], param: str, read: ReadInput) -> None:
    if not isinstance(block.get("tool_use_id"), str):
        raise BadRequestError(f"{param}.tool_use_id is missing", param=f"{param}.tool_use_id")
    content, answered = block.get("content") or "", {"tool_call_id": block["tool_use_id"]}
    if isinstance(content, str):
        message = {"role": "tool", **answered, "content": content}
        read.add(message, Origin(param, f"{param}.content"))
    elif isinstance(content, list):
        blocks = enumerate(content)
        parts = [part for n, each in blocks for part in _parts(each, f"{param}.content[{n}]")]
        _add("tool", parts, param, read, **answered)
    else:
        raise BadRequestError(f"{param}.content: text or blocks", param=f"{param}.content")


BLOCK_FIELDS = {
    ".tool_call_id": ".tool_use_id",
    ".function.arguments": ".input",
    ".function": "",
}
"""See `ReadInput.fields`."""
CHAT_NAMES = {
    ".function.parameters": ".input_schema",
    ".function": "",
    "response_format.json_schema": "output_config.format",
}
"""Names of a chat's fields, in the order in which they are looked for → this API's."""


def _own_name(param: str, read: ReadInput) -> str:
    """What this API calls a part of the chat."""
    if param == "stop" or param.startswith("stop["):
        return param.replace("stop", "stop_sequences", 1)
    if param.startswith("messages["):
        return read.renamed(param)
    for name, own in CHAT_NAMES.items():
        param = param.replace(name, own)
    return param


def _own_names(read: ReadInput) -> AbstractContextManager[None]:
    """Errors about a chat get the names of this API."""
    return renaming_errors(lambda param: _own_name(param, read))


def _own_grammar(grammar: Grammar, read: ReadInput) -> Grammar:
    """The same; the engine's errors name it and its parts as this API does."""
    return msgspec.structs.replace(
        grammar,
        param=_own_name(grammar.param, read),
        parts=tuple(_own_grammar(part, read) for part in grammar.parts),
    )


# --- the answer -----------------------------------------------------------------------------------


class MessagesBuilder(ChatResponseBuilder):
    """Builds a message, or the events it is streamed as; also encodes these events."""

    end = b""

    def __init__(
        self,
        context: ServingContext,
        body: ChatRequest,
        sampling: SamplingParams,
        tools: ToolCalling | None,
        read: ReadInput,
    ) -> None:
        super().__init__(context, body, sampling, tools)
        self._id = f"msg_{context.request_id}"
        self._origins = read
        self._content: list[Json] = []
        """The blocks so far; the last may be incomplete."""
        self._arguments = ""
        """Of the last block, where that is a call."""
        self._open = False
        """The last block may get more."""
        self._started = False

    async def render(self) -> None:
        with _own_names(self._origins):
            await super().render()

    def whole(self, samples: Sequence[Sample]) -> AnthropicMessage:
        (sample,) = samples
        for _ in self._events_of(sample, "".join(sample.text), last=True):
            pass
        message = self._message()
        message.content = self._content
        message.stop_reason, message.stop_sequence = self._stop(sample)
        message.reuse_receipt = self._context.receipt()
        return message

    def chunks(self, piece: Piece) -> Iterator[AnthropicEvent]:
        if not self._started:
            self._started = True
            yield AnthropicEvent(type="message_start", message=self._message())
        yield from self._events_of(piece, piece.text, last=piece.finish_reason is not None)
        if piece.finish_reason is not None:
            reason, sequence = self._stop(piece)
            yield AnthropicEvent(
                type="message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=self._usage(),
                reuse_receipt=self._context.receipt(),
            )
            yield AnthropicEvent(type="message_stop")

    def event(self, body: msgspec.Struct) -> bytes:
        assert isinstance(body, AnthropicEvent)
        return b"event: " + body.type.encode() + b"\ndata: " + encode(body) + b"\n\n"

    def failure(self, error: Exception) -> bytes:
        return b"event: error\ndata: " + encode(anthropic_error(error)) + b"\n\n"

    def _message(self) -> AnthropicMessage:
        return AnthropicMessage(
            id=self._id, model=self._context.model, content=[], usage=self._usage()
        )

    def _usage(self) -> AnthropicUsage:
        usage = self._context.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return AnthropicUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )

    def _stop(self, ended: Sample | Piece) -> tuple[str, str | None]:
        reason = self._finish_reason(ended.finish_reason or "stop", called=self._answers.called(0))
        if isinstance(ended.stop_reason, str):
            return "stop_sequence", ended.stop_reason
        return STOP_REASONS.get(reason, "end_turn"), None

    def _events_of(self, new: Sample | Piece, text: str, *, last: bool) -> Iterator[AnthropicEvent]:
        for delta in self._read(0, new, text, last=last):
            match delta:
                case ContentText(more):
                    yield from self._add_text("text", more)
                case ReasoningText(more):
                    yield from self._add_text("thinking", more)
                case ToolCallDelta():
                    yield from self._add_call(delta)
        if last:
            yield from self._end_block()

    def _add_text(self, kind: str, text: str) -> Iterator[AnthropicEvent]:
        if not text:
            return
        if not self._content or self._content[-1]["type"] != kind or not self._open:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin_block({"type": kind, kind: "", **signature})
        self._content[-1][kind] += text
        yield self._delta_event({"type": f"{kind}_delta", kind: text})

    def _add_call(self, delta: ToolCallDelta) -> Iterator[AnthropicEvent]:
        if isinstance(delta.id, str):
            block: Json = {
                "type": "tool_use",
                "id": delta.id,
                "name": delta.function.name,
                "input": {},
            }
            yield from self._begin_block(block)
        if delta.function.arguments:
            self._arguments += delta.function.arguments
            partial = delta.function.arguments
            yield self._delta_event({"type": "input_json_delta", "partial_json": partial})

    def _begin_block(self, block: Json) -> Iterator[AnthropicEvent]:
        yield from self._end_block()
        self._content.append(block)
        self._open, self._arguments = True, ""
        index = len(self._content) - 1
        yield AnthropicEvent(type="content_block_start", index=index, content_block=dict(block))

    def _end_block(self) -> Iterator[AnthropicEvent]:
        if not self._open:
            return
        self._open = False
        if self._content[-1]["type"] == "tool_use":
            self._content[-1]["input"] = _input(self._arguments)
        yield AnthropicEvent(type="content_block_stop", index=len(self._content) - 1)

    def _delta_event(self, delta: Json) -> AnthropicEvent:
        index = len(self._content) - 1
        return AnthropicEvent(type="content_block_delta", index=index, delta=delta)


def _input(arguments: str) -> Json:
    """The object that the model wrote; empty where it wrote none, or was cut off."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}
