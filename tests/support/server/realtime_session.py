"""A realtime session without sockets, whose work the test does."""

from __future__ import annotations

import json

import msgspec

from lookonce.server.realtime_sessions import ByteBudget
from lookonce.server.routes.realtime.session import AnswerReport, RealtimeSession
from tests.support.server.realtime import as_text

MAX_SECONDS = 2.0
LIMIT = 400_000
"""Bytes that the session may hold."""
FRAME = 1024


class Work:
    """Keeps what was begun; the test ends it."""

    def __init__(self):
        self.answers, self.transcripts = {}, {}
        self.heard, self.forgotten = {}, []
        self.untaken = []
        """Bytes of sound that is with the work."""

    def answer(self, response):
        self.answers[response.id] = response

    def stop_answer(self, response_id):
        del self.answers[response_id]
        return AnswerReport()

    def transcribe(self, item):
        self.transcripts[item.id] = item

    def stop_transcript(self, item_id):
        self.transcripts.pop(item_id, None)

    def hear(self, item_id, clip):
        self.heard.setdefault(item_id, []).append(clip)
        self.untaken.append(len(clip.data))

    def end_sound(self, item_id):
        self.transcripts[item_id] = self.heard.pop(item_id)

    def forget_sound(self, item_id):
        self.forgotten.append(item_id)
        self.heard.pop(item_id)

    def forget_voice(self):
        pass


class Played:
    """A session, what it sent, and its work."""

    def __init__(self, kind="realtime", limit=LIMIT, *, hears_live=False):
        self.sent, self.work = [], Work()
        self.total = ByteBudget(10 * LIMIT)
        self.session = RealtimeSession(
            kind=kind,
            model="nano",
            hears=True,
            hears_live=hears_live,
            budget=ByteBudget(limit, self.total),
            max_audio_seconds=MAX_SECONDS,
            send=lambda event: self.sent.append(json.loads(msgspec.json.encode(event))),
            work=self.work,
        )
        self.session.begin()

    def send(self, name, **fields):
        """The events that are answered at once."""
        before = len(self.sent)
        event = {"type": name, "event_id": "mine", **fields}
        self.session.receive(json.dumps(event).encode())
        return self.sent[before:]

    def take_sound(self):
        """The model has taken all sound that it was given."""
        while self.work.untaken:
            self.session.sound_taken(self.work.untaken.pop())

    def append(self, nbytes, voices=()):
        """Append sound; its frames are heard with these probabilities, the last for the rest."""
        answered = self.send("input_audio_buffer.append", audio=as_text(bytes(nbytes)))
        voices = list(voices) or [0.0]
        while frames := self.session.frames_to_hear():
            count = len(frames) // FRAME
            self.session.heard([voices.pop(0) if voices[1:] else voices[0] for _ in range(count)])
        return answered

    def manual(self):
        self.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
        return self


def names(events):
    return [event["type"] for event in events]
