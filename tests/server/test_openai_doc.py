"""docs/openai.md decides on every parameter of OpenAI's, and says what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from openai.types import EmbeddingCreateParams
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

DOC = Path(__file__).parents[2] / "docs" / "openai.md"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = {
    "/v1/chat/completions": (HELLO, chat.CompletionCreateParamsBase),
    "/v1/completions": ({"prompt": "hi"}, completions.CompletionCreateParamsBase),
    "/v1/responses": ({"input": "hi"}, responses.ResponseCreateParamsBase),
}
"""Routes of models that generate."""


def table(route):
    """Parameter → decision, of one route's table."""
    section = DOC.read_text().split(f"## `POST {route}`")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE))


@pytest.mark.parametrize("route", ROUTES)
def test_every_parameter_the_client_knows_is_decided_on(route):
    known = set(ROUTES[route][1].__annotations__) | {"stream"}
    assert known - set(table(route)) == set()


def test_every_parameter_of_embeddings_is_decided_on():
    known = set(EmbeddingCreateParams.__annotations__)
    assert known == set(table("/v1/embeddings"))


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_refused_is_refused_by_name(on_site, route):
    async def scenario(site):
        for name, decision in table(route).items():
            if decision == "refused":
                body = {**ROUTES[route][0], name: "something"}
                response = await site.client.post(route, json=body)
                assert response.status_code == 400, name
                assert response.json()["error"]["param"] == name
            if decision == "refused":
                body = {**ROUTES[route][0], name: None}
                assert (await site.client.post(route, json=body)).status_code == 200, name

    on_site(scenario)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_accepted_changes_nothing(on_site, route):
    samples = {
        "metadata": {"a": "b"}, "store": True, "stream_options": None,
        "prompt_cache_options": {"mode": "implicit"}, "prediction": {"type": "content"},
    }  # fmt: skip

    async def scenario(site):
        accepted = [name for name, decision in table(route).items() if decision == "accepted"]
        body = {**ROUTES[route][0], **{name: samples.get(name, "x") for name in accepted}}
        assert (await site.client.post(route, json=body)).status_code == 200
        await site.client.post(route, json=ROUTES[route][0])
        first, second = site.engine.samplings
        assert first == second

    on_site(scenario)


OTHERS = {
    "/v1/chat/completions": (
        "max_output_tokens", "max_new_tokens", "suffix", "add_special_tokens",
        "media_io_kwargs", "thinking_token_budget", "guided_whitespace_pattern", "bad_words",
    ),
    "/v1/completions": (
        "max_output_tokens", "top_logprobs", "tools", "tool_choice", "mm_processor_kwargs",
    ),
    "/v1/responses": (
        "max_completion_tokens", "chat_template", "documents",
        "functions", "function_call", "modalities", "echo", "prompt_logprobs",
    ),
    "/tokenize": ("chat_template", "documents", "truncate_prompt_tokens"),
}  # fmt: skip
"""What a route of OpenAI's or vLLM's knows by this name and another route does not serve."""


@pytest.mark.parametrize("route", OTHERS)
def test_what_another_route_knows_is_refused_not_passed_over(on_site, route):
    async def scenario(site):
        plain = ROUTES[route][0] if route in ROUTES else {"prompt": "hi"}
        for name in OTHERS[route]:
            response = await site.client.post(route, json={**plain, name: "something"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
            assert (await site.client.post(route, json={**plain, name: None})).status_code == 200

    on_site(scenario)
