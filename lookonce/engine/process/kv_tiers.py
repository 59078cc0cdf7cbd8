"""Opens the external KV tiers of an engine, from its settings and its model."""

from __future__ import annotations

import logging
from typing import Any

from lookonce.config import KVConfig
from lookonce.kv.chain import open_chain
from lookonce.kv.connector import KVConnector
from lookonce.kv.objects import ObjectFormat, namespace_digest
from lookonce.kv.transfer import MAX_QUEUED_BYTES
from lookonce.types.model import ModelInfo
from lookonce.types.ports import KVPageCopier

logger = logging.getLogger(__name__)

ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def open_external(
    kv: KVConfig, info: ModelInfo, rope: dict[str, object], pages: KVPageCopier
) -> KVConnector:
    """Raises `ConfigError` for a tier this machine cannot have."""
    namespace = namespace_digest(weights_digest=info.weights_digest, layout=pages.layout, rope=rope)
    objects = ObjectFormat(namespace, pages.layout)
    chain = open_chain(kv.tiers, objects)
    names = ", ".join(tier.name for tier in chain.tiers)
    logger.info("KV beyond the device: %s, namespace %s", names, namespace.hex()[:16])
    # Blocks stay on the device until they are copied away: never a large part of it.
    max_queued_bytes = min(MAX_QUEUED_BYTES, max(kv.cache_bytes // 4, pages.layout.block_bytes))
    return KVConnector(chain, pages, policy=kv.load_policy, max_queued_bytes=max_queued_bytes)


def rope_of(text_config: Any) -> dict[str, object]:
    """The fields of a model's config that rotary positions depend on."""
    return {name: getattr(text_config, name, None) for name in ROPE_FIELDS}
