"""What a session has done for it: responses are generated, sound is transcribed.

A response is an ordinary request over the conversation's items: what earlier ones computed of its
beginning is in the prefix cache, and its pictures and sounds in the caches of media. Each runs in a
task of its own and waits while the client does not read what was sent before (`room`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace

from msgspec import UNSET

from lookonce.errors import LookOnceError, RequestError
from lookonce.frontend.generation import merged
from lookonce.frontend.live_transcription import LiveTranscription, Pace
from lookonce.frontend.logprobs import chat_logprobs
from lookonce.frontend.responses import Usage
from lookonce.frontend.sampling_params import response_sampling
from lookonce.frontend.transcription import (
    EncodedAudio,
    Transcriber,
    TranscriptDone,
    TranscriptEvent,
    TranscriptionOptions,
)
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.body import renamed_error
from lookonce.server.rate_limits import RequestUsage, count_media
from lookonce.server.realtime_sessions import ByteBudget
from lookonce.server.routes.realtime.audio import Clip
from lookonce.server.routes.realtime.conversation import Item, chat_bytes, chat_messages
from lookonce.server.routes.realtime.events import (
    CachedTokenDetails,
    Logprob,
    OutputTokenDetails,
    ResponseUsage,
    TranscriptionTokenDetails,
    TranscriptionUsage,
)
from lookonce.server.routes.realtime.session import AnswerReport, RealtimeSession, Response
from lookonce.server.routes.serving_base import ServingContext
from lookonce.server.services import Services
from lookonce.types.logs import current_request_id
from lookonce.types.request import TokenLogprob

logger = logging.getLogger("lookonce.server")

Room = Callable[[], Awaitable[None]]


class SessionTasks:
    """The `SessionWork` of a session. Set `session` before it begins."""

    session: RealtimeSession

    def __init__(
        self,
        services: Services,
        principal: Principal,
        model: str,
        room: Room,
        copies: ByteBudget,
    ) -> None:
        """`room` returns once more may be sent; `copies` is for sound that the model is given."""
        self._services = services
        self._principal = principal
        self._model = model
        self._room = room
        self._copies = copies
        self._contexts: dict[str, ServingContext] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By the id of the response or of the item."""
        self._stopped: set[asyncio.Task[None]] = set()
        self._one_transcript = asyncio.Lock()
        self._on_end = asyncio.Event()
        self.voice_forgotten = False
        """Set when voice detection must begin anew; whoever detects clears it."""
        self._live = LiveTranscription(services, self, tenant=principal.tenant)
        self._live_limits: deque[RequestUsage] = deque()
        """Of the items that are heard live, in their order."""

    async def close(self) -> None:
        """Wait for what was stopped."""
        tasks = [*self._tasks.values(), *self._stopped]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._live.close()

    async def wait_sound_taken(self) -> None:
        """Returns once the engine has taken the sound that it hears live."""
        await self._live.wait_taken()

    async def wait_any_end(self) -> None:
        """Returns when a response or transcript has ended after this call."""
        self._on_end.clear()
        await self._on_end.wait()

    def forget_voice(self) -> None:
        self.voice_forgotten = True

    def _start(self, name: str, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        self._stopped.discard(task)
        self._on_end.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of a realtime session broke", exc_info=error)

    def _stop(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            self._stopped.add(task)
            task.cancel()

    # --- responses ---

    def answer(self, response: Response) -> None:
        settings = response.settings
        context = ServingContext(
            services=self._services,
            principal=self._principal,
            model=self._model,
            request_id=response.id,
            stream=True,
            wants_receipt=settings.reuse_receipt,
            limit_asked=settings.max_output_tokens is not None,
        )
        self._contexts[response.id] = context
        self._start(response.id, self._answer(response, context))

    def stop_answer(self, response_id: str) -> AnswerReport:
        report = _report(self._contexts.pop(response_id))
        self._stop(response_id)
        return report

    async def _answer(self, response: Response, context: ServingContext) -> None:
        reason = ""
        current_request_id.set(response.id)
        try:
            self._services.require_ready()
            with self._services.admit(self._principal) as context.usage_limits, context:
                await self._render(response, context)
                async with aclosing(merged(context.generations)) as pieces:
                    async for piece in pieces:
                        await self._room()
                        self.session.answer_text(response.id, piece.text)
                        reason = piece.finish_reason or reason
        except Exception as error:  # noqa: BLE001 - the client is told
            _log(error)
            del self._contexts[response.id]
            self.session.answer_failed(response.id, error, _report(context))
        else:
            del self._contexts[response.id]
            self.session.answer_ended(response.id, reason, _report(context))

    async def _render(self, response: Response, context: ServingContext) -> None:
        settings, services = response.settings, self._services
        fields = settings.sampling_fields()
        fields.max_tokens = settings.max_output_tokens
        sampling = response_sampling(fields, None, services.defaults)
        with self._copies.taken(chat_bytes(response.items)):
            chat = chat_messages(settings.instructions, response.items)
            context.usage_limits.take_media(count_media(chat.messages))
            try:
                with services.metrics.render.time():
                    rendered = await services.renderer.render_chat(
                        chat.messages,
                        tenant=self._principal.tenant,
                        cache_salt=settings.cache_salt,
                        options={},
                    )
                context.add_prompt(rendered, sampling)
            except RequestError as error:
                named = chat.renamed(error.param or "")
                raise (error if named == error.param else renamed_error(error, named)) from None

    # --- transcripts ---

    def transcribe(self, item: Item) -> None:
        self._start(item.id, self._transcribe(item.id, item.clips[0], self._options()))

    def stop_transcript(self, item_id: str) -> None:
        self._stop(item_id)
        self._live.drop(item_id)

    def _options(self) -> TranscriptionOptions:
        asked = self.session.settings.transcription
        assert asked is not None, "it was asked for"
        return TranscriptionOptions(
            language=asked.language, prompt=asked.prompt, logprobs=self.session.settings.logprobs
        )

    async def _transcribe(self, item_id: str, clip: Clip, options: TranscriptionOptions) -> None:
        """One at a time and in their order: a session's turns follow each other."""
        current_request_id.set(item_id)
        try:
            async with self._one_transcript:
                self._services.require_ready()
                with (
                    self._copies.taken(clip.wav_bytes),
                    self._services.admit(self._principal) as limits,
                ):
                    audio = EncodedAudio(clip.wav(), param=item_id)
                    limits.take_media(1)
                    limits.take_tokens(0, 1)  # how many there will be is not known
                    asked = replace(options, max_tokens=limits.limit_answer(None, asked=False))
                    events = Transcriber(self._services, limits.generated).transcribe(
                        audio, asked, tenant=self._principal.tenant
                    )
                    await self._send_transcript(item_id, events)
        except Exception as error:  # noqa: BLE001 - the client is told
            _log(error)
            self.session.transcript_failed(item_id, error)

    async def _send_transcript(
        self, item_id: str, events: AsyncGenerator[TranscriptEvent, None]
    ) -> None:
        async with aclosing(events):
            async for event in events:
                await self.transcript_event(item_id, event)

    async def transcript_event(self, name: str, event: TranscriptEvent) -> None:
        await self._room()
        logprobs = self._logprobs(event.token_ids, event.logprobs)
        if isinstance(event, TranscriptDone):
            self.session.transcript_done(
                name, event.text, _usage(event.usage), event.receipt, logprobs
            )
            self._on_end.set()
        elif event.text:
            self.session.transcript_text(name, event.text, logprobs)

    # --- what the model hears as it comes ---

    def hear(self, item_id: str, clip: Clip) -> None:
        samples, nbytes = clip.format.decode(clip.data), len(clip.data)

        def taken() -> None:
            self.session.sound_taken(nbytes)

        self._live.hear(item_id, samples, clip.format.rate, self._options(), taken)

    def end_sound(self, item_id: str) -> None:
        self._live.end(item_id)

    def forget_sound(self, item_id: str) -> None:
        self._live.drop(item_id)

    def transcript_failed(self, name: str, error: Exception) -> None:
        self.session.transcript_failed(name, error)
        self._on_end.set()

    def sound_lost(self, error: Exception) -> None:
        if isinstance(error, LookOnceError):
            self.session.tell_error(error)

    def begin_transcript(self) -> None:
        self._services.require_ready()
        limits = self._services.admit(self._principal)
        with ExitStack() as stack:
            stack.enter_context(limits)
            limits.take_media(1)
            limits.take_tokens(0, 1)
            stack.pop_all()
        self._live_limits.append(limits)

    def end_transcript(self, num_tokens: int) -> None:
        with self._live_limits.popleft() as limits:
            limits.generated(num_tokens)

    def pace_changed(self, pace: Pace) -> None:
        self.session.sound_paced(pace.limit, pace.remaining, pace.seconds)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> list[Logprob] | None:
        if not logprobs:
            return None
        shown = chat_logprobs(list(token_ids), list(logprobs), self._services.renderer.token_bytes)
        return [Logprob(each.token, each.logprob, list(each.bytes)) for each in shown.content]


def _log(error: Exception) -> None:
    """What is no fault of the request, and no error that is known."""
    if not isinstance(error, LookOnceError):
        logger.error("the work of a realtime session broke", exc_info=error)


def _report(context: ServingContext) -> AnswerReport:
    """A response that was not rendered cost nothing."""
    if not context.generations:
        return AnswerReport()
    found = context.usage()
    details = found.prompt_tokens_details
    media = details.image_tokens + details.audio_tokens
    receipt = context.receipt()
    return AnswerReport(
        ResponseUsage(
            total_tokens=found.total_tokens,
            input_tokens=found.prompt_tokens,
            output_tokens=found.completion_tokens,
            input_token_details=CachedTokenDetails(
                cached_tokens=details.cached_tokens,
                text_tokens=found.prompt_tokens - media,
                audio_tokens=details.audio_tokens,
                image_tokens=details.image_tokens,
            ),
            output_token_details=OutputTokenDetails(text_tokens=found.completion_tokens),
        ),
        None if receipt is UNSET else receipt,
    )


def _usage(found: Usage) -> TranscriptionUsage:
    audio = found.prompt_tokens_details.audio_tokens
    return TranscriptionUsage(
        input_tokens=found.prompt_tokens,
        output_tokens=found.completion_tokens,
        total_tokens=found.total_tokens,
        input_token_details=TranscriptionTokenDetails(
            audio_tokens=audio, text_tokens=found.prompt_tokens - audio
        ),
    )
