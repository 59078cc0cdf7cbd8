"""`GET /openapi.json`: the routes described by the structs that decode and encode their bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from lookonce.frontend.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RefusesUnsupported,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from lookonce.frontend.responses import (
    ChatCompletion,
    Completion,
    EmbeddingList,
    ErrorResponse,
    ModelCard,
    ModelList,
    PoolingList,
    Prompt,
    RerankResult,
    ScoreList,
    Tokens,
)
from lookonce.frontend.transcript_formats import Transcription
from lookonce.server.routes.admin import (
    AbortRequest,
    AbortResponse,
    Load,
    ServerInfo,
    Status,
    Version,
)
from lookonce.server.routes.anthropic_messages import (
    AnthropicMessage,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from lookonce.server.routes.conversations import (
    ConversationItemsRequest,
    ConversationObject,
    ConversationRequest,
    ConversationUpdate,
)
from lookonce.server.routes.debug import ProfileRequest, SavedToday, ServerState
from lookonce.server.routes.generate import GenerateRequest, GenerateResponse
from lookonce.server.routes.lora import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from lookonce.server.routes.media_cache import MediaCacheInfo, MediaCacheRequest, MediaCacheResponse
from lookonce.server.routes.page import HEADERS
from lookonce.server.routes.render import RenderChatRequest, RenderCompletionRequest, RenderedBody
from lookonce.server.routes.responses_api.events import ResponseObject
from lookonce.server.routes.responses_api.input import ResponsesRequest
from lookonce.server.routes.responses_api.route import InputTokens
from lookonce.server.routes.responses_api.stored import DeletedObject, ItemList
from lookonce.server.services import Services

Json = dict[str, Any]
PATH_PARAMETER = re.compile(r"{(\w+)}")
Struct = type[msgspec.Struct]

REF = "#/components/schemas/{name}"
ERRORS = {
    "400": "the request is at fault; `error.param` names the part",
    "401": "the API key is missing or unknown",
    "403": "the key lacks a right, or the media's source is not allowed",
    "404": "no such model or route, or nothing of this id is stored",
    "409": "a media uuid is bound to other bytes, or another profile is being taken",
    "413": "too large",
    "415": "the body is of a type that the route does not take",
    "422": "media cannot be decoded or is not cached",
    "429": "too many requests are waiting, or a limit of the tenant or key is used up",
    "503": "not ready, draining, or the engine is gone",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. `answer` None: text or an empty body. `streams`: it can answer in events."""

    method: str
    path: str
    summary: str
    body: Struct | None = None
    answer: Struct | None = None
    streams: bool = False
    is_open: bool = False
    """Needs no key."""


CONVERSATION = "/v1/conversations/{conversation_id}"
OPERATIONS = (
    Operation("GET", "/health", "Is the engine alive?", answer=Status, is_open=True),
    Operation("GET", "/ready", "May requests come?", answer=Status, is_open=True),
    Operation("GET", "/version", "The server's version", answer=Version, is_open=True),
    Operation("GET", "/metrics", "Prometheus metrics", is_open=True),
    Operation("GET", "/openapi.json", "This description", is_open=True),
    Operation("GET", "/docs", "This description for people", is_open=True),
    Operation("GET", "/ping", "As /health", answer=Status, is_open=True),
    Operation("POST", "/ping", "As /health", answer=Status, is_open=True),
    Operation("GET", "/load", "How many sequences run or wait", answer=Load),
    Operation("GET", "/server_info", "Version and configuration", answer=ServerInfo),
    Operation("GET", "/tokenizer_info", "The tokenizer's configuration"),
    Operation("GET", "/v1/models", "The served model and its adapters", answer=ModelList),
    Operation("GET", "/v1/models/{model}", "One of them", answer=ModelCard),
    Operation(
        "POST", "/v1/chat/completions", "Answer a conversation", ChatRequest, ChatCompletion, True
    ),
    Operation("POST", "/v1/completions", "Continue a text", CompletionRequest, Completion, True),
    Operation(
        "POST", "/v1/audio/transcriptions", "Sound to text", answer=Transcription, streams=True
    ),
    Operation(
        "POST", "/v1/audio/translations", "Sound to English", answer=Transcription, streams=True
    ),
    Operation("POST", "/v1/responses", "Answer items", ResponsesRequest, ResponseObject, True),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Count the tokens of a request",
        ResponsesRequest,
        InputTokens,
    ),
    Operation("GET", "/v1/responses/{response_id}", "A stored response", answer=ResponseObject),
    Operation("DELETE", "/v1/responses/{response_id}", "Delete it", answer=DeletedObject),
    Operation("GET", "/v1/responses/{response_id}/input_items", "Its input", answer=ItemList),
    Operation(
        "POST",
        "/v1/conversations",
        "Store a conversation",
        ConversationRequest,
        ConversationObject,
    ),
    Operation("GET", CONVERSATION, "A stored conversation", answer=ConversationObject),
    Operation("POST", CONVERSATION, "Change its metadata", ConversationUpdate, ConversationObject),
    Operation("DELETE", CONVERSATION, "Delete it", answer=DeletedObject),
    Operation("GET", CONVERSATION + "/items", "Its items", answer=ItemList),
    Operation("POST", CONVERSATION + "/items", "Add items", ConversationItemsRequest, ItemList),
    Operation("GET", CONVERSATION + "/items/{item_id}", "One item"),
    Operation(
        "DELETE", CONVERSATION + "/items/{item_id}", "Remove one item", answer=ConversationObject
    ),
    Operation(
        "POST", "/v1/chat/completions/render", "Render only", RenderChatRequest, RenderedBody
    ),
    Operation("POST", "/v1/completions/render", "Render only", RenderCompletionRequest),
    Operation("POST", "/tokenize", "Text or messages to token ids", TokenizeRequest, Tokens),
    Operation("POST", "/detokenize", "Token ids to text", DetokenizeRequest, Prompt),
    Operation(
        "POST",
        "/inference/v1/generate",
        "Tokens in, tokens out",
        GenerateRequest,
        GenerateResponse,
        True,
    ),
    Operation("POST", "/inference/v1/abort_requests", "End requests", AbortRequest, AbortResponse),
    Operation(
        "POST",
        "/inference/v1/media_cache",
        "Inject processed media",
        MediaCacheRequest,
        MediaCacheResponse,
    ),
    Operation(
        "GET", "/inference/v1/media_cache", "What injection needs to know", answer=MediaCacheInfo
    ),
    Operation(
        "POST", "/v1/messages", "Answer as Anthropic's API", MessagesRequest, AnthropicMessage, True
    ),
    Operation("POST", "/v1/messages/count_tokens", "Count tokens", CountTokensRequest, TokenCount),
    Operation("POST", "/v1/embeddings", "Inputs to vectors", EmbeddingsRequest, EmbeddingList),
    Operation("POST", "/pooling", "Inputs to all their vectors", PoolingRequest, PoolingList),
    Operation("POST", "/v1/score", "Compare texts", ScoreRequest, ScoreList),
    Operation("POST", "/score", "As /v1/score", ScoreRequest, ScoreList),
    Operation("POST", "/v1/rerank", "Sort documents", RerankRequest, RerankResult),
    Operation("POST", "/v2/rerank", "As /v1/rerank", RerankRequest, RerankResult),
    Operation("POST", "/rerank", "As /v1/rerank", RerankRequest, RerankResult),
    Operation("POST", "/invocations", "Any of the requests for a model's work", streams=True),
    Operation("POST", "/v1/load_lora_adapter", "Load an adapter", LoadLoRAAdapterRequest),
    Operation("POST", "/v1/unload_lora_adapter", "Unload it", UnloadLoRAAdapterRequest),
    Operation("POST", "/reset_mm_cache", "Empty the cache of processed media"),
    Operation("POST", "/reset_encoder_cache", "Empty the cache of encoder outputs"),
    Operation("POST", "/reset_prefix_cache", "Empty the prefix cache"),
    Operation("GET", "/savings", "What reuse saved today", answer=SavedToday),
    Operation("GET", "/debug/state", "What runs now, by tenant", answer=ServerState),
    Operation("POST", "/debug/profile", "Stacks of all processes, or a trace", ProfileRequest),
)


async def show_openapi(request: Request) -> Response:
    """Describes the routes that this application serves."""
    services: Services = request.app.state.services
    body = _encoded(_paths(request), services.config.server.root_path)
    return Response(body, media_type="application/json")


def _paths(request: Request) -> frozenset[str]:
    return frozenset(route.path.replace(":path", "") for route in request.app.routes)


@cache
def _encoded(paths: frozenset[str], root_path: str) -> bytes:
    described = _described_paths(paths)
    if root_path:
        described = {**described, "servers": [{"url": root_path}]}
    return msgspec.json.encode(described)


async def show_docs(request: Request) -> Response:
    """The same for people: a page without scripts."""
    return HTMLResponse(_docs(_paths(request)), headers=HEADERS)


@cache
def _docs(paths: frozenset[str]) -> str:
    described = _described_paths(paths)
    schemas = described["components"]["schemas"]
    sections = [
        _docs_of(method.upper(), path, operation, schemas)
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<title>LookOnce: routes</title><link rel="stylesheet" href="page/docs.css"></head>'
        f"<body><h1>LookOnce {escape(described['info']['version'])}</h1>"
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(sections)}</body></html>"
    )


def _docs_of(method: str, path: str, operation: Json, schemas: Json) -> str:
    rows = ""
    if body := operation.get("requestBody"):
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        required = schemas[name].get("required", ())
        rows = "".join(
            f"<tr><td><code>{escape(field)}</code></td><td>{escape(_type_of(schema))}</td>"
            f"<td>{'required' if field in required else ''}</td></tr>"
            for field, schema in schemas[name]["properties"].items()
        )
        rows = f"<table><tr><th>field</th><th>type</th><th></th></tr>{rows}</table>"
    return (
        f"<section><h2><code>{method} {escape(path)}</code></h2>"
        f"<p>{escape(operation['summary'])}</p>{rows}</section>"
    )


def _type_of(schema: Json) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(_type_of(part) for part in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    if "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema["enum"])
    return str(schema.get("type", "any"))


@cache
def _described_paths(paths: frozenset[str]) -> Json:
    return describe(op for op in OPERATIONS if op.path in paths)


def describe(operations: Iterable[Operation]) -> Json:
    """An OpenAPI 3.1 document."""
    operations = list(operations)
    structs = {struct for op in operations for struct in (op.body, op.answer) if struct is not None}
    components = _components([*structs, ErrorResponse])
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "LookOnce", "version": version("lookonce")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _components(structs: list[Struct]) -> Json:
    """Schemas by name. Fields that are declared unsupported are left out."""
    structs = sorted(structs, key=lambda struct: struct.__name__)
    _, components = msgspec.json.schema_components(structs, ref_template=REF)
    for struct in structs:
        if issubclass(struct, RefusesUnsupported):
            for name in struct.unsupported_fields():
                del components[struct.__name__]["properties"][name]
    return components


def _described(operation: Operation) -> Json:
    described: Json = {"summary": operation.summary, "responses": _responses(operation)}
    described["security"] = [] if operation.is_open else [{}, {"key": []}]
    if names := PATH_PARAMETER.findall(operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.body is not None:
        content = {"application/json": {"schema": _ref(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _responses(operation: Operation) -> Json:
    content: Json = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": _ref(operation.answer)}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answered: Json = {"description": "answered"}
    if content:
        answered["content"] = content
    error = {"application/json": {"schema": _ref(ErrorResponse)}}
    failed = {status: {"description": text, "content": error} for status, text in ERRORS.items()}
    return {"200": answered, **({} if operation.is_open else failed)}


def _ref(struct: Struct) -> Json:
    return {"$ref": REF.format(name=struct.__name__)}
