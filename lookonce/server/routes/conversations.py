"""`/v1/conversations`: conversations that are stored, and their items."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.render.prompt.messages import has_many_values
from lookonce.server.http.body import receive, renaming_errors
from lookonce.server.http.responses import encode, json_response
from lookonce.server.response_store import ResponseDatabase
from lookonce.server.routes.responses_api.events import new_id
from lookonce.server.routes.responses_api.input import Json, read_input
from lookonce.server.routes.responses_api.stored import (
    DeletedObject,
    check_metadata,
    item_list,
    page_asked,
    shown_item,
    store_of,
    stored_items,
    with_references,
)
from lookonce.server.services import Services

MAX_ITEMS = 1000
"""Of one request."""


class ConversationRequest(msgspec.Struct, kw_only=True):
    items: list[Json] | None = None
    metadata: dict[str, Any] | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    metadata: dict[str, Any] | None = None


class ConversationItemsRequest(msgspec.Struct, kw_only=True):
    items: list[Json]


class ConversationObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, Any]


async def create_conversation(request: Request) -> Response:
    store, tenant = store_of(request)
    body = await receive(request, ConversationRequest)
    metadata = check_metadata(body.metadata)
    items = await _checked(request, body.items or [])
    conversation = ConversationObject(
        id=new_id("conv"), created_at=int(time.time()), metadata=metadata
    )
    with renaming_errors(_items_name):
        await store.call(
            ResponseDatabase.create_conversation,
            tenant,
            conversation.id,
            encode(conversation),
            items,
        )
    return json_response(conversation)


async def show_conversation(request: Request) -> Response:
    store, tenant = store_of(request)
    body = await store.call(ResponseDatabase.body, tenant, "conversation", _id(request))
    return Response(body, media_type="application/json")


async def update_conversation(request: Request) -> Response:
    """Replaces the metadata."""
    store, tenant = store_of(request)
    asked = await receive(request, ConversationUpdate)
    metadata = check_metadata(asked.metadata)
    before = await store.call(ResponseDatabase.body, tenant, "conversation", _id(request))
    conversation = msgspec.json.decode(before, type=ConversationObject)
    conversation.metadata = metadata
    await store.call(
        ResponseDatabase.update_conversation, tenant, conversation.id, encode(conversation)
    )
    return json_response(conversation)


async def delete_conversation(request: Request) -> Response:
    store, tenant = store_of(request)
    await store.call(ResponseDatabase.delete, tenant, "conversation", _id(request))
    return json_response(DeletedObject(id=_id(request), object="conversation.deleted"))


async def list_conversation_items(request: Request) -> Response:
    store, tenant = store_of(request)
    asked = page_asked(request)
    items, has_more = await store.call(
        ResponseDatabase.page,
        tenant,
        "conversation",
        _id(request),
        after=asked.after,
        limit=asked.limit,
        descending=asked.descending,
    )
    return json_response(item_list(items, has_more=has_more))


async def add_conversation_items(request: Request) -> Response:
    store, tenant = store_of(request)
    body = await receive(request, ConversationItemsRequest)
    items = await _checked(request, body.items)
    with renaming_errors(_items_name):
        added = await store.call(ResponseDatabase.add_to_conversation, tenant, _id(request), items)
    return json_response(item_list(added))


async def show_conversation_item(request: Request) -> Response:
    store, tenant = store_of(request)
    item = await store.call(
        ResponseDatabase.conversation_item, tenant, _id(request), request.path_params["item_id"]
    )
    return Response(encode(shown_item(item)), media_type="application/json")


async def delete_conversation_item(request: Request) -> Response:
    """Answers with the conversation."""
    store, tenant = store_of(request)
    body = await store.call(
        ResponseDatabase.remove_from_conversation,
        tenant,
        _id(request),
        request.path_params["item_id"],
    )
    return Response(body, media_type="application/json")


def _id(request: Request) -> str:
    conversation_id: str = request.path_params["conversation_id"]
    return conversation_id


async def _checked(request: Request, items: list[Json]) -> list[Json]:
    """Items as they are stored. Raises `BadRequestError` naming the item at fault."""
    store, tenant = store_of(request)
    if len(items) > MAX_ITEMS:
        raise BadRequestError(
            f"items: {len(items)} of them; {MAX_ITEMS} are allowed at a time", param="items"
        )
    with renaming_errors(_items_name):
        found = await with_references(store, tenant, items)
        services: Services = request.app.state.services
        work = partial(read_input, found, None)
        await services.renderer.in_turn_if(has_many_values(found), tenant, work)
    assert not isinstance(found, str)
    return stored_items(found)


def _items_name(param: str) -> str:
    """`input[0].role` → `items[0].role`."""
    return "items" + param.removeprefix("input") if param.startswith("input") else param
