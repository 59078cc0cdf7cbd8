"""`POST /v1/embeddings`, `/pooling`, `/v1/score` and `/v1/rerank`: what models give that pool.

An input is a prompt that ends with its last token: it is rendered, queued, computed, limited and
aborted as any other.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import Piece, Sample
from lookonce.frontend.pooling import (
    Floats,
    base64_of,
    check_dimensions,
    encoded,
    overlap,
    pooled_of,
    probabilities,
    ranked,
    require_pools,
    similarity,
    vectors,
)
from lookonce.frontend.requests import (
    Compared,
    EmbeddingsRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from lookonce.frontend.responses import (
    Embedding,
    EmbeddingList,
    PooledOutput,
    PoolingList,
    RankedDocument,
    RerankResult,
    Score,
    ScoreList,
    TokenWeight,
)
from lookonce.server.http.body import receive, renaming_errors
from lookonce.server.rate_limits import count_media
from lookonce.server.routes.serving_base import ServingContext, open_context, respond
from lookonce.types.pooling import PoolingInfo
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams

MAX_INPUTS = 2048
"""OpenAI's."""
MAX_NUMBERS = 1 << 22
"""Most numbers of one answer's vectors: some 80 MB of JSON."""
SAMPLING = SamplingParams(max_tokens=1)
"""Nothing is sampled."""


async def embeddings(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, EmbeddingsRequest)
    context = _open(request, body, arrival)
    pooling = require_pools(context.services.engine.model)
    if pooling.scores:
        raise BadRequestError(
            "this model gives scores and no embeddings: use /v1/score, /v1/rerank or /pooling",
            param="model",
        )
    if pooling.kind == "all":
        raise BadRequestError(
            "this model gives a vector of each token: use /pooling, /v1/score or /v1/rerank",
            param="model",
        )
    if pooling.kind == "sparse":
        raise BadRequestError(
            "this model gives weights of tokens: use /pooling, /v1/score or /v1/rerank",
            param="model",
        )
    check_dimensions(body.dimensions, pooling)
    return await respond(request, context, EmbeddingsBuilder(context, body, pooling))


async def pool(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, PoolingRequest)
    context = _open(request, body, arrival)
    pooling = require_pools(context.services.engine.model)
    _check_task(body.task, pooling)
    check_dimensions(body.dimensions, pooling)
    return await respond(request, context, PoolingBuilder(context, body, pooling))


async def score(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, ScoreRequest)
    context = _open(request, body, arrival)
    pooling = _compares(context)
    return await respond(request, context, ScoreBuilder(context, body, pooling, _pairs(body)))


async def rerank(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, RerankRequest)
    context = _open(request, body, arrival)
    pooling = _compares(context)
    if body.top_n is not None and body.top_n < 0:
        raise BadRequestError("top_n: must be at least 0", param="top_n")
    return await respond(request, context, RerankBuilder(context, body, pooling))


def _check_task(task: str | None, pooling: PoolingInfo) -> None:
    """Raises `BadRequestError` for a task that the model does not do."""
    given = {"all": "token_embed", "sparse": "token_classify"}.get(pooling.kind, "embed")
    given = "classify" if pooling.scores else given
    if task not in (None, given):
        raise BadRequestError(f"task: this model does {given} alone", param="task")


def _open(request: Request, body: PoolingFields, arrival: float) -> ServingContext:
    """As `open_context`. Raises `BadRequestError` for what an answer of numbers has not."""
    for name in ("stream", "kv_transfer_params"):
        if getattr(body, name):
            raise BadRequestError(f"{name} is not supported here", param=name)
    return open_context(request, body, arrival, pools=True)


def _compares(context: ServingContext) -> PoolingInfo:
    """Raises `BadRequestError` for a model that cannot compare two texts."""
    pooling = require_pools(context.services.engine.model)
    if pooling.scores and pooling.width != 1:
        raise BadRequestError(
            f"this model gives {pooling.width} labels and compares nothing: use /pooling",
            param="model",
        )
    return pooling


class Named(NamedTuple):
    """One input, and its name in errors."""

    name: str
    value: Any


def named_inputs(given: str | list[str | int | list[int]]) -> list[Named]:
    """The texts and lists of token ids of `input`. Raises `BadRequestError`."""
    if isinstance(given, str):
        return [Named("input", given)]
    numbers = sum(isinstance(part, int) for part in given)
    if not given or 0 < numbers < len(given):
        raise BadRequestError("input is text, token ids or a list of either", param="input")
    if numbers:
        return [Named("input", given)]
    _check_count(len(given), "input")
    return [Named(f"input[{number}]", part) for number, part in enumerate(given)]


def _check_count(count: int, name: str) -> None:
    if count > MAX_INPUTS:
        raise BadRequestError(f"{name} has {count} inputs, {MAX_INPUTS} are allowed", param=name)


class PooledBuilder(ABC):
    """Renders inputs; a subclass builds the answer of what they give."""

    def __init__(self, context: ServingContext, body: PoolingFields, pooling: PoolingInfo) -> None:
        self.context = context
        self.body = body
        self.pooling = pooling

    @abstractmethod
    async def render(self) -> None: ...

    @abstractmethod
    def whole(self, samples: Sequence[Sample]) -> msgspec.Struct: ...

    def chunks(self, piece: Piece) -> Iterator[msgspec.Struct]:
        return iter(())  # never streamed

    def usage_chunk(self) -> msgspec.Struct:
        raise NotImplementedError

    def pooled(self, number: int) -> Floats:
        """[n, width] of input `number`."""
        return pooled_of(self.context.generations[number], self.pooling)

    async def add_text(self, named: Named, *, add_special_tokens: bool | None = None) -> None:
        """Take a text or token ids as an input."""
        context = self.context
        with context.services.metrics.render.time(), _naming(named.name, "prompt"):
            self._add(
                await context.services.renderer.render_completion(
                    named.value,
                    tenant=context.principal.tenant,
                    cache_salt=self.body.cache_salt,
                    add_special_tokens=add_special_tokens is not False,
                )
            )

    async def add_messages(
        self, messages: Sequence[Any], name: str = "messages", **options: Any
    ) -> None:
        """Take messages as one input."""
        context = self.context
        context.usage_limits.take_media(count_media(messages))
        with context.services.metrics.render.time(), _naming(name, "messages"):
            self._add(
                await context.services.renderer.render_chat(
                    messages,
                    tenant=context.principal.tenant,
                    cache_salt=self.body.cache_salt,
                    options=self._template_options(**options),
                )
            )

    async def add_pair(self, query: Named, document: Named) -> None:
        """Take two texts as one input of a model that compares them."""
        context = self.context
        contents = [_content(query), _content(document)]
        context.usage_limits.take_media(count_media([{"content": each} for each in contents]))

        def renamed(param: str) -> str:
            for number, named in enumerate((query, document)):
                param = param.replace(f"messages[{number}].content", named.name)
            return param

        with context.services.metrics.render.time(), renaming_errors(renamed):
            self._add(
                await context.services.renderer.render_pair(
                    contents[0],
                    contents[1],
                    tenant=context.principal.tenant,
                    cache_salt=self.body.cache_salt,
                    options=self._template_options(),
                )
            )

    async def add_compared(self, named: Named) -> None:
        """Take one of two texts that are compared by their vectors."""
        content = _content(named)
        if isinstance(content, str):
            await self.add_text(Named(named.name, content))
        else:
            await self.add_messages([{"role": "user", "content": content}], named.name)

    def _template_options(self, **options: Any) -> dict[str, Any]:
        return {
            "add_generation_prompt": False,
            "chat_template_kwargs": self.body.chat_template_kwargs,
            "mm_processor_kwargs": self.body.mm_processor_kwargs,
            **options,
        }

    def _listed(
        self, kind: Callable[..., msgspec.Struct], prefix: str, data: Sequence[msgspec.Struct]
    ) -> msgspec.Struct:
        context = self.context
        return kind(
            id=f"{prefix}-{context.request_id}",
            created=context.created,
            model=context.model,
            data=data,
            usage=context.usage(),
            reuse_receipt=context.receipt(),
        )

    def _add(self, rendered: RenderedPrompt) -> None:
        """Raises `BadRequestError` where the results would have more numbers than `MAX_NUMBERS`,
        all of which are in memory at a time."""
        context = self.context
        context.num_pooled += self.pooling.most_numbers(rendered.num_tokens)
        context.add_prompt(rendered, SAMPLING, pools=True)
        if context.num_pooled > MAX_NUMBERS:
            raise BadRequestError(
                f"the inputs' vectors would have more than {MAX_NUMBERS} numbers; send fewer at a "
                "time",
                param="input",
            )


def _naming(name: str, own: str) -> Any:
    """The renderer's errors say `own`; this makes them say which input."""

    def renamed(param: str) -> str:
        if own == "messages" and name != own:
            return param.replace("messages[0].content", name).replace("messages", name)
        of_input = param == own or param.startswith(f"{own}[")
        return param.replace(own, name, 1) if of_input else param

    return renaming_errors(renamed)


class EmbeddingsBuilder(PooledBuilder):
    body: EmbeddingsRequest

    def __init__(
        self, context: ServingContext, body: EmbeddingsRequest, pooling: PoolingInfo
    ) -> None:
        super().__init__(context, body, pooling)
        if (body.input is None) == (body.messages is None):
            raise BadRequestError("send input or messages, one of them", param="input")
        if body.messages is None and body.mm_processor_kwargs:
            raise BadRequestError(
                "mm_processor_kwargs needs messages, in which media may be",
                param="mm_processor_kwargs",
            )
        self._inputs = [] if body.input is None else named_inputs(body.input)

    async def render(self) -> None:
        body = self.body
        if body.messages is not None:
            messages, body.messages = body.messages, []
            await self.add_messages(
                messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            )
        for number, named in enumerate(self._inputs):
            if number:
                await asyncio.sleep(0)  # each may take milliseconds: others have turns between
            await self.add_text(named, add_special_tokens=body.add_special_tokens)
        self._inputs = []

    def _vectors(self, number: int) -> Floats:
        body = self.body
        return vectors(
            self.pooled(number),
            self.pooling,
            dimensions=body.dimensions,
            normalize=body.use_activation if body.normalize is None else body.normalize,
        )

    def whole(self, samples: Sequence[Sample]) -> msgspec.Struct:
        wanted = self.body.encoding_format
        data = [
            Embedding(index=index, embedding=encoded(self._vectors(index)[0], wanted))
            for index in range(len(self.context.generations))
        ]
        return self._listed(EmbeddingList, "embd", data)


class PoolingBuilder(EmbeddingsBuilder):
    def whole(self, samples: Sequence[Sample]) -> msgspec.Struct:
        data = [
            PooledOutput(index=index, data=self._data(index))
            for index in range(len(self.context.generations))
        ]
        return self._listed(PoolingList, "pool", data)

    def _data(self, index: int) -> list[float | list[float] | TokenWeight] | str:
        if self.pooling.kind == "sparse":
            found = self.pooled(index)
            if self.body.encoding_format != "base64":
                return [TokenWeight(int(token), weight) for token, weight in found.tolist()]
        elif self.pooling.scores:
            found = self.pooled(index)
            found = found if self.body.use_activation is False else probabilities(found)
        else:
            found = self._vectors(index)
        if self.body.encoding_format == "base64":
            return base64_of(found)
        if self.pooling.kind != "all":
            return list(found[0].tolist())
        each: list[float | list[float] | TokenWeight] = found.tolist()
        return each


class Pair(NamedTuple):
    first: Named
    second: Named


def _pairs(body: ScoreRequest) -> list[Pair]:
    """What is compared with what. Raises `BadRequestError`."""
    names = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"))
    given = [pair for pair in names if any(getattr(body, name) is not None for name in pair)]
    if len(given) != 1 or any(getattr(body, name) is None for name in given[0]):
        raise BadRequestError("send queries and documents, or text_1 and text_2", param="queries")
    first, second = (_named_list(getattr(body, name), name) for name in given[0])
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise BadRequestError(
            f"{given[0][0]} has {len(first)} entries and {given[0][1]} {len(second)}; one is "
            "compared with all of the other, or as many with as many",
            param=given[0][1],
        )
    return [Pair(*each) for each in zip(first, second, strict=True)]


def _named_list(given: Compared | list[Compared], name: str) -> list[Named]:
    if not isinstance(given, list):
        return [Named(name, given)]
    if not given:
        raise BadRequestError(f"{name} is empty", param=name)
    _check_count(len(given), name)
    return [Named(f"{name}[{number}]", each) for number, each in enumerate(given)]


def _content(named: Named) -> str | list[Any]:
    """A text, or a message's content. Raises `BadRequestError`."""
    if isinstance(named.value, str):
        return named.value
    held: Mapping[str, Any] = named.value
    content = held.get("content", held.get("text"))
    if not isinstance(content, str | list):
        raise BadRequestError(
            f"{named.name}: a text, or an object with content: a text or a list of parts",
            param=named.name,
        )
    return content


class ComparingBuilder(PooledBuilder):
    """Scores pairs: each is one input of a model that compares, or two inputs whose vectors are
    compared; an input that occurs in several pairs is computed once."""

    def __init__(
        self,
        context: ServingContext,
        body: PoolingFields,
        pooling: PoolingInfo,
        pairs: list[Pair],
    ) -> None:
        super().__init__(context, body, pooling)
        self._pairs = pairs
        self._inputs: list[tuple[int, int]] = []
        """By pair, the numbers of its inputs."""

    async def render(self) -> None:
        numbers: dict[str, int] = {}
        for pair in self._pairs:
            if self.context.generations:
                await asyncio.sleep(0)
            if self.pooling.scores:
                number = len(self.context.generations)
                await self.add_pair(*pair)
                self._inputs.append((number, number))
                continue
            for named in pair:
                if named.name not in numbers:
                    numbers[named.name] = len(self.context.generations)
                    await self.add_compared(named)
            self._inputs.append((numbers[pair.first.name], numbers[pair.second.name]))
        self._pairs = []

    def scores(self) -> list[float]:
        return [self._score(first, second) for first, second in self._inputs]

    def _score(self, first: int, second: int) -> float:
        pooled = self.pooled(first)
        if not self.pooling.scores:
            compare = overlap if self.pooling.kind == "sparse" else similarity
            return compare(pooled, self.pooled(second))
        if self.body.use_activation is not False:
            pooled = probabilities(pooled)
        return float(pooled[0, 0])


class ScoreBuilder(ComparingBuilder):
    def whole(self, samples: Sequence[Sample]) -> msgspec.Struct:
        data = [Score(index=index, score=each) for index, each in enumerate(self.scores())]
        return self._listed(ScoreList, "score", data)


class RerankBuilder(ComparingBuilder):
    body: RerankRequest

    def __init__(self, context: ServingContext, body: RerankRequest, pooling: PoolingInfo) -> None:
        query = Named("query", body.query)
        documents = _named_list(body.documents, "documents")
        super().__init__(context, body, pooling, [Pair(query, each) for each in documents])

    def whole(self, samples: Sequence[Sample]) -> msgspec.Struct:
        context, scores = self.context, self.scores()
        results = [
            RankedDocument(index=index, relevance_score=scores[index])
            for index in ranked(scores, self.body.top_n or None)
        ]
        if self.body.return_documents is not False:
            for result in results:
                given = self.body.documents[result.index]
                result.document = {"text": given} if isinstance(given, str) else given
        return RerankResult(
            id=f"rerank-{context.request_id}",
            model=context.model,
            results=results,
            usage=context.usage(),
            reuse_receipt=context.receipt(),
        )
