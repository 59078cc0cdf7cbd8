"""One prompt's samples: the engine's token deltas become pieces of text.

A `PromptGeneration` owns one engine request. Leaving its iterator, for whatever reason, aborts the
samples that the engine still computes.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from lookonce.errors import BadRequestError, RequestFailedError, error_from_wire
from lookonce.frontend.frontend import Frontend
from lookonce.frontend.responses import StopReason
from lookonce.render.prompt.detokenizer import CONTEXT_TOKENS, Detokenizer
from lookonce.types.logs import current_request_id
from lookonce.types.request import (
    PrefillStats,
    PrefillTimes,
    PromptLogprob,
    RenderedPrompt,
    TokenDelta,
    TokenLogprob,
    engine_request_id,
)
from lookonce.types.request_validation import check_fits, shorten_max_tokens
from lookonce.types.sampling import SamplingParams

MAX_SIDE_BY_SIDE = 256
"""Prompts of one response that the engine has at a time: more would fill its queue."""
_numbers = itertools.count()


@functools.cache
def _process_id(pid: int) -> str:
    """A random name of this process. Not made on import: processes are forked after that."""
    return secrets.token_hex(8)


def _new_engine_id() -> str:
    """An id that is unique among all API processes; clients may repeat their own ids, which follow
    in it."""
    unique = f"{_process_id(os.getpid())}-{next(_numbers)}"
    return engine_request_id(unique, current_request_id.get())


@dataclass(slots=True)
class Piece:
    """What one delta adds to one sample."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None


class TokenCounter:
    """In the place of a `Detokenizer` where nobody needs the text."""

    stopped: str | None = None

    def __init__(self) -> None:
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self.num_tokens += len(token_ids)
        return ""

    def finish(self) -> str:
        return ""


class PromptGeneration:
    """Samples `index_base` to `index_base + n - 1` of one response, from one prompt."""

    def __init__(
        self,
        frontend: Frontend,
        rendered: RenderedPrompt,
        sampling: SamplingParams,
        *,
        arrival: float | None = None,
        index_base: int = 0,
        keep: Collection[str] = (),
        makes_text: bool = True,
    ) -> None:
        self.rendered = rendered
        self.sampling = sampling
        self.reuse_stats: PrefillStats | None = None
        self.prompt_logprobs: list[PromptLogprob | None] | None = None
        """One per token of the prompt, where they were asked for; set with the first delta."""
        self.alignment: list[int] | None = None
        """An input position per aligned token, where they were asked for."""
        self.pooled: bytes | None = None
        """What a model that pools gave (`TokenDelta.pooled`)."""
        self.completion_tokens = 0
        self.aborted = False
        """Set before the request is submitted: it is not submitted then."""
        self._frontend = frontend
        self._engine_id = _new_engine_id()
        self._index_base = index_base
        self._arrival = time.monotonic() if arrival is None else arrival
        context: list[int] = rendered.ids[-CONTEXT_TOKENS:].tolist()
        self._texts: dict[int, Detokenizer | TokenCounter] = {
            index: frontend.renderer.detokenizer(sampling, context, keep)
            if makes_text
            else TokenCounter()
            for index in range(sampling.n)
        }
        """Of the samples that are not finished."""
        self._last_delta: dict[int, float] = {}
        self.reasons: list[str] = []
        """Why samples finished, in the order in which they did."""
        self._first_reason = ""
        self.recorded: list[int] | None = None
        """Tokens of the first sample, where somebody wants them."""
        self.first_delta = 0.0
        """When the first tokens came, `time.monotonic()`; 0 before."""
        self.started = self.ended = 0.0
        """When the engine was asked, and when its last delta came; `time.monotonic()`."""

    @property
    def times(self) -> PrefillTimes | None:
        """None before the first token."""
        return None if self.reuse_stats is None else self.reuse_stats.times

    @property
    def finished(self) -> bool:
        """Every sample has its finish reason."""
        return not self._texts

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Every sample's pieces until all are finished. Raises what broke the request."""
        if self.aborted:
            for index in list(self._texts):
                self._close_sample(index, "abort")
                yield Piece(index + self._index_base, "", [], finish_reason="abort")
            return
        self.started = time.monotonic()
        deltas = self._frontend.engine.generate(self.rendered, self.sampling, self._engine_id)
        async with aclosing(deltas):
            async for delta in deltas:
                self._observe(delta)
                piece = self._take(delta)
                if piece is None:
                    continue
                if piece.finish_reason and delta.finish_reason is None and self._texts:
                    await self._frontend.engine.abort(self._engine_id, delta.index)
                yield piece
                if not self._texts:
                    return
        raise RequestFailedError("the engine ended the request without finishing it")

    async def abort(self) -> None:
        """End every unfinished sample with "abort"."""
        self.aborted = True
        await self._frontend.engine.abort(self._engine_id)

    def _take(self, delta: TokenDelta) -> Piece | None:
        """None for tokens that the engine computed after a stop string had ended the sample."""
        if delta.error is not None:
            raise error_from_wire(*delta.error)
        detokenizer = self._texts.get(delta.index)
        if detokenizer is None:
            return None
        taken_before = detokenizer.num_tokens
        text = detokenizer.push(delta.token_ids)
        finish_reason: str | None = delta.finish_reason
        stop_reason: StopReason = delta.stop_token_id
        if finish_reason is not None:
            text += detokenizer.finish()
        if detokenizer.stopped is not None:
            finish_reason, stop_reason = "stop", detokenizer.stopped
        num_tokens = detokenizer.num_tokens - taken_before
        if self.recorded is not None and delta.index == 0:
            self.recorded += delta.token_ids[:num_tokens]
        self.completion_tokens += num_tokens
        if finish_reason is not None:
            self._close_sample(delta.index, finish_reason)
        return Piece(
            index=delta.index + self._index_base,
            text=text,
            token_ids=delta.token_ids[:num_tokens],
            logprobs=None if delta.logprobs is None else delta.logprobs[:num_tokens],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _close_sample(self, index: int, reason: str) -> None:
        del self._texts[index]
        self.reasons.append(reason)
        if index == 0:
            self._first_reason = reason
        if not self._texts:
            metrics = self._frontend.metrics
            metrics.success.inc(self._first_reason)
            self.ended = time.monotonic()
            metrics.request_latency.observe(self.ended - self._arrival)
            if self.times is not None:
                metrics.observe_phases(self.times, self.ended)

    def _observe(self, delta: TokenDelta) -> None:
        metrics, now = self._frontend.metrics, time.monotonic()
        before = self._last_delta.get(delta.index)
        if before is not None:
            metrics.delivered(now - before, len(delta.token_ids))
        else:
            if not self._last_delta:
                self.first_delta = now
                metrics.time_to_first_token.observe(now - self._arrival)
                metrics.prompt_tokens.inc(self.rendered.num_tokens)
            metrics.generation_tokens.inc(len(delta.token_ids))
        self._last_delta[delta.index] = now
        if delta.reuse_stats is not None:
            self.reuse_stats = delta.reuse_stats
        if delta.pooled is not None:
            self.pooled = delta.pooled
        if delta.alignment is not None:
            self.alignment = delta.alignment
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = self._per_token(delta.prompt_logprobs)

    def _per_token(self, scored: list[PromptLogprob]) -> list[PromptLogprob | None]:
        """One entry per prompt token: None for the first token and for tokens of media."""
        entries: list[PromptLogprob | None] = [None, *scored]
        if self._frontend.engine.model.items_in_prompt:
            for feature in self.rendered.features:
                entries[feature.offset : feature.end] = [None] * feature.length
        return entries


def prepare(
    frontend: Frontend,
    rendered: RenderedPrompt,
    sampling: SamplingParams,
    *,
    arrival: float | None = None,
    index_base: int = 0,
    keep: Collection[str] = (),
    limit_asked: bool = True,
    pools: bool = False,
    makes_text: bool = True,
) -> PromptGeneration:
    """A generation ready to start; the caller still has to release the prompt.

    `limit_asked`: the client set `max_tokens`; `pools`: the prompt is to be pooled, not answered;
    without `makes_text` pieces have tokens and no text, and no stop string is found.
    Raises `BadRequestError` where the model cannot take the prompt.
    """
    model = frontend.engine.model
    if (model.pooling is not None) != pools:
        raise BadRequestError(
            "this model gives embeddings or scores and generates nothing"
            if model.pooling is not None
            else "this model generates and gives no embeddings or scores",
            param="model",
        )
    if model.encoder_decoder and not rendered.features:
        raise BadRequestError(
            "this model answers no text alone: it transcribes sound (/v1/audio/transcriptions)",
            param="model",
        )
    if not limit_asked:
        sampling = shorten_max_tokens(sampling, rendered.num_tokens, model.max_model_len)
    check_fits(rendered.num_tokens, sampling, model)
    rendered.weight = frontend.weights.of(rendered.tenant)
    return PromptGeneration(
        frontend,
        rendered,
        sampling,
        arrival=arrival,
        index_base=index_base,
        keep=keep,
        makes_text=makes_text,
    )


@contextmanager
def prepared(
    frontend: Frontend,
    rendered: RenderedPrompt,
    sampling: SamplingParams,
    *,
    keep: Collection[str] = (),
    pools: bool = False,
) -> Iterator[PromptGeneration]:
    """A generation ready to start; the prompt is released at the end of the block.

    Raises `BadRequestError` where the model cannot take the prompt.
    """
    try:
        # In Python's `SamplingParams` the model's recommended limit looks like the caller's own.
        asked = sampling.max_tokens != frontend.defaults.max_new_tokens
        yield prepare(
            frontend, rendered, sampling, limit_asked=asked or pools, keep=keep, pools=pools
        )
    finally:
        frontend.renderer.release(rendered)


def merged(generations: list[PromptGeneration]) -> AsyncGenerator[Piece, None]:
    """The pieces of all generations, as they come. The first failure ends all of them."""
    return generations[0].pieces() if len(generations) == 1 else _side_by_side(generations)


async def _side_by_side(generations: list[PromptGeneration]) -> AsyncGenerator[Piece, None]:
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
    turns = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
    tasks = [asyncio.create_task(_forward(g.pieces(), queue, turns)) for g in generations]
    try:
        remaining = len(tasks)
        while remaining:
            match await queue.get():
                case None:
                    remaining -= 1
                case BaseException() as error:
                    raise error
                case piece:
                    yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    pieces: AsyncGenerator[Piece, None],
    queue: asyncio.Queue[Piece | BaseException | None],
    turns: asyncio.Semaphore,
) -> None:
    try:
        async with turns, aclosing(pieces):
            async for piece in pieces:
                queue.put_nowait(piece)
    except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


@dataclass(slots=True)
class Sample:
    """All pieces of one sample, for an answer that is not streamed."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: StopReason = None

    def take(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or ()
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
