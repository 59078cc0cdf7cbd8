"""nano-ear writes down what clips of speech say: files, in this process, and, in `make soak`, live
turns on a real server."""

from __future__ import annotations

import asyncio
import json

import pytest

from lookonce.config import NANO_EAR, NANO_EAR_FOLDER
from tests.support.live_server import LiveServer
from tests.support.nodes import engine_node, run
from tests.support.server.realtime import as_text, silence
from tests.support.server.realtime import until as events_until
from tests.support.speech_clips import speech_clips

COMPLETED = "conversation.item.input_audio_transcription.completed"
CLIPS = speech_clips()
RATE = 24_000


def test_a_clip_is_written_down_word_for_word():
    async def scenario():
        async with engine_node(NANO_EAR_FOLDER, served_model_name=NANO_EAR) as node:
            for clip in CLIPS:
                answer = await node.http.post(
                    "/v1/audio/transcriptions",
                    files={"file": (clip.file.name, clip.file.read_bytes())},
                    data={"model": NANO_EAR},
                )
                assert tuple(answer.json()["text"].split()) == clip.words

    run(scenario())


@pytest.mark.soak
def test_a_live_turn_is_written_down():
    with LiveServer(NANO_EAR) as ear:
        write_down_a_live_turn(ear)


def write_down_a_live_turn(ear: LiveServer) -> None:
    clip = CLIPS[0]
    spoken = (clip.wave(RATE) * 32_767).astype("<i2")

    async def scenario():
        intent = {"intent": "transcription"}
        async with ear.async_client().realtime.connect(extra_query=intent) as connection:
            sound = {"format": {"type": "audio/pcm", "rate": RATE}}
            turns = {**sound, "turn_detection": {"type": "server_vad"}}
            await connection.session.update(
                session={"type": "transcription", "audio": {"input": turns}}
            )
            for part in (silence(0.5), spoken, silence(1.0)):
                await connection.input_audio_buffer.append(audio=as_text(part))
            done = (await events_until(connection, COMPLETED))[-1]
            assert done.type == COMPLETED, done
            assert tuple(done.transcript.split()) == clip.words

    asyncio.run(scenario())


def test_what_ships_is_small():
    assert sum(file.stat().st_size for file in NANO_EAR_FOLDER.iterdir()) <= 12_000_000
    assert json.loads((NANO_EAR_FOLDER / "config.json").read_text())["model_type"] == (
        "voxtral_realtime"
    )
    assert sum(clip.file.stat().st_size for clip in CLIPS) <= 300_000
