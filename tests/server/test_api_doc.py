"""docs/api.md against the code: its examples are sent, its lists are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from lookonce.errors import LookOnceError, SessionEvictedError, SessionFullError, http_status
from lookonce.frontend.metrics import COUNTED_ELSEWHERE, Metrics
from lookonce.server.http.app import ROUTES
from tests.support.drawing import image_part
from tests.support.model.cases import picture
from tests.support.nodes import Node, engine_node, run
from tests.support.server.media import frontend

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
HEADING = re.compile(r"^### (.*)$", re.MULTILINE)
ROUTE = re.compile(r"`(GET|POST) (/[^`]*)`")
BLOCK = re.compile(r"```json\n(.*?)```", re.DOTALL)
ROUTED, _, UNROUTED = PAGE.partition("Before a route is found:")
"""Without and with the errors that no route raises."""
PART = image_part(picture(1))


def sections() -> list[tuple[str, str, list[str]]]:
    """Method, path and JSON blocks of every section about one route."""
    parts = HEADING.split(PAGE)[1:]
    found = []
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        routes = ROUTE.findall(heading)
        if len(routes) == 1:
            found.append((*routes[0], BLOCK.findall(text.partition("\n## ")[0])))
    return found


EXAMPLES = sorted((section for section in sections() if section[2]), key=lambda each: each[0])
"""Those of GET first, of a server that has done nothing yet."""


def shape(value: object) -> object:
    """The keys, and what kind of value stands under each; lists by their first entry."""
    match value:
        case dict():
            return {key: shape(each) for key, each in value.items()}
        case list():
            return [shape(each) for each in value[:1]]
        case bool() | None:
            return value
        case int() | float():
            return "number"
        case _:
            return "text"


@pytest.fixture(scope="module")
def answers(folder) -> list[httpx.Response]:
    """To the examples, by one server, whose caches are emptied before each; at last to one that is
    an error."""
    found: list[httpx.Response] = []

    async def answer(node: Node, method: str, path: str, blocks: list[str]) -> httpx.Response:
        for tier in ("mm", "encoder", "prefix"):
            assert (await node.post(f"/reset_{tier}_cache", None)).status_code == 200
        if method == "GET":
            return await node.http.get(path)
        _, _, arrays = await frontend(node, PART)
        data = PART["image_url"]["url"].partition(",")[2]
        sent = blocks[0].replace("DATA", data).replace("ARRAYS", arrays)
        return await node.post(path, json.loads(sent))

    async def scenario() -> None:
        async with engine_node(folder("nano"), served_model_name="nano") as node:
            found.extend([await answer(node, *example) for example in EXAMPLES])
            body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": -1}
            found.append(await node.post("/v1/chat/completions", body))

    run(scenario())
    return found


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=[f"{s[0]} {s[1]}" for s in EXAMPLES])
def test_the_example_s_answer_has_the_shape_that_is_shown(answers, number):
    *_, shown = EXAMPLES[number][2]
    answer = answers[number]
    assert answer.status_code == 200, answer.text
    assert shape(answer.json()) == shape(json.loads(shown))


def test_every_route_described_is_served():
    described = {path for _, path in ROUTE.findall(PAGE)}
    assert described <= {str(route.path).replace(":path", "") for route in ROUTES}
    assert len(described) >= 18


def test_the_example_of_an_error_is_what_is_answered(answers):
    (shown,) = re.findall(r"```json error\n(.*?)```", PAGE, re.DOTALL)
    assert answers[-1].status_code == 400
    assert answers[-1].json() == json.loads(shown)


def errors(base: type[LookOnceError]) -> list[type[LookOnceError]]:
    found = [base] if hasattr(base, "code") else []
    return found + [error for sub in base.__subclasses__() for error in errors(sub)]


def test_every_error_code_is_listed_with_its_status():
    rows = re.findall(r"^\| (\d+) \| `(\w+)`", ROUTED, re.M)
    listed = {code: int(status) for status, code in rows}
    of_sessions = (SessionEvictedError, SessionFullError)  # which no route has
    leaves = [e for e in errors(LookOnceError) if e.code and e not in of_sessions]
    known = {str(error.code): http_status(error("x")) for error in leaves}
    assert listed == {**known, "not_found": 404}


def test_every_metric_listed_means_what_is_said():
    rows: dict[str, Any] = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", PAGE, re.M))
    told = {name: described.help for name, described in COUNTED_ELSEWHERE.items()}
    for family in Metrics("x").families():
        suffix = "_total" if family.type == "counter" else ""
        told[family.name.removeprefix("lookonce_") + suffix] = family.documentation
    listed = {name: meaning for name, meaning in rows.items() if name in told}
    assert {name: told[name] for name in listed} == listed
    assert len(listed) >= 58
    assert {name for name in rows if name.endswith("_total")} <= listed.keys()
    assert told.keys() <= rows.keys()
