"""`POST /v1/completions`: one or many prompts, as text or token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import Piece, Sample
from lookonce.frontend.logprobs import CompletionLogprobsBuilder, echoed_logprobs, joined_completion
from lookonce.frontend.requests import CompletionRequest
from lookonce.frontend.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from lookonce.frontend.sampling_params import asked_limit, completion_sampling
from lookonce.server.http.body import receive, renaming_errors
from lookonce.server.routes.serving_base import ServingContext, open_context, respond
from lookonce.types.request import RenderedPrompt, TokenLogprob
from lookonce.types.sampling import SamplingParams

MAX_PROMPTS = 256


async def completions(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, CompletionRequest)
    context = open_context(request, body, arrival)
    sampling = completion_sampling(body, context.services.defaults)
    return await respond(request, context, CompletionResponseBuilder(context, body, sampling))


def named_prompts(prompt: str | list[str | int | list[int]]) -> dict[str, str | list[int]]:
    """Each prompt by its name in errors: `prompt` for a single one, else `prompt[0]` and so on.

    Raises `BadRequestError` for no prompt, too many, or a mixture of token ids and prompts.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    token_ids = [part for part in prompt if isinstance(part, int)]
    if token_ids and len(token_ids) == len(prompt):
        return {"prompt": token_ids}
    prompts = [part for part in prompt if not isinstance(part, int)]
    if token_ids or not prompts:
        raise BadRequestError("prompt is text, token ids or a list of either", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise BadRequestError(
            f"prompt has {len(prompts)} prompts, {MAX_PROMPTS} are allowed", param="prompt"
        )
    return {f"prompt[{number}]": part for number, part in enumerate(prompts)}


def _naming(name: str) -> AbstractContextManager[None]:
    """The renderer's errors say `prompt`; this makes them say which of several prompts."""

    def renamed(param: str) -> str:
        of_prompt = param == "prompt" or param.startswith("prompt[")
        return param.replace("prompt", name, 1) if of_prompt else param

    return renaming_errors(renamed)


class CompletionResponseBuilder:
    """Builds text completion objects; a chunk of a stream is one too."""

    def __init__(
        self, context: ServingContext, body: CompletionRequest, sampling: SamplingParams
    ) -> None:
        self._context = context
        self._body = body
        self._sampling = sampling
        self._prompts: list[str] = []
        """With `echo`, the text of each prompt."""
        self._begun: set[int] = set()
        """Samples of which a chunk was built."""
        self._prompt_only = bool(body.echo) and asked_limit(body) == 0
        """The answer has the prompt alone: the token that is generated is left out."""
        self._logprob_builders: dict[int, CompletionLogprobsBuilder] = {}
        self._echoes: dict[int, CompletionLogprobs] = {}
        """With `echo`, the log-probabilities of each prompt."""
        self._id = f"cmpl-{context.request_id}"

    async def render(self) -> None:
        context = self._context
        scored_by = "logprobs" if self._body.prompt_logprobs is None else "prompt_logprobs"
        for number, (name, prompt) in enumerate(named_prompts(self._body.prompt).items()):
            if number:
                await asyncio.sleep(0)  # each may take milliseconds: others have turns between
            with context.services.metrics.render.time(), _naming(name):
                rendered = await context.services.renderer.render_completion(
                    prompt,
                    tenant=context.principal.tenant,
                    cache_salt=self._body.cache_salt,
                    add_special_tokens=self._body.add_special_tokens,
                )
                context.add_prompt(rendered, self._sampling, scored_by=scored_by)
                if self._body.echo:
                    self._keep_text(rendered)

    def _keep_text(self, rendered: RenderedPrompt) -> None:
        text = rendered.text
        if text is None:
            text = self._context.services.renderer.decode(rendered.token_ids)
        self._prompts.append(text)

    def whole(self, samples: Sequence[Sample]) -> Completion:
        body = self._envelope([self._choice(i, sample) for i, sample in enumerate(samples)])
        body.usage = self._usage()
        body.reuse_receipt = self._context.receipt()
        body.kv_transfer_params = self._context.kv_transfer()
        return body

    def _choice(self, index: int, sample: Sample) -> CompletionChoice:
        if self._prompt_only:
            sample = Sample(finish_reason="length")
        return CompletionChoice(
            index=index,
            text=self._prompt_text(index) + "".join(sample.text),
            logprobs=self._logprobs(index, sample.token_ids, sample.logprobs),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            prompt_logprobs=self._context.prompt_entries(
                index // self._sampling.n, self._body.prompt_logprobs
            ),
        )

    def _prompt_text(self, index: int) -> str:
        """The prompt of sample `index` with `echo`; without, an empty text."""
        return self._prompts[index // self._sampling.n] if self._prompts else ""

    def chunks(self, piece: Piece) -> Iterator[Completion]:
        if self._prompt_only:
            piece = Piece(piece.index, "", [], finish_reason=piece.finish_reason and "length")
        logprobs = self._logprobs(piece.index, piece.token_ids, piece.logprobs)
        text = piece.text
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            text = self._prompt_text(piece.index) + text
        if text or logprobs is not None or piece.finish_reason is not None:
            choice = CompletionChoice(index=piece.index, text=text, logprobs=logprobs)
            chunk = self._envelope([choice])
            if piece.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
                if self._context.finished and not self._context.include_usage:
                    chunk.reuse_receipt = self._context.receipt()
                    chunk.kv_transfer_params = self._context.kv_transfer()
            yield chunk

    def usage_chunk(self) -> Completion:
        return self.whole([])

    def _usage(self) -> Usage:
        usage = self._context.usage()
        if self._prompt_only:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _envelope(self, choices: list[CompletionChoice]) -> Completion:
        context = self._context
        return Completion(
            id=self._id,
            created=context.created,
            model=context.model,
            request_id=context.request_id,
            choices=choices,
            usage=self._context.chunk_usage(),
        )

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> CompletionLogprobs | None:
        """Of `token_ids`; before a sample's first tokens, with `echo`, those of the prompt."""
        wanted, renderer = self._sampling.logprobs, self._context.services.renderer
        if wanted is None:
            return None
        parts = []
        if index not in self._logprob_builders:
            echo = self._echo(index, wanted)
            parts += [] if echo is None else [echo]
            self._logprob_builders[index] = CompletionLogprobsBuilder(
                renderer.token_bytes,
                wanted,
                renderer.skipped(self._sampling),
                offset=0 if echo is None else len(self._prompt_text(index)),
                name=self._context.token_name,
            )
        if logprobs:
            parts.append(self._logprob_builders[index].take(token_ids, logprobs))
        return joined_completion(parts) if parts else None

    def _echo(self, index: int, wanted: int) -> CompletionLogprobs | None:
        """Of the prompt of sample `index`; None without `echo`, or where the prompt was aborted."""
        number = index // self._sampling.n
        generation = self._context.generations[number]
        if not self._body.echo or generation.prompt_logprobs is None:
            return None
        if number not in self._echoes:
            self._echoes[number] = echoed_logprobs(
                self._prompts[number],
                generation.rendered.token_ids,
                generation.prompt_logprobs,
                wanted,
                self._context.services.renderer.token_bytes,
                self._context.token_name,
            )
        return self._echoes[number]
