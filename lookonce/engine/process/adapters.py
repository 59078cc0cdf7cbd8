"""LoRA adapters by name: loaded and unloaded while requests run, dropped when the last one ends.

    LoadAdapter ──▶ read, beside the steps ──▶ taken between two steps ──▶ every API process knows
                                                                           it ──▶ AdapterAnswer
    UnloadAdapter ──▶ the name is gone ──▶ every API process knows it ──▶ AdapterAnswer
                          └──▶ the matrices go with the last request that is computed with them

A name stands for contents (`LoRAIdentity`), and what runs is bound to contents: another adapter
under an old name changes nothing for requests that run.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from lookonce.errors import (
    BadRequestError,
    LookOnceError,
    ModelNotFoundError,
    QueueFullError,
    RequestFailedError,
)
from lookonce.types.lora import Install, LoRAIdentity, LoRAInfo, ReadAdapter
from lookonce.types.media import Modality

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Adapters that wait to be read."""


class AdapterStore(Protocol):
    """Holds adapters on the device; `model.lora_files.AdapterStore` is the real one. One thread
    calls it at a time."""

    def load(self, path: str) -> ReadAdapter:
        """Read the adapter in a folder. Raises `BadRequestError`."""

    def drop(self, digest: bytes) -> Install:
        """Make what is held without this adapter, which no sequence uses any more."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load that somebody waits for."""

    sender: str
    nonce: int
    name: str
    path: str


class Loaded(NamedTuple):
    """What became of a load."""

    load: Load
    error: LookOnceError | None


class EngineAdapters:
    """The adapters of one engine. The input thread alone calls it; `_read` runs in a thread of its
    own, one job at a time, whose result is taken before the next one begins."""

    def __init__(
        self,
        store: AdapterStore,
        *,
        max_loras: int,
        loaded: tuple[LoRAInfo, ...] = (),
        for_media: Mapping[Modality, LoRAIdentity] = MappingProxyType({}),
    ) -> None:
        """`loaded`: what was loaded when the engine started. `for_media`: the model's own adapters,
        which have no names, by the media that they are for; the first one that a prompt has media
        for is its own."""
        self._store = store
        self._max_loras = max_loras
        self._by_name = {info.name: info for info in loaded}
        self._uses: Counter[bytes] = Counter(info.identity.digest for info in loaded)
        """Digest → names and requests that use it, and media, which always do."""
        self._uses.update(identity.digest for identity in for_media.values())
        self._for_media = for_media
        self._of_request: dict[str, bytes] = {}
        self._waiting: deque[Load | bytes] = deque()
        """Adapters to read, and digests of such to drop."""
        self._running: Load | bytes | None = None
        """The job whose result was not taken yet."""
        self._not_dropped: list[bytes] = []
        """Digests of adapters for whose removal there was no memory: tried again with a load."""
        self._done: deque[tuple[Load | None, ReadAdapter | Install | LookOnceError]] = deque()
        self.wake: Callable[[], None] = lambda: None
        """Called from another thread when there is something to `take`."""

    @property
    def listed(self) -> tuple[LoRAInfo, ...]:
        return tuple(self._by_name.values())

    def knows(self, name: str) -> bool:
        """Whether an adapter of this name is loaded, or will be."""
        return name in self._by_name or name in self._coming()

    def _coming(self) -> set[str]:
        jobs = (*self._waiting, self._running)
        return {job.name for job in jobs if isinstance(job, Load)}

    # --- names --------------------------------------------------------------------------------

    def load(self, load: Load, *, replace: bool) -> None:
        """Begin to read an adapter. Raises `BadRequestError` for a name that is taken, unless it is
        to be replaced, and where `max_loras` are loaded."""
        coming = self._coming()
        if load.name in coming:
            raise BadRequestError(f"the adapter {load.name!r} is being loaded", param="lora_name")
        if load.name in self._by_name and not replace:
            raise BadRequestError(
                f"the adapter {load.name!r} is loaded already; unload it first, or set "
                "load_inplace",
                param="lora_name",
            )
        if len({*self._by_name, *coming, load.name}) > self._max_loras:
            raise BadRequestError(
                f"{self._max_loras} adapters are loaded, the most that may be (--max-loras); "
                "unload one first",
                param="lora_name",
            )
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFullError(f"{MAX_WAITING} adapters are waiting to be loaded")
        self._waiting += [*self._not_dropped, load]
        self._not_dropped = []
        self._begin_next()

    def unload(self, name: str) -> None:
        """Forget a name; requests that run go on. Raises `ModelNotFoundError`."""
        info = self._by_name.pop(name, None)
        if info is None:
            raise ModelNotFoundError(f"there is no adapter {name[:200]!r}", param="lora_name")
        self._release(info.identity.digest)

    # --- requests -----------------------------------------------------------------------------

    def acquire(self, request_id: str, name: str) -> LoRAIdentity:
        """What the name stands for, kept for a request. Raises `ModelNotFoundError`."""
        info = self._by_name.get(name)
        if info is None:
            raise ModelNotFoundError(
                f"the model {name[:200]!r} is not served any more", param="model"
            )
        self._of_request[request_id] = info.identity.digest
        self._uses[info.identity.digest] += 1
        return info.identity

    def own(self, modalities: Collection[Modality]) -> LoRAIdentity | None:
        """The model's own adapter for a prompt with these media, whose request names none."""
        return next((self._for_media[each] for each in self._for_media if each in modalities), None)

    @property
    def for_media(self) -> tuple[tuple[Modality, LoRAIdentity], ...]:
        """The model's own adapters, in the order in which prompts with several media get them."""
        return tuple(self._for_media.items())

    @property
    def chosen_by_media(self) -> bool:
        return bool(self._for_media)

    def release(self, request_id: str) -> None:
        """Other requests have none, and may be given."""
        digest = self._of_request.pop(request_id, None)
        if digest is not None:
            self._release(digest)

    def _release(self, digest: bytes) -> None:
        self._uses[digest] -= 1
        if not self._uses[digest]:
            del self._uses[digest]
            self._waiting.append(digest)
            self._begin_next()

    # --- jobs ---------------------------------------------------------------------------------

    def take(self) -> tuple[list[Install], list[Loaded]]:
        """What the step thread has to call, in order, before requests that come after; and the
        loads that have ended, whose names stand for the new contents from now on."""
        installs: list[Install] = []
        ended: list[Loaded] = []
        while self._done:
            load, result = self._done.popleft()
            job, self._running = self._running, None
            if isinstance(job, bytes) and isinstance(result, LookOnceError):
                self._not_dropped.append(job)
            elif load is None:
                if not isinstance(result, LookOnceError | ReadAdapter):
                    installs.append(result)
            elif isinstance(result, ReadAdapter):
                installs.append(result.install)
                self._name(load, result)
                ended.append(Loaded(load, None))
            elif isinstance(result, LookOnceError):
                ended.append(Loaded(load, result))
            self._begin_next()
        return installs, ended

    def _name(self, load: Load, read: ReadAdapter) -> None:
        before = self._by_name.get(load.name)
        self._by_name[load.name] = LoRAInfo(load.name, read.identity, read.rank, load.path)
        self._uses[read.identity.digest] += 1
        if before is not None:
            self._release(before.identity.digest)

    def _begin_next(self) -> None:
        while self._waiting and self._running is None:
            job = self._waiting.popleft()
            if isinstance(job, bytes) and job in self._uses:
                continue  # it was loaded again meanwhile
            self._running = job
            thread = threading.Thread(target=self._work, args=(job,), name="adapters", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more threads
                self._running = None
                if isinstance(job, Load):
                    refused = RequestFailedError(f"the adapter could not be loaded: {error}")
                    self._done.append((job, refused))
                    self.wake()

    def _work(self, job: Load | bytes) -> None:
        load = job if isinstance(job, Load) else None
        result: ReadAdapter | Install | LookOnceError
        try:
            result = self._store.load(job.path) if isinstance(job, Load) else self._store.drop(job)
        except LookOnceError as error:
            result = error.with_traceback(None)
        except Exception:
            logger.exception("an adapter could not be loaded")
            result = RequestFailedError("the adapter could not be loaded")
        self._done.append((load, result))
        self.wake()

    def counters(self) -> dict[str, float]:
        return {
            "lora_adapters_loaded": float(len(self._by_name)),
            "lora_requests_running": float(len(self._of_request)),
        }
