"""`/v1/completions`, `/tokenize` and `/detokenize` on doubles."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support.server.site import events

END = "<|end|>"
URL = "/v1/completions"


def test_a_completion_has_openai_s_shape_and_sixteen_tokens_at_most(on_site):
    async def scenario(site):
        site.engine.answer = "x" * 40
        body = (await site.client.post(URL, json={"prompt": "hello"})).json()
        assert body["object"] == "text_completion"
        assert body["choices"] == [
            {
                "index": 0,
                "text": "x" * 16,
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ]
        assert body["usage"]["total_tokens"] == 21

    on_site(scenario)


def test_prompts_come_as_text_tokens_or_lists_of_either(on_site):
    async def scenario(site):
        for prompt, count in [("ab", 1), ([97, 98], 1), (["a", "b", "c"], 3), ([[97], [98]], 2)]:
            body = (await site.client.post(URL, json={"prompt": prompt, "n": 2})).json()
            assert [c["index"] for c in body["choices"]] == list(range(2 * count))
            assert {c["text"] for c in body["choices"]} == {"a red circle"}

        for prompt in ([], [[97], 5], ["a", 5], None, 3, [True]):
            response = await site.client.post(URL, json={"prompt": prompt})
            assert response.status_code == 400

    on_site(scenario)


def test_many_prompts_stream_through_one_response(on_site):
    async def scenario(site):
        fields = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
        response = await site.client.post(URL, json={"prompt": ["a", "bc"], **fields})
        *chunks, last = events(response.text)
        for index in range(4):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert "".join(c["text"] for c in mine) == "a red circle"
            assert mine[-1]["finish_reason"] == "stop"
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 52)

    on_site(scenario)


def test_one_prompt_that_fails_ends_them_all(on_site):
    async def scenario(site):
        response = await site.client.post(URL, json={"prompt": ["fine", "x" * 500]})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert site.engine.tokens_made == {}

    on_site(scenario)


def test_logprobs_are_parallel_lists(on_site):
    async def scenario(site):
        fields = {"logprobs": 2, "max_tokens": 3}
        body = (await site.client.post(URL, json={"prompt": "hi", **fields})).json()
        assert body["choices"][0]["logprobs"] == {
            "text_offset": [0, 1, 2],
            "token_logprobs": [-0.5, -0.5, -0.5],
            "tokens": ["a", " ", "r"],
            "top_logprobs": [
                {"a": -0.5, "<|end|>": -2.0},
                {" ": -0.5, "<|end|>": -2.0},
                {"r": -0.5, "<|end|>": -2.0},
            ],
        }
        streamed = await site.client.post(URL, json={"prompt": "hi", **fields, "stream": True})
        parts = [chunk["choices"][0]["logprobs"] for chunk in events(streamed.text)]
        assert [part["text_offset"] for part in parts] == [[0], [1], [2]]

    on_site(scenario)


def test_an_echoed_prompt_has_logprobs_from_its_second_token_on(on_site):
    async def scenario(site):
        fields = {"prompt": "hi!", "echo": True, "logprobs": 1, "max_tokens": 2}
        body = (await site.client.post(URL, json=fields)).json()
        (choice,) = body["choices"]
        expected = {
            "text_offset": [0, 1, 2, 3, 4],
            "token_logprobs": [None, -1.5, -1.5, -0.5, -0.5],
            "tokens": ["h", "i", "!", "a", " "],
            "top_logprobs": [
                None,
                {"i": -1.5, END: -0.5},
                {"!": -1.5, END: -0.5},
                {"a": -0.5},
                {" ": -0.5},
            ],
        }
        assert choice["text"] == "hi!a "
        assert choice["logprobs"] == expected
        assert "prompt_logprobs" not in choice

        streamed = await site.client.post(URL, json={**fields, "stream": True})
        parts = [chunk["choices"][0] for chunk in events(streamed.text)]
        assert [part["text"] for part in parts] == ["hi!a", " "]
        for name, values in expected.items():
            assert [value for part in parts for value in part["logprobs"][name]] == values

    on_site(scenario)


def test_every_sample_of_every_prompt_echoes_its_own(on_site):
    async def scenario(site):
        fields = {"prompt": ["ab", [99, 100, 101]], "echo": True, "logprobs": 0, "n": 2}
        body = (await site.client.post(URL, json={**fields, "max_tokens": 1})).json()
        tokens = [choice["logprobs"]["tokens"] for choice in body["choices"]]
        assert tokens == [[*"aba"], [*"aba"], [*"cdea"], [*"cdea"]]
        tops = body["choices"][0]["logprobs"]["top_logprobs"]
        assert tops == [None, {"b": -1.5}, {"a": -0.5}]
        assert [s.prompt_logprobs for s in site.engine.samplings] == [0, 0]

    on_site(scenario)


def test_prompt_logprobs_name_the_token_that_stands_there_and_the_likeliest(on_site):
    async def scenario(site):
        fields = {"prompt": "hi", "prompt_logprobs": 1, "max_tokens": 1}
        (choice,) = (await site.client.post(URL, json=fields)).json()["choices"]
        assert choice["prompt_logprobs"] == [
            None,
            {
                str(ord("i")): {"logprob": -1.5, "rank": 2, "decoded_token": "i"},
                "301": {"logprob": -0.5, "rank": 1, "decoded_token": END},
            },
        ]
        assert choice["logprobs"] is None

        both = {**fields, "echo": True, "logprobs": 2}
        (choice,) = (await site.client.post(URL, json=both)).json()["choices"]
        assert len(choice["prompt_logprobs"][1]) == 2
        assert choice["logprobs"]["top_logprobs"][1] == {END: -0.5, "i": -1.5}
        assert site.engine.samplings[-1].prompt_logprobs == 2

    on_site(scenario)


def test_a_prompt_is_echoed_and_scored_without_an_answer(on_site):
    """`max_tokens` 0, as harnesses score a text."""

    async def scenario(site):
        fields = {"prompt": ["hi", "ab"], "echo": True, "logprobs": 0, "max_tokens": 0}
        body = (await site.client.post(URL, json=fields)).json()
        assert [choice["text"] for choice in body["choices"]] == ["hi", "ab"]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 2
        told = [choice["logprobs"]["token_logprobs"] for choice in body["choices"]]
        assert told == [[None, -1.5]] * 2
        assert body["usage"]["completion_tokens"] == 0
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] == 4

        streamed = await site.client.post(URL, json={**fields, "stream": True})
        chunks = [chunk["choices"][0] for chunk in events(streamed.text)]
        assert sorted(chunk["text"] for chunk in chunks) == ["ab", "hi"]
        assert {chunk["finish_reason"] for chunk in chunks} == {"length"}
        refused = await site.client.post(URL, json={"prompt": "hi", "max_tokens": 0})
        assert refused.status_code == 400

    on_site(scenario)


def test_offsets_count_characters_of_the_text(on_site):
    """Tokens here are bytes: each stands where its character does; the end shows nowhere."""

    async def scenario(site):
        site.engine.answer = "né!"
        prompt = "日本 é"
        fields = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 9}
        (choice,) = (await site.client.post(URL, json=fields)).json()["choices"]
        assert choice["text"] == prompt + "né!"
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == [0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7]
        tokens = choice["logprobs"]["tokens"]
        assert choice["text"][offsets[tokens.index("n")]] == "n"
        assert choice["text"][offsets[tokens.index("!")]] == "!"

    on_site(scenario)


def test_an_answer_that_would_burst_is_refused_before_anything_is_computed(on_site):
    async def scenario(site):
        prompt = [97] * 150
        for fields in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
            body = {"prompt": [prompt] * 2, "n": 128, **fields}
            refused = await site.client.post(URL, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == list(fields)[-1]
        assert site.engine.tokens_made == {}

    on_site(scenario)


def test_a_long_answer_is_written_beside_the_event_loop(on_site):
    async def scenario(site):
        writers = set()
        plain = site.renderer.token_bytes

        def token_bytes(token_id):
            writers.add(threading.get_ident())
            return plain(token_id)

        site.renderer.token_bytes = token_bytes
        fields = {"prompt": [97] * 150, "prompt_logprobs": 20, "max_tokens": 1}
        (choice,) = (await site.client.post(URL, json=fields)).json()["choices"]
        assert len(choice["prompt_logprobs"]) == 150
        assert threading.get_ident() not in writers
        assert len(writers) == 1
        stream = {**fields, "prompt_logprobs": None, "echo": True, "logprobs": 20, "stream": True}
        assert (await site.client.post(URL, json=stream)).status_code == 200
        assert threading.get_ident() not in writers

    on_site(scenario)


def test_what_is_not_built_is_refused(on_site):
    async def scenario(site):
        for field in (
            {"prompt_logprobs": 1, "stream": True},
            {"suffix": "end"},
            {"best_of": 3},
            {"prompt_embeds": "x"},
        ):
            response = await site.client.post(URL, json={"prompt": "hi", **field})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(field))
        for field in (
            {"echo": False},
            {"echo": None},
            {"echo": True},
            {"suffix": None},
            {"best_of": 1},
        ):
            response = await site.client.post(URL, json={"prompt": "hi", **field})
            assert response.status_code == 200

    on_site(scenario)


def test_tokenize_and_detokenize_undo_each_other(on_site):
    async def scenario(site):
        tokens = (await site.client.post("/tokenize", json={"prompt": "hello"})).json()
        assert tokens == {
            "count": 5, "max_model_len": 200, "tokens": list(b"hello"), "token_strs": None,
        }  # fmt: skip
        text = await site.client.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert text.json() == {"prompt": "hello"}

        chat = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
        tokens = (await site.client.post("/tokenize", json=chat)).json()
        assert tokens["token_strs"] == ["h", "i"]

        for body in ({}, {"prompt": "a", "messages": []}, {"prompt": 3}):
            assert (await site.client.post("/tokenize", json=body)).status_code == 400
        assert (await site.client.post("/detokenize", json={"tokens": ["a"]})).status_code == 400

    on_site(scenario)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/completions/render"])
def test_between_the_prompts_of_a_request_others_have_turns(on_site, route):
    async def scenario(site):
        render, turns, seen = site.renderer.render_completion, 0, []

        async def noted(*given, **named):
            seen.append(turns)
            return await render(*given, **named)

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        site.renderer.render_completion = noted
        counting = asyncio.create_task(count())
        response = await site.client.post(route, json={"prompt": ["hi"] * 20, "max_tokens": 1})
        counting.cancel()
        assert response.status_code == 200
        assert len(seen) == len(set(seen)) == 20
        site.renderer.rendered.clear()

    on_site(scenario)
