"""The engine process from outside: how it starts, refuses, ends, and is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from lookonce.config import ChannelConfig, EncoderConfig, KVConfig, ModelConfig, SchedulerConfig
from lookonce.engine.client.engine_client import EngineClient
from lookonce.engine.process_io import (
    EngineAlive,
    EngineLoading,
    EngineSettings,
    ProgressPipe,
    Serving,
    StartFailed,
    parse_progress,
)
from lookonce.engine.supervisor.child_process import EXIT_REFUSED
from lookonce.errors import EngineDeadError, error_from_wire
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import text
from tests.support.engine.living import PATIENCE, expected, part, rendered, tokens_of

COMMAND = (sys.executable, "-m", "tests.support.engine.fake_process")
ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def settings(folder: Path, behaviour: str = "serve") -> EngineSettings:
    return EngineSettings(
        model=ModelConfig(behaviour, behaviour),
        scheduler=SchedulerConfig(),
        kv=KVConfig(),
        encoder=EncoderConfig(),
        address=f"{folder}/engine",
    )


class Engine:
    """One engine process, its events, and a client for it."""

    def __init__(self, given: EngineSettings | bytes):
        line = given if isinstance(given, bytes) else msgspec.json.encode(given)
        self.process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        )
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def events(self):
        """Until it serves or has ended."""
        found = []
        for line in self.process.stdout:
            found.append(parse_progress(line))
            if isinstance(found[-1], Serving):
                break
        return found

    def end(self):
        self.process.kill()
        _, errors = self.process.communicate(timeout=PATIENCE)
        return errors.decode()


@contextmanager
def started(given):
    engine = Engine(given)
    try:
        yield engine
    finally:
        engine.end()


def client_of(given: EngineSettings) -> EngineClient:
    return EngineClient(ChannelConfig(given.address), processor_cache_bytes=1 << 20)


def test_it_serves_over_the_socket_and_tells_how_far_loading_is(tmp_path):
    given = settings(tmp_path)
    prompt = rendered(text(20), part("cat"), offsets=(3,))

    async def scenario():
        async with asyncio.timeout(PATIENCE), client_of(given) as client:
            await client.wait_ready()
            deltas = [delta async for delta in client.generate(prompt, GREEDY, "r")]
            assert tokens_of(deltas) == expected(prompt, 8)

    with started(given) as engine:
        events = engine.events()
        asyncio.run(scenario())
    told = [event for event in events if not isinstance(event, EngineAlive)]
    assert told[:3] == [EngineLoading(0, 0), EngineLoading(0, 2), EngineLoading(2, 2)]
    assert isinstance(told[3], Serving)


def test_a_refusal_is_told_with_its_reason_and_exit_status_2(tmp_path):
    with started(settings(tmp_path, "refuse")) as engine:
        failed = engine.events()[-1]
        assert isinstance(failed, StartFailed)
        assert "at least 900" in error_from_wire(*failed.error).message
        assert engine.process.wait(PATIENCE) == EXIT_REFUSED
        assert "Traceback" not in engine.end()


def test_settings_that_are_none_are_refused():
    with started(b'{"model": 3}') as engine:
        assert isinstance(engine.events()[-1], StartFailed)
        assert engine.process.wait(PATIENCE) == EXIT_REFUSED


def test_a_bug_while_loading_ends_the_process_with_a_trace_in_the_log(tmp_path):
    with started(settings(tmp_path, "break")) as engine:
        engine.events()
        assert engine.process.wait(PATIENCE) == 1
        assert "a bug" in engine.end()


def test_it_ends_with_its_parent(tmp_path):
    with started(settings(tmp_path)) as engine:
        engine.events()
        engine.process.stdin.close()
        assert engine.process.wait(PATIENCE) == 0
        engine.process.stdin = None


def test_sigterm_ends_it_and_ctrl_c_is_its_parents_affair(tmp_path):
    with started(settings(tmp_path)) as engine:
        engine.events()
        engine.process.send_signal(signal.SIGINT)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(PATIENCE) == 0


def test_killed_it_leaves_a_socket_file_that_its_successor_takes_over(tmp_path):
    given = settings(tmp_path)

    async def scenario():
        first = Engine(settings(tmp_path, "hold"))
        async with asyncio.timeout(2 * PATIENCE), client_of(given) as client:
            await client.wait_ready()
            generation = await client.generate(rendered(text(9)), GREEDY, "r")
            os.kill(first.process.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                _ = [delta async for delta in generation]
            assert client.state == "dead"
            await asyncio.to_thread(first.end)
            left = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
            assert left == {"engine", "stacks"}
            second = Engine(given)
            try:
                await client.wait_ready()
                prompt = rendered(text(20))
                deltas = [delta async for delta in client.generate(prompt, GREEDY, "r")]
                assert tokens_of(deltas) == expected(prompt, 8)
            finally:
                await asyncio.to_thread(second.end)

    asyncio.run(scenario())


def test_progress_neither_blocks_nor_fails_when_nobody_reads():
    reader, writer = os.pipe()
    pipe = ProgressPipe(writer)
    for _ in range(5000):
        pipe.tell(EngineAlive(0.0))
    os.close(reader)
    pipe.tell(EngineAlive(0.0))
    os.close(writer)


def test_lines_that_are_no_events_are_told_apart():
    assert parse_progress(b"Downloading...\n") is None
    assert parse_progress(b'{"type": "alive", "stalled_seconds": 1.5}\n') == EngineAlive(1.5)
