"""Realtime sessions in tests: a server on doubles behind a real socket, and sound to send."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import openai

from lookonce.config import ConnectionConfig, SessionConfig
from lookonce.server.http.app import WEBSOCKETS, build_app
from lookonce.server.process import ApiServer, api_server
from lookonce.server.realtime_sessions import RealtimeSessions
from tests.support.server.site import Site, site

VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480))
"""Formants, Hz."""


def speech(seconds: float, rate: int = 24_000, seed: int = 0) -> np.ndarray:
    """Vowels of a voice at 120 Hz as 16-bit samples: voice detection takes them for speech."""
    rng = np.random.default_rng(seed)
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < seconds * rate:
        pieces += [_vowel(rng, rate), rng.standard_normal(rate // 25) * 0.03]
    return (np.concatenate(pieces)[: int(seconds * rate)] * 30_000).astype("<i2")


def _vowel(rng: np.random.Generator, rate: int) -> np.ndarray:
    count = int(rate * rng.uniform(0.12, 0.22))
    times = np.arange(count) / rate
    pitch = rng.uniform(100, 140) * (1 + 0.05 * np.sin(2 * np.pi * 5 * times))
    phase = np.cumsum(pitch) / rate
    formants = VOWELS[rng.integers(len(VOWELS))]
    tone = np.zeros(count)
    for harmonic in range(1, 30):
        frequency = harmonic * pitch.mean()
        gain = sum(
            loud / (1 + ((frequency - formant) / (80 + 0.05 * formant)) ** 2)
            for formant, loud in zip(formants, (1, 0.6, 0.3), strict=True)
        )
        tone += (gain + 0.02) * np.sin(2 * np.pi * harmonic * phase)
    return tone / np.abs(tone).max() * 0.4 * np.sqrt(np.sin(np.pi * np.arange(count) / count))


def silence(seconds: float, rate: int = 24_000) -> np.ndarray:
    return np.zeros(int(seconds * rate), "<i2")


def spoken_turn(rate: int = 16_000) -> np.ndarray:
    """A second of speech between silences."""
    return np.concatenate([silence(1, rate), speech(1, rate), silence(2, rate)])


def as_text(samples: np.ndarray | bytes) -> str:
    return base64.b64encode(samples if isinstance(samples, bytes) else samples.tobytes()).decode()


@dataclasses.dataclass
class RealtimeSite:
    """A server with real sockets; the engine and the renderer are doubles."""

    site: Site
    server: ApiServer
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    @contextlib.asynccontextmanager
    async def session(self, kind: str = "realtime", **how: Any) -> AsyncIterator[Any]:
        """A connection of OpenAI's client, which has read what a new session is told."""
        query = {"extra_query": {"intent": "transcription"}} if kind == "transcription" else {}
        async with self.client().realtime.connect(**query, **how) as connection:
            assert (await connection.recv()).type == "session.created"
            if kind == "realtime":
                assert (await connection.recv()).type == "conversation.created"
            yield connection


async def until(connection: Any, *kinds: str) -> list[Any]:
    """The events up to the first of these types, or an error."""
    found: list[Any] = []
    async with asyncio.timeout(100):
        while not found or found[-1].type not in (*kinds, "error"):
            found.append(await connection.recv())
    return found


def types(events: Sequence[Any]) -> list[str]:
    return [event.type for event in events]


def on_realtime_site(
    scenario: Callable[[RealtimeSite], Awaitable[None]],
    sessions: SessionConfig | None = None,
    connections: ConnectionConfig | None = None,
    **options: object,
) -> None:
    """Runs a scenario; afterwards nothing of its sessions may be left."""
    asyncio.run(_run(scenario, sessions, connections, options))


async def _run(
    scenario: Callable[[RealtimeSite], Awaitable[None]],
    sessions: SessionConfig | None,
    connections: ConnectionConfig | None,
    options: dict[str, object],
) -> None:
    async with realtime_site(sessions, connections, **options) as here:
        await scenario(here)
        await nothing_left(here)


async def nothing_left(here: RealtimeSite) -> None:
    services = here.site.services
    async with asyncio.timeout(100):
        while services.realtime.num_open or services.drain.active:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert services.realtime.budget.used == 0
    assert services.realtime.detectors.num_open == 0
    assert here.site.engine.running == {}
    rendered = here.site.renderer.rendered
    assert all(prompt in here.site.renderer.released for prompt in rendered)


@contextlib.asynccontextmanager
async def realtime_site(
    sessions: SessionConfig | None = None,
    connections: ConnectionConfig | None = None,
    **options: object,
) -> AsyncIterator[RealtimeSite]:
    async with site(**options) as here:
        old = here.services.config.server
        limits = dataclasses.replace(
            old, sessions=sessions or old.sessions, connections=connections or old.connections
        )
        here.services.config = dataclasses.replace(here.services.config, server=limits)
        here.services.realtime = RealtimeSessions(limits.sessions, here.services.metrics.counts)
        server = api_server(build_app(here.services, websockets=WEBSOCKETS), here.services)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield RealtimeSite(here, server, listener.getsockname()[1])
            finally:
                server.should_exit = True
                await serving
                await here.services.realtime.detectors.__aexit__(None, None, None)
