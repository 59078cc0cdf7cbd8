"""What resolving media rests on; each seam has a double in the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from lookonce.render.families.base import Options
from lookonce.render.media.processing import MediaJob, Processed
from lookonce.render.media.sources import MediaSource
from lookonce.types.media import Modality
from lookonce.types.ports import ItemDirectory


class Family(Protocol):
    """What identities depend on; `families.base.ProcessorFamily` is the real one."""

    def fingerprint(self) -> bytes: ...

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options: ...


class Loader(Protocol):
    """Encoded bytes of a source; `load.MediaLoader` is the real one."""

    @property
    def fetched(self) -> Counter[str]:
        """Bodies fetched and files read, by modality."""

    async def load(self, source: MediaSource, scope: bytes = b"") -> bytes: ...


class Pool(Protocol):
    """Decodes and processes off the event loop; `pool.MediaPool` is the real one."""

    def run(self, job: MediaJob) -> Coroutine[Any, Any, Processed]:
        """Raises at once what refuses the job; the rest when awaited."""


class RendererDirectory(ItemDirectory, Protocol):
    @property
    def capacity_bytes(self) -> int: ...


class NameBindings(Protocol):
    """What uuids mean; `cache.uuids.UuidBindings` is the real one."""

    def bind(self, scope: bytes, uuid: str, digest: bytes, *, param: str | None = None) -> None: ...

    def resolve(self, scope: bytes, uuid: str) -> bytes | None: ...
