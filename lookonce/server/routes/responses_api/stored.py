"""Stored responses: what a request continues, what is stored of it, and the routes that read it.

`GET /v1/responses/{id}`, `DELETE /v1/responses/{id}`, `GET /v1/responses/{id}/input_items`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError, LookOnceError, NotFoundError, QueueFullError
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.responses import json_response
from lookonce.server.response_store import Origin, ResponseDatabase, ResponseStore
from lookonce.server.routes.responses_api.events import ResponseObject, new_id
from lookonce.server.routes.responses_api.input import Json, ResponsesRequest
from lookonce.server.services import Services

logger = logging.getLogger("lookonce.server")

MAX_ID = 128
MAX_PAGE = 100
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
ITEM_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""An item's type → how its id begins; `msg` for any other."""


class ItemList(msgspec.Struct, kw_only=True):
    """One page of items."""

    object: str = "list"
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedObject(msgspec.Struct, kw_only=True):
    id: str
    object: str
    deleted: bool = True


# --- a request that is stored or continues what is stored -----------------------------------------


@dataclass(slots=True)
class StoredTurn:
    """What one request for a response continues, and what is stored of it."""

    store: ResponseStore | None
    tenant: str
    keep: bool
    """The response can be read and continued later."""
    origin: Origin | None
    _begun: str | None = None
    """The id under which the input is stored, until the turn has ended."""
    _num_new: int = 0
    _finished: bool = False

    @property
    def conversation(self) -> str | None:
        """The id of the conversation to which the input and the output are added."""
        found = self.origin is not None and self.origin.kind == "conversation"
        return self.origin.id if found and self.origin is not None else None

    @property
    def adds_to_conversation(self) -> bool:
        return self.conversation is not None

    async def begin(self, response_id: str, given: str | list[Json]) -> list[Json]:
        """The items that the request continues; those of the request are stored. Raises
        `NotFoundError`, `QueueFullError`, and `TooLargeError` where they had to be stored in a
        conversation."""
        if self.store is None or not (self.keep or self.adds_to_conversation):
            return await self.context()
        items = stored_items(given)
        self._begun, self._num_new = response_id, len(items)  # also where the client leaves now
        try:
            return await self.store.call(
                ResponseDatabase.begin, self.tenant, response_id, items, self.origin
            )
        except LookOnceError as error:
            self._begun = None
            if self.origin is not None or isinstance(error, QueueFullError):
                raise
            # It is too large, or the file cannot be used.
            logger.warning("a response is not stored: %s", error.message)
            self.keep = False
            return []

    async def context(self) -> list[Json]:
        """The items that the request continues. Raises `NotFoundError`."""
        if self.origin is None:
            return []
        if self.store is None:
            raise nothing_stored(self.origin.param)
        return await self.store.call(ResponseDatabase.context, self.tenant, self.origin)

    async def finish(self, response: ResponseObject) -> None:
        """Store the answer. A failure is logged: the client has its answer."""
        if self.store is None or self._begun is None:
            return
        output: list[Json] = msgspec.to_builtins(response.output)
        try:
            self._finished = await self.store.call(
                ResponseDatabase.finish,
                self.tenant,
                self._begun,
                msgspec.json.encode(response),
                output,
                keep=self.keep,
                conversation=self.conversation,
                num_new=self._num_new,
            )
        except LookOnceError as error:
            logger.warning("a response is not stored: %s", error.message)

    def end(self) -> None:
        """Forget what was stored of a request that was not answered."""
        if self.store is not None and self._begun is not None and not self._finished:
            self.store.discard_later(self.tenant, self._begun)


def turn_of(services: Services, principal: Principal, body: ResponsesRequest) -> StoredTurn:
    """Raises `BadRequestError`."""
    keep = services.responses is not None and body.store is not False
    return StoredTurn(services.responses, principal.tenant, keep, origin_of(body))


def origin_of(body: ResponsesRequest) -> Origin | None:
    """Raises `BadRequestError`."""
    asked = body.conversation
    conversation = asked.id if asked is not None and not isinstance(asked, str) else asked
    if body.previous_response_id and conversation:
        raise BadRequestError(
            "previous_response_id and conversation cannot be used together",
            param="previous_response_id",
        )
    if body.previous_response_id:
        return Origin("response", body.previous_response_id)
    return Origin("conversation", conversation) if conversation else None


def nothing_stored(param: str) -> NotFoundError:
    return NotFoundError(
        f"{param}: this server stores no responses (--response-store-gb)", param=param
    )


async def with_references(
    store: ResponseStore | None, tenant: str, given: str | list[Json]
) -> str | list[Json]:
    """`given` with the stored item in place of each `item_reference`. Raises `NotFoundError`."""
    if isinstance(given, str):
        return given
    places = [n for n, item in enumerate(given) if item.get("type") == "item_reference"]
    if not places:
        return given
    for place in places:
        if not isinstance(given[place].get("id"), str):
            param = f"input[{place}].id"
            raise BadRequestError(f"{param}: must be a text", param=param)
    if store is None:
        raise nothing_stored(f"input[{places[0]}].id")
    ids = [given[place]["id"] for place in places]
    found = await store.call(ResponseDatabase.items, tenant, ids)
    items = list(given)
    for place, item in zip(places, found, strict=True):
        if item is None:
            param = f"input[{place}].id"
            raise NotFoundError(
                f"{param}: no item {given[place]['id'][:80]!r} is stored here", param=param
            )
        items[place] = item
    return items


# --- items ----------------------------------------------------------------------------------------


def stored_items(given: str | Sequence[Json]) -> list[Json]:
    """Input items as they are stored: each has a type and an id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_stored_item(item) for item in given]


def _stored_item(item: Json) -> Json:
    kind = item.get("type", "message")
    own = item.get("id")
    named = isinstance(own, str) and 0 < len(own) <= MAX_ID
    prefix = ITEM_PREFIXES.get(kind, "msg") if isinstance(kind, str) else "msg"
    return {**item, "type": kind, "id": own if named else new_id(prefix)}


def shown_item(item: Json) -> Json:
    """A stored item as clients get it: with a status, and content as parts."""
    shown: Json = {"status": "completed", **item}
    content = item.get("content")
    if item["type"] == "message" and isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        more: Json = {"annotations": []} if kind == "output_text" else {}
        shown["content"] = [{"type": kind, "text": content, **more}]
    return shown


def item_list(items: Sequence[Json], *, has_more: bool = False) -> ItemList:
    return ItemList(
        data=[shown_item(item) for item in items],
        first_id=items[0]["id"] if items else None,
        last_id=items[-1]["id"] if items else None,
        has_more=has_more,
    )


def check_metadata(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Raises `BadRequestError` for more or longer pairs than OpenAI's."""
    metadata = metadata or {}
    fits = len(metadata) <= MAX_METADATA and all(
        isinstance(value, str) and len(key) <= MAX_METADATA_KEY and len(value) <= MAX_METADATA_VALUE
        for key, value in metadata.items()
    )
    if not fits:
        raise BadRequestError(
            f"metadata: up to {MAX_METADATA} texts of up to {MAX_METADATA_VALUE} characters, with "
            f"names of up to {MAX_METADATA_KEY}",
            param="metadata",
        )
    return metadata


# --- routes ---------------------------------------------------------------------------------------


def store_of(request: Request) -> tuple[ResponseStore, str]:
    """The store and the request's tenant. Raises `NotFoundError` where nothing is stored."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    if services.responses is None:
        raise nothing_stored("id")
    return services.responses, principal.tenant


@dataclass(frozen=True, slots=True)
class PageAsked:
    after: str | None
    limit: int
    descending: bool


def page_asked(request: Request) -> PageAsked:
    """Of the query. Raises `BadRequestError`."""
    query = request.query_params
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    is_count = limit.isdecimal() and limit.isascii() and len(limit) <= len(str(MAX_PAGE))
    if not (is_count and 1 <= int(limit) <= MAX_PAGE):
        raise BadRequestError(f"limit: 1 to {MAX_PAGE}, got {limit[:20]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise BadRequestError(f"order: asc or desc, got {order[:20]!r}", param="order")
    return PageAsked(query.get("after"), int(limit), order == "desc")


async def show_response(request: Request) -> Response:
    store, tenant = store_of(request)
    if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        raise BadRequestError("stream: a stored response is not streamed", param="stream")
    response_id = request.path_params["response_id"]
    body = await store.call(ResponseDatabase.body, tenant, "response", response_id)
    return Response(body, media_type="application/json")


async def delete_response(request: Request) -> Response:
    store, tenant = store_of(request)
    response_id = request.path_params["response_id"]
    await store.call(ResponseDatabase.delete, tenant, "response", response_id)
    return json_response(DeletedObject(id=response_id, object="response"))


async def show_input_items(request: Request) -> Response:
    """All items that the response was generated from."""
    store, tenant = store_of(request)
    asked = page_asked(request)
    items, has_more = await store.call(
        ResponseDatabase.page,
        tenant,
        "response",
        request.path_params["response_id"],
        after=asked.after,
        limit=asked.limit,
        descending=asked.descending,
    )
    return json_response(item_list(items, has_more=has_more))
