"""What clients of OpenAI's API send beside a question: honoured, or ignored and said so."""

from __future__ import annotations

import json
import logging

import msgspec
import openai
import pytest

from lookonce.errors import BadRequestError
from lookonce.frontend.tools.calls import Function
from lookonce.frontend.tools.formats import choose_dialect
from lookonce.frontend.tools.function_fields import read_functions
from lookonce.types.model import Comparison
from tests.support.server.site import events

HEADER = "x-lookonce-warning"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
LABELS = {
    "metadata": {"a": "b"}, "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "safety_identifier": "s", "service_tier": "flex", "store": True, "user": "me",
}  # fmt: skip
CONTROLS = {
    "reasoning": {"effort": "low", "summary": "auto"},
    "reasoning_effort": "low",
    "verbosity": "low",
}
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern"]}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.mark.parametrize("strict", [False, True])
def test_what_cannot_be_honoured_is_named_and_never_refused(on_site, strict):
    async def scenario(site):
        response = await site.chat(**LABELS, **CONTROLS, parallel_tool_calls=False)
        assert response.status_code == 200, response.text
        told = response.headers[HEADER]
        assert told.startswith("ignored: ")
        for name in (*LABELS, "reasoning.effort", "reasoning_effort", "verbosity"):
            assert name in told
        assert not site.renderer.options["chat_template_kwargs"]

    on_site(scenario, strict_requests=strict)


@pytest.mark.parametrize("value", [5, True, "<|im_end|>", "x" * 50, {"a": 1}])
def test_an_odd_effort_is_ignored_not_written_into_the_prompt(on_site, value):
    async def scenario(site):
        site.renderer.template_variables = frozenset({"reasoning_effort"})
        response = await site.chat(reasoning_effort=value)
        assert (response.status_code, response.headers[HEADER]) == (
            200,
            "ignored: reasoning_effort",
        )
        assert not site.renderer.options["chat_template_kwargs"]

    on_site(scenario)


@pytest.mark.parametrize(
    ("reads", "fields", "variables"),
    [
        ("reasoning_effort", {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ("reasoning_effort", {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ("enable_thinking", {"reasoning_effort": "none"}, {"enable_thinking": False}),
        ("thinking", {"reasoning_effort": "high"}, {"thinking": True}),
        ("verbosity", {"verbosity": "low"}, {"verbosity": "low"}),
        (
            "reasoning_effort",
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "mine"}},
            {"reasoning_effort": "mine"},
        ),
    ],
)
def test_what_the_template_reads_is_honoured(on_site, reads, fields, variables):
    async def scenario(site):
        site.renderer.template_variables = frozenset({reads})
        response = await site.chat(**fields)
        assert response.status_code == 200
        assert HEADER not in response.headers
        assert site.renderer.options["chat_template_kwargs"] == variables

    on_site(scenario)


def test_responses_honour_it_too(on_site):
    async def scenario(site):
        site.renderer.template_variables = frozenset({"reasoning_effort", "verbosity"})
        body = {"input": "hi", "reasoning": {"effort": "low"}, "text": {"verbosity": "high"}}
        response = await site.client.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        variables = site.renderer.options["chat_template_kwargs"]
        assert variables == {"reasoning_effort": "low", "verbosity": "high"}

    on_site(scenario)


def test_null_and_zero_ask_for_nothing(on_site):
    async def scenario(site):
        for fields in (
            {"top_logprobs": 0, "logprobs": False},
            {"stream": True, "stream_options": {"include_usage": None}},
        ):
            response = await site.chat(**fields)
            assert response.status_code == 200, response.text
            assert HEADER not in response.headers
            assert '"usage":null' not in response.text

    on_site(scenario)


def test_each_is_logged_once(on_site, caplog):
    async def scenario(site):
        for _ in range(3):
            await site.chat(store=True)

    with caplog.at_level(logging.WARNING, "lookonce.server"):
        on_site(scenario)
    assert [record.getMessage() for record in caplog.records] == [
        "a field of a request was ignored (logged once): store"
    ]


# --- functions ----------------------------------------------------------------------------------


def calling(site):
    """A model that writes tool calls as Qwen's do."""
    site.services.tool_dialect = choose_dialect("hermes", "{{ tools }}<tool_call>", {})
    site.engine.answer = CALL


def test_functions_are_answered_in_their_own_form(on_site):
    async def scenario(site):
        calling(site)
        fields = {"functions": [WEATHER], "function_call": {"name": "get_weather"}}
        answer = (await site.chat(**fields)).json()["choices"][0]
        call = answer["message"]["function_call"]
        assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Bern"})
        assert "tool_calls" not in answer["message"]
        assert answer["finish_reason"] == "function_call"
        assert site.renderer.options["tools"][0]["function"]["name"] == "get_weather"

    on_site(scenario)


def test_so_is_a_stream(on_site):
    async def scenario(site):
        calling(site)
        choices = [
            chunk["choices"][0]
            for chunk in events((await site.chat(functions=[WEATHER], stream=True)).text)
        ]
        deltas = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
        assert deltas[0]["name"] == "get_weather"
        assert json.loads("".join(d["arguments"] for d in deltas)) == {"city": "Bern"}
        assert choices[-1]["finish_reason"] == "function_call"
        assert not any("tool_calls" in choice["delta"] for choice in choices)

    on_site(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [WEATHER], "tools": [{"type": "function", "function": WEATHER}]},
         "functions"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [WEATHER], "function_call": {"name": "other"}}, "function_call"),
        ({"function_call": {"name": "other"}}, "function_call"),
    ],
)  # fmt: skip
def test_functions_that_cannot_be_are_refused_by_their_own_names(on_site, fields, param):
    async def scenario(site):
        calling(site)
        error = (await site.chat(**fields)).json()["error"]
        assert error["param"] == param, error

    on_site(scenario)


def test_a_function_called_tools_keeps_its_name_in_errors():
    tools = Function(name="tools", parameters={"type": "object"})
    with pytest.raises(BadRequestError, match=r"^functions\[1\]\.name: 'tools' comes twice$"):
        read_functions([tools, tools], None, close=True)
    asked = read_functions([tools], None, close=True)
    assert asked is not None
    assert asked.params == ("functions[0].parameters",)


def test_openai_s_client_reads_the_older_form(on_site):
    async def scenario(site):
        calling(site)
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="x", http_client=site.client
        ) as client:
            answer = await client.chat.completions.create(
                model="recital", **HELLO, functions=[WEATHER], reasoning_effort="low",
                verbosity="low", store=True, user="me", service_tier="flex",
            )  # fmt: skip
            assert answer.choices[0].message.function_call.name == "get_weather"

    on_site(scenario, strict_requests=True)


# --- what vLLM's own tests ask for ----------------------------------------------------------------


def test_tokens_are_named_by_their_ids_where_that_is_asked_for(on_site):
    async def scenario(site):
        chat = await site.chat(
            logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True, max_tokens=1
        )
        (entry,) = chat.json()["choices"][0]["logprobs"]["content"]
        assert entry["token"] == f"token_id:{ord('a')}"
        assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:97", "token_id:301"]
        body = {"prompt": "hi", "logprobs": 1, "echo": True, "max_tokens": 1}
        answer = await site.client.post(
            "/v1/completions", json={**body, "return_tokens_as_token_ids": True}
        )
        logprobs = answer.json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:104", "token_id:105", "token_id:97"]
        assert list(logprobs["top_logprobs"][2]) == ["token_id:97"]

    on_site(scenario)


def test_generate_without_alternatives_names_the_token_itself(on_site):
    async def scenario(site):
        body = {"token_ids": [65], "sampling_params": {"logprobs": 0, "max_tokens": 1}}
        answer = await site.client.post("/inference/v1/generate", json=body)
        (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
        assert [top["token"] for top in entry["top_logprobs"]] == [entry["token"]]
        site.renderer.rendered.clear()

    on_site(scenario)


def test_allowed_tokens_reach_the_engine_and_are_checked(on_site):
    async def scenario(site):
        assert (await site.chat(allowed_token_ids=[65, 66])).status_code == 200
        assert site.engine.samplings[-1].allowed_token_ids == (65, 66)
        for wrong in ([512], [-1], ["a"]):
            response = await site.chat(allowed_token_ids=wrong)
            assert response.status_code == 400
            assert response.json()["error"]["param"].startswith("allowed_token_ids")
        response = await site.chat(allowed_token_ids=[65], guided_regex="a")
        assert response.json()["error"]["param"] == "allowed_token_ids"

    on_site(scenario)


def test_an_empty_model_is_the_served_one(on_site):
    async def scenario(site):
        assert (await site.chat(model="")).json()["model"] == "recital"

    on_site(scenario)


def test_every_chunk_has_the_usage_so_far(on_site):
    async def scenario(site):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events((await site.chat(stream=True, stream_options=options)).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, len(site.engine.answer) + 1)

    on_site(scenario)


INVOCATIONS = [
    (HELLO, "chat.completion"),
    ({"prompt": "hi"}, "text_completion"),
    ({"input": "hi"}, "response"),
    ({"token_ids": [65]}, "generate"),
]


@pytest.mark.parametrize(("body", "kind"), INVOCATIONS)
def test_invocations_serves_every_kind(on_site, body, kind):
    async def scenario(site):
        answer = await site.client.post("/invocations", json=body)
        assert answer.json()["object"] == kind
        streamed = await site.client.post("/invocations", json={**body, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        site.renderer.rendered.clear()

    on_site(scenario)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"{", b'{"prompt": 5}'])
def test_invocations_refuses_the_rest(on_site, body):
    async def scenario(site):
        answer = await site.client.post("/invocations", content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]

    on_site(scenario)


def test_operators_routes_of_other_servers_answer(on_site):
    async def scenario(site):
        for method in ("GET", "POST"):
            assert (await site.client.request(method, "/ping")).json() == {"status": "ready"}
        assert (await site.client.get("/load")).json() == {"server_load": 0}
        site.engine.counters["num_requests_waiting"] = 3.0
        assert (await site.client.get("/load")).json() == {"server_load": 3}
        info = (await site.client.get("/server_info")).json()
        assert info["config"]["model"]["served_name"] == "recital"
        assert info["comparison"] is None

    on_site(scenario)


def test_server_info_shows_how_the_model_was_compared(on_site):
    async def scenario(site):
        found = Comparison(2e-7, 1e-3, ("image",), "features", "items")
        site.engine.model = msgspec.structs.replace(site.engine.model, comparison=found)
        shown = (await site.client.get("/server_info")).json()["comparison"]
        assert msgspec.convert(shown, Comparison) == found

    on_site(scenario)


def test_server_info_shows_no_secret_and_needs_an_admin(on_site, tmp_path):
    async def scenario(site):
        key = {"Authorization": "Bearer user-key"}
        assert (await site.client.get("/server_info", headers=key)).status_code == 403
        key = {"Authorization": "Bearer admin-key"}
        shown = (await site.client.get("/server_info", headers=key)).text
        assert "hush" not in shown
        assert "digest" not in shown
        assert site.services.config.server.request_log.secret not in shown
        assert "example.org" in shown

    on_site(
        scenario,
        api_key=("a:user-key", "b:admin-key:admin"),
        kv_tier=("valkey://me:hush@example.org:6379",),
        request_log=str(tmp_path / "log"),
    )


def test_the_routes_are_described_for_people_without_scripts(on_site):
    async def scenario(site):
        page = await site.client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "<script" not in page.text
        assert "style=" not in page.text
        for word in ("/v1/chat/completions", "allowed_token_ids", "required"):
            assert word in page.text
        assert (await site.client.get("/page/docs.css")).status_code == 200

    on_site(scenario)


def test_routes_are_found_beneath_the_root_path_and_without_it(on_site):
    async def scenario(site):
        for prefix in ("", "/models/a"):
            assert (await site.client.get(f"{prefix}/version")).status_code == 200
            answer = await site.client.post(f"{prefix}/v1/chat/completions", json=HELLO)
            assert answer.status_code == 200
        assert (await site.client.get("/models/ab/version")).status_code == 404
        described = (await site.client.get("/models/a/openapi.json")).json()
        assert described["servers"] == [{"url": "/models/a"}]

    on_site(scenario, root_path="/models/a/")
