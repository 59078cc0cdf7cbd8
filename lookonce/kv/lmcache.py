"""LMCache's multi-process server on this machine, as one more tier.

Objects are the same as everywhere: our header and payload are what LMCache keeps, so every read is
verified here, whatever LMCache promises. It evicts by itself; a lease is a read lock of its, which
it takes back after a time of its own. It cannot delete one object: what was found broken is
remembered as absent instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import numpy as np

from lookonce.kv.lmcache_client import Registration, library
from lookonce.kv.objects import HEADER_BYTES, ObjectFormat
from lookonce.kv.tier import ReadOutcome, Reason, TierError

logger = logging.getLogger(__name__)

TIMEOUT = 1.0
"""Seconds one call may take, registering included."""
IDLE_SECONDS = 20.0
"""After so long without a call it registers again: a server forgets clients that are silent for
two minutes, and one that was restarted knows none."""
MAX_BROKEN = 10_000

T = TypeVar("T")


class LMCacheTier:
    """A `KVTier` on a server; one that is away costs a deadline, and then a breaker's patience.

    Raises `ConfigError` where the library is not installed.
    """

    name = "lmcache"
    held_bytes = 0

    def __init__(self, objects: ObjectFormat, address: str, *, timeout: float = TIMEOUT) -> None:
        library()  # slow the first time, so not in a request
        self._objects = objects
        self._address = address
        self._timeout = timeout
        self._lock = threading.Lock()
        self._registration: Registration | None = None
        self._numbers = count()
        self._leases: defaultdict[bytes, list[Any]] = defaultdict(list)
        """Block → LMCache keys whose sessions hold a read lock on it."""
        self._broken: OrderedDict[bytes, None] = OrderedDict()

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        asked = [key for key in keys if key not in self._broken]

        def ask(registration: Registration, deadline: float) -> set[bytes]:
            named = self._name(registration, asked)
            held = registration.look_up(named, deadline)
            registration.end(n for n, there in zip(named, held, strict=True) if not there)
            with self._lock:
                for key, name, there in zip(asked, named, held, strict=True):
                    if there:
                        self._leases[key].append(name)
            return {key for key, there in zip(asked, held, strict=True) if there}

        found = self._exchange(ask) if asked else set()
        return [key in found for key in keys]

    def release(self, keys: Sequence[bytes]) -> None:
        names = [name for key in keys if (name := self._take_lease(key)) is not None]
        registration = self._registration
        if not names or registration is None:
            return
        try:
            registration.unlock(names, time.monotonic() + self._timeout)
        except (OSError, ValueError, RuntimeError):
            logger.info("LMCache: read locks are left to their end")

    def read(self, keys: Sequence[bytes], into: memoryview) -> ReadOutcome:
        def fetch(registration: Registration, deadline: float) -> ReadOutcome:
            named = self._locked(registration, keys, deadline)
            shorter: Reason | None = None if len(named) == len(keys) else "missing"
            try:
                slots = registration.prepare_load(named, deadline)
                good, failure = self._copy_out(keys, slots, into)
                return ReadOutcome(good, failure or shorter)
            finally:
                registration.commit_load(named, deadline)

        try:
            return self._exchange(fetch)
        except TierError as error:
            return ReadOutcome(0, error.reason)

    def write(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> int:
        def put(registration: Registration, deadline: float) -> int:
            named = self._name(registration, keys)
            slots = registration.prepare_store(named, deadline)
            lent = []
            for key, name, payload, slot in zip(keys, named, payloads, slots, strict=True):
                if slot is not None:
                    self._copy_in(key, payload, slot)
                    lent.append(name)
            kept = sum(registration.commit_store(lent, deadline))
            registration.end(named)
            return kept

        return self._exchange(put)

    def close(self) -> None:
        with self._lock:
            registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()

    # --- objects ------------------------------------------------------------------------------

    def _copy_in(self, key: bytes, payload: memoryview, slot: np.ndarray) -> None:
        slot[:HEADER_BYTES] = np.frombuffer(self._objects.header(key, payload), dtype=np.uint8)
        np.copyto(slot[HEADER_BYTES:], np.frombuffer(payload, dtype=np.uint8))

    def _copy_out(
        self, keys: Sequence[bytes], slots: Sequence[np.ndarray | None], into: memoryview
    ) -> tuple[int, Reason | None]:
        """Leading blocks that are in `into` and intact, and why the next one of `slots` is not."""
        size = self._objects.payload_bytes
        target = np.frombuffer(into, dtype=np.uint8)
        for index, (key, slot) in enumerate(zip(keys, slots, strict=False)):
            if slot is None:
                return index, "missing"
            payload = target[index * size : (index + 1) * size]
            header = slot[:HEADER_BYTES].tobytes()
            np.copyto(payload, slot[HEADER_BYTES:])
            if not self._objects.intact(key, header, payload.data):
                self._condemn(key)
                return index, "corrupt"
        return len(slots), None

    def _condemn(self, key: bytes) -> None:
        with self._lock:
            self._broken[key] = None
            while len(self._broken) > MAX_BROKEN:
                self._broken.popitem(last=False)

    # --- sessions on the server -----------------------------------------------------------------

    def _name(self, registration: Registration, keys: Sequence[bytes]) -> list[Any]:
        """Each asks in a session of its own."""
        prefix = f"lookonce-{registration.instance:x}"
        return [registration.key(key, f"{prefix}-{next(self._numbers)}") for key in keys]

    def _take_lease(self, key: bytes) -> Any:
        with self._lock:
            names = self._leases.get(key)
            name = names.pop() if names else None
            if names is not None and not names:
                del self._leases[key]
            return name

    def _locked(
        self, registration: Registration, keys: Sequence[bytes], deadline: float
    ) -> list[Any]:
        """Names of the leading blocks that are held, with the locks of leases or new ones."""
        names = [self._take_lease(key) for key in keys]
        absent = [index for index, name in enumerate(names) if name is None]
        if absent:
            asked = self._name(registration, [keys[index] for index in absent])
            held = registration.look_up(asked, deadline)
            for index, name, there in zip(absent, asked, held, strict=True):
                names[index] = name if there else None
        end = names.index(None) if None in names else len(names)
        beyond = [name for name in names[end:] if name is not None]
        if beyond:
            registration.unlock(beyond, deadline)
        return names[:end]

    # --- the server -------------------------------------------------------------------------------

    def _exchange(self, talk: Callable[[Registration, float], T]) -> T:
        """Run `talk`. Raises `TierError`; a registration that failed is not used again."""
        deadline = time.monotonic() + self._timeout
        try:
            registration = self._register(deadline)
            answer = talk(registration, deadline)
        except TimeoutError as error:
            self._drop()
            raise TierError("timeout", str(error)) from error
        except OSError as error:
            self._drop()
            raise TierError("connection", str(error)) from error
        except (ValueError, RuntimeError) as error:
            self._drop()
            raise TierError("io", str(error)) from error
        registration.used_at = time.monotonic()
        return answer

    def _register(self, deadline: float) -> Registration:
        with self._lock:
            registration = self._registration
            if registration is None:
                model = f"lookonce-{self._objects.namespace.hex()}"
                size = self._objects.object_bytes
                registration = Registration(self._address, model, size, deadline)
                self._registration = registration
            elif time.monotonic() - registration.used_at > IDLE_SECONDS:
                registration.refresh(deadline)
            return registration

    def _drop(self) -> None:
        with self._lock:
            registration, self._registration = self._registration, None
            self._leases.clear()
        if registration is not None:
            registration.client.close()
