"""What LookOnce uses of LMCache's client library: one registration with a multi-process server.

The server lends slots of its shared memory: `prepare_*` names them, this process copies, `commit_*`
gives them back. That needs a server on this machine. LMCache's other way, pickles over the network,
is not used: opening a pickle runs whatever its sender put into it.

The library names data by token ids and hashes them itself. One block of ours is one chunk of its
own, whose "tokens" are the words of the block's full hash, under a model name that is the whole
namespace digest; so two blocks meet there exactly if they meet everywhere else.
"""

from __future__ import annotations

import importlib.util
import logging
import mmap
import os
import secrets
import socket
import struct
import time
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from lookonce.errors import ConfigError
from lookonce.types.kv import LMCACHE_MISSING

logger = logging.getLogger(__name__)

KEY_WORDS = struct.Struct("<8I")
"""A block hash as "token ids"."""
SHARED_MEMORY = "/dev/shm"


class Registration:
    """One client with one layout of objects. Used by several threads at once.

    Raises `OSError` (`TimeoutError` past the deadline) and `ValueError`, as its methods do.
    """

    def __init__(self, address: str, model: str, object_bytes: int, deadline: float) -> None:
        _require_local(address)
        types, factory = library()
        self._types = types
        self._model = model
        self._object_bytes = object_bytes
        self.instance = secrets.randbits(48)
        """Ours alone among everybody's who uses the server."""
        self.client: Any = factory.RequestClientFactory.create(f"tcp://{address}")
        try:
            self._chunk = int(one(self.client.get_chunk_size(), deadline))
            if self._chunk < 8:
                raise ValueError("LMCache's chunk size must be at least 8")
            self.refresh(deadline)
        except BaseException:
            self.client.close()
            raise

    def refresh(self, deadline: float) -> None:
        """Register, again if need be, and map the memory the server has now."""
        width = -(-self._object_bytes // self._chunk)
        payload = self._types.RegisterEngineDrivenContextPayload(
            instance_id=self.instance,
            model_name=self._model,
            world_size=1,
            block_size=self._chunk,
            num_layers=1,
            hidden_dim_size=width,
            dtype_str="uint8",
            use_mla=True,  # one plane of bytes, not keys and values apart
            num_physical_slots=self._chunk,
        )
        try:
            answer = one(self.client.register_kv_cache_engine_driven_context(payload), deadline)
        except TimeoutError:
            logger.warning(
                "LMCache answers, but takes no client of this kind: start its server with "
                "--supported-transfer-mode engine_driven (or auto) and --shm-name"
            )
            raise
        self._pool = _map_shared(answer.shm_name, answer.pool_size)
        self.used_at = time.monotonic()

    def close(self) -> None:
        self.client.unregister_kv_cache_engine_driven_context(self.instance)
        self.client.close()

    def key(self, block_hash: bytes, request_id: str) -> Any:
        """Names one block in a session of its own on the server."""
        words = KEY_WORDS.unpack(block_hash) + (0,) * (self._chunk - 8)
        return self._types.IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=0,
            token_ids=words,
            start=0,
            end=self._chunk,
            request_id=request_id,
            num_kv_readers=1,
        )

    def look_up(self, keys: Iterable[Any], deadline: float) -> list[bool]:
        """Which are held; each of those is then locked for one reader."""
        asked = list(keys)
        everything([self.client.lookup(k.no_worker_id_version(), 1) for k in asked], deadline)
        waits = [
            self.client.wait_prefetch_status(k.request_id, max(0.0, deadline - time.monotonic()))
            for k in asked
        ]
        return [bool(found) for found in everything(waits, deadline)]

    def unlock(self, keys: Iterable[Any], deadline: float) -> None:
        given = list(keys)
        everything([self.client.free_lookup_locks(k, 1) for k in given], deadline)
        self.end(given)

    def prepare_load(self, keys: Iterable[Any], deadline: float) -> list[np.ndarray | None]:
        """The bytes of locked blocks where they lie, until `commit_load`; None: gone."""
        asked = [self.client.prepare_retrieve(key, self.instance) for key in keys]
        answers = everything(asked, deadline)
        return [self._slot(answer.context) if answer.success else None for answer in answers]

    def commit_load(self, keys: Iterable[Any], deadline: float) -> None:
        given = list(keys)
        everything([self.client.commit_retrieve(key, self.instance) for key in given], deadline)
        self.end(given)

    def prepare_store(self, keys: Iterable[Any], deadline: float) -> list[np.ndarray | None]:
        """Where to write each block, until `commit_store`; None: held already, or no room."""
        asked = [self.client.prepare_store(key, self.instance) for key in keys]
        return [self._slot(answer.context) for answer in everything(asked, deadline)]

    def commit_store(self, keys: Iterable[Any], deadline: float) -> list[bool]:
        asked = [self.client.commit_store(key, self.instance, b"") for key in keys]
        return [bool(answer) for answer in everything(asked, deadline)]

    def end(self, keys: Iterable[Any]) -> None:
        """The server forgets the sessions; nobody waits for that."""
        for key in keys:
            self.client.end_session(key.request_id)

    def _slot(self, context: dict[str, Any]) -> np.ndarray | None:
        slots = context.get("slots")
        if not slots:
            return None
        start = int(slots[0]["offset"])
        slot = self._pool[start : start + self._object_bytes]
        if int(slots[0]["length"]) < self._object_bytes or slot.nbytes != self._object_bytes:
            raise ValueError("LMCache lent a slot of another size")
        return slot


def one(future: Any, deadline: float) -> Any:
    """Raises `TimeoutError`."""
    return future.result(timeout=max(0.0, deadline - time.monotonic()))


def everything(futures: Iterable[Any], deadline: float) -> list[Any]:
    """All were sent before the first is waited for."""
    return [one(future, deadline) for future in list(futures)]


def library() -> tuple[ModuleType, ModuleType]:
    """LMCache's types and its client, quiet and without telemetry; seconds the first time.

    Raises `ConfigError` where it is not installed.
    """
    if importlib.util.find_spec("lmcache") is None:
        raise ConfigError(LMCACHE_MISSING)
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        types = importlib.import_module("lmcache.v1.multiprocess.custom_types")
        factory = importlib.import_module("lmcache.v1.multiprocess.transport.factory")
    return types, factory


def _require_local(address: str) -> None:
    """Its memory is mapped by name, so a server elsewhere must not be taken for one here.

    Raises `OSError` for an address that is not this machine's.
    """
    host = address.rpartition(":")[0].strip("[]")
    family, kind, protocol, _, resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(resolved)


def _map_shared(name: str, nbytes: int) -> np.ndarray:
    """The server's pool. Raises `OSError`, `ValueError` where it lends none."""
    if not name or nbytes <= 0:
        raise ValueError("the LMCache server lends no shared memory: start it with --shm-name")
    descriptor = os.open(f"{SHARED_MEMORY}/{name.lstrip('/')}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
    finally:
        os.close(descriptor)
