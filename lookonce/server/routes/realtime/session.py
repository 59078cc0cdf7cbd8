"""The state of one realtime session: what each event of the client changes and answers.

It knows no sockets, tasks or engine. What takes time is begun through `SessionWork`, which calls
back with what came of it; what the client must know goes to `send`, in order.

    client event ─▶ receive ─┬▶ send(server events)
                             └▶ SessionWork ─▶ answer_text, answer_ended, transcript_…
    frames_to_hear ─▶ voice detection ─▶ heard ─▶ turns ─▶ committed items

A model that hears frame by frame (`hears_live`) gets the sound of a transcription session as it
comes (`SessionWork.hear`): nothing of it waits in the buffer for its commit.

    a response    created ─▶ item added, at its first text ─▶ text deltas ─▶ done
                     └──────────────── cancelled or failed ──────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from lookonce.errors import (
    BadRequestError,
    DrainingError,
    LookOnceError,
    RequestError,
    RequestFailedError,
    TooLargeError,
    UnavailableError,
)
from lookonce.frontend.responses import ReuseReceipt
from lookonce.render.media.vad import FRAME_MILLISECONDS
from lookonce.server.http.body import parse
from lookonce.server.http.responses import error_body
from lookonce.server.realtime_sessions import ByteBudget, full_error
from lookonce.server.routes.realtime.audio import AudioBuffer, Clip, VoiceFeed
from lookonce.server.routes.realtime.conversation import (
    KEPT_TRANSCRIPTS,
    Conversation,
    Item,
    read_audio,
    read_item,
    spoken_item,
)
from lookonce.server.routes.realtime.events import (
    CLIENT_EVENTS,
    SPEECH_EVENTS,
    AudioAppend,
    BufferCleared,
    BufferCommitted,
    ContentPart,
    ConversationCreated,
    ConversationItem,
    ErrorDetail,
    ErrorEvent,
    EventHead,
    ItemCreate,
    ItemDeleted,
    ItemEvent,
    ItemNamed,
    ItemRetrieved,
    Logprob,
    OutputItemEvent,
    PartEvent,
    RateLimit,
    RateLimitsUpdated,
    ResponseCancel,
    ResponseCreate,
    ResponseEvent,
    ResponseObject,
    ResponseOptions,
    ResponseUsage,
    ServerEvent,
    SessionEvent,
    SessionKind,
    SessionOptions,
    SessionUpdate,
    SpeechStarted,
    SpeechStopped,
    StatusDetails,
    TextDelta,
    TextDone,
    TextPart,
    TranscriptionCompleted,
    TranscriptionDelta,
    TranscriptionFailed,
    TranscriptionUsage,
    merged,
    new_id,
)
from lookonce.server.routes.realtime.events import Conversation as ConversationShown
from lookonce.server.routes.realtime.options import (
    AnswerSettings,
    check_supported,
    read_response,
    read_session,
)
from lookonce.server.routes.realtime.turns import TurnDetector

Json = dict[str, Any]
MIN_COMMIT_MS = 100
MAX_APPEND_BYTES = 15 * 1024 * 1024
MAX_RESPONSES = 4
"""Responses of one session that run at the same time; one of them writes to the conversation."""
FEW_BYTES = 64 * 1024
MAX_VALUES = 1 << 18
"""JSON values of one event: they are decoded on the event loop, in a tenth of a second."""
NEW_WORK = (
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "conversation.item.create",
    "response.create",
)
"""Client events that a session which ends takes no more."""


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """What a response cost so far."""

    usage: ResponseUsage | None = None
    receipt: ReuseReceipt | None = None


@dataclass(slots=True)
class Response:
    """A response that is being made."""

    id: str
    settings: AnswerSettings
    items: tuple[Item, ...]
    """What it answers."""
    in_conversation: bool
    metadata: dict[str, str] | None
    item: Item = field(
        default_factory=lambda: Item(
            ConversationItem(
                id=new_id("item"), object="realtime.item", status="in_progress", role="assistant"
            )
        )
    )
    text: list[str] = field(default_factory=list)
    begun: bool = False
    charged: int = 0
    """Bytes of items that are not the conversation's."""


class SessionWork(Protocol):
    """What a session has done for it. Nothing here blocks or calls back at once."""

    def answer(self, response: Response) -> None:
        """Begin to generate; `answer_text` and one of `answer_ended`, `answer_failed` follow."""

    def stop_answer(self, response_id: str) -> AnswerReport:
        """Abort it: nothing of it is called back any more."""

    def transcribe(self, item: Item) -> None:
        """Begin; `transcript_text` and one of `transcript_done`, `transcript_failed` follow."""

    def stop_transcript(self, item_id: str) -> None:
        """Abort it, if it has not ended: nothing of it is called back any more."""

    def hear(self, item_id: str, clip: Clip) -> None:
        """More sound of an item that is not committed yet: `transcript_text` may follow, and
        `sound_taken` once the sound is not held any more."""

    def end_sound(self, item_id: str) -> None:
        """The item that was heard is committed: as after `transcribe`."""

    def forget_sound(self, item_id: str) -> None:
        """The item that was heard is none: nothing of it is called back any more."""

    def forget_voice(self) -> None:
        """The sound that comes next does not continue what was heard."""


class RealtimeSession:
    """One session, from its first event to its end."""

    def __init__(
        self,
        *,
        kind: SessionKind,
        model: str,
        hears: bool,
        budget: ByteBudget,
        max_audio_seconds: float,
        send: Callable[[ServerEvent], None],
        work: SessionWork,
        options: SessionOptions | None = None,
        hears_live: bool = False,
    ) -> None:
        """`hears`: the model takes sound; `hears_live`: frame by frame. Raises `BadRequestError`
        for `options`."""
        self.id = new_id("sess")
        self._model = model
        self._hears = hears
        self._hears_live = hears_live
        self._budget = budget
        self._max_audio_seconds = max_audio_seconds
        self._send = send
        self._work = work
        self._options = options or SessionOptions()
        self.settings = read_session(self._options, kind, model)
        self.conversation = Conversation(budget)
        self._responses: dict[str, Response] = {}
        self._transcribing: set[str] = set()
        self._buffer = AudioBuffer(self.settings.format)
        self._feed = VoiceFeed(self.settings.format, 0)
        self._turns: TurnDetector | None = None
        self._turn_item: str | None = None
        """The id that the speech being heard will have as an item."""
        self._turn_begin = 0
        """Position in the sound where that begins, of an item that is heard live."""
        self._num_untaken = 0
        """Bytes of sound that are with `work`."""
        self._receivers: dict[str, Callable[[Any], None]] = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve,
            "conversation.item.delete": self._delete,
            "response.create": self._respond,
            "response.cancel": self._cancel,
        }
        self._closing = False
        self._start_turns()

    @property
    def busy(self) -> bool:
        """Something is being made for the client."""
        return bool(self._responses or self._transcribing)

    @property
    def num_transcribing(self) -> int:
        return len(self._transcribing)

    @property
    def nbytes(self) -> int:
        """What the session holds of its budget."""
        return self._budget.used

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless what is held is what was taken from the budget, and one
        response at most writes to the conversation."""
        held = sum(item.nbytes for item in self.conversation) + self._buffer.nbytes
        held += self._num_untaken
        held += sum(response.charged for response in self._responses.values())
        assert self._budget.used == held, (self._budget.used, held)
        assert sum(each.in_conversation for each in self._responses.values()) <= 1
        assert all(item_id in self.conversation for item_id in self._transcribing)

    def begin(self) -> None:
        self._send(SessionEvent(type="session.created", session=self._shown()))
        if self.settings.kind == "realtime":
            shown = ConversationShown(id=self.conversation.id)
            self._send(ConversationCreated(conversation=shown))

    def close(self) -> None:
        """Tell the client that the session ends soon, and take no new work."""
        self._closing = True
        self.tell_error(_closing_error())

    def end(self) -> None:
        """Stop all work, and give back what is held."""
        for response in self._responses.values():
            self._work.stop_answer(response.id)
            self._budget.give(response.charged)
        for item_id in list(self._transcribing):
            self._work.stop_transcript(item_id)
        self._responses.clear()
        self._transcribing.clear()
        self._drop_buffer()
        self._budget.give(self._num_untaken)
        self._num_untaken = 0
        self.conversation.clear()

    def receive(self, message: bytes) -> None:
        """Take one event of the client's, as JSON. What is wrong with it is answered as an error
        event; the session goes on."""
        event_id = None
        try:
            _check_size(message)
            head = parse(message, EventHead)
            event_id = head.event_id
            kind = CLIENT_EVENTS.get(head.type)
            if kind is None:
                raise _unknown_event(head.type)
            if self._closing and head.type in NEW_WORK:
                raise _closing_error()
            self._receivers[head.type](parse(message, kind))
        except LookOnceError as error:
            self.tell_error(error, event_id)

    def tell_error(self, error: LookOnceError, event_id: str | None = None) -> None:
        body = error_body(error).error
        self._send(ErrorEvent(error=ErrorDetail.of(body, event_id)))

    # --- the session itself ---

    def _shown(self) -> Json:
        return self.settings.shown(self.id, self._model)

    def _update(self, event: SessionUpdate) -> None:
        check_supported(event.session)
        options = merged(self._options, event.session)
        settings = read_session(options, self.settings.kind, self._model)
        if self._hears_live and settings.transcription and settings.transcription.prompt:
            raise BadRequestError(
                "session.audio.input.transcription.prompt: this model takes no prompt beside the "
                "sound",
                param="session.audio.input.transcription.prompt",
            )
        if settings.kind != self.settings.kind and (len(self.conversation) or self.busy):
            raise BadRequestError(
                "session.type cannot change once there are items", param="session.type"
            )
        if settings.format != self.settings.format and (self._buffer.nbytes or self._heard_item):
            raise BadRequestError(
                "session.audio.input.format cannot change while the input buffer holds sound: "
                "commit or clear it first",
                param="session.audio.input.format",
            )
        deaf = self._turns is None and settings.turn_detection is not None
        turns_changed = deaf or (settings.format, settings.turn_detection) != (
            self.settings.format,
            self.settings.turn_detection,
        )
        if settings.kind != self.settings.kind and self._heard_item is not None:
            self._forget_heard()
        self._options, self.settings = options, settings
        if turns_changed:
            self._start_turns()
        self._send(SessionEvent(type="session.updated", session=self._shown()))

    def _start_turns(self) -> None:
        """Listen from here on; sound that is in the buffer stays there."""
        old, format = self._buffer, self.settings.format
        if old.format != format:
            begin = format.samples_of(old.format.milliseconds(old.end))
            self._buffer = AudioBuffer(format, begin)
        detection = self.settings.turn_detection
        self._turns = None if detection is None else TurnDetector(detection)
        if self._heard_item is None:
            self._turn_item = None
        self._feed = VoiceFeed(format, self._buffer.end)
        self._work.forget_voice()

    # --- sound ---

    @property
    def _is_live(self) -> bool:
        """The model hears sound as it comes, before it is committed."""
        return self._hears_live and self.settings.kind == "transcription"

    @property
    def _heard_item(self) -> str | None:
        """The id of the item that is being heard and is not committed."""
        return self._turn_item if self._is_live else None

    def _append(self, event: AudioAppend) -> None:
        if not self._hears:
            raise BadRequestError("the model takes no audio", param="audio")
        data = read_audio(event.audio, self.settings.format, "audio")
        if len(data) > MAX_APPEND_BYTES:
            raise BadRequestError(
                f"audio has {len(data)} bytes, {MAX_APPEND_BYTES} are allowed in one event",
                param="audio",
                code="audio_too_large",
            )
        added = self.settings.format.num_samples(len(data))
        held = self._buffer.end - self._buffer.begin
        if self._turns is None and not self._is_live and held + added > self._max_samples:
            raise BadRequestError(
                f"the input buffer holds {self._buffer.milliseconds / 1000:.1f} s of sound and may "
                f"hold {self._max_audio_seconds:g} s: commit or clear it",
                param="audio",
                code="input_audio_buffer_full",
            )
        if not self._budget.take(len(data)):
            raise full_error("the sound")
        self._buffer.append(data)
        if self._turns is not None:
            self._feed.push(data)
        elif self._is_live:
            self._hear_all()

    def _hear_all(self) -> None:
        """Let the model hear the buffer; an item that is too long is committed."""
        while self._buffer.nbytes:
            if self._turn_item is None:
                self._begin_turn()
            end = self._turn_begin + int(self._max_samples)
            self._hear_until(min(end, self._buffer.end))
            if self._buffer.begin >= end:
                self._end_heard()

    def _begin_turn(self) -> str:
        """The id of the item that begins with the buffer."""
        self._turn_item, self._turn_begin = new_id("item"), self._buffer.begin
        return self._turn_item

    def _hear_until(self, position: int) -> None:
        """Let the model hear what lies before."""
        clip = self._buffer.take_until(position)
        if clip.data and self._turn_item is not None:
            self._num_untaken += len(clip.data)
            self._work.hear(self._turn_item, clip)

    def sound_taken(self, nbytes: int) -> None:
        """Sound that `work` was given is not held any more."""
        nbytes = min(nbytes, self._num_untaken)  # none is after the end
        self._num_untaken -= nbytes
        self._budget.give(nbytes)

    def sound_paced(self, limit: int, remaining: int, seconds: float) -> None:
        """So many frames, of at most `limit`, may be sent now; `seconds` of sound wait."""
        rate = RateLimit(limit=limit, remaining=remaining, reset_seconds=seconds)
        self._send(RateLimitsUpdated(rate_limits=[rate]))

    def _end_heard(self) -> None:
        """Commit what was heard; the error event says why where the conversation is full."""
        item_id, self._turn_item = self._turn_item, None
        assert item_id is not None, "something was heard"
        try:
            self._commit_item(spoken_item(item_id), charged=0)
        except RequestError as error:
            self._work.forget_sound(item_id)
            self.tell_error(error)

    def _forget_heard(self) -> None:
        item_id, self._turn_item = self._turn_item, None
        if item_id is not None:
            self._work.forget_sound(item_id)

    @property
    def _max_samples(self) -> float:
        return self._max_audio_seconds * self.settings.format.rate

    def frames_to_hear(self) -> bytes:
        """Frames for voice detection, whose probabilities `heard` takes next; empty: none."""
        return b"" if self._turns is None else self._feed.next_frames()

    def voices_lost(self, error: LookOnceError) -> None:
        """Voices cannot be detected: the client commits by itself until it updates the session."""
        self._turns = None
        self._feed = VoiceFeed(self.settings.format, self._buffer.end)
        self.tell_error(
            RequestFailedError(f"{error.message}: commit the sound, or update the session")
        )

    def heard(self, probabilities: Sequence[float]) -> None:
        """One probability of speech for each frame of `frames_to_hear`."""
        for probability in probabilities:
            if self._turns is None:
                return
            self._hear(self._turns, probability)

    def _hear(self, turns: TurnDetector, probability: float) -> None:
        position = self._feed.heard()
        turn = turns.push(probability)
        detection = self.settings.turn_detection
        assert detection is not None, "turns are detected"
        format = self.settings.format
        if turn == "started":
            self._speech_started(position)
        if turn == "stopped":
            self._speech_stopped(position, respond=detection.create_response)
        elif turns.speaking:
            length = position - (self._turn_begin if self._is_live else self._buffer.begin)
            if self._is_live:
                self._hear_until(position)
            if length + format.samples_of(FRAME_MILLISECONDS) > self._max_samples:
                turns.reset()
                self._speech_stopped(position, respond=False)
        else:
            padding = format.samples_of(detection.prefix_padding_ms)
            self._budget.give(self._buffer.drop_before(position - padding))

    def _speech_started(self, position: int) -> None:
        detection = self.settings.turn_detection
        assert detection is not None, "turns are detected"
        format = self.settings.format
        frame = format.samples_of(FRAME_MILLISECONDS)
        begin = position - frame - format.samples_of(detection.prefix_padding_ms)
        item_id = self._heard_item
        if item_id is None:  # else it goes on: the client has changed how turns are told
            self._budget.give(self._buffer.drop_before(begin))
            item_id = self._begin_turn()
        self._send(
            SpeechStarted(audio_start_ms=format.milliseconds(self._buffer.begin), item_id=item_id)
        )
        if detection.interrupt_response:
            for response in [each for each in self._responses.values() if each.in_conversation]:
                self._stop(response, "turn_detected")

    def _speech_stopped(self, position: int, *, respond: bool) -> None:
        item_id = self._turn_item or new_id("item")
        end = min(position, self._buffer.end)
        format = self.settings.format
        self._send(SpeechStopped(audio_end_ms=format.milliseconds(end), item_id=item_id))
        if self._heard_item is not None:
            self._hear_until(end)
            self._end_heard()
            return
        self._turn_item = None
        try:
            self._commit_clip(self._buffer.take_until(end), item_id)
            if respond and self.settings.kind == "realtime":
                self._respond(ResponseCreate())
        except RequestError as error:
            self.tell_error(error)

    def _commit(self, _: object) -> None:
        begin = self._buffer.begin if self._heard_item is None else self._turn_begin
        held = self.settings.format.milliseconds(self._buffer.end - begin)
        if held < MIN_COMMIT_MS:
            raise BadRequestError(
                f"the input buffer holds {held} ms of sound; at least "
                f"{MIN_COMMIT_MS} ms are committed",
                code="input_audio_buffer_commit_empty",
            )
        if self._is_live:
            self._hear_all()
            if self._turn_item is not None:
                self._end_heard()
            if self._turns is not None:
                self._start_turns()
            return
        item_id, self._turn_item = self._turn_item or new_id("item"), None
        clip = self._buffer.take_until(self._buffer.end)
        if self._turns is not None:
            self._start_turns()
        self._commit_clip(clip, item_id)

    def _commit_clip(self, clip: Clip, item_id: str) -> None:
        """The clip's bytes are taken from the budget already."""
        try:
            self._commit_item(spoken_item(item_id, clip), charged=len(clip.data))
        except RequestError:
            self._budget.give(len(clip.data))
            raise

    def _commit_item(self, item: Item, *, charged: int) -> None:
        previous = self.conversation.last_id
        self.conversation.add(item, charged=charged)
        self._send(BufferCommitted(item_id=item.id, previous_item_id=previous))
        self._tell_item(item, previous)
        if self.settings.transcription is not None:
            self._transcribing.add(item.id)
            if item.clips:
                self._work.transcribe(item)
            else:
                self._work.end_sound(item.id)

    def _clear(self, _: object) -> None:
        self._drop_buffer()
        if self._heard_item is not None:
            self._forget_heard()
        if self._turns is not None:
            self._start_turns()
        self._send(BufferCleared())

    def _drop_buffer(self) -> None:
        self._budget.give(self._buffer.drop_before(self._buffer.end))

    # --- transcripts ---

    def transcript_text(
        self, item_id: str, text: str, logprobs: list[Logprob] | None = None
    ) -> None:
        self._send(TranscriptionDelta(item_id=item_id, delta=text, logprobs=logprobs))

    def transcript_done(
        self,
        item_id: str,
        text: str,
        usage: TranscriptionUsage,
        receipt: ReuseReceipt | None = None,
        logprobs: list[Logprob] | None = None,
    ) -> None:
        self._transcribing.discard(item_id)
        event = TranscriptionCompleted(
            item_id=item_id, transcript=text, usage=usage, logprobs=logprobs
        )
        if receipt is not None and self.settings.answer.reuse_receipt:
            event.reuse_receipt = receipt
        if item_id in self.conversation:
            item = self.conversation.get(item_id)
            item.shown.content[0].transcript = text
            self._forget_sound(item)
        self._send(event)

    def transcript_failed(self, item_id: str, error: Exception) -> None:
        self._transcribing.discard(item_id)
        if item_id in self.conversation:
            self._forget_sound(self.conversation.get(item_id))
        self._tell_unavailable(error)
        self._send(TranscriptionFailed(item_id=item_id, error=error_body(error).error))

    def _forget_sound(self, item: Item) -> None:
        """A transcription session sends transcripts and keeps no sound, and the newest items."""
        if self.settings.kind == "transcription":
            item.clips.clear()
            self.conversation.resized(item)
            done = len(self.conversation) - len(self._transcribing)
            if done > KEPT_TRANSCRIPTS:
                self._forget_oldest(done - KEPT_TRANSCRIPTS)
        else:
            self.conversation.resized(item)

    def _forget_oldest(self, count: int) -> None:
        old = [each.id for each in self.conversation if each.id not in self._transcribing]
        for item_id in old[:count]:
            self.conversation.remove(item_id)

    # --- items ---

    def _create_item(self, event: ItemCreate) -> None:
        self._require_conversation("conversation.item.create")
        item = read_item(event.item, self.settings.format)
        if item.clips and not self._hears:
            raise BadRequestError("the model takes no audio", param="item.content")
        previous = self.conversation.add(item, event.previous_item_id)
        self._tell_item(item, previous)

    def _tell_item(self, item: Item, previous: str | None) -> None:
        for name in ("created", "added", "done"):
            self._send(
                ItemEvent(
                    type=f"conversation.item.{name}", previous_item_id=previous, item=item.copy()
                )
            )

    def _retrieve(self, event: ItemNamed) -> None:
        self._send(ItemRetrieved(item=self.conversation.get(event.item_id).with_media()))

    def _delete(self, event: ItemNamed) -> None:
        self.conversation.remove(event.item_id)
        if event.item_id in self._transcribing:
            self._transcribing.discard(event.item_id)
            self._work.stop_transcript(event.item_id)
        self._send(ItemDeleted(item_id=event.item_id))

    def _require_conversation(self, what: str) -> None:
        if self.settings.kind == "transcription":
            raise BadRequestError(
                f"{what}: a transcription session has no conversation; connect with a model, or "
                "update session.type to realtime",
                code="wrong_session_type",
            )

    # --- responses ---

    def _respond(self, event: ResponseCreate) -> None:
        self._require_conversation("response.create")
        options, settings = read_response(event.response, self.settings.answer)
        in_conversation = options.conversation != "none"
        if in_conversation and any(each.in_conversation for each in self._responses.values()):
            raise BadRequestError(
                "the conversation has an active response; wait until it is done, or cancel it",
                code="conversation_already_has_active_response",
            )
        if len(self._responses) >= MAX_RESPONSES:
            raise BadRequestError(
                f"{MAX_RESPONSES} responses are being made; wait until one is done",
                code="too_many_responses",
            )
        items, charged = self._answered(options)
        if not items and not settings.instructions:
            raise BadRequestError(
                "there is nothing to answer: create an item first", code="conversation_empty"
            )
        if not self._budget.take(charged):
            raise full_error("response.input")
        response = Response(
            id=new_id("resp"),
            charged=charged,
            settings=settings,
            items=items,
            in_conversation=in_conversation,
            metadata=options.metadata,
        )
        self._responses[response.id] = response
        self._send(ResponseEvent(type="response.created", response=self._object(response)))
        self._work.answer(response)

    def _answered(self, options: ResponseOptions) -> tuple[tuple[Item, ...], int]:
        """The items of the conversation, or those of `input`, and the bytes of the latter."""
        if options.input is None:
            return tuple(self.conversation), 0
        found, nbytes = [], 0
        for number, sent in enumerate(options.input):
            where = f"response.input[{number}]"
            if sent.get("type") == "item_reference":
                found.append(self.conversation.get(str(sent.get("id")), f"{where}.id"))
                continue
            try:
                item = msgspec.convert(sent, ConversationItem)
            except msgspec.ValidationError as error:
                raise BadRequestError(f"{where}: {error}", param=where) from None
            found.append(read_item(item, self.settings.format, where))
            nbytes += found[-1].nbytes
        return tuple(found), nbytes

    def _object(self, response: Response, **fields: Any) -> ResponseObject:
        return ResponseObject(
            id=response.id,
            conversation_id=self.conversation.id if response.in_conversation else None,
            max_output_tokens=response.settings.limit_shown,
            metadata=response.metadata,
            **fields,
        )

    def answer_text(self, response_id: str, text: str) -> None:
        response = self._responses[response_id]
        self._open_item(response)
        if not text:
            return
        response.text.append(text)
        self._send(TextDelta(response_id=response.id, item_id=response.item.id, delta=text))

    def _open_item(self, response: Response) -> None:
        if response.begun:
            return
        response.begun = True
        item = response.item
        self._send(
            OutputItemEvent(
                type="response.output_item.added", response_id=response.id, item=item.copy()
            )
        )
        if response.in_conversation:
            try:
                previous = self.conversation.add(item)
            except RequestError as error:
                self.tell_error(error)  # it is answered, and not kept
            else:
                for name in ("created", "added"):
                    self._send(
                        ItemEvent(
                            type=f"conversation.item.{name}",
                            previous_item_id=previous,
                            item=item.copy(),
                        )
                    )
        self._send(
            PartEvent(
                type="response.content_part.added",
                response_id=response.id,
                item_id=item.id,
                part=TextPart(),
            )
        )

    def answer_ended(self, response_id: str, reason: str, report: AnswerReport) -> None:
        """`reason` is the engine's finish reason."""
        response = self._responses[response_id]
        if reason == "length":
            self._finish(
                response,
                "incomplete",
                report,
                StatusDetails(type="incomplete", reason="max_output_tokens"),
            )
        elif reason == "abort":
            self._finish(
                response,
                "cancelled",
                report,
                StatusDetails(type="cancelled", reason="client_cancelled"),
            )
        else:
            self._finish(response, "completed", report, None)

    def answer_failed(self, response_id: str, error: Exception, report: AnswerReport) -> None:
        response = self._responses[response_id]
        self._tell_unavailable(error)
        body = error_body(error).error
        self._finish(response, "failed", report, StatusDetails(type="failed", error=body))

    def _tell_unavailable(self, error: Exception) -> None:
        """An engine that is gone concerns the whole session."""
        if isinstance(error, UnavailableError):
            self.tell_error(error)

    def _cancel(self, event: ResponseCancel) -> None:
        asked = event.response_id
        found = (
            [self._responses[asked]]
            if asked is not None and asked in self._responses
            else [
                each for each in self._responses.values() if asked is None and each.in_conversation
            ]
        )
        if not found:
            raise BadRequestError(
                "there is no such response that could be cancelled",
                param=None if asked is None else "response_id",
                code="response_cancel_not_active",
            )
        for response in found:
            self._stop(response, "client_cancelled")

    def _stop(self, response: Response, reason: str) -> None:
        report = self._work.stop_answer(response.id)
        self._finish(response, "cancelled", report, StatusDetails(type="cancelled", reason=reason))

    def _finish(
        self, response: Response, status: Any, report: AnswerReport, details: StatusDetails | None
    ) -> None:
        """Close what is open, and send `response.done`."""
        del self._responses[response.id]
        self._budget.give(response.charged)
        if status == "completed":
            self._open_item(response)  # an answer without a word is a message without text
        text, item = "".join(response.text), response.item
        if response.begun:
            item.shown.status = "completed" if status == "completed" else "incomplete"
            item.shown.content = [ContentPart(type="output_text", text=text)]
            self._close_item(response, text)
        done = self._object(
            response,
            status=status,
            status_details=details,
            output=[item.copy()] if response.begun else [],
            usage=report.usage,
        )
        if report.receipt is not None and response.settings.reuse_receipt:
            done.reuse_receipt = report.receipt
        self._send(ResponseEvent(type="response.done", response=done))

    def _close_item(self, response: Response, text: str) -> None:
        item = response.item
        self._send(TextDone(response_id=response.id, item_id=item.id, text=text))
        self._send(
            PartEvent(
                type="response.content_part.done",
                response_id=response.id,
                item_id=item.id,
                part=TextPart(text=text),
            )
        )
        self._send(
            OutputItemEvent(
                type="response.output_item.done", response_id=response.id, item=item.copy()
            )
        )
        if item.id in self.conversation:
            self.conversation.resized(item)
            self._send(
                ItemEvent(
                    type="conversation.item.done",
                    previous_item_id=self.conversation.before(item.id),
                    item=item.copy(),
                )
            )


def _check_size(message: bytes) -> None:
    """Raises `TooLargeError` for JSON that would take long to decode; base64 has no commas."""
    if len(message) < FEW_BYTES:
        return
    if sum(message.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise TooLargeError(f"the event has more than {MAX_VALUES} commas and brackets")


def _closing_error() -> DrainingError:
    return DrainingError("the server shuts down: this session ends; open another elsewhere")


def _unknown_event(name: str) -> BadRequestError:
    if name in SPEECH_EVENTS:
        return BadRequestError(
            f"{name}: this server answers in text alone, no speech",
            param="type",
            code="audio_output_not_supported",
        )
    known = ", ".join(CLIENT_EVENTS)
    return BadRequestError(
        f"type: {name[:100]!r} is not an event of this server; there are {known}",
        param="type",
        code="unknown_event",
    )
