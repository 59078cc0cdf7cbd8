"""What the API processes of one server ask each other: their counts, and to abort requests.

Each process answers on unix sockets beside the engine's socket, in a folder that only this user can
enter. A process that is gone, or does not answer in time, is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Self, TypeVar

import msgspec
from prometheus_client.core import Metric

logger = logging.getLogger("lookonce.server")
METRICS_SECONDS = 1.0
ABORT_SECONDS = 2.0
AbortLocally = Callable[[str, list[str]], Awaitable[list[str]]]
"""Aborts a tenant's requests of these ids; answers the ids that were running."""
SampleKey = tuple[str, tuple[tuple[str, str], ...]]
T = TypeVar("T")


class PeerSockets:
    """Base of both: one socket per API process. `index` is this process's number of `count`."""

    def __init__(self, folder: Path, kind: str, index: int, count: int, timeout: float) -> None:
        self._others = [folder / f"{kind}-{number}.sock" for number in range(count)]
        self._own = self._others.pop(index)
        self._timeout = timeout
        self._server: asyncio.Server | None = None

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

    async def answer(self, question: bytes) -> bytes:
        """What this process says to another's question."""
        raise NotImplementedError

    async def ask_others(self, question: bytes, answer_type: type[T]) -> list[T]:
        """The answers of the other processes that give one."""
        asked = (self._ask(path, question, answer_type) for path in self._others)
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await self.answer(await reader.read()))
        finally:
            writer.close()

    async def _ask(self, path: Path, question: bytes, answer_type: type[T]) -> T | None:
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(question)
                writer.write_eof()
                answer = await reader.read()
                writer.close()
            return msgspec.msgpack.decode(answer, type=answer_type)
        except (OSError, TimeoutError, msgspec.DecodeError):
            logger.info("no answer from %s", path.name)
            return None


class _AbortQuestion(msgspec.Struct, array_like=True):
    """What one API process asks another."""

    tenant: str
    request_ids: list[str]


class AbortPeers(PeerSockets):
    """Aborts requests in whatever API process they run; `local` aborts those of this process."""

    def __init__(self, folder: Path, index: int, count: int, local: AbortLocally) -> None:
        super().__init__(folder, "abort", index, count, ABORT_SECONDS)
        self._local = local

    async def abort(self, tenant: str, request_ids: list[str]) -> list[str]:
        """The ids that were running in any process, in the order they were asked for."""
        question = msgspec.msgpack.encode(_AbortQuestion(tenant, request_ids))
        own, others = await asyncio.gather(
            self._local(tenant, request_ids), self.ask_others(question, list[str])
        )
        ended = {*own, *(name for answer in others for name in answer)}
        return [name for name in dict.fromkeys(request_ids) if name in ended]

    async def answer(self, question: bytes) -> bytes:
        asked = msgspec.msgpack.decode(question, type=_AbortQuestion)
        ended = await self._local(asked.tenant, asked.request_ids)
        return msgspec.msgpack.encode(ended)


# --- metrics ------------------------------------------------------------------------------------


class MetricFamily(msgspec.Struct, array_like=True):
    """One metric family as it travels: samples are (name, labels, value)."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, dict[str, str], float]]


class MetricsPeers(PeerSockets):
    """Sums the metrics of all API processes, so that any of them answers `/metrics` for all.

    The counts of a process that has died are lost with it.
    """

    def __init__(
        self, folder: Path, index: int, count: int, local: Callable[[], list[Metric]]
    ) -> None:
        super().__init__(folder, "metrics", index, count, METRICS_SECONDS)
        self._local = local

    async def families(self) -> list[Metric]:
        """The sums over all processes that answer."""
        answers = await self.ask_others(b"", list[MetricFamily])
        return _summed(
            family for families in [self._own_families(), *answers] for family in families
        )

    async def answer(self, question: bytes) -> bytes:
        return msgspec.msgpack.encode(self._own_families())

    def _own_families(self) -> list[MetricFamily]:
        return [
            MetricFamily(
                metric.name,
                metric.type,
                metric.documentation,
                [(sample.name, sample.labels, sample.value) for sample in metric.samples],
            )
            for metric in self._local()
        ]


def _summed(families: Iterable[MetricFamily]) -> list[Metric]:
    """Families of one name become one, whose samples of equal name and labels are added up."""
    described: dict[str, MetricFamily] = {}
    sums: dict[str, dict[SampleKey, float]] = {}
    for family in families:
        described.setdefault(family.name, family)
        total = sums.setdefault(family.name, {})
        for name, labels, value in family.samples:
            key = (name, tuple(labels.items()))
            total[key] = total.get(key, 0.0) + value
    return [_metric(family, sums[name]) for name, family in described.items()]


def _metric(family: MetricFamily, values: dict[SampleKey, float]) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    for (name, labels), value in values.items():
        metric.add_sample(name, dict(labels), value)
    return metric
