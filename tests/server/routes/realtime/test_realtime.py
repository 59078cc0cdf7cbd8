"""`/v1/realtime` with OpenAI's own client, over real sockets; the engine is a double."""

from __future__ import annotations

import asyncio
import json

import pytest
import websockets
from openai.types.realtime import RealtimeErrorEvent
from websockets.exceptions import ConnectionClosed, InvalidStatus

from lookonce.config import Options, SessionConfig, resolve
from lookonce.errors import EngineDeadError
from lookonce.server.rate_limits import RateLimits
from lookonce.types.request import client_request_id
from tests.support.server.realtime import (
    as_text,
    on_realtime_site,
    silence,
    speech,
    types,
    until,
)

HELLO = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "What shape is red?"}],
}
MANUAL = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
ANSWERED = [
    "response.created",
    "response.output_item.added",
    "conversation.item.created",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


COMPLETED = "conversation.item.input_audio_transcription.completed"


def without_repeats(names):
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


async def say_hello(connection):
    await connection.conversation.item.create(item=HELLO)
    told = await until(connection, "conversation.item.done")
    assert types(told) == [f"conversation.item.{name}" for name in ("created", "added", "done")]
    return told[-1].item.id


async def answered(connection, **options):
    """The response, once it is done."""
    await connection.response.create(**options)
    return (await until(connection, "response.done"))[-1].response


async def answering(here, connection):
    """Returns while an answer is generated; it goes on once the engine's gate opens."""
    here.site.engine.gate.clear()
    await say_hello(connection)
    await connection.response.create()
    await until(connection, "response.created")


# --- conversations ------------------------------------------------------------------------------


def test_a_text_is_answered_by_openai_s_events_in_their_order():
    async def scenario(here):
        async with here.session() as connection:
            question = await say_hello(connection)
            await connection.response.create(response={"reuse_receipt": True})
            events = await until(connection, "response.done")
            assert without_repeats(types(events)) == ANSWERED
            deltas = [event.delta for event in events if event.type == ANSWERED[5]]
            assert "".join(deltas) == "a red circle"
            done = events[-1].response
            assert (done.status, done.output[0].content[0].text) == ("completed", "a red circle")
            assert done.usage.output_tokens == len("a red circle") + 1
            assert done.usage.input_tokens == len("What shape is red?")
            assert done.usage.input_token_details.cached_tokens == 3
            assert done.reuse_receipt["prompt_tokens"] == done.usage.input_tokens
            assert len({event.event_id for event in events}) == len(events)
            added = next(each for each in events if each.type == "conversation.item.added")
            assert added.previous_item_id == question

    on_realtime_site(scenario)


def test_the_engine_s_ids_name_responses_and_items():
    async def scenario(here):
        async with here.session() as connection:
            await say_hello(connection)
            done = await answered(connection)
        async with here.session("transcription") as connection:
            await connection.session.update(session=MANUAL)
            await until(connection, "session.updated")
            await connection.input_audio_buffer.append(audio=as_text(speech(0.2)))
            await connection.input_audio_buffer.commit()
            item_id = (await until(connection, COMPLETED))[-1].item_id
        names = [client_request_id(name) for name, _ in here.site.engine.tokens_made]
        assert names == [done.id, item_id]

    on_realtime_site(scenario)


def test_the_next_answer_reads_the_whole_conversation():
    async def scenario(here):
        async with here.session() as connection:
            await connection.session.update(
                session={"type": "realtime", "instructions": "Be kind."}
            )
            updated = (await until(connection, "session.updated"))[-1]
            assert updated.session.instructions == "Be kind."
            for _ in range(2):
                await say_hello(connection)
                await connection.response.create()
                await until(connection, "response.done")
        prompt = bytes(here.site.engine.prompts[-1].token_ids).decode()
        assert prompt == "Be kind.What shape is red?a red circleWhat shape is red?"

    on_realtime_site(scenario)


def test_pictures_and_sounds_are_read_with_the_text():
    async def scenario(here):
        async with here.session() as connection:
            content = [
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
                {"type": "input_audio", "audio": as_text(speech(0.2))},
                {"type": "input_text", "text": "What?"},
            ]
            item = {"type": "message", "role": "user", "content": content}
            await connection.conversation.item.create(item=item)
            created = (await until(connection, "conversation.item.done"))[-1]
            assert created.item.content[1].audio is None
            await connection.conversation.item.retrieve(item_id=created.item.id)
            found = (await until(connection, "conversation.item.retrieved"))[-1]
            assert found.item.content[1].audio == as_text(speech(0.2))
            usage = (await answered(connection)).usage
            details = usage.input_token_details
            assert (details.image_tokens, details.audio_tokens, details.text_tokens) == (4, 4, 5)

    on_realtime_site(scenario)


def test_a_response_is_cancelled_and_the_next_one_begins_at_once():
    async def scenario(here):
        async with here.session() as connection:
            await answering(here, connection)
            await connection.response.cancel()
            cancelled = (await until(connection, "response.done"))[-1].response
            assert cancelled.status == "cancelled"
            assert cancelled.status_details.reason == "client_cancelled"
            await connection.response.cancel()
            error = (await until(connection))[-1].error
            assert error.code == "response_cancel_not_active"
            here.site.engine.gate.set()
            done = await answered(connection)
            assert done.status == "completed"

    on_realtime_site(scenario)


def test_one_response_at_a_time_writes_to_the_conversation():
    async def scenario(here):
        async with here.session() as connection:
            here.site.engine.gate.clear()
            await say_hello(connection)
            await connection.response.create()
            await connection.response.create()
            error = (await until(connection))[-1].error
            assert error.code == "conversation_already_has_active_response"
            aside = {"conversation": "none", "input": [HELLO], "metadata": {"topic": "aside"}}
            await connection.response.create(response=aside)
            begun = (await until(connection, "response.created"))[-1].response
            assert (begun.metadata, begun.conversation_id) == ({"topic": "aside"}, None)
            here.site.engine.gate.set()
            for _ in range(2):
                done = (await until(connection, "response.done"))[-1].response
                assert done.status == "completed"

    on_realtime_site(scenario)


def test_a_limit_makes_an_answer_incomplete():
    async def scenario(here):
        async with here.session() as connection:
            await say_hello(connection)
            done = await answered(connection, response={"max_output_tokens": 3})
            assert (done.status, done.status_details.reason) == ("incomplete", "max_output_tokens")
            assert done.output[0].content[0].text == "a r"

    on_realtime_site(scenario)


def test_an_engine_that_dies_is_an_error_and_a_failed_response_and_the_session_goes_on():
    async def scenario(here):
        async with here.session() as connection:
            here.site.engine.failure = EngineDeadError("the engine was restarted")
            await say_hello(connection)
            await connection.response.create()
            error = (await until(connection, "response.done"))[-1].error
            assert (error.code, error.type) == ("engine_dead", "service_unavailable_error")
            failed = (await until(connection, "response.done"))[-1].response
            assert (failed.status, failed.output[0].status) == ("failed", "incomplete")
            here.site.engine.failure = None
            done = await answered(connection)
            assert done.status == "completed"

    on_realtime_site(scenario)


def test_what_the_client_gets_wrong_is_an_error_event_with_its_event_id():
    wrong = {
        "nonsense": ("unknown_event", "type"),
        "conversation.item.truncate": ("audio_output_not_supported", "type"),
        "conversation.item.delete": ("invalid_value", "item_id"),
        "input_audio_buffer.commit": ("input_audio_buffer_commit_empty", None),
        "response.create": ("conversation_empty", None),
    }
    speaking = {"type": "session.update", "session": {"output_modalities": ["audio"]}}

    async def scenario(here):
        async with here.session() as connection:
            for name, (code, param) in wrong.items():
                await connection.send_raw(json.dumps({"type": name, "event_id": f"my-{name}"}))
                told = (await until(connection))[-1]
                assert isinstance(told, RealtimeErrorEvent)
                assert (told.error.code, told.error.param) == (code, param), told
                assert told.error.event_id == f"my-{name}"
            await connection.send_raw(json.dumps(speaking))
            assert (await until(connection))[-1].error.code == "audio_output_not_supported"
            for broken in ("{", "[]", "null", '{"type": 5}', "\ud7ff", "[" * 5000):
                await connection.send_raw(broken)
                assert (await until(connection))[-1].type == "error"
            await say_hello(connection)

    on_realtime_site(scenario)


# --- transcripts --------------------------------------------------------------------------------


def test_committed_sound_is_transcribed_with_usage():
    async def scenario(here):
        async with here.session("transcription") as connection:
            await connection.session.update(session=MANUAL)
            updated = (await until(connection, "session.updated"))[-1].session
            assert (updated.type, updated.audio.input.turn_detection) == ("transcription", None)
            for part in (speech(0.5), speech(0.5, seed=1)):
                await connection.input_audio_buffer.append(audio=as_text(part))
            await connection.input_audio_buffer.commit()
            events = await until(connection, COMPLETED)
            assert without_repeats(types(events)) == [
                "input_audio_buffer.committed",
                "conversation.item.created",
                "conversation.item.added",
                "conversation.item.done",
                "conversation.item.input_audio_transcription.delta",
                COMPLETED,
            ]
            done = events[-1]
            assert done.transcript == "a red circle"
            assert done.usage.input_token_details.audio_tokens == 4
            assert {done.item_id} == {each.item_id for each in events if hasattr(each, "item_id")}
            await connection.conversation.item.retrieve(item_id=done.item_id)
            item = (await until(connection, "conversation.item.retrieved"))[-1].item
            assert (item.content[0].transcript, item.content[0].audio) == ("a red circle", None)
            await connection.conversation.item.delete(item_id=done.item_id)
            await until(connection, "conversation.item.deleted")
            assert here.site.services.realtime.budget.used == 0

    on_realtime_site(scenario)


def test_transcripts_count_for_the_limits_and_the_weight_of_their_tenant(tmp_path):
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nweight = 4\ntokens_per_minute = 100")

    async def transcribe(connection):
        await connection.input_audio_buffer.append(audio=as_text(speech(0.5)))
        await connection.input_audio_buffer.commit()
        failed = "conversation.item.input_audio_transcription.failed"
        return (await until(connection, COMPLETED, failed))[-1]

    async def scenario(here):
        services = here.site.services
        limits, path = services.config.server.limits, tmp_path / "usage"
        services.rates = RateLimits(limits, path, weights=services.weights)
        async with here.session("transcription") as connection:
            await connection.session.update(session=MANUAL)
            usage = (await transcribe(connection)).usage
            assert {prompt.weight for prompt in here.site.engine.prompts} == {4}
            left = dict(services.rates.admit("").headers())[b"x-ratelimit-remaining-tokens"]
            assert 100 - usage.total_tokens <= int(left) < 120 - usage.total_tokens
            while (last := await transcribe(connection)).type == COMPLETED:
                pass
            assert "tokens per minute" in last.error.message

    on_realtime_site(scenario, limits=str(limits))


@pytest.mark.parametrize("rate", [24_000, 16_000])
def test_server_vad_finds_the_turns(rate):
    async def scenario(here):
        async with here.session("transcription") as connection:
            format = {"type": "audio/pcm", "rate": rate}
            session = {"type": "transcription", "audio": {"input": {"format": format}}}
            await connection.session.update(session=session)
            await until(connection, "session.updated")
            sound = [silence(1, rate), speech(1, rate), silence(1, rate), speech(1, rate)]
            for part in (*sound, silence(1, rate)):
                await connection.input_audio_buffer.append(audio=as_text(part))
            events = await until(connection, COMPLETED) + await until(connection, COMPLETED)
            turns = {name: [e for e in events if e.type == name] for name in types(events)}
            started, stopped, committed = (
                turns[f"input_audio_buffer.{name}"]
                for name in ("speech_started", "speech_stopped", "committed")
            )
            ids = [each.item_id for each in started]
            assert len(set(ids)) == 2
            assert [each.item_id for each in (*stopped, *committed, *turns[COMPLETED])] == ids * 3
            assert committed[1].previous_item_id == ids[0]
            for begin, at, until_ms in zip((1.0, 3.0), started, stopped, strict=True):
                assert abs(at.audio_start_ms - (begin * 1000 - 300)) <= 100
                assert abs(until_ms.audio_end_ms - (begin * 1000 + 1500)) <= 150
            await connection.input_audio_buffer.clear()
            await until(connection, "input_audio_buffer.cleared")

    on_realtime_site(scenario)


def test_speech_interrupts_an_answer_and_is_answered():
    async def scenario(here):
        async with here.session() as connection:
            await answering(here, connection)
            for part in (speech(0.6), silence(0.8)):
                await connection.input_audio_buffer.append(audio=as_text(part))
            await until(connection, "input_audio_buffer.speech_started")
            stopped = (await until(connection, "response.done"))[-1].response
            assert stopped.status_details.reason == "turn_detected"
            await until(connection, "input_audio_buffer.committed")
            here.site.engine.gate.set()
            done = (await until(connection, "response.done"))[-1].response
            assert done.status == "completed"
            assert done.usage.input_token_details.audio_tokens == 4

    on_realtime_site(scenario)


def test_a_transcript_that_fails_is_an_event_of_its_item():
    async def scenario(here):
        async with here.session("transcription") as connection:
            await connection.session.update(session=MANUAL)
            await until(connection, "session.updated")
            here.site.engine.refusal = EngineDeadError("gone")
            await connection.input_audio_buffer.append(audio=as_text(speech(0.5)))
            await connection.input_audio_buffer.commit()
            assert (await until(connection))[-1].error.code == "engine_dead"
            name = "conversation.item.input_audio_transcription.failed"
            failed = (await until(connection, name))[-1]
            assert failed.error.code == "engine_dead"
            here.site.engine.refusal = None

    on_realtime_site(scenario)


# --- who may connect, and how long --------------------------------------------------------------


async def refused(here, path="/v1/realtime", **how):
    url = here.url.replace("http", "ws", 1) + path
    with pytest.raises(InvalidStatus) as caught:
        async with websockets.connect(url, **how):
            pass
    response = caught.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


def test_keys_come_in_the_header_or_as_a_subprotocol():
    async def scenario(here):
        assert await refused(here) == (401, "invalid_api_key")
        wrong = ["realtime", "openai-insecure-api-key.nokey"]
        assert await refused(here, subprotocols=wrong) == (401, "invalid_api_key")
        url = here.url.replace("http", "ws", 1) + "/v1/realtime"
        offered = ["realtime", "openai-insecure-api-key.sesame"]
        async with websockets.connect(url, subprotocols=offered) as connection:
            assert connection.subprotocol == "realtime"
            assert json.loads(await connection.recv())["type"] == "session.created"
        async with here.client("sesame").realtime.connect() as connection:
            assert (await connection.recv()).type == "session.created"

    on_realtime_site(scenario, api_key=("sesame",))


def test_sessions_are_found_beneath_the_root_path_and_without_it():
    async def scenario(here):
        for prefix in ("", "/models/a"):
            url = f"{here.url.replace('http', 'ws', 1)}{prefix}/v1/realtime"
            async with websockets.connect(url) as connection:
                assert json.loads(await connection.recv())["type"] == "session.created"
        assert await refused(here, "/models/b/v1/realtime") == (400, "websocket_not_supported")

    on_realtime_site(scenario, root_path="/models/a")


def test_a_session_ends_when_its_key_is_taken_away():
    async def scenario(here):
        async with here.client("sesame").realtime.connect() as connection:
            await until(connection, "conversation.created")
            here.site.services.keys.replace(resolve(Options(api_key=("other",))).server.api_keys)
            error = (await until(connection, "error"))[-1].error
            assert error.code == "invalid_api_key"
            with pytest.raises(ConnectionClosed) as closed:
                await connection.recv()
            assert closed.value.rcvd.code == 1008

    on_realtime_site(scenario, api_key=("sesame",))


def test_a_handshake_is_refused_like_any_request(caplog):
    async def scenario(here):
        assert await refused(here, "/v1/realtime?model=gpt") == (404, "model_not_found")
        assert await refused(here, "/v1/realtime?intent=x") == (400, "bad_request")
        assert await refused(here, "/v1/chat") == (400, "websocket_not_supported")
        strange = {"origin": "https://evil.example"}
        assert await refused(here, **strange) == (403, "origin_not_allowed")
        here.site.services.drain.begin()
        assert await refused(here) == (503, "draining")

    on_realtime_site(scenario)
    assert [line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == []


def test_a_refused_handshake_is_in_the_audit(caplog):
    async def scenario(here):
        headers = {"X-Request-Id": "mine"}
        with caplog.at_level("INFO", "lookonce.audit"):
            caplog.clear()
            assert await refused(here, additional_headers=headers) == (401, "invalid_api_key")
        (line,) = caplog.records  # and none of uvicorn, for which it would be an error
        assert line.name == "lookonce.audit"
        assert (line.event, line.route, line.status) == ("refused", "WS /v1/realtime", 401)
        assert (line.client, line.code) == ("127.0.0.1", "invalid_api_key")

    on_realtime_site(scenario, api_key=("sesame",))


def test_a_tenant_may_have_so_many_sessions():
    async def scenario(here):
        async with here.session(), here.session():
            assert await refused(here) == (429, "too_many_sessions")
        while here.site.services.realtime.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with here.session():
            pass

    on_realtime_site(scenario, max_sessions=2)


def test_a_session_that_is_idle_ends_with_a_word():
    async def scenario(here):
        async with here.session() as connection:
            assert (await until(connection))[-1].error.code == "idle_timeout"
            with pytest.raises(ConnectionClosed) as closed:
                await connection.recv()
            assert closed.value.rcvd.code == 1000

    on_realtime_site(scenario, SessionConfig(idle_timeout=0.2))


def test_draining_lets_an_answer_end_and_takes_no_new_work():
    async def scenario(here):
        async with here.session() as connection:
            await answering(here, connection)
            here.site.services.drain.begin()
            assert (await until(connection))[-1].error.code == "draining"
            await connection.conversation.item.create(item=HELLO)
            assert (await until(connection))[-1].error.code == "draining"
            here.site.engine.gate.set()
            done = (await until(connection, "response.done"))[-1].response
            assert done.status == "completed"
            with pytest.raises(ConnectionClosed) as closed:
                await connection.recv()
            assert closed.value.rcvd.code == 1001

    on_realtime_site(scenario)
