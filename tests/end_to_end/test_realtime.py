"""`/v1/realtime` of a real server with nano, by OpenAI's clients, synchronous and asynchronous."""

from __future__ import annotations

import asyncio

import numpy as np

from tests.support.drawing import SAMPLE_RATE, beeps, image_part, picture
from tests.support.server.realtime import as_text, silence, speech, types
from tests.support.server.realtime import until as events_until

COMPLETED = "conversation.item.input_audio_transcription.completed"
MANUAL = {"turn_detection": None, "format": {"type": "audio/pcm", "rate": SAMPLE_RATE}}
PICTURE = image_part(picture(("red", "circle"), ("blue", "square")))["image_url"]["url"]


def pcm(sound):
    return (sound * 32_767).astype("<i2")


def user(*content):
    return {"type": "message", "role": "user", "content": list(content)}


def text(words):
    return {"type": "input_text", "text": words}


def collected(connection, *kinds):
    """The events up to the first of these types, from a synchronous connection."""
    found = []
    while not found or found[-1].type not in (*kinds, "error"):
        found.append(connection.recv())
    return found


def test_the_synchronous_client_asks_about_a_picture_and_a_sound(server):
    with server.client() as client, client.realtime.connect(model="nano") as connection:
        collected(connection, "conversation.created")
        connection.session.update(
            session={"type": "realtime", "output_modalities": ["text"], "audio": {"input": MANUAL}}
        )
        collected(connection, "session.updated")
        shown = {"type": "input_image", "image_url": PICTURE}
        heard = {"type": "input_audio", "audio": as_text(pcm(beeps(3)))}
        for content, expected in (
            ([shown, text("Where is the red circle?")], "left"),
            ([heard, text("How many beeps do you hear?")], "3"),
        ):
            connection.conversation.item.create(item=user(*content))
            connection.response.create(
                response={
                    "max_output_tokens": 30,
                    "conversation": "none" if expected == "3" else "auto",
                    "input": [user(*content)],
                    "reuse_receipt": True,
                    "temperature": 0,
                }
            )
            done = collected(connection, "response.done")[-1].response
            assert done.status == "completed", done
            assert expected in done.output[0].content[0].text
            assert len(done.reuse_receipt["items"]) == 1
            details = done.usage.input_token_details
            assert bool(details.image_tokens) == (expected == "left")
            assert bool(details.audio_tokens) == (expected == "3")


def test_the_second_answer_computes_what_is_new(server):
    async def scenario():
        async with server.async_client().realtime.connect() as connection:
            await events_until(connection, "conversation.created")
            cached = []
            for words in ("What is in the picture? " * 8, "Where is the red circle?"):
                parts = [{"type": "input_image", "image_url": PICTURE}] if not cached else []
                await connection.conversation.item.create(item=user(*parts, text(words)))
                await connection.response.create(response={"max_output_tokens": 8})
                done = (await events_until(connection, "response.done"))[-1].response
                cached.append(done.usage.input_token_details.cached_tokens)
                long = done.usage.input_tokens
            assert cached[1] > long / 2

    asyncio.run(scenario())


def test_sound_is_transcribed_in_every_format_and_in_turns(server):
    formats = {
        ("audio/pcm", 24_000): speech(0.6).tobytes(),
        ("audio/pcm", 16_000): speech(0.6, 16_000).tobytes(),
        ("audio/pcmu", None): bytes(np.random.default_rng(0).integers(0, 256, 4800, np.uint8)),
        ("audio/pcma", None): bytes(np.random.default_rng(1).integers(0, 256, 4800, np.uint8)),
    }

    async def scenario():
        intent = {"intent": "transcription"}
        async with server.async_client().realtime.connect(extra_query=intent) as connection:
            for (kind, rate), sound in formats.items():
                format = {"type": kind} if rate is None else {"type": kind, "rate": rate}
                session = {
                    "type": "transcription",
                    "audio": {"input": {**MANUAL, "format": format}},
                }
                await connection.session.update(session=session)
                await connection.input_audio_buffer.append(audio=as_text(sound))
                await connection.input_audio_buffer.commit()
                done = (await events_until(connection, COMPLETED))[-1]
                assert done.type == COMPLETED, done
                assert done.usage.input_token_details.audio_tokens > 0
            format = {"type": "audio/pcm", "rate": 24_000}
            turns = {"format": format, "turn_detection": {"type": "server_vad"}}
            session = {"type": "transcription", "audio": {"input": turns}}
            await connection.session.update(session=session)
            for part in (silence(0.5), speech(0.7), silence(0.8)):
                await connection.input_audio_buffer.append(audio=as_text(part))
            told = types(await events_until(connection, COMPLETED))
            for name in ("speech_started", "speech_stopped", "committed"):
                assert told.count(f"input_audio_buffer.{name}") == 1

    asyncio.run(scenario())


def test_a_picture_that_is_none_fails_its_response_alone(server):
    async def scenario():
        async with server.async_client().realtime.connect() as connection:
            await events_until(connection, "conversation.created")
            broken = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
            await connection.conversation.item.create(item=user(broken, text("What?")))
            item = (await events_until(connection, "conversation.item.done"))[-1].item
            await connection.response.create()
            failed = (await events_until(connection, "response.done"))[-1].response
            assert failed.status == "failed"
            assert f"{item.id}.content[0]" in failed.status_details.error.message
            await connection.conversation.item.delete(item_id=item.id)
            await connection.conversation.item.create(item=user(text("What shape is red?")))
            await connection.response.create(response={"max_output_tokens": 4})
            done = (await events_until(connection, "response.done"))[-1].response
            assert done.status in ("completed", "incomplete")

    asyncio.run(scenario())
