"""Opens the external tiers of an engine, of KV blocks and of encoder outputs, from its settings and
its model."""

from __future__ import annotations

import logging
from typing import Any

from lookonce.config import EncoderConfig, KVConfig
from lookonce.errors import ConfigError
from lookonce.kv.chain import open_chain
from lookonce.kv.connector import KVConnector
from lookonce.kv.encoder_connector import EncoderConnector
from lookonce.kv.objects import ObjectFormat, namespace_digest, output_namespace_digest
from lookonce.kv.transfer import MAX_QUEUED_BYTES
from lookonce.types.kv import OutputLayout
from lookonce.types.model import ModelInfo
from lookonce.types.ports import EncoderOutputCopier, KVPageCopier

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


def open_external_outputs(
    encoder: EncoderConfig, info: ModelInfo, copier: EncoderOutputCopier
) -> EncoderConnector:
    """Raises `ConfigError` for a tier this machine cannot have, and for a model that encodes
    nothing."""
    if not info.encoder_row_bytes:
        raise ConfigError("--encoder-tier: this model has no encoder of media")
    layout = OutputLayout.of_rows(info.encoder_row_bytes, info.dtype)
    namespace = output_namespace_digest(weights_digest=info.weights_digest, layout=layout)
    chain = open_chain(encoder.tiers, ObjectFormat(namespace, layout, option="--encoder-tier"))
    names = ", ".join(tier.name for tier in chain.tiers)
    logger.info("encoder outputs beyond the device: %s, namespace %s", names, namespace.hex()[:16])
    # An output that waits to be copied stays on the device, evicted or not.
    max_queued_bytes = min(MAX_QUEUED_BYTES, encoder.cache_bytes)
    return EncoderConnector(chain, copier, layout, max_queued_bytes=max_queued_bytes)


def rope_of(text_config: Any) -> dict[str, object]:
    """The fields of a model's config that rotary positions depend on."""
    return {name: getattr(text_config, name, None) for name in ROPE_FIELDS}
