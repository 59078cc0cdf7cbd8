"""One `/metrics` for all API processes of a server: each tells the others its own counts.

Every process answers on a unix socket beside the engine's, in the folder only this user can enter.
A peer that is gone, or does not answer at once, is left out: its counters died with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import msgspec
from prometheus_client.core import Metric

logger = logging.getLogger("lookonce.server")

ANSWER_SECONDS = 1.0
SampleKey = tuple[str, tuple[tuple[str, str], ...]]


class Family(msgspec.Struct, array_like=True):
    """One metric family as it travels: samples are (name, labels, value)."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, dict[str, str], float]]


class Peers:
    """This process's counts, and everybody's. `index` is this process's number of `count`."""

    def __init__(
        self, folder: Path, index: int, count: int, local: Callable[[], list[Metric]]
    ) -> None:
        self._paths = [folder / f"metrics-{number}.sock" for number in range(count)]
        self._own = self._paths.pop(index)
        self._local = local
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

    async def families(self) -> list[Metric]:
        """The sums over all processes that answer."""
        answers = await asyncio.gather(*map(self._ask, self._paths))
        own = [_family(metric) for metric in self._local()]
        return _summed(family for families in [own, *answers] for family in families)

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.msgpack.encode([_family(metric) for metric in self._local()]))
        writer.close()
        await writer.wait_closed()

    async def _ask(self, path: Path) -> list[Family]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(path)
                answer = await reader.read()
                writer.close()
            return msgspec.msgpack.decode(answer, type=list[Family])
        except (OSError, TimeoutError, msgspec.DecodeError):
            logger.info("no metrics from %s", path.name)
            return []


def _family(metric: Metric) -> Family:
    samples = [(sample.name, sample.labels, sample.value) for sample in metric.samples]
    return Family(metric.name, metric.type, metric.documentation, samples)


def _summed(families: Iterable[Family]) -> list[Metric]:
    """Families of one name become one, whose samples of equal name and labels are added up."""
    described: dict[str, Family] = {}
    sums: dict[str, dict[SampleKey, float]] = {}
    for family in families:
        described.setdefault(family.name, family)
        total = sums.setdefault(family.name, {})
        for name, labels, value in family.samples:
            key = (name, tuple(labels.items()))
            total[key] = total.get(key, 0.0) + value
    return [_metric(family, sums[name]) for name, family in described.items()]


def _metric(family: Family, values: dict[SampleKey, float]) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    for (name, labels), value in values.items():
        metric.add_sample(name, dict(labels), value)
    return metric
