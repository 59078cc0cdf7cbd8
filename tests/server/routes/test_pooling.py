"""Embeddings, pooling, scores and reranking by the real application, engine and model."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from openai import AsyncOpenAI

from lookonce.frontend.pooling import normalized, similarity
from tests.support.drawing import image_part
from tests.support.model.cases import picture
from tests.support.nodes import Node, engine_node, run

EXAMPLES = re.findall(
    r"```json\n(.*?)```",
    (Path(__file__).parents[3] / "docs" / "embeddings.md").read_text(),
    re.DOTALL,
)
PART = image_part(picture(1))
OTHER = image_part(picture(2))


def vector(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def client(node: Node) -> AsyncOpenAI:
    return AsyncOpenAI(api_key="none", base_url="http://node/v1", http_client=node.http)


@torch.inference_mode()
def expected(folder: Path, token_ids: list[int]) -> np.ndarray:
    """The normalized hidden state of the last token, by plain transformers."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    last = model(torch.tensor([token_ids])).last_hidden_state[0, -1].numpy()
    return last / np.linalg.norm(last)


def example(number: int) -> Any:
    """A body that the page about embeddings shows."""
    data = PART["image_url"]["url"].partition(",")[2]
    return json.loads(EXAMPLES[number].replace("DATA", data))


async def refused(node: Node, path: str, body: object, param: str | None) -> str:
    answer = await node.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    return str(error["message"])


def test_embeddings_of_texts_by_openai_s_client(embedder):
    """Every form of input, both encodings, fewer dimensions, usage; what comes again is reused."""
    folder = embedder("text")

    async def scenario() -> None:
        async with engine_node(folder) as node:
            create = client(node).embeddings.create
            assert node.engine is not None
            tokens = (await node.ok("/tokenize", {"prompt": "a red circle"}))["tokens"]
            reference = expected(folder, tokens)
            answer = await create(model="m", input="a red circle")
            found = np.array(answer.data[0].embedding)  # by base64, as the client asks
            assert np.abs(found - reference).max() < 2e-4
            assert abs(np.linalg.norm(found) - 1) < 1e-5
            assert answer.object == "list"
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(tokens)

            several = await create(
                model="m", input=["a red circle", "a blue star"], encoding_format="float"
            )
            assert [each.index for each in several.data] == [0, 1]
            assert np.allclose(several.data[0].embedding, found, atol=1e-6)
            assert not np.allclose(several.data[1].embedding, found, atol=1e-2)
            assert several.usage.prompt_tokens_details["cached_tokens"] == len(tokens)
            stats = await node.engine.stats()
            assert stats["pooled_cache_hits_total"] == 1
            assert stats["pooled_cache_queries_total"] == 3

            ids = await create(model="m", input=tokens)
            lists = await create(model="m", input=[tokens, tokens[:2]])
            assert np.allclose(ids.data[0].embedding, found, atol=1e-6)
            assert np.allclose(lists.data[0].embedding, found, atol=1e-6)

            short = await create(model="m", input="a red circle", dimensions=8)
            cut = found[:8] / np.linalg.norm(found[:8])
            assert np.allclose(short.data[0].embedding, cut, atol=1e-6)
            assert (await node.post("/v1/embeddings", example(0))).status_code == 200

            for asked in ({"normalize": False}, {"use_activation": False}):
                raw = await create(model="m", input="a red circle", extra_body=asked)
                assert np.linalg.norm(raw.data[0].embedding) > 1.5
            body = {"input": "a red circle", "encoding_format": None}
            plain = await node.ok("/v1/embeddings", body)
            assert np.allclose(plain["data"][0]["embedding"], found, atol=1e-6)
            pooled = await node.ok("/pooling", {"input": "a red circle", "task": "embed"})
            assert np.allclose(pooled["data"][0]["data"], found, atol=1e-6)
            await refused(node, "/pooling", {"input": "a", "task": "token_embed"}, "task")

    run(scenario())


def test_an_embedding_model_refuses_what_it_cannot_do(embedder):
    async def scenario() -> None:
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        async with engine_node(embedder("text")) as node:
            for path, body in {
                "/v1/chat/completions": chat,
                "/v1/completions": {"prompt": "Hi"},
                "/v1/responses": {"input": "Hi"},
                "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {}},
            }.items():
                assert "/v1/embeddings" in await refused(node, path, body, "model")
            anthropic = {**chat, "max_tokens": 3, "model": "m"}
            answer = await node.post("/v1/messages", anthropic)
            assert answer.status_code == 400

            post = "/v1/embeddings"
            await refused(node, post, {"input": "a", "dimensions": 65}, "dimensions")
            await refused(node, post, {"input": "a", "dimensions": 0}, "dimensions")
            await refused(node, post, {"input": []}, "input")
            await refused(node, post, {"input": [[]]}, "input[0]")
            await refused(node, post, {"input": ["a", 5]}, "input")
            await refused(node, post, {"input": ["a", [999_999]]}, "input[1][0]")
            await refused(node, post, {"input": ["a"] * 2049}, "input")
            await refused(node, post, {}, "input")
            await refused(node, post, {"input": "a", "stream": True}, "stream")
            await refused(node, post, {"input": "a", **chat}, "input")
            await refused(node, post, {"input": "a", "encoding_format": "bits"}, "encoding_format")
            cut = {"input": "a", "truncate_prompt_tokens": 3}
            await refused(node, post, cut, "truncate_prompt_tokens")
            long = [5] * (node.engine.model.max_model_len + 1)  # type: ignore[union-attr]
            await refused(node, post, {"input": ["a", long]}, "input[1]")
            fits = await node.ok(post, {"input": [long[1:]]})
            assert fits["usage"]["prompt_tokens"] == len(long) - 1
            messages = [{"role": "user", "content": [PART]}]
            assert "takes no image" in await refused(
                node, post, {"messages": messages}, "messages[0].content[0]"
            )

    run(scenario())


def test_a_model_that_generates_gives_no_embeddings(folder):
    async def scenario() -> None:
        async with engine_node(folder("qwen3")) as node:
            for path, body in {
                "/v1/embeddings": {"input": "a"},
                "/pooling": {"input": "a"},
                "/v1/score": {"text_1": "a", "text_2": "b"},
                "/v1/rerank": {"query": "a", "documents": ["b"]},
            }.items():
                assert "--pooling" in await refused(node, path, body, "model")

    run(scenario())


def test_pictures_are_embedded_and_each_is_processed_and_encoded_once(embedder):
    async def scenario() -> None:
        async with engine_node(embedder("picture")) as node:
            assert node.engine is not None

            async def embed(*content: Any, **more: Any) -> Any:
                messages = [{"role": "user", "content": list(content)}]
                body = {"messages": messages, "encoding_format": "base64", **more}
                return await node.ok("/v1/embeddings", body)

            words = {"type": "text", "text": "what is this"}
            first = await embed(PART, words, reuse_receipt=True)
            (item,) = first["reuse_receipt"]["items"]
            assert (item["processor"], item["encoder"]) == ("miss", "miss")
            assert first["usage"]["prompt_tokens_details"]["image_tokens"] > 0

            again = await embed(PART, words, reuse_receipt=True)
            (item,) = again["reuse_receipt"]["items"]
            assert (item["processor"], item["encoder"]) == ("hit", "skipped")
            assert again["data"] == first["data"]
            tokens = again["usage"]["prompt_tokens"]
            assert again["reuse_receipt"]["prefix_cached_tokens"] == tokens

            # In other words, and in another place: the encoder's output is used again.
            moved = await embed({"type": "text", "text": "see"}, PART, reuse_receipt=True)
            (item,) = moved["reuse_receipt"]["items"]
            assert (item["processor"], item["encoder"]) == ("hit", "hit")
            new = await embed(OTHER, words)
            one, two = (vector(each["data"][0]["embedding"]) for each in (first, new))
            assert not np.allclose(one, two, atol=1e-3)
            assert node.jobs() == 2
            stats = await node.engine.stats()
            assert stats["encoder_runs_total"] == 2
            assert stats["pooled_cache_hits_total"] == 1

            # Another scope shares nothing.
            salted = await embed(PART, words, cache_salt="other", reuse_receipt=True)
            (item,) = salted["reuse_receipt"]["items"]
            assert (item["processor"], item["encoder"]) == ("miss", "miss")

            scores = await node.ok(
                "/v1/score",
                {
                    "queries": "a picture",
                    "documents": [{"content": [PART]}, {"content": [OTHER]}, "words"],
                },
            )
            assert [each["index"] for each in scores["data"]] == [0, 1, 2]
            assert all(-1.001 <= each["score"] <= 1.001 for each in scores["data"])
            assert await refused(
                node, "/v1/score", {"queries": "a", "documents": [{"content": 5}]}, "documents[0]"
            )
            assert (await node.ok("/v1/embeddings", example(1)))["data"]
            assert len((await node.ok("/v1/rerank", example(2)))["results"]) == 1

            broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            answer = await node.post(
                "/v1/rerank", {"query": "a", "documents": ["b", {"content": [broken]}]}
            )
            assert answer.status_code == 422
            assert answer.json()["error"]["param"].startswith("documents[1][0]")

    run(scenario())


def test_scores_and_ranks_are_cosines_of_embeddings(embedder):
    async def scenario() -> None:
        async with engine_node(embedder("text")) as node:
            texts = ["a red circle", "a blue star", "a red square"]
            each = await node.ok("/v1/embeddings", {"input": texts})
            found = np.array([entry["embedding"] for entry in each["data"]])
            cosines = found @ found[0]
            scored = await node.ok("/score", {"text_1": texts[0], "text_2": texts})
            assert np.allclose([s["score"] for s in scored["data"]], cosines, atol=1e-5)
            pairs = await node.ok("/v1/score", {"text_1": texts, "text_2": texts})
            assert np.allclose([s["score"] for s in pairs["data"]], 1.0, atol=1e-5)

            ranked = await node.ok(
                "/v1/rerank", {"query": texts[0], "documents": texts, "top_n": 2}
            )
            order = np.argsort(-cosines)[:2].tolist()
            assert [result["index"] for result in ranked["results"]] == order
            assert ranked["results"][0]["document"] == {"text": texts[order[0]]}
            whole = {"query": texts[0], "documents": texts, "top_n": 0, "return_documents": None}
            assert len((await node.ok("/v1/rerank", whole))["results"]) == len(texts)
            bare = await node.ok(
                "/v2/rerank", {"query": "a", "documents": texts, "return_documents": False}
            )
            assert "document" not in bare["results"][0]
            # The query of all pairs is one input.
            assert bare["usage"]["prompt_tokens"] < 2 * ranked["usage"]["prompt_tokens"]

            uneven = {"text_1": texts[:2], "text_2": texts}
            await refused(node, "/v1/score", uneven, "text_2")
            await refused(node, "/v1/score", {"text_1": "a"}, "queries")
            await refused(node, "/v1/rerank", {"query": "a", "documents": []}, "documents")
            await refused(
                node, "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"
            )

    run(scenario())


@pytest.mark.parametrize("kind", ["cross", "reranker"])
def test_a_reranker_s_scores_are_transformers(embedder, kind):
    """Pairs as the tokenizer joins them, or as the chat template takes a query and a document."""
    folder = embedder(kind)

    async def scenario() -> None:
        async with engine_node(folder) as node:
            body = {"query": "a circle", "documents": ["a star", "a red circle"]}
            ranked = await node.ok("/v1/rerank", body)
            found = {r["index"]: r["relevance_score"] for r in ranked["results"]}
            reference = scores_of(folder, kind, body["query"], body["documents"])  # type: ignore[arg-type]
            assert np.allclose([found[0], found[1]], reference, atol=1e-4)
            assert abs(found[0] - found[1]) > 1e-4
            logits = await node.ok(
                "/v1/score",
                {"text_1": "a circle", "text_2": "a star", "use_activation": False},
            )
            logit = logits["data"][0]["score"]
            assert abs(1 / (1 + np.exp(-logit)) - found[0]) < 1e-5
            await refused(node, "/v1/embeddings", {"input": "a"}, "model")
            for path in ("/pooling", "/invocations"):
                classes = await node.ok(path, {"input": "a circle"})
                assert len(classes["data"][0]["data"]) == 1

    run(scenario())


@torch.inference_mode()
def scores_of(folder: Path, kind: str, query: str, documents: list[str]) -> list[float]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for document in documents:
        if kind == "cross":
            given = tokenizer(query, document, return_tensors="pt", return_token_type_ids=True)
        else:
            messages = [
                {"role": "query", "content": query},
                {"role": "document", "content": document},
            ]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            given = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            given.pop("token_type_ids", None)
        found.append(float(torch.sigmoid(model(**given).logits[0, 0])))
    return found


def test_a_vector_of_each_token_and_late_interaction(embedder):
    async def scenario() -> None:
        async with engine_node(embedder("colqwen2")) as node:
            messages = [{"role": "user", "content": [PART]}]
            page = await node.ok("/pooling", {"messages": messages, "encoding_format": "float"})
            tokens = page["usage"]["prompt_tokens"]
            vectors = np.array(page["data"][0]["data"])
            assert vectors.shape == (tokens, 24)
            assert np.allclose(np.linalg.norm(vectors, axis=-1), 1.0, atol=1e-5)
            packed = await node.ok("/pooling", {"messages": messages, "encoding_format": "base64"})
            assert np.allclose(vector(packed["data"][0]["data"]).reshape(-1, 24), vectors)
            query = np.array((await node.ok("/pooling", {"input": "a circle"}))["data"][0]["data"])
            scored = await node.ok(
                "/v1/score", {"queries": "a circle", "documents": {"content": [PART]}}
            )
            expected = (query @ vectors.T).max(-1).sum()
            assert abs(scored["data"][0]["score"] - expected) < 1e-4
            assert node.jobs() == 1
            assert "/pooling" in await refused(node, "/v1/embeddings", {"input": "a"}, "model")

    run(scenario())


def test_late_interaction_of_long_inputs_holds_a_part_of_their_cosines_at_a_time():
    draw = np.random.default_rng(1)
    query = draw.standard_normal((3000, 4), np.float32)
    page = draw.standard_normal((4000, 4), np.float32)
    expected = (normalized(query) @ normalized(page).T).max(-1).sum()
    tracemalloc.start()
    try:
        scored = similarity(query, page)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert abs(scored - expected) < 1e-2
    assert peak < 3000 * 4000 * 4 // 2


def test_sparse_vectors_and_their_dot_products(embedder):
    async def scenario() -> None:
        async with engine_node(embedder("splade")) as node:
            texts = ["a red circle", "a blue star"]
            answer = await node.ok("/pooling", {"input": texts, "encoding_format": "float"})
            found = [
                {each["token_id"]: each["weight"] for each in row["data"]} for row in answer["data"]
            ]
            assert all(isinstance(token, int) for row in found for token in row)
            assert all(found)
            assert found[0] != found[1]
            packed = await node.ok("/pooling", {"input": texts[0], "encoding_format": "base64"})
            pairs = vector(packed["data"][0]["data"]).reshape(-1, 2)
            assert dict(pairs.tolist()) == pytest.approx(found[0])
            assert packed["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            scored = await node.ok("/v1/score", {"text_1": texts[0], "text_2": texts})
            products = [
                sum(weight * row.get(token, 0.0) for token, weight in found[0].items())
                for row in found
            ]
            scores = [each["score"] for each in scored["data"]]
            assert scores == pytest.approx(products, rel=1e-5)
            assert "/pooling" in await refused(node, "/v1/embeddings", {"input": "a"}, "model")
            fields = {"input": "a", "dimensions": 8}
            assert "no dense" in await refused(node, "/pooling", fields, "dimensions")

    run(scenario())


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_texts_and_pictures_of_two_towers_are_in_one_space(embedder, kind):
    async def scenario() -> None:
        async with engine_node(embedder(kind)) as node:
            assert node.engine is not None
            width = node.engine.model.pooling.width  # type: ignore[union-attr]
            messages = [{"role": "user", "content": [PART]}]
            for _ in range(2):
                seen = await node.ok("/v1/embeddings", {"messages": messages})
                assert len(seen["data"][0]["embedding"]) == width
            assert node.jobs() == 1
            stats = await node.engine.stats()
            assert stats["encoder_runs_total"] == 1
            ranked = await node.ok(
                "/v1/rerank", {"query": "a circle", "documents": [{"content": [PART]}, "words"]}
            )
            assert len(ranked["results"]) == 2
            said = await node.ok("/v1/embeddings", {"input": "a circle"})
            chat = [{"role": "user", "content": "a circle"}]
            assert said["data"] == (await node.ok("/v1/embeddings", {"messages": chat}))["data"]
            both = [{"role": "user", "content": [PART, {"type": "text", "text": "words"}]}]
            await refused(node, "/v1/embeddings", {"messages": both}, "messages")
            await refused(node, "/v1/chat/completions", {"messages": chat}, "model")

    run(scenario())


def test_a_request_for_many_embeddings_is_aborted_by_its_id(embedder, monkeypatch):
    async def scenario() -> None:
        async with engine_node(embedder("text")) as node:
            held, begun = asyncio.Event(), asyncio.Event()
            render = node.services.renderer.render_completion

            async def render_late(prompt: Any, **options: Any) -> Any:
                if prompt == "the last":
                    begun.set()
                    await held.wait()
                return await render(prompt, **options)

            monkeypatch.setattr(node.services.renderer, "render_completion", render_late)
            body = {"input": ["a", "b", "the last"], "request_id": "all-of-them"}
            asked = asyncio.create_task(node.post("/v1/embeddings", body))
            await begun.wait()
            await node.ok("/inference/v1/abort_requests", {"request_ids": ["all-of-them"]})
            held.set()
            answer = await asked
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "request_aborted"
            assert (await node.engine.stats())["num_requests_running"] == 0  # type: ignore[union-attr]

    run(scenario())
