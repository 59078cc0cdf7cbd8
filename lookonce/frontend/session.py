"""A live session: text, pictures and sound are appended, and its answers come as text.

    session = await Session.open(frontend, [{"role": "user", "content": "Hello"}])
    async for piece in session: ...            the answer; piece.ended says where it ends
    await session.append([{"role": "user", "content": [...]}])      and the next one

What is appended while an answer runs waits for its end, or interrupts it. `append` waits where the
session is sent to faster than it is computed. Nothing of the conversation is kept here: messages
are rendered as what follows those that the engine has. The engine's `Session` says what it forgets.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lookonce.engine.client.engine_client import EngineClient
from lookonce.engine.client.session import ClosedAtEnd, EngineSession
from lookonce.errors import BadRequestError, NotReadyError
from lookonce.frontend.frontend import Frontend
from lookonce.render.prompt.detokenizer import CONTEXT_TOKENS, Detokenizer
from lookonce.render.prompt.encoder import ChatOptions, Follows
from lookonce.render.renderer import LiveSoundPrompt
from lookonce.types.request import (
    EXTEND,
    AnswerEnd,
    ExtendOptions,
    Overflow,
    RenderedPrompt,
    SessionOptions,
    TokenDelta,
    TokenLogprob,
)
from lookonce.types.request_validation import check_fits
from lookonce.types.sampling import SamplingParams

Message = dict[str, Any]
MAX_SECONDS_AT_ONCE = 10
"""Of sound: a longer one is appended in pieces, each of which waits for credits."""


@dataclass(frozen=True, slots=True)
class SessionPiece:
    """What one delta adds to a session's answers."""

    extension: int
    """The number that `append` returned of what this answers; 0: the opening."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    ended: AnswerEnd | None = None
    """The answer ends with this piece, and why."""
    compacted: int = 0
    """The session has dropped so many tokens of its middle, to make room."""
    logprobs: tuple[TokenLogprob, ...] = ()


class Session(ClosedAtEnd):
    """A live session of one model; iterate for its pieces. Use as an async context manager.

    Iterating and appending raise what ended the session: `SessionFullError` at the end of the
    context, `EngineDeadError`, `SessionEvictedError`. One task at a time may iterate.
    """

    def __init__(
        self,
        frontend: Frontend,
        engine_session: EngineSession,
        sampling: SamplingParams,
        opening: RenderedPrompt,
        *,
        cache_salt: str | None,
        is_chat: bool,
        answered: bool,
    ) -> None:
        """Use `open`."""
        self._frontend = frontend
        self._engine_session = engine_session
        self._sampling = sampling
        self._tenant = opening.tenant
        self._cache_salt = cache_salt
        self._is_chat = is_chat
        self._follows: Follows = "answer" if answered else "message"
        self._turn = asyncio.Lock()
        self._contexts: dict[int, list[int]] = {0: _context_of(opening)}
        """Number → last tokens, of what was appended and not answered yet."""
        self._detokenizer: Detokenizer | None = None
        """Of the answer that runs."""

    @classmethod
    async def open(
        cls,
        frontend: Frontend,
        messages: Sequence[Message] | None = None,
        *,
        prompt: str | Sequence[int] | None = None,
        sampling: SamplingParams,
        answer: bool = True,
        overflow: Overflow = "end",
        keep_tokens: int | None = None,
        tenant: str = "",
        cache_salt: str | None = None,
        lora_name: str = "",
    ) -> Self:
        """A session that begins with messages, or with a plain prompt of text or token ids, with
        the LoRA adapter of a name; empty: with none.

        With `answer` the opening is answered. A session of a model with full attention ends at the
        model's context, or, with `overflow="compact"`, drops its middle, and keeps the first
        `keep_tokens` (None: the opening) and the newest part.
        """
        if (messages is None) == (prompt is None):
            raise BadRequestError("a session is opened with messages or with a prompt")
        if sampling.stop:
            raise BadRequestError("a session has stop_token_ids, no stop strings", param="stop")
        renderer = frontend.renderer
        if messages is not None:
            options = ChatOptions(add_generation_prompt=answer)
            rendered = await renderer.render_chat(
                messages, tenant=tenant, cache_salt=cache_salt, options=options
            )
        else:
            rendered = await renderer.render_completion(
                prompt or "", tenant=tenant, cache_salt=cache_salt
            )
        rendered.tenant, rendered.lora_name = tenant, lora_name
        return await cls.open_rendered(
            frontend,
            rendered,
            sampling=sampling,
            options=SessionOptions(answer=answer, overflow=overflow, keep_tokens=keep_tokens),
            cache_salt=cache_salt,
            is_chat=messages is not None,
        )

    @classmethod
    async def open_rendered(
        cls,
        frontend: Frontend,
        rendered: RenderedPrompt,
        *,
        sampling: SamplingParams,
        options: SessionOptions | None = None,
        cache_salt: str | None = None,
        is_chat: bool = False,
    ) -> Self:
        """As `open`, with a prompt that is rendered already."""
        options = options or SessionOptions()
        rendered.weight = frontend.weights.of(rendered.tenant)
        engine = _engine_of(frontend)
        try:
            check_fits(rendered.num_tokens, sampling, engine.model)
            session_id = f"session-{secrets.token_hex(16)}"
            session = await engine.open_session(rendered, sampling, session_id, options)
        finally:
            frontend.renderer.release(rendered)
        return cls(
            frontend,
            session,
            sampling,
            rendered,
            cache_salt=cache_salt,
            is_chat=is_chat,
            answered=options.answer,
        )

    async def append(
        self,
        messages: Sequence[Message],
        *,
        answer: bool = True,
        interrupt: bool = False,
        max_tokens: int | None = None,
    ) -> int:
        """Append messages with text, pictures and sound; the number that their answer names.

        An answer that runs is ended with `interrupt`, and waited for otherwise. Without `answer`
        the model computes what is appended and says nothing.
        """
        if not self._is_chat:
            raise BadRequestError("this session was opened with a plain prompt", param="messages")
        async with self._turn:  # what is rendered depends on what was appended before
            follows = self._follows
            rendered = await self._frontend.renderer.render_chat(
                messages,
                tenant=self._tenant,
                cache_salt=self._cache_salt,
                options=ChatOptions(add_generation_prompt=answer),
                follows=follows,
            )
            return await self.append_rendered(
                rendered,
                ExtendOptions(interrupt, answer, max_tokens, joins=follows == "answer"),
            )

    async def append_prompt(
        self,
        prompt: str | Sequence[int],
        *,
        answer: bool = True,
        interrupt: bool = False,
        max_tokens: int | None = None,
    ) -> int:
        """Append plain text or token ids, as they are."""
        rendered = await self._frontend.renderer.render_completion(
            prompt, tenant=self._tenant, cache_salt=self._cache_salt, add_special_tokens=False
        )
        options = ExtendOptions(interrupt, answer, max_tokens)
        return await self.append_rendered(rendered, options)

    async def append_rendered(
        self,
        rendered: RenderedPrompt,
        options: ExtendOptions = EXTEND,
    ) -> int:
        """Append what is rendered already (`EngineSession.extend`)."""
        context = _context_of(rendered)
        try:
            number = await self._engine_session.extend(rendered, options)
        finally:
            self._frontend.renderer.release(rendered)
        self._follows = "answer" if options.answer else "message"
        if options.answer:
            self._contexts[number] = context
        return number

    @property
    def credits(self) -> int:
        """Tokens that may be sent before `append` waits."""
        return self._engine_session.credits

    @property
    def is_slowed(self) -> bool:
        """The next `append` waits: more was sent than is computed, or answers are not read."""
        return self._engine_session.is_slowed

    @property
    def closed(self) -> bool:
        return self._engine_session.closed

    def close(self) -> None:
        """End the session; whoever iterates or appends is woken."""
        self._engine_session.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionPiece:
        return self._piece(await anext(self._engine_session))

    async def answer(self) -> str:
        """The text of the next answer, once it has ended."""
        texts = []
        async for piece in self:
            texts.append(piece.text)
            if piece.ended:
                break
        return "".join(texts)

    def _piece(self, delta: TokenDelta) -> SessionPiece:
        said = delta.session
        extension, ended = (0, None) if said is None else (said.extension, said.ended)
        text = ""
        if delta.token_ids:
            if self._detokenizer is None:
                self._detokenizer = self._frontend.renderer.detokenizer(
                    self._sampling, self._contexts.get(extension, [])
                )
            text = self._detokenizer.push(delta.token_ids)
            self._frontend.metrics.generation_tokens.inc(len(delta.token_ids))
        if ended is not None:
            text += self._detokenizer.finish() if self._detokenizer else ""
            self._detokenizer = None
            for number in [number for number in self._contexts if number <= extension]:
                del self._contexts[number]
        return SessionPiece(
            extension,
            text,
            tuple(delta.token_ids),
            ended,
            0 if said is None else said.compacted,
            tuple(delta.logprobs or ()),
        )


class SoundSession(ClosedAtEnd):
    """A live sound, transcribed as it comes, by a model that adds sound to its tokens frame by
    frame. Samples go in, pieces of text come out.

    Iteration ends once the sound is finished and its last word is there. `append` waits where more
    was sent than is computed. Both raise what ended the session. A sound that has no end has pauses
    (`pause`), after which what was said before is written.
    """

    def __init__(self, session: Session, live: LiveSoundPrompt) -> None:
        """Use `open`."""
        self._session = session
        self._live = live
        self._num_frames = _num_frames(live.opening)
        self._num_tokens = 0
        self._is_finished = False

    @classmethod
    async def open(
        cls,
        frontend: Frontend,
        *,
        sampling: SamplingParams,
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> Self:
        """Raises `BadRequestError` for a model that takes no sound frame by frame."""
        live = frontend.renderer.live_sound(tenant=tenant, cache_salt=cache_salt)
        session = await Session.open_rendered(
            frontend, live.opening, sampling=sampling, cache_salt=cache_salt
        )
        return cls(session, live)

    @property
    def sampling_rate(self) -> int:
        """Hz of the samples that `append` takes."""
        return self._live.sampling_rate

    @property
    def frame_seconds(self) -> float:
        """Of sound, in one frame."""
        return self._live.frame_seconds

    @property
    def num_tokens(self) -> int:
        """Tokens that came until now."""
        return self._num_tokens

    @property
    def num_expected(self) -> int:
        """Tokens that will have come once all frames that were sent are computed."""
        return self._num_frames - self._live.opening.num_tokens + 1

    @property
    def num_waiting(self) -> int:
        """Frames that were sent and are not answered."""
        return max(0, self.num_expected - self._num_tokens)

    @property
    def credits(self) -> int:
        """Frames that may be sent before `append` waits."""
        return self._session.credits

    @property
    def is_slowed(self) -> bool:
        """The next `append` waits: more was sent than is computed, or text is not read."""
        return self._session.is_slowed

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def append(self, samples: NDArray[np.float32]) -> None:
        """Append mono samples [n] from -1 to 1, of any number."""
        if self._is_finished:
            raise BadRequestError("the sound is finished", param="audio")
        if not np.isfinite(samples).all():
            raise BadRequestError("the audio holds samples that are no numbers", param="audio")
        at_once = MAX_SECONDS_AT_ONCE * self.sampling_rate
        for start in range(0, len(samples), at_once):
            await self._append(self._live.push(samples[start : start + at_once]))

    async def finish(self) -> None:
        """The sound has ended: what was said last is written, too."""
        if not self._is_finished:
            self._is_finished = True
            await self._append(self._live.finish())

    async def pause(self, on_length: Callable[[int], None]) -> None:
        """Append a silence in which what was said last is written; more sound may follow.

        Before it is sent `on_length` gets `num_tokens` as it will be once that is written.
        """
        rendered = self._live.finish()
        on_length(self.num_expected + (0 if rendered is None else _num_frames(rendered)))
        await self._append(rendered)

    async def _append(self, rendered: RenderedPrompt | None) -> None:
        if rendered is not None:
            self._num_frames += _num_frames(rendered)
            await self._session.append_rendered(rendered, ExtendOptions(answer=False))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionPiece:
        if self._is_finished and self._num_tokens >= self.num_expected:
            raise StopAsyncIteration
        piece = await anext(self._session)
        self._num_tokens += len(piece.token_ids)
        return piece

    def close(self) -> None:
        """End the session; whoever iterates or appends is woken."""
        self._session.close()


def _num_frames(rendered: RenderedPrompt) -> int:
    return 0 if rendered.frames is None else rendered.frames.shape[0]


def _context_of(rendered: RenderedPrompt) -> list[int]:
    last: list[int] = rendered.ids[-CONTEXT_TOKENS:].tolist()
    return last


def _engine_of(frontend: Frontend) -> EngineClient:
    if not isinstance(frontend.engine, EngineClient):
        raise NotReadyError("this server renders and does not generate")
    return frontend.engine
