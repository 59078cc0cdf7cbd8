"""`POST /v1/responses`: what clients send."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from lookonce.errors import BadRequestError
from lookonce.frontend.requests import NOTHING, GenerationFields, JsonSchemaFormat, Raw, Schema
from lookonce.frontend.sampling_params import schema_grammar
from lookonce.frontend.tools.calls import (
    Function,
    NamedChoice,
    NamedFunction,
    RequestedTools,
    Tool,
    read_tools,
)
from lookonce.types.sampling import Grammar

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""The second asks for nothing here: no model served has hidden reasoning."""


class TextFormat(msgspec.Struct, kw_only=True):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function; unlike a chat's tool it is not wrapped once more."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str = ""


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Nothing may be asked for: no model served reasons apart from its answer."""

    effort: None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(GenerationFields, kw_only=True):
    input: str | list[dict[str, Any]]
    """A text, or items: messages, function calls and what they returned."""
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
    metadata: dict[str, Any] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    prompt_logprobs: Raw = NOTHING
    max_completion_tokens: Raw = NOTHING
    chat_template: Raw = NOTHING
    documents: Raw = NOTHING
    reasoning_effort: Raw = NOTHING
    verbosity: Raw = NOTHING
    functions: Raw = NOTHING
    function_call: Raw = NOTHING
    modalities: Raw = NOTHING
    echo: Raw = NOTHING
    previous_response_id: Raw = NOTHING
    conversation: Raw = NOTHING
    image: Raw = NOTHING
    prompt: Raw = NOTHING
    background: Raw = NOTHING
    max_tool_calls: Raw = NOTHING
    context_management: Raw = NOTHING
    moderation: Raw = NOTHING


def check_response(body: ResponsesRequest) -> None:
    """Raises `BadRequestError` for what no response of this server can be."""
    refused = {
        "n": body.n not in (None, 1),
        "truncation": body.truncation not in (None, "disabled"),
        "max_tokens": body.max_tokens is not None,
        "response_format": body.response_format is not None,
        "text.verbosity": body.text is not None and body.text.verbosity not in (None, "medium"),
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


def text_grammar(body: ResponsesRequest) -> Grammar | None:
    """Of `text.format`. Raises `BadRequestError`."""
    asked = (body.text and body.text.format) or TextFormat()
    match asked.type:
        case "text":
            return None
        case "json_object":
            return Grammar(kind="json_schema", source='{"type":"object"}', param="text.format")
        case "json_schema":
            return schema_grammar(JsonSchemaFormat(schema=asked.schema), "text.format")
    raise BadRequestError(
        f"text.format.type: {asked.type[:50]!r} is none of text, json_object, json_schema",
        param="text.format.type",
        code="unsupported_parameter",
    )


def response_tools(body: ResponsesRequest) -> RequestedTools | None:
    """Raises `BadRequestError` naming the part at fault."""
    tools = [_tool(tool) for tool in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        named = NamedChoice(type=choice.type, function=NamedFunction(choice.name))
        return _unwrapped(tools, named, body.parallel_tool_calls)
    return _unwrapped(tools, choice, body.parallel_tool_calls)


def _unwrapped(
    tools: list[Tool], choice: str | NamedChoice | None, parallel: bool | None
) -> RequestedTools | None:
    """Errors name the parts as they are here."""
    try:
        asked = read_tools(tools, choice, parallel)
    except BadRequestError as error:
        param = (error.param or "").replace(".function", "")
        message = error.message.replace(error.param or param, param, 1)
        raise BadRequestError(message, param=param, code=error.code) from None
    if asked is None:
        return None
    params = tuple(param.replace(".function", "") for param in asked.params)
    return dataclasses.replace(asked, params=params)


def _tool(tool: ResponseTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type=tool.type, function=function)
