"""What the numbers of a pooled prompt become: vectors, base64, similarities, probabilities."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import BadRequestError, RequestFailedError
from lookonce.frontend.generation import PromptGeneration
from lookonce.types.model import ModelInfo
from lookonce.types.pooling import PoolingInfo

Floats = NDArray[np.float32]
SMALLEST = 1e-12
"""Vectors shorter than this are divided by it when they are normalized, as torch does."""
MOST_COSINES = 1 << 22
"""In memory at a time: two long pages of late interaction would have hundreds of millions."""


def require_generates(model: ModelInfo) -> None:
    """Raises `BadRequestError` for a model that pools."""
    if model.pooling is not None:
        routes = "/v1/score, /v1/rerank or /pooling"
        if model.pooling.embeds:
            routes = "/v1/embeddings"
        kind = "scores" if model.pooling.scores else "embeddings"
        raise BadRequestError(
            f"this model gives {kind} and generates nothing: use {routes}", param="model"
        )


def require_pools(model: ModelInfo) -> PoolingInfo:
    """Raises `BadRequestError` for a model that generates."""
    if model.pooling is None:
        raise BadRequestError(
            "this model generates and gives no embeddings or scores; a server started with "
            "--pooling gives those of its hidden states",
            param="model",
        )
    return model.pooling


def check_dimensions(dimensions: int | None, pooling: PoolingInfo) -> None:
    """Raises `BadRequestError`."""
    if dimensions is None:
        return
    if pooling.scores or pooling.kind == "sparse":
        raise BadRequestError("dimensions: this model gives no dense vectors", param="dimensions")
    if not 1 <= dimensions <= pooling.width:
        raise BadRequestError(
            f"dimensions: this model's vectors have {pooling.width} numbers, of which 1 to "
            f"{pooling.width} can be kept; got {dimensions}",
            param="dimensions",
        )


def pooled_of(generation: PromptGeneration, pooling: PoolingInfo) -> Floats:
    """[n, width] as the model gave it: a vector of the prompt or of each token, or pairs of token
    id and weight. Raises `BadRequestError` for a prompt that its client aborted."""
    if generation.pooled is None:
        if "abort" in generation.reasons:
            raise BadRequestError("the request was aborted", code="request_aborted")
        raise RequestFailedError("the engine gave no result")
    return np.frombuffer(generation.pooled, "<f4").reshape(-1, pooling.width).astype(np.float32)


def vectors(
    pooled: Floats,
    pooling: PoolingInfo,
    *,
    dimensions: int | None = None,
    normalize: bool | None = None,
) -> Floats:
    """[n, dimensions]: the leading numbers of each vector, then normalized where asked for."""
    kept = pooled[:, :dimensions]
    return normalized(kept) if (pooling.normalize if normalize is None else normalize) else kept


def normalized(found: Floats) -> Floats:
    """Each vector of [n, W] divided by its length."""
    lengths = np.linalg.norm(found, axis=-1, keepdims=True)
    result: Floats = found / np.maximum(lengths, np.float32(SMALLEST))
    return result


def probabilities(logits: Floats) -> Floats:
    """Of [n, labels]: of the one label, or of each where there are several."""
    wide = logits.astype(np.float64)
    if logits.shape[-1] == 1:
        likely = 0.5 * (1.0 + np.tanh(0.5 * wide))
    else:
        raised = np.exp(wide - wide.max(-1, keepdims=True))
        likely = raised / raised.sum(-1, keepdims=True)
    result: Floats = likely.astype(np.float32)
    return result


def similarity(first: Floats, second: Floats) -> float:
    """Of two inputs with vectors [n, W] and [m, W]: their cosine where each has one, else the sum
    over the first's of the largest cosine with one of the second's (late interaction)."""
    documents = normalized(second).T
    rows = max(1, MOST_COSINES // documents.shape[1])
    likest = [
        float((normalized(first[at : at + rows]) @ documents).max(-1).sum())
        for at in range(0, len(first), rows)
    ]
    return sum(likest)


def overlap(first: Floats, second: Floats) -> float:
    """The dot product of two sparse vectors, pairs of token id and weight [n, 2] and [m, 2]."""
    _, left, right = np.intersect1d(
        first[:, 0], second[:, 0], assume_unique=True, return_indices=True
    )
    return float(first[left, 1] @ second[right, 1])


def encoded(found: Floats, encoding_format: str | None) -> list[float] | str:
    """One vector [W] as a client asked for it."""
    if encoding_format == "base64":
        return base64_of(found)
    numbers: list[float] = found.tolist()
    return numbers


def base64_of(found: Floats) -> str:
    """The numbers, of any shape, as float32, little-endian."""
    return base64.b64encode(found.astype("<f4").tobytes()).decode()


def ranked(scores: Sequence[float], top_n: int | None) -> list[int]:
    """Indices of the highest scores, best first; equal ones in their order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return order[:top_n]
