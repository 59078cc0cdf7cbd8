"""What a request says its answer must look like, and the grammar that becomes of it."""

from __future__ import annotations

import msgspec
import pytest

from lookonce.server.routes.generate import sampling_of
from lookonce.types.sampling import Grammar, SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
CLOSED = TEXT[:-1] + ',"additionalProperties":false}'
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}

SERVED = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type":"object"}')),
    ({"response_format": FORMAT}, ("json_schema", CLOSED)),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", CLOSED)),
    ({"guided_json": SCHEMA}, ("json_schema", CLOSED)),
    ({"structured_outputs": {"json": TEXT}}, ("json_schema", CLOSED)),
    (
        {"structured_outputs": {"json": TEXT, "disable_additional_properties": False}},
        ("json_schema", TEXT),
    ),
    ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", '["a","b"]')),
    ({"structured_outputs": {"grammar": "root ::= x"}}, ("grammar", "root ::= x")),
    ({"structured_outputs": {"json_object": True}}, ("json_schema", '{"type":"object"}')),
    ({"guided_json": True}, ("json_schema", "{}")),
    ({"guided_regex": "a+"}, ("regex", "a+")),
    ({"guided_choice": ["a"]}, ("choice", '["a"]')),
    ({"guided_grammar": "start: x"}, ("grammar", "start: x")),
]


def test_every_way_to_ask_is_served(on_site):
    async def scenario(site):
        for fields, expected in SERVED:
            assert (await site.chat(**fields)).status_code == 200, fields
            grammar = site.engine.samplings[-1].grammar
            assert expected == (None if grammar is None else (grammar.kind, grammar.source)), fields

    on_site(scenario)


def test_an_option_of_the_server_leaves_schemas_open(on_site):
    async def scenario(site):
        assert (await site.chat(response_format=FORMAT)).status_code == 200
        assert site.engine.samplings[-1].grammar.source == TEXT
        shut = {"json": SCHEMA, "disable_additional_properties": True}
        assert (await site.chat(structured_outputs=shut)).status_code == 200
        assert site.engine.samplings[-1].grammar.source == CLOSED

    on_site(scenario, closed_schemas=False)


REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
     "response_format.json_schema.schema"),
    ({"response_format": 5}, "response_format"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"disable_any_whitespace": True}},
     "structured_outputs.disable_any_whitespace"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "min_tokens": 5}, "min_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_what_cannot_be_is_refused_by_name(on_site, route):
    async def scenario(site):
        for fields, param in REFUSED:
            body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", **fields}
            response = await site.client.post(route, json=body)
            assert response.status_code == 400, fields
            assert response.json()["error"]["param"] == param, response.json()

    on_site(scenario)


def test_generate_takes_what_render_answers_and_vllm_s_own_words():
    ours = SamplingParams(grammar=Grammar(kind="regex", source="a+", param="guided_regex"))
    for raw in (msgspec.json.encode(ours), b'{"structured_outputs": {"regex": "a+"}}'):
        grammar = sampling_of(raw).grammar
        assert grammar is not None
        assert (grammar.kind, grammar.source) == ("regex", "a+")
