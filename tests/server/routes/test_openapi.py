"""The description of the routes: of every one, and true."""

from __future__ import annotations

import re

from lookonce.frontend.requests import ChatRequest
from lookonce.server.http.app import ROUTES
from lookonce.server.routes.openapi import OPERATIONS, describe

NOT_DESCRIBED = {"/", "/page/{name}"}
"""For people."""


def test_every_route_is_described():
    routes = {
        (method, route.path.replace(":path", ""))
        for route in ROUTES
        for method in (getattr(route, "methods", None) or ())
        if method != "HEAD"
    }
    described = {(operation.method, operation.path) for operation in OPERATIONS}
    assert {route for route in routes if route[1] not in NOT_DESCRIBED} == described


def test_the_document_is_served_and_hangs_together(on_site):
    async def scenario(site):
        response = await site.client.get("/openapi.json")
        document = response.json()
        assert document["openapi"].startswith("3.1")
        named = set(re.findall(r'"#/components/schemas/(\w+)"', response.text))
        assert named <= set(document["components"]["schemas"])
        chat = document["paths"]["/v1/chat/completions"]["post"]
        assert chat["requestBody"]["content"]["application/json"]["schema"] == {
            "$ref": "#/components/schemas/ChatRequest"
        }
        assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}

    on_site(scenario)


def test_what_is_refused_is_not_offered():
    offered = describe(OPERATIONS)["components"]["schemas"]["ChatRequest"]["properties"]
    assert "messages" in offered
    assert ChatRequest.unsupported_fields()
    assert not set(ChatRequest.unsupported_fields()) & set(offered)
