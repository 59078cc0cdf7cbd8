"""Ends the tenant's own requests, by the ids clients know.

A request may run in another API process of this server than the one that was asked: each listens on
a unix socket beside the engine's, in the folder only this user can enter, and all are asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

logger = logging.getLogger("lookonce.server")

ANSWER_SECONDS = 2.0
Abort = Callable[[], Awaitable[None]]


class _Question(msgspec.Struct, array_like=True):
    """What one API process asks another."""

    tenant: str
    request_ids: list[str]


class RunningRequests:
    """Who runs what here: (tenant, request id) → how to end it. Clients may repeat their ids."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Abort]] = {}

    @contextmanager
    def noted(self, tenant: str, request_id: str, abort: Abort) -> Iterator[None]:
        """While one request runs."""
        self.note(tenant, request_id, abort)
        try:
            yield
        finally:
            self.forget(tenant, request_id, abort)

    def note(self, tenant: str, request_id: str, abort: Abort) -> None:
        self._running.setdefault((tenant, request_id), []).append(abort)

    def forget(self, tenant: str, request_id: str, abort: Abort) -> None:
        name = (tenant, request_id)
        self._running[name].remove(abort)
        if not self._running[name]:
            del self._running[name]

    async def abort(self, tenant: str, request_ids: list[str]) -> list[str]:
        """The ids that were running here."""
        found = [name for name in dict.fromkeys(request_ids) if (tenant, name) in self._running]
        for request_id in found:
            for abort in list(self._running.get((tenant, request_id), ())):
                await abort()
        return found


class AbortPeers:
    """Asks every API process of the server. `index` is this process's number of `count`."""

    def __init__(self, folder: Path, index: int, count: int, running: RunningRequests) -> None:
        self._paths = [folder / f"abort-{number}.sock" for number in range(count)]
        self._own = self._paths.pop(index)
        self._running = running
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        if self._paths:
            self._own.unlink(missing_ok=True)  # a predecessor that was killed left its own
            self._server = await asyncio.start_unix_server(self._answer, self._own)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._own.unlink(missing_ok=True)

    async def abort(self, tenant: str, request_ids: list[str]) -> list[str]:
        """The ids that were running anywhere, in the order they were asked for."""
        question = msgspec.msgpack.encode(_Question(tenant, request_ids))
        own, *others = await asyncio.gather(
            self._running.abort(tenant, request_ids),
            *(self._ask(path, question) for path in self._paths),
        )
        ended = {*own, *(name for answer in others for name in answer)}
        return [name for name in dict.fromkeys(request_ids) if name in ended]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = msgspec.msgpack.decode(await reader.read(), type=_Question)
            ended = await self._running.abort(asked.tenant, asked.request_ids)
            writer.write(msgspec.msgpack.encode(ended))
        finally:
            writer.close()

    async def _ask(self, path: Path, question: bytes) -> list[str]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(question)
                writer.write_eof()
                answer = await reader.read()
                writer.close()
            return msgspec.msgpack.decode(answer, type=list[str])
        except (OSError, TimeoutError, msgspec.DecodeError):
            logger.info("no answer from %s", path.name)
            return []
