"""Disk: one file per block, published by rename, found again after a restart.

    folder/<namespace, 16 hex>/<2 hex>/<block hash, 64 hex>.kv

Writers never change a file: they write another and rename it, so a reader sees a whole object or
none. What a crash tore is found by its checksum and deleted. Servers may share a folder; each keeps
the byte limit for the files it knows: its own, those its scan found, those it has read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lookonce.errors import ConfigError
from lookonce.kv.objects import HEADER_BYTES, ObjectFormat
from lookonce.kv.tier import ReadOutcome, TierError

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
ABANDONED_SECONDS = 60.0
"""Age at which an unpublished file belongs to nobody any more."""
SUFFIX = ".kv"
NAMESPACE_DIGITS = 16


class DiskTier:
    """A `KVTier` in a folder. Raises `ConfigError` for one that cannot be written."""

    name = "disk"

    def __init__(
        self,
        objects: ObjectFormat,
        folder: str,
        capacity_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._root = folder
        self._own = os.path.join(folder, objects.namespace.hex()[:NAMESPACE_DIGITS])
        self._capacity = capacity_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Path → bytes, least recently used first."""
        self._held_bytes = 0
        self._leases: dict[str, float] = {}
        self._num_written = 0
        try:
            os.makedirs(self._own, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{objects.option} disk: {folder} cannot be used: {error}") from error
        if not os.access(self._own, os.W_OK | os.X_OK):
            raise ConfigError(f"{objects.option} disk: {folder} cannot be written")
        self._scan = threading.Thread(target=self._scan_all, name="kv-disk-scan", daemon=True)
        self._scan.start()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks the file system, so that it also finds what other servers wrote."""
        until = self._clock() + LEASE_SECONDS
        held = []
        for key in keys:
            path = self._path(key)
            found = os.path.exists(path)
            if found:
                self._leases[path] = until
            held.append(found)
        return held

    def release(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._leases.pop(self._path(key), None)

    def read(self, keys: Sequence[bytes], into: memoryview) -> ReadOutcome:
        size = self._objects.payload_bytes
        for index, key in enumerate(keys):
            path = self._path(key)
            payload = into[index * size : (index + 1) * size]
            try:
                intact = self._read_object(path, key, payload)
            except FileNotFoundError:
                self._forget(path)
                return ReadOutcome(index, "missing")
            except OSError as error:
                logger.warning("a block cannot be read", extra={"cause": error.strerror})
                return ReadOutcome(index, "io")
            if not intact:
                self._delete(path)
                return ReadOutcome(index, "corrupt")
            self._used(path)
        return ReadOutcome(len(keys))

    def write(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> int:
        written = 0
        for key, payload in zip(keys, payloads, strict=True):
            path = self._path(key)
            if path in self._sizes and os.path.exists(path):
                continue
            try:
                self._publish(path, key, payload)
            except OSError as error:
                raise TierError("io", error.strerror or "") from error
            self._used(path)
            written += 1
        self._make_room()
        return written

    def close(self) -> None:
        self._scan.join(timeout=1.0)

    def wait_scanned(self) -> None:
        """Returns once everything an earlier server left is counted."""
        self._scan.join()

    # --- files --------------------------------------------------------------------------------

    def _path(self, key: bytes) -> str:
        digits = key.hex()
        return f"{self._own}/{digits[:2]}/{digits}{SUFFIX}"

    def _read_object(self, path: str, key: bytes, payload: memoryview) -> bool:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != self._objects.object_bytes:
                return False
            header = bytearray(HEADER_BYTES)
            count = os.preadv(descriptor, [header, payload], 0)
            with suppress(OSError):  # so that the next server knows what was used last
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        whole = count == self._objects.object_bytes
        return whole and self._objects.intact(key, header, payload)

    def _publish(self, path: str, key: bytes, payload: memoryview) -> None:
        self._num_written += 1
        draft = f"{path}.{os.getpid()}-{threading.get_ident()}-{self._num_written}.tmp"
        try:
            descriptor = _create(draft)
            try:
                header = self._objects.header(key, payload)
                if os.writev(descriptor, [header, payload]) != self._objects.object_bytes:
                    raise OSError(None, "a short write")
            finally:
                os.close(descriptor)
            os.rename(draft, path)
        except OSError:
            with suppress(OSError):
                os.unlink(draft)
            raise

    def _delete(self, path: str) -> None:
        with suppress(OSError):
            os.unlink(path)
        self._forget(path)

    # --- the index ----------------------------------------------------------------------------

    def _used(self, path: str) -> None:
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
            else:
                self._sizes[path] = self._objects.object_bytes
                self._held_bytes += self._objects.object_bytes

    def _forget(self, path: str) -> None:
        with self._lock:
            self._held_bytes -= self._sizes.pop(path, 0)

    def _make_room(self) -> None:
        while True:
            with self._lock:
                victim = self._victim() if self._held_bytes > self._capacity else None
            if victim is None:
                return
            self._delete(victim)

    def _victim(self) -> str | None:
        """The least recently used file without a lease; a leased one if all have one."""
        now = self._clock()
        oldest = next(iter(self._sizes), None)
        for path in self._sizes:
            until = self._leases.get(path)
            if until is None or until <= now:
                self._leases.pop(path, None)
                return path
        return oldest

    def _scan_all(self) -> None:
        """Count what earlier servers left, oldest first before anything used since."""
        try:
            found = sorted(self._survey())
        except OSError as error:
            logger.warning("the KV folder cannot be listed: %s", error.strerror)
            return
        with self._lock:
            for _, path, size in reversed(found):
                if path not in self._sizes:
                    self._sizes[path] = size
                    self._sizes.move_to_end(path, last=False)
                    self._held_bytes += size
        self._make_room()
        if found:
            logger.info("the KV folder holds %d blocks, %d bytes", len(found), self._held_bytes)

    def _survey(self) -> Iterator[tuple[float, str, int]]:
        """`(last used, path, bytes)` of every block of every namespace; deletes abandoned drafts.

        Only this tier's own kinds of names are looked at: whatever else lies there is left alone.
        """
        for namespace in Path(self._root).iterdir():
            if len(namespace.name) != NAMESPACE_DIGITS or not namespace.is_dir():
                continue
            for path in namespace.glob(f"??/*{SUFFIX}*"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if path.suffix == SUFFIX:
                        yield status.st_mtime, str(path), status.st_size
                    elif time.time() - status.st_mtime > ABANDONED_SECONDS:
                        path.unlink()


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)
