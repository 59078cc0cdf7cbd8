"""Voxtral Realtime: files on a real server, and live sessions through the engine link."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import openai
import pytest
from websockets.exceptions import ConnectionClosed

from lookonce.config import ChannelConfig, Options, resolve
from lookonce.engine.client.engine_client import EngineClient
from lookonce.engine.process.build import EngineThreads
from lookonce.errors import BadRequestError
from lookonce.frontend.frontend import Frontend
from lookonce.frontend.metrics import Metrics
from lookonce.frontend.session import SoundSession
from lookonce.types.request import SESSION_CREDITS, RenderedPrompt
from lookonce.types.sampling import SamplingParams
from tests.support.chaos import API, ENGINE, num_descriptors, of_kind
from tests.support.engine.loading import build, settings
from tests.support.in_process_link import InProcessHub
from tests.support.live_server import LiveServer
from tests.support.live_server import until as wait_until
from tests.support.model.cases import sound
from tests.support.model.chats import make_renderer, reference, sent_part
from tests.support.model.realtime import (
    FRAME,
    RealtimeSubject,
    realtime_subject,
    reference_answer,
)
from tests.support.server.realtime import as_text, silence, speech, types, until

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PATIENCE = 60.0
NUM_LEAVING = 12
"""Clients that leave in mid-word, at once."""
NUM_ROUNDS = int(os.environ.get("LEAVING_ROUNDS", "1"))
"""Times that so many leave; in the soak 1,000 clients do."""
RIGHT_PAD = 15
"""Frames of silence after a sound: a delay of 4, and 11."""


@pytest.fixture(scope="module")
def subject(folder) -> RealtimeSubject:
    return realtime_subject(folder("voxtral_realtime"))


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(subject) -> Iterator[LiveServer]:
    with LiveServer(str(subject.folder), "--api-processes", "2") as live:
        yield live


def ask(server: LiveServer, *parts):
    body = {
        "messages": [{"role": "user", "content": [sent_part(part) for part in parts]}],
        "temperature": 0,
        "ignore_eos": True,
        "reuse_receipt": True,
    }
    return server.post("/v1/chat/completions", body)


def test_a_file_is_transcribed_as_by_transformers_and_encoded_once(server, subject):
    wave = sound(1, 1.5)
    theirs = reference_answer(subject, **reference(subject.folder, (wave,)))
    first, second = (ask(server, wave).json() for _ in range(2))
    (choice,) = first["choices"]
    assert choice["finish_reason"] == "stop"
    assert first["usage"]["completion_tokens"] == len(theirs.token_ids)
    tokenizer = make_renderer(subject.folder).tokenizer
    text = tokenizer.decode(theirs.token_ids, skip_special_tokens=True)
    assert choice["message"]["content"] == text
    assert second["choices"][0]["message"] == choice["message"]
    (cold,), (warm,) = (each["reuse_receipt"]["items"] for each in (first, second))
    assert (cold["processor"], cold["encoder"]) == ("miss", "miss")
    # "shared" where another of the server's API processes was asked the second time.
    assert warm["processor"] in ("hit", "shared", "not_needed")
    assert warm["encoder"] == "hit"


def test_a_transcription_is_the_same_text(server, subject):
    part = sent_part(sound(1, 1.5))
    data = base64.b64decode(part["input_audio"]["data"])
    client = server.client()
    found = client.audio.transcriptions.create(file=("a.wav", data), model=str(subject.folder))
    chat = ask(server, sound(1, 1.5)).json()["choices"][0]["message"]["content"]
    # A transcription stops at the model's end of sequence, which a chat may be asked to ignore.
    assert found.text
    assert chat.strip().startswith(found.text)
    with pytest.raises(openai.BadRequestError, match="does not translate"):
        client.audio.translations.create(file=("a.wav", data), model=str(subject.folder))
    with pytest.raises(openai.BadRequestError, match="takes no prompt"):
        client.audio.transcriptions.create(
            file=("a.wav", data), model=str(subject.folder), prompt="Names: Ada"
        )


def test_text_is_refused(server):
    response = ask(server, "Write it down: ", sound(1, 0.5))
    assert response.status_code == 400
    assert "takes no text" in response.json()["error"]["message"]
    response = server.post("/v1/completions", {"prompt": "Hello"})
    assert response.status_code == 400
    assert "one sound" in response.json()["error"]["message"]


# --- live, by OpenAI's client ---------------------------------------------------------------------

DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"
FAILED = "conversation.item.input_audio_transcription.failed"
FORMAT = {"type": "audio/pcm", "rate": 16_000}
MANUAL = {"type": "transcription", "audio": {"input": {"format": FORMAT, "turn_detection": None}}}


def pcm(wave: np.ndarray) -> np.ndarray:
    return np.round(wave * 32768).astype("<i2")


def spoken(*waves: np.ndarray) -> np.ndarray:
    """Sounds one after the other, after each the silence in which it is written, but the last."""
    parts: list[np.ndarray] = []
    for wave in waves[:-1]:
        missing = -len(wave) % FRAME + RIGHT_PAD * FRAME
        parts += [wave, np.zeros(missing, np.float32)]
    return np.concatenate([*parts, waves[-1]])


def references(subject, *waves: np.ndarray) -> list[str]:
    """The transcript of each, by transformers, which hears all of them as one sound."""
    whole = reference_answer(subject, **reference(subject.folder, (spoken(*waves),))).token_ids
    decode = make_renderer(subject.folder).tokenizer.decode
    texts, start = [], 0
    for number in range(1, len(waves) + 1):
        frames = -(-len(spoken(*waves[:number])) // FRAME) + RIGHT_PAD
        # A frame needs a few samples after it: the silence's last one comes with the next sound.
        end = frames - 1 - subject.delay if number < len(waves) else len(whole)
        texts.append(decode(whole[start:end], skip_special_tokens=True).strip())
        start = end
    return texts


async def live_session(server: LiveServer, stack: contextlib.AsyncExitStack, **session):
    connection = await stack.enter_async_context(server.async_client().realtime.connect())
    await connection.session.update(session={**MANUAL, **session})
    assert (await until(connection, "session.updated"))[-1].session.type == "transcription"
    return connection


async def say(connection, wave: np.ndarray, piece: int = 2000) -> None:
    for at in range(0, len(wave), piece):
        await connection.input_audio_buffer.append(audio=as_text(pcm(wave[at : at + piece])))


def test_words_come_while_they_are_spoken_and_one_session_hears_all_items(server, subject):
    waves = [sound(1, 1.5), sound(2, 2.3), sound(3, 0.4)]
    expected = references(subject, *waves)
    opened = server.metrics()["sessions_opened_total"]

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            connection = await live_session(server, stack)
            for wave, text in zip(waves, expected, strict=True):
                await say(connection, wave)
                deltas = []
                if len(wave) > 16_000:  # a word is written 4 frames after it is spoken
                    deltas = await until(connection, DELTA)
                    assert types(deltas) == [DELTA]
                await connection.input_audio_buffer.commit()
                events = deltas + await until(connection, COMPLETED)
                done = events[-1]
                assert done.type == COMPLETED, done
                assert done.transcript == text
                assert {e.item_id for e in events if e.type == DELTA} == {done.item_id}
                assert "".join(e.delta for e in events if e.type == DELTA) == text
                assert done.usage.input_token_details.audio_tokens == done.usage.output_tokens
                told = types(events)
                committed = told.index("input_audio_buffer.committed")
                assert "conversation.item.done" in told[committed:]

    asyncio.run(scenario())
    assert server.metrics()["sessions_opened_total"] == opened + 1


def test_what_is_cleared_is_told_no_more_and_the_next_item_is_heard(server, subject):
    waves = [sound(1, 1.5), sound(2, 2.3)]
    expected = references(subject, *waves)

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            connection = await live_session(server, stack)
            await say(connection, waves[0])
            heard = (await until(connection, DELTA))[-1].item_id
            await connection.input_audio_buffer.clear()
            await until(connection, "input_audio_buffer.cleared")
            await say(connection, waves[1])
            await connection.input_audio_buffer.commit()
            events = await until(connection, COMPLETED)
            assert events[-1].transcript == expected[1]
            assert all(getattr(event, "item_id", None) != heard for event in events)

    asyncio.run(scenario())


def test_turns_are_heard_while_they_are_spoken(server):
    turns = {"type": "server_vad", "silence_duration_ms": 300}
    detected = {"audio": {"input": {"format": FORMAT, "turn_detection": turns}}}

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            connection = await live_session(server, stack, **detected)
            for _ in range(2):
                for part in (silence(0.4, 16_000), speech(1.5, 16_000)):
                    await connection.input_audio_buffer.append(audio=as_text(part))
                begun = await until(connection, DELTA)
                assert "input_audio_buffer.speech_started" in types(begun)
                assert "input_audio_buffer.committed" not in types(begun)
                await connection.input_audio_buffer.append(audio=as_text(silence(0.8, 16_000)))
                events = begun + await until(connection, COMPLETED)
                assert events[-1].type == COMPLETED, events[-1]
                assert events[-1].transcript
                named = {e.item_id for e in events if getattr(e, "item_id", None)}
                assert named == {events[-1].item_id}

    asyncio.run(scenario())


def test_a_prompt_is_refused_and_the_session_goes_on(server, subject):
    told = {"input": {**MANUAL["audio"]["input"], "transcription": {"prompt": "Names: Ada"}}}

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            connection = await live_session(server, stack)
            await connection.session.update(session={**MANUAL, "audio": told})
            error = (await until(connection, "error"))[-1].error
            assert "takes no prompt" in error.message
            await say(connection, sound(1, 1.5))
            await connection.input_audio_buffer.commit()
            events = await until(connection, COMPLETED)
            assert events[-1].transcript == references(subject, sound(1, 1.5))[0]

    asyncio.run(scenario())


def test_a_client_that_is_gone_in_mid_word_leaves_nothing_and_disturbs_nobody(server, subject):
    wave = sound(1, 1.5)

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            leaving = [await live_session(server, stack) for _ in range(NUM_LEAVING)]
            staying = await live_session(server, stack)
            for connection in (*leaving, staying):
                await say(connection, wave)
            for connection in (*leaving, staying):
                await until(connection, DELTA)
            for connection in leaving:
                connection._connection.transport.abort()
            await staying.input_audio_buffer.commit()
            done = (await until(staying, COMPLETED))[-1]
            assert done.transcript == references(subject, wave)[0]

    before = {pid: num_descriptors(pid) for pid in server.pids(b"lookonce")}
    used = []
    for _ in range(NUM_ROUNDS):
        asyncio.run(scenario())
        nothing_left(server)
        used.append(memory(server))
    for pid, num in before.items():
        assert num_descriptors(pid) <= num + 2, "descriptors are lost"
    assert used[-1] <= 1.05 * used[len(used) // 10], f"bytes after each round: {used}"


def memory(server: LiveServer) -> int:
    """Resident bytes of the engine and of the API processes."""
    pids = [*of_kind(server, ENGINE), *of_kind(server, API)]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def nothing_left(server: LiveServer) -> None:
    names = ("realtime_sessions", "sessions_open", "num_requests_running", "kv_cache_usage_ratio")

    def is_idle() -> bool:
        found = server.metrics()
        return not any(found[name] for name in names)

    wait_until(is_idle, PATIENCE, server.log)


def test_who_sends_faster_than_is_computed_is_told_and_slowed(server):
    """The engine stands still, so that what it has not computed stays."""
    minutes = np.zeros(100 * 16_000, np.float32)  # 1,250 frames; 1,024 may wait

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            connection = await live_session(server, stack)
            await say(connection, sound(1, 1.5))
            await until(connection, DELTA)
            pid = server.engine_pid()
            os.kill(pid, signal.SIGSTOP)
            try:
                sending = asyncio.create_task(say(connection, minutes, 32_000))
                while (told := await connection.recv()).type == DELTA:
                    pass
                assert told.type == "rate_limits.updated", told
                (rate,) = told.rate_limits
                assert (rate.name, rate.limit, rate.remaining) == ("tokens", SESSION_CREDITS, 0)
                assert rate.reset_seconds > 60
                more = asyncio.create_task(say(connection, np.tile(minutes, 20), 1_600_000))
                await asyncio.to_thread(server.metrics)
                assert not more.done(), "the server reads on"
                more.cancel()
                sending.cancel()
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.gather(sending, more, return_exceptions=True)
            connection._connection.transport.abort()

    asyncio.run(scenario())
    nothing_left(server)


def test_an_api_process_is_killed_in_mid_word_and_the_other_ones_sessions_go_on(server, subject):
    wave = sound(1, 1.5)

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            talking = [await live_session(server, stack) for _ in range(6)]
            for connection in talking:
                await say(connection, wave)
            for connection in talking:
                await until(connection, DELTA)
            os.kill(of_kind(server, API)[0], signal.SIGKILL)
            for connection in talking:
                with contextlib.suppress(ConnectionClosed):  # it was one of the killed process
                    await connection.input_audio_buffer.commit()
                    done = (await until(connection, COMPLETED))[-1]
                    assert done.transcript == references(subject, wave)[0]

    before = server.metrics()["sessions_opened_total"]
    asyncio.run(scenario())
    wait_until(lambda: len(of_kind(server, API)) == 2, PATIENCE, server.log)
    nothing_left(server)
    assert server.metrics()["sessions_opened_total"] == before + 6


async def kill_engine_in_mid_word(server, connection, wave) -> None:
    """The speaker is told at once, and the item fails when it is committed."""
    await say(connection, wave)
    await until(connection, DELTA)
    os.kill(server.engine_pid(), signal.SIGKILL)
    error = (await until(connection, "error"))[-1].error
    assert error.code == "engine_dead"
    await connection.input_audio_buffer.commit()
    while (await until(connection, FAILED))[-1].type == "error":
        pass


@pytest.mark.soak  # an engine's start takes ten seconds; test_chaos.py has one in every run
def test_a_live_session_goes_on_with_the_next_engine(server, subject):
    wave = sound(1, 1.5)

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            connection = await live_session(server, stack)
            await kill_engine_in_mid_word(server, connection, wave)
            deadline = time.monotonic() + PATIENCE
            while True:
                await say(connection, wave)
                await connection.input_audio_buffer.commit()
                while (last := (await until(connection, FAILED, COMPLETED))[-1]).type == "error":
                    pass
                if last.type == COMPLETED:
                    break
                assert time.monotonic() < deadline, server.log()
                await asyncio.sleep(0.2)
            assert last.transcript == references(subject, wave)[0]

    asyncio.run(scenario())
    nothing_left(server)


def test_an_engine_is_killed_in_mid_word(server):
    """The last one with this server, whose next engine nobody waits for."""

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            connection = await live_session(server, stack)
            await kill_engine_in_mid_word(server, connection, sound(1, 1.5))

    asyncio.run(scenario())


# --- live sessions --------------------------------------------------------------------------------


@pytest.fixture
def hub(subject) -> Iterator[InProcessHub]:
    """An engine with the real model, its threads, and a link in this process."""
    hub = InProcessHub()
    threads = EngineThreads(
        hub.engine_link(), num_senders=1, max_queue=8, max_sessions=8, max_tenant_sessions=8
    )
    core, preprocessor = build(settings(subject.folder))
    threads.start_input()
    steps = threading.Thread(target=threads.run_steps, args=(core,))
    steps.start()
    threads.open(preprocessor)
    yield hub
    threads.stop()
    steps.join(PATIENCE)
    core.check_integrity()
    assert core.stats()["kv_cache_usage_ratio"] == 0


def run(hub: InProcessHub, scenario) -> None:
    async def whole() -> None:
        client = EngineClient(
            ChannelConfig("", PATIENCE, 1 << 20),
            processor_cache_bytes=1 << 20,
            connect=hub.client_link,
        )
        async with asyncio.timeout(PATIENCE), client:
            await client.wait_ready()
            await scenario(client)
            await _until_ended(client)

    asyncio.run(whole())


async def _until_ended(client: EngineClient) -> None:
    while True:
        stats = await client.stats()
        if not stats["num_requests_running"]:
            return
        await asyncio.sleep(0.01)


async def transcribe(frontend: Frontend, wave: np.ndarray, piece: int) -> tuple[list[int], str]:
    """Tokens and text of a live sound that is sent in pieces of so many samples, and ends."""
    tokens: list[int] = []
    texts: list[str] = []
    async with await SoundSession.open(frontend, sampling=GREEDY) as session:

        async def speak() -> None:
            for at in range(0, len(wave), piece):
                await session.append(wave[at : at + piece])
            await session.finish()

        speaking = asyncio.create_task(speak())
        async for part in session:
            tokens += part.token_ids
            texts.append(part.text)
        await speaking
    return tokens, "".join(texts)


def frontend_of(subject: RealtimeSubject, client: EngineClient) -> Frontend:
    return Frontend(
        config=resolve(Options(model=str(subject.folder))),
        renderer=make_renderer(subject.folder),
        engine=client,
        metrics=Metrics("m", vllm_names=False),
    )


def test_live_sounds_side_by_side_are_transcribed_as_their_files(hub, subject):
    waves = [sound(1, 1.5), sound(2, 2.3), sound(3, 0.4)]
    theirs = [reference_answer(subject, **reference(subject.folder, (wave,))) for wave in waves]
    # What a file is: 16 bits.
    waves = [np.round(wave * 32768).astype(np.int16) / np.float32(32768) for wave in waves]

    async def scenario(client):
        frontend = frontend_of(subject, client)
        pieces = (1280, 3000, 700)
        found = await asyncio.gather(*map(partial(transcribe, frontend), waves, pieces))
        assert [tokens for tokens, _ in found] == [answer.token_ids for answer in theirs]
        decode = frontend.renderer.tokenizer.decode
        assert [text for _, text in found] == [decode(answer.token_ids) for answer in theirs]

    run(hub, scenario)


def test_what_is_no_sound_is_refused_and_the_session_goes_on(hub, subject):
    async def scenario(client):
        session = await SoundSession.open(frontend_of(subject, client), sampling=GREEDY)
        with pytest.raises(BadRequestError, match="no numbers"):
            await session.append(np.array([np.nan], np.float32))
        await session.append(sound(1, 0.3))
        await session.finish()
        with pytest.raises(BadRequestError, match="finished"):
            await session.append(sound(1, 0.3))
        assert sum([len(part.token_ids) async for part in session]) > 10
        session.close()

    run(hub, scenario)


def test_frames_of_another_shape_end_their_session_alone(hub, subject):
    wave = sound(2, 0.5)

    async def scenario(client):
        frontend = frontend_of(subject, client)
        live = frontend.renderer.live_sound()
        session = await client.open_session(live.opening, GREEDY, "wrong")
        wrong = RenderedPrompt([], scope=live.opening.scope, frames=_transposed(live.push(wave)))
        await session.extend(wrong)
        with pytest.raises(BadRequestError, match="this model takes float32 of shape"):
            async for _ in session:
                pass
        assert await transcribe(frontend, wave, 1280)

    run(hub, scenario)


def _transposed(rendered: RenderedPrompt):
    frames = rendered.frames
    n, bins, mel = frames.shape
    return type(frames)(frames.dtype, (n, mel, bins), frames.data)
