"""Clients that embed and rerank, unmodified, against a real server that pools.

`make test-clients` installs them.
"""

from __future__ import annotations

import math
import warnings

import pytest

from tests.support.live_server import LiveServer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    openai_of = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    haystack = pytest.importorskip(
        "haystack.components.embedders", reason="haystack-ai is not installed"
    )

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["a red circle", "a blue star"]


@pytest.fixture(scope="module")
def embedder():
    with LiveServer("--pooling", "last") as live:
        yield live


@pytest.fixture(scope="module")
def expected(embedder):
    """The vectors as plain HTTP answers them."""
    body = {"input": TEXTS, "encoding_format": "float"}
    return [row["embedding"] for row in embedder.post("/v1/embeddings", body).json()["data"]]


def same(found, expected):
    return all(
        math.isclose(x, y, abs_tol=1e-5)
        for one, other in zip(found, expected, strict=True)
        for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("fields", [{}, {"encoding_format": "float"}])
def test_openai_embeds(embedder, expected, fields):
    """It asks for base64 where nothing is said."""
    answer = embedder.client().embeddings.create(model="nano", input=TEXTS, **fields)
    assert same([row.embedding for row in answer.data], expected)


def test_openai_embeds_in_fewer_dimensions(embedder):
    answer = embedder.client().embeddings.create(model="nano", input=TEXTS, dimensions=8)
    assert [len(row.embedding) for row in answer.data] == [8, 8]


def test_langchain_embeds(embedder, expected):
    model = openai_of.OpenAIEmbeddings(
        model="nano", base_url=f"{embedder.url}/v1", api_key="none",
        check_embedding_ctx_length=False,
    )  # fmt: skip
    assert same(model.embed_documents(TEXTS), expected)
    assert same([model.embed_query(TEXTS[0])], expected[:1])


def test_litellm_embeds(embedder, expected):
    answer = litellm.embedding(
        "openai/nano", input=TEXTS, api_base=f"{embedder.url}/v1", api_key="none"
    )
    assert same([row["embedding"] for row in answer.data], expected)


def test_litellm_reranks(embedder):
    answer = litellm.rerank(
        "hosted_vllm/nano", query=TEXTS[0], documents=[TEXTS[1], TEXTS[0]],
        api_base=embedder.url, api_key="none",
    )  # fmt: skip
    assert answer.results[0]["index"] == 1


def test_haystack_embeds(embedder, expected):
    from haystack.utils import Secret

    model = haystack.OpenAITextEmbedder(
        api_key=Secret.from_token("none"), model="nano", api_base_url=f"{embedder.url}/v1"
    )
    assert same([model.run(TEXTS[0])["embedding"]], expected[:1])
