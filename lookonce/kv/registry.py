"""From `--kv-tier` to tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lookonce.kv.chain import TierChain
from lookonce.kv.disk import DiskTier
from lookonce.kv.host import HostTier
from lookonce.kv.lmcache import LMCacheTier
from lookonce.kv.objects import ObjectFormat
from lookonce.kv.tier import KVTier
from lookonce.kv.valkey import ValkeyTier
from lookonce.types.kv import TierKind, TierSpec


def open_chain(specs: Sequence[TierSpec], objects: ObjectFormat) -> TierChain:
    """Open every tier, nearest first. Raises `ConfigError` for one this machine cannot have.

    A server that does not answer is no error: it may come later.
    """
    return TierChain([_OPENERS[spec.kind](objects, spec) for spec in specs])


def _host(objects: ObjectFormat, spec: TierSpec) -> KVTier:
    return HostTier(objects, spec.capacity_bytes)


def _disk(objects: ObjectFormat, spec: TierSpec) -> KVTier:
    return DiskTier(objects, spec.path or "", spec.capacity_bytes)


def _valkey(objects: ObjectFormat, spec: TierSpec) -> KVTier:
    return ValkeyTier(objects, spec)


def _lmcache(objects: ObjectFormat, spec: TierSpec) -> KVTier:
    return LMCacheTier(objects, f"{spec.host}:{spec.port}")


_OPENERS: dict[TierKind, Callable[[ObjectFormat, TierSpec], KVTier]] = {
    "host": _host,
    "disk": _disk,
    "valkey": _valkey,
    "lmcache": _lmcache,
}
