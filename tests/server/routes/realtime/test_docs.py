"""docs/openai.md decides on every event and parameter of OpenAI's realtime client, truly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from openai.types.realtime import (
    RealtimeClientEvent,
    RealtimeResponseCreateParams,
    RealtimeSessionCreateRequest,
)

from tests.support.server.realtime_session import Played, names

DOCS = Path(__file__).parents[4] / "docs"
SECTION = (DOCS / "openai.md").read_text().split("## `WS /v1/realtime`")[1].split("\n## ")[0]


def table(head):
    """Name → decision, of the table with this head."""
    part = SECTION.split(f"\n| {head} |")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| (\w+) \|", part, re.MULTILINE))


EVENTS = table("event of the client")
CLIENT_EVENTS = get_args(get_args(RealtimeClientEvent)[0])
PARAMETERS = {
    "session.update": ("session", table("parameter of a session"), RealtimeSessionCreateRequest),
    "response.create": ("response", table("parameter of a response"), RealtimeResponseCreateParams),
}


def test_every_event_of_the_client_is_decided_on():
    assert set(EVENTS) == {get_args(e.model_fields["type"].annotation)[0] for e in CLIENT_EVENTS}
    for name, decision in EVENTS.items():
        code = Played().send(name)[-1].get("error", {}).get("code")
        assert (code == "audio_output_not_supported") == (decision == "refused"), name


@pytest.mark.parametrize("event", PARAMETERS)
def test_every_parameter_is_decided_on_and_refused_by_name(event):
    field, decisions, known = PARAMETERS[event]
    assert set(decisions) == set(known.model_fields)
    samples = {"tools": [{"type": "function"}], "tracing": "auto", "parallel_tool_calls": True,
               "tool_choice": "auto", "audio": {}}  # fmt: skip
    for name, decision in decisions.items():
        played = Played()
        given = {"instructions": "Hi", name: samples.get(name, {"id": "x"})}
        answered = played.send(event, **{field: given})
        if decision == "refused":
            assert answered[0]["error"]["param"] == f"{field}.{name}", name
        if decision == "accepted":
            assert "error" not in names(answered), (name, answered)


def test_every_code_of_an_error_is_one_that_the_code_has():
    told = (DOCS / "realtime.md").read_text().split("## Errors")[1].split("\n## ")[0]
    codes = {code for row in re.findall(r"^\| (`.*?`) \|", told, re.MULTILINE)
             for code in re.findall(r"`(\w+)`", row)}  # fmt: skip
    root = Path(__file__).parents[4] / "lookonce"
    sources = [root / "errors.py", root / "server/http/body.py"]
    sources += (root / "server/routes/realtime").glob("*.py")
    text = "".join(source.read_text() for source in sources)
    assert {code for code in codes - {"code"} if f'"{code}"' not in text} == set()
