"""`/v1/chat/completions` on doubles: shapes, streams, samples, stop strings, receipts."""

from __future__ import annotations

from tests.support.server.site import events

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_the_answer_has_openai_s_shape(on_site):
    async def scenario(site):
        response = await site.chat("hello", max_tokens=50)
        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "chat.completion"
        assert body["model"] == "recital"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a red circle", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        assert body["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 13,
            "total_tokens": 18,
            "prompt_tokens_details": {"cached_tokens": 3, "image_tokens": 0, "audio_tokens": 0},
        }
        assert "reuse_receipt" not in body

    on_site(scenario)


def test_a_stream_is_role_text_finish_and_done(on_site):
    async def scenario(site):
        response = await site.chat("hello", stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response.text)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(texts) == "a red circle"
        assert chunks[-1]["choices"][0]["delta"] == {}
        assert [c["choices"][0]["finish_reason"] for c in chunks][-2:] == [None, "stop"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert all("usage" not in chunk for chunk in chunks)

    on_site(scenario)


def test_include_usage_adds_one_last_chunk_without_choices(on_site):
    async def scenario(site):
        response = await site.chat("hello", stream=True, stream_options={"include_usage": True})
        *others, last = events(response.text)
        assert all(chunk["usage"] is None for chunk in others)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 13

    on_site(scenario)


def test_n_samples_come_side_by_side(on_site):
    async def scenario(site):
        whole = (await site.chat("hello", n=3, max_tokens=4)).json()
        assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
        assert {c["finish_reason"] for c in whole["choices"]} == {"length"}
        assert whole["usage"]["completion_tokens"] == 12
        assert whole["usage"]["prompt_tokens"] == 5

        chunks = events((await site.chat("hello", n=2, stream=True)).text)
        for index in (0, 1):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert mine[0]["delta"]["role"] == "assistant"
            assert "".join(c["delta"].get("content", "") for c in mine) == "a red circle"

    on_site(scenario)


def test_a_stop_string_cuts_the_text_and_ends_its_sample_in_the_engine(on_site):
    async def scenario(site):
        body = (await site.chat("hello", stop=["circ", "zebra"])).json()
        choice = body["choices"][0]
        assert choice["message"]["content"] == "a red "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "circ")
        assert max(site.engine.tokens_made.values()) == len("a red circ")

        kept = await site.chat("hello", stop="circ", include_stop_str_in_output=True)
        assert kept.json()["choices"][0]["message"]["content"] == "a red circ"

    on_site(scenario)


def test_with_two_samples_a_stop_string_ends_each_by_itself(on_site):
    async def scenario(site):
        body = (await site.chat("hello", n=2, stop="red", stream=False)).json()
        assert [c["message"]["content"] for c in body["choices"]] == ["a ", "a "]
        assert body["usage"]["completion_tokens"] == 2 * len("a red")

    on_site(scenario)


def test_logprobs_name_token_bytes_and_alternatives(on_site):
    async def scenario(site):
        body = (await site.chat("hi", logprobs=True, top_logprobs=2, max_tokens=2)).json()
        content = body["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["a", " "]
        assert content[0]["bytes"] == [97]
        assert content[0]["logprob"] == -0.5
        assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "<|end|>"]
        assert site.engine.samplings[-1].logprobs == 2

        chunks = events((await site.chat("hi", logprobs=True, stream=True, max_tokens=2)).text)
        parts = [c["choices"][0]["logprobs"] for c in chunks]
        assert [p["content"][0]["token"] for p in parts if p] == ["a", " "]

    on_site(scenario)


def test_prompt_logprobs_are_of_words_not_of_media(on_site):
    async def scenario(site):
        picture = {"type": "image_url", "image_url": {"url": "some picture"}}
        content = [{"type": "text", "text": "ab"}, picture, {"type": "text", "text": "c"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = await site.client.post("/v1/chat/completions", json={**body, "prompt_logprobs": 0})
        told = answer.json()["prompt_logprobs"]
        assert [place and list(place) for place in told] == [
            None, ["98"], None, None, None, None, ["99"],
        ]  # fmt: skip
        assert told[1]["98"] == {"logprob": -1.5, "rank": 2, "decoded_token": "b"}
        silent = await site.client.post("/v1/chat/completions", json=body)
        assert "prompt_logprobs" not in silent.json()

    on_site(scenario)


def test_logprobs_stay_with_the_text_that_is_held_back(on_site):
    async def scenario(site):
        response = await site.chat("hi", logprobs=True, stream=True, stop="circus")
        chunks = [c["choices"][0] for c in events(response.text)]
        tokens = [e["token"] for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
        assert "".join(tokens) == "a red circle<|end|>"
        assert "".join(c["delta"].get("content", "") for c in chunks) == "a red circle"

    on_site(scenario)


def test_the_receipt_says_where_each_item_came_from(on_site):
    content = [{"type": "text", "text": "look: "}, PICTURE]
    expected = {
        "prompt_tokens": 10,
        "prefix_cached_tokens": 2,
        "external_cached_tokens": 1,
        "items": [
            {
                "modality": "image",
                "hash": (b"0" * 6 + b"data:image/png;base64,AAAA")[:8].hex(),
                "offset": 6,
                "length": 4,
                "processor": "hit",
                "encoder": "miss",
                "decode_ms": 0.0,
                "process_ms": 0.0,
                "encode_ms": 1.5,
            }
        ],
    }

    async def scenario(site):
        messages = [{"role": "user", "content": content}]
        url, body = "/v1/chat/completions", {"messages": messages}
        by_field = await site.client.post(url, json={**body, "reuse_receipt": True})
        assert by_field.json()["reuse_receipt"] == expected
        assert by_field.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 4

        by_header = await site.client.post(url, json=body, headers={"X-Reuse-Receipt": "1"})
        assert by_header.json()["reuse_receipt"] == expected

        streamed = await site.client.post(
            url, json={**body, "stream": True, "n": 2, "reuse_receipt": True}
        )
        *others, last = events(streamed.text)
        assert last["reuse_receipt"] == expected
        assert not any("reuse_receipt" in chunk for chunk in others)

        with_usage = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await site.client.post(url, json={**body, **with_usage, "reuse_receipt": True})
        *others, last = events(streamed.text)
        assert last["usage"]["prompt_tokens"] == 10
        assert last["reuse_receipt"] == expected
        assert not any("reuse_receipt" in chunk for chunk in others)

    on_site(scenario)


def test_request_ids_come_back(on_site):
    async def scenario(site):
        given = await site.chat("hi", request_id="order-66")
        assert given.json()["request_id"] == "order-66"
        assert given.json()["id"] == "chatcmpl-order-66"
        assert given.headers["x-request-id"] == "order-66"

        made = await site.chat("hi")
        assert made.json()["request_id"] == made.headers["x-request-id"]

        sent = await site.client.get("/health", headers={"X-Request-Id": "abc"})
        assert sent.headers["x-request-id"] == "abc"

    on_site(scenario)


def test_two_requests_of_one_id_do_not_meet_in_the_engine(on_site):
    async def scenario(site):
        for _ in range(2):
            await site.chat("hi", request_id="same")
        assert len({request_id for request_id, _ in site.engine.tokens_made}) == 2

    on_site(scenario)


def test_salt_and_tenant_reach_the_renderer(on_site):
    async def scenario(site):
        site.client.headers["Authorization"] = "Bearer k1"
        await site.chat("hi", cache_salt="pepper")
        assert site.engine.prompts[-1].scope == b"acme/pepper"

    on_site(scenario, api_key=("acme:k1",))


def test_harmless_fields_of_openai_s_clients_are_ignored(on_site):
    harmless = {
        "user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto",
        "parallel_tool_calls": True, "tools": [], "tool_choice": "none", "functions": None,
        "response_format": {"type": "text"}, "modalities": ["text"], "seed": 7,
        "safety_identifier": "x", "prompt_cache_key": "y", "echo": False,
    }  # fmt: skip

    async def scenario(site):
        assert (await site.chat("hi", **harmless)).status_code == 200
        assert site.engine.samplings[-1].seed == 7

    on_site(scenario)
