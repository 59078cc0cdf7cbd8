"""The API processes of one server abort requests for each other, and tell what they do.

Each process answers on unix sockets beside the engine's socket, in a folder that only this user can
enter. A process that is gone, or does not answer in time, is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from lookonce.frontend.savings import Saved

logger = logging.getLogger("lookonce.server")
T = TypeVar("T")
ABORT_SECONDS = 2.0
AbortLocally = Callable[[str, list[str]], Awaitable[list[str]]]
"""Aborts a tenant's requests of these ids; answers the ids that were running."""


class _AbortQuestion(msgspec.Struct, array_like=True):
    """What one API process asks another."""

    tenant: str
    request_ids: list[str]
    state: bool = False
    """It asks for the other's state instead, and aborts nothing."""


class ProcessState(msgspec.Struct, kw_only=True):
    """What one API process does now."""

    index: int
    pid: int
    serving: int
    """Requests of any kind."""
    draining: bool
    tenants: dict[str, int]
    """Tenant → its requests for generated tokens."""
    day: str = ""
    saved: dict[str, Saved] = {}
    """Tenant → what reuse saved it on that day."""


class AbortPeers:
    """Aborts requests in whatever API process they run; `local` aborts those of this process.

    `index` is this process's number of `count`.
    """

    def __init__(self, folder: Path, index: int, count: int, local: AbortLocally) -> None:
        self._others = [folder / f"abort-{number}.sock" for number in range(count)]
        self._own = self._others.pop(index)
        self._local = local
        self._server: asyncio.Server | None = None
        self.describe: Callable[[], ProcessState] | None = None
        """Answers those who ask for this process's state."""

    async def __aenter__(self) -> Self:
        if self._others:
            self._own.unlink(missing_ok=True)  # a predecessor that was killed left its own
            self._server = await asyncio.start_unix_server(self._serve, self._own)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._own.unlink(missing_ok=True)

    async def abort(self, tenant: str, request_ids: list[str]) -> list[str]:
        """The ids that were running in any process, in the order they were asked for."""
        question = msgspec.msgpack.encode(_AbortQuestion(tenant, request_ids))
        own, others = await asyncio.gather(
            self._local(tenant, request_ids),
            asyncio.gather(*(self._ask(path, question, list[str]) for path in self._others)),
        )
        ended = {*own, *(name for answer in others for name in answer or ())}
        return [name for name in dict.fromkeys(request_ids) if name in ended]

    async def states(self) -> list[ProcessState]:
        """Of the other processes, those that answer."""
        question = msgspec.msgpack.encode(_AbortQuestion("", [], state=True))
        answers = await asyncio.gather(
            *(self._ask(path, question, ProcessState) for path in self._others)
        )
        return [answer for answer in answers if answer is not None]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = msgspec.msgpack.decode(await reader.read(), type=_AbortQuestion)
            if asked.state:
                told = None if self.describe is None else self.describe()
                writer.write(msgspec.msgpack.encode(told))
                return
            ended = await self._local(asked.tenant, asked.request_ids)
            writer.write(msgspec.msgpack.encode(ended))
        finally:
            writer.close()

    async def _ask(self, path: Path, question: bytes, kind: type[T]) -> T | None:
        """Another process's answer; None where it does not answer."""
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(question)
                writer.write_eof()
                answer = await reader.read()
                writer.close()
            return msgspec.msgpack.decode(answer, type=kind)
        except (OSError, TimeoutError, msgspec.DecodeError):
            logger.info("no answer from %s", path.name)
            return None
