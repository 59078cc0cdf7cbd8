"""A session without sockets: every sequence of client events gets the right server events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from openai._models import construct_type
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from lookonce.errors import EngineDeadError, RequestFailedError
from lookonce.server.routes.realtime.events import (
    TranscriptionTokenDetails,
    TranscriptionUsage,
)
from lookonce.server.routes.realtime.session import AnswerReport
from tests.support.server.realtime import as_text
from tests.support.server.realtime_session import LIMIT, MAX_SECONDS, Played, names

USAGE = TranscriptionUsage(
    input_tokens=1,
    output_tokens=1,
    total_tokens=2,
    input_token_details=TranscriptionTokenDetails(audio_tokens=1, text_tokens=0),
)
KNOWN_EVENTS = TypeAdapter(RealtimeServerEvent)
IMAGE = "data:image/png;base64,AAAA"


# --- options ------------------------------------------------------------------------------------


def test_an_update_changes_what_it_names_and_nothing_else():
    played = Played()
    (updated,) = played.send(
        "session.update",
        session={
            "type": "realtime",
            "instructions": "Short.",
            "audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 0.7}}},
        },
    )
    (updated,) = played.send(
        "session.update",
        session={"audio": {"input": {"turn_detection": {"silence_duration_ms": 320}}}},
    )
    turns = updated["session"]["audio"]["input"]["turn_detection"]
    assert (turns["threshold"], turns["silence_duration_ms"]) == (0.7, 320)
    assert updated["session"]["instructions"] == "Short."
    (off,) = played.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
    assert off["session"]["audio"]["input"]["turn_detection"] is None


REFUSED = {
    "session.type": {"type": "song"},
    "session.output_modalities": {"output_modalities": ["audio"]},
    "session.tools": {"tools": [{"type": "function", "name": "f"}]},
    "session.max_output_tokens": {"max_output_tokens": 0},
    "session.include[0]": {"include": ["x"]},
    "session.model": {"model": "gpt-realtime"},
    "session.modalities": {"modalities": ["text"]},
    "session.input_audio_format": {"input_audio_format": "pcm16"},
    "session.audio.input.format": {"audio": {"input": {"format": {"type": "audio/opus"}}}},
    "session.audio.input.turn_detection.type": {
        "audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}
    },
    "session.audio.input.turn_detection.threshold": {
        "audio": {"input": {"turn_detection": {"threshold": 2}}}
    },
    "session.audio.input.transcription.model": {
        "audio": {"input": {"transcription": {"model": "whisper-1"}}}
    },
    "session.audio.input.transcription.keywords": {
        "audio": {"input": {"transcription": {"keywords": ["x"]}}}
    },
    "session.audio.input.noise_reduction": {
        "audio": {"input": {"noise_reduction": {"type": "near_field"}}}
    },
    "session.temperature": {"temperature": "hot"},
}


@pytest.mark.parametrize("param", REFUSED)
def test_what_is_refused_is_named_and_changes_nothing(param):
    played = Played()
    (error,) = played.send("session.update", session={**REFUSED[param], "instructions": "Changed"})
    assert (error["type"], error["error"]["param"]) == ("error", param), error
    assert error["error"]["event_id"] == "mine"
    assert param.split("[")[0] in error["error"]["message"]
    (updated,) = played.send("session.update", session={})
    assert updated["session"]["instructions"] == ""


def test_a_format_cannot_change_under_sound():
    played = Played().manual()
    played.append(9_600)
    pcmu = {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}
    (error,) = played.send("session.update", session=pcmu)
    assert error["error"]["param"] == "session.audio.input.format"
    played.send("input_audio_buffer.clear")
    (updated,) = played.send("session.update", session=pcmu)
    assert updated["session"]["audio"]["input"]["format"] == {"type": "audio/pcmu"}


# --- sound --------------------------------------------------------------------------------------


def test_sound_that_is_no_base64_or_no_whole_sample_is_refused():
    played = Played().manual()
    for wrong in ("%%%", as_text(b"abc")):
        (error,) = played.send("input_audio_buffer.append", audio=wrong)
        assert error["error"]["code"] == "invalid_audio"


def test_the_buffer_is_full_at_the_longest_sound():
    played = Played().manual()
    assert played.append(int(MAX_SECONDS * 48_000)) == []
    (error,) = played.append(4_800)
    assert error["error"]["code"] == "input_audio_buffer_full"
    assert names(played.send("input_audio_buffer.commit"))[0] == "input_audio_buffer.committed"


def test_less_than_a_millisecond_too_much_is_too_much():
    played = Played().manual()
    assert played.append(int(MAX_SECONDS * 48_000)) == []
    (error,) = played.append(2)
    assert error["error"]["code"] == "input_audio_buffer_full"


def test_silence_is_forgotten_as_it_comes():
    played = Played()
    for _ in range(100):
        played.append(48_000, [0.0])
    assert played.session.nbytes <= 48_000 // 2


def test_speech_without_a_pause_is_cut_at_the_longest_sound():
    played = Played()
    for _ in range(5):
        played.append(48_000, [1.0])
    assert names(played.sent).count("input_audio_buffer.committed") == 2
    assert played.session.nbytes <= LIMIT


def test_what_is_cut_is_not_longer_than_the_longest_sound():
    played = Played("transcription")
    played.append(48_000, [0.0])
    for _ in range(4):
        played.append(48_000, [1.0])
    lengths = [len(item.clips[0].data) for item in played.work.transcripts.values()]
    assert len(lengths) == 2
    assert all(1.9 * 48_000 < length <= MAX_SECONDS * 48_000 for length in lengths)


def test_a_deleted_item_is_not_transcribed_any_more():
    played = Played("transcription").manual()
    played.append(48_000)
    item_id = played.send("input_audio_buffer.commit")[0]["item_id"]
    assert item_id in played.work.transcripts
    assert names(played.send("conversation.item.delete", item_id=item_id)) == [
        "conversation.item.deleted"
    ]
    assert played.work.transcripts == {}
    assert not played.session.busy


def test_a_transcription_session_keeps_only_its_newest_transcripts():
    played = Played("transcription").manual()
    for _ in range(200):
        played.append(48_000)
        item_id = played.send("input_audio_buffer.commit")[0]["item_id"]
        played.session.transcript_done(item_id, "two words", USAGE)
        del played.work.transcripts[item_id]
    assert len(played.session.conversation) == 64
    assert played.session.nbytes == 64 * len("two words")


def test_items_are_put_where_they_are_asked_for():
    played = Played()
    for name, after in (("b", None), ("a", "root"), ("d", None), ("c", "b")):
        content = [{"type": "input_text", "text": name}]
        item = {"type": "message", "role": "user", "id": name, "content": content}
        played.send("conversation.item.create", item=item, previous_item_id=after)
    assert [item.id for item in played.session.conversation] == list("abcd")


# --- any sequence -------------------------------------------------------------------------------


class AnySession(RuleBasedStateMachine):
    """Checks the events of any sequence against a small model of the session."""

    @initialize(kind=st.sampled_from(["realtime", "transcription"]), live=st.booleans())
    def start(self, kind, live):
        self.played = Played(kind, hears_live=live)
        self.kind = kind
        self.items, self.done = set(), set()
        self.read = 0

    def expect(self, answered, *expected):
        """One error, or events of these types in this order."""
        if names(answered) == ["error"]:
            assert answered[0]["error"]["event_id"] == "mine"
            return False
        assert names(answered) == list(expected), names(answered)
        return True

    @rule(text=st.text(max_size=20), after=st.sampled_from([None, "root", "nobody"]))
    def create_text(self, text, after):
        item = {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": text},
                {"type": "input_image", "image_url": IMAGE},
            ],
        }
        answered = self.played.send("conversation.item.create", item=item, previous_item_id=after)
        created = self.expect(
            answered, *[f"conversation.item.{name}" for name in ("created", "added", "done")]
        )
        assert created == (self.kind == "realtime" and after != "nobody") or self.full()
        if created:
            self.items.add(answered[0]["item"]["id"])

    def full(self):
        return self.played.session.nbytes > LIMIT // 2

    @rule(
        nbytes=st.integers(0, 60_000).map(lambda n: 2 * n),
        voices=st.lists(st.floats(0, 1), min_size=1, max_size=30),
    )
    def append(self, nbytes, voices):
        self.played.append(nbytes, voices)

    @rule()
    def take_sound(self):
        self.played.take_sound()

    @rule()
    def commit(self):
        self.played.send("input_audio_buffer.commit")

    @rule()
    def clear(self):
        assert self.expect(
            self.played.send("input_audio_buffer.clear"), "input_audio_buffer.cleared"
        )

    @rule(on=st.booleans())
    def turns(self, on):
        detection = {"type": "server_vad", "silence_duration_ms": 64} if on else None
        session = {"audio": {"input": {"turn_detection": detection}}}
        assert self.expect(self.played.send("session.update", session=session), "session.updated")

    @rule(data=st.data())
    def retrieve_or_delete(self, data):
        known = [item.id for item in self.played.session.conversation]
        item_id = data.draw(st.sampled_from([*known, "nobody"]))
        what = data.draw(st.sampled_from(["retrieve", "delete"]))
        answered = self.played.send(f"conversation.item.{what}", item_id=item_id)
        assert self.expect(answered, f"conversation.item.{what}d") == (item_id != "nobody")

    @rule(conversation=st.sampled_from([None, "none"]))
    def respond(self, conversation):
        running = len(self.played.work.answers)
        answered = self.played.send("response.create", response={"conversation": conversation})
        if self.expect(answered, "response.created"):
            assert len(self.played.work.answers) == running + 1

    @rule()
    def cancel(self):
        self.played.send("response.cancel")

    @rule(data=st.data(), text=st.text(max_size=10))
    def answer(self, data, text):
        if not self.played.work.answers:
            return
        response_id = data.draw(st.sampled_from(list(self.played.work.answers)))
        self.played.session.answer_text(response_id, text)

    @rule(data=st.data(), how=st.sampled_from(["stop", "length", "abort", "dead", "broken"]))
    def end_answer(self, data, how):
        if not self.played.work.answers:
            return
        response_id = data.draw(st.sampled_from(list(self.played.work.answers)))
        del self.played.work.answers[response_id]
        if how in ("dead", "broken"):
            error = EngineDeadError("gone") if how == "dead" else RequestFailedError("broken")
            self.played.session.answer_failed(response_id, error, AnswerReport())
        else:
            self.played.session.answer_ended(response_id, how, AnswerReport())
        assert self.played.sent[-1]["type"] == "response.done"
        assert self.played.sent[-1]["response"]["id"] == response_id

    @rule(data=st.data(), fails=st.booleans())
    def end_transcript(self, data, fails):
        if not self.played.work.transcripts:
            return
        item_id = data.draw(st.sampled_from(list(self.played.work.transcripts)))
        del self.played.work.transcripts[item_id]
        if fails:
            self.played.session.transcript_failed(item_id, RequestFailedError("broken"))
        else:
            self.played.session.transcript_done(item_id, "words", USAGE)
        assert self.played.sent[-1]["item_id"] == item_id

    @rule(junk=st.binary(max_size=30) | st.sampled_from([b"{}", b"[]", b'{"type":"x"}']))
    def junk(self, junk):
        before = len(self.played.sent)
        self.played.session.receive(junk)
        assert names(self.played.sent[before:]) == ["error"]

    @invariant()
    def memory_is_bounded_and_counted(self):
        if hasattr(self, "played"):
            self.played.session.check_integrity()
            assert self.played.session.nbytes == self.played.total.used
            assert self.played.session.nbytes <= LIMIT + 1000  # answers, which the context bounds

    @invariant()
    def what_runs_is_what_was_begun(self):
        if hasattr(self, "played"):
            work = self.played.work
            assert self.played.session.busy == bool(work.answers or work.transcripts)
            assert self.played.session.num_transcribing == len(work.transcripts)

    @invariant()
    def openai_s_client_knows_every_event(self):
        if not hasattr(self, "played"):
            return
        new, self.read = self.played.sent[self.read :], len(self.played.sent)
        for event in new:
            found = construct_type(type_=RealtimeServerEvent, value=event)
            assert found.type == event["type"]
            if event["type"] not in ("session.created", "session.updated"):
                KNOWN_EVENTS.validate_python(event)

    def teardown(self):
        if hasattr(self, "played"):
            self.played.session.end()
            assert self.played.total.used == 0
            assert not self.played.work.answers
            assert not self.played.work.transcripts


AnySession.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestAnySession = AnySession.TestCase


# --- models that hear live ----------------------------------------------------------------------


def live(**how):
    return Played("transcription", hears_live=True, **how).manual()


def test_a_prompt_is_refused_where_the_model_takes_sound_alone():
    played = live()
    where = "session.audio.input.transcription.prompt"
    change = {"audio": {"input": {"transcription": {"prompt": "names"}}}}
    (told,) = played.send("session.update", session=change)
    assert (told["type"], told["error"]["param"]) == ("error", where)
    assert played.session.settings.transcription.prompt == ""
    assert played.append(4_800) == []


def test_sound_is_heard_as_it_comes_and_the_commit_names_what_was_heard():
    played = live()
    assert played.append(4_800) == []
    assert played.append(4_800) == []
    ((item_id, clips),) = played.work.heard.items()
    assert [len(clip.data) for clip in clips] == [4_800, 4_800]
    assert played.session.nbytes == 9_600
    played.take_sound()
    played.session.check_integrity()
    assert played.session.nbytes == 0
    told = played.send("input_audio_buffer.commit")
    assert told[0]["type"] == "input_audio_buffer.committed"
    assert told[0]["item_id"] == item_id
    assert list(played.work.transcripts) == [item_id]
    played.append(4_800)
    assert item_id not in played.work.heard, "the next sound is another item"


def test_too_little_live_sound_is_not_committed_and_stays():
    played = live()
    played.append(2_400)
    (error,) = played.send("input_audio_buffer.commit")
    assert error["error"]["code"] == "input_audio_buffer_commit_empty"
    assert "50 ms" in error["error"]["message"]
    played.append(2_400)
    assert len(played.work.heard) == 1
    assert names(played.send("input_audio_buffer.commit"))[0] == "input_audio_buffer.committed"


def test_what_is_cleared_is_forgotten_by_the_model():
    played = live()
    played.append(4_800)
    (item_id,) = played.work.heard
    played.take_sound()
    played.session.check_integrity()
    assert names(played.send("input_audio_buffer.clear")) == ["input_audio_buffer.cleared"]
    assert played.work.forgotten == [item_id]
    played.send("input_audio_buffer.clear")
    assert played.work.forgotten == [item_id]


def test_live_sound_without_a_commit_is_committed_when_it_is_long():
    played = live()
    bytes_of_limit = int(MAX_SECONDS * 48_000)
    before = len(played.sent)
    played.append(bytes_of_limit - 4_800)
    played.append(9_600)
    committed = [
        event["item_id"]
        for event in played.sent[before:]
        if event["type"] == "input_audio_buffer.committed"
    ]
    (first,) = committed
    assert list(played.work.transcripts) == [first]
    ((second, clips),) = played.work.heard.items()
    assert second != first
    assert [len(clip.data) for clip in clips] == [4_800]


def test_a_turn_is_heard_from_its_padding_on():
    played = Played("transcription", hears_live=True)
    played.append(48_000, [0.0])
    assert played.work.heard == {}
    played.append(24_000, [0.9])
    (item_id,) = played.work.heard
    assert played.sent[-1]["type"] == "input_audio_buffer.speech_started"
    assert played.sent[-1]["item_id"] == item_id
    heard = sum(len(clip.data) for clip in played.work.heard[item_id])
    assert 24_000 < heard < 24_000 + 48 * 400, "the padding and the speech"
    played.append(48_000, [0.0])
    assert list(played.work.transcripts) == [item_id]
    assert "input_audio_buffer.speech_stopped" in names(played.sent)


def test_a_session_goes_on_without_voice_detection_until_it_is_updated():
    played = Played("transcription")
    played.session.voices_lost(RequestFailedError("voices cannot be detected now"))
    assert "commit the sound" in played.sent[-1]["error"]["message"]
    assert played.append(9_600, [0.9]) == []
    assert names(played.send("input_audio_buffer.commit"))[0] == "input_audio_buffer.committed"
    played.send("session.update", session={"audio": {"input": {}}})
    before = len(played.sent)
    played.append(24_000, [0.9])
    assert names(played.sent[before:]) == ["input_audio_buffer.speech_started"]
