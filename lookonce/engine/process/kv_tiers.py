"""Opens the external tiers of an engine, of KV blocks and of encoder outputs, from its settings and
its model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lookonce.config import EncoderConfig, KVConfig
from lookonce.errors import ConfigError
from lookonce.kv.chain import open_chain
from lookonce.kv.connector import KVConnector
from lookonce.kv.encoder_connector import EncoderConnector
from lookonce.kv.objects import ObjectFormat, namespace_digest, output_namespace_digest
from lookonce.kv.transfer import MAX_QUEUED_BYTES
from lookonce.types.kv import OutputLayout, StatePieces, TierSpec
from lookonce.types.model import ModelInfo
from lookonce.types.ports import EncoderOutputCopier, KVPageCopier, StateCopier

logger = logging.getLogger(__name__)

ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def open_external(
    kv: KVConfig,
    info: ModelInfo,
    rope: dict[str, object],
    pages: KVPageCopier,
    states: StateCopier | None = None,
) -> KVConnector:
    """`states`: of a model that keeps states beside keys and values.

    Raises `ConfigError` for a tier this machine cannot have, or that has no room for one state.
    """
    layout = pages.layout
    namespace = namespace_digest(
        weights_digest=info.weights_digest,
        layout=layout,
        rope=rope,
        states=b"" if states is None else states.describe(),
    )
    state_bytes = 0
    if states is not None:
        state_bytes = StatePieces(states.state_bytes, layout.block_bytes).padded_bytes
        _check_room(kv.tiers, state_bytes)
    chain = open_chain(kv.tiers, ObjectFormat(namespace, layout))
    names = ", ".join(tier.name for tier in chain.tiers)
    logger.info("KV beyond the device: %s, namespace %s", names, namespace.hex()[:16])
    # Blocks stay on the device until they are copied away: never a large part of it.
    max_queued_bytes = min(MAX_QUEUED_BYTES, max(kv.cache_bytes // 4, layout.block_bytes))
    return KVConnector(
        chain,
        pages,
        states=states,
        policy=kv.load_policy,
        max_queued_bytes=max(max_queued_bytes, 2 * state_bytes),
    )


def _check_room(tiers: Sequence[TierSpec], state_bytes: int) -> None:
    for spec in tiers:
        if spec.kind in ("host", "disk") and spec.capacity_bytes < 2 * state_bytes:
            raise ConfigError(
                f"--kv-tier {spec.kind}: {spec.capacity_bytes} bytes are no room for this model's "
                f"states, which take {state_bytes} bytes each"
            )


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
