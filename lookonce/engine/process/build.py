"""From settings to a warm engine core: the one module of this floor that needs torch."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from lookonce.config import GIB, KVConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.request_validation import Door
from lookonce.core.scheduler import Scheduler
from lookonce.engine.process.engine_core import EngineCore
from lookonce.engine.process.grammar import GrammarCompiler
from lookonce.engine.process.kv_tiers import open_external, rope_of
from lookonce.engine.process.request_validation import Judge
from lookonce.engine.process.warmup import WarmUpItems, warm_up
from lookonce.engine.settings import EngineSettings
from lookonce.errors import ConfigError
from lookonce.model.attention.backend import AttentionBackend
from lookonce.model.attention.select import resolve_block_size, select_backend
from lookonce.model.loader import LoadedModel, load_model
from lookonce.model.runner import Runner, ThreadCounts
from lookonce.types.model import ModelInfo
from lookonce.types.ports import ExternalPrefixCache, ModelRunner

logger = logging.getLogger(__name__)

CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux says what a container's processes may take, by its newer and older interface."""

Progress = Callable[[int, int], None]
"""Called with (weights loaded, weights in all)."""


def build_engine(settings: EngineSettings, progress: Progress) -> tuple[EngineCore, Judge]:
    """Load the model, size the caches, and warm up.

    Raises `ConfigError` for settings the model cannot be served with, and `ModelLoadError`.
    """
    threads = ThreadCounts.of_machine()
    items = WarmUpItems(settings)  # processed while weights load
    loaded = load_model(settings.model, progress)
    backend, block_size = attention_of(loaded, settings.kv)
    num_blocks = _num_blocks(loaded, settings.kv, block_size)
    loaded = _fitted(loaded, num_blocks * block_size)
    scratch = BlockPool(num_blocks, block_size)
    runner = make_runner(loaded, settings, backend, scratch, threads)
    logger.info(
        "serving %s on %s: %s, attention %s, %d KV blocks of %d tokens",
        loaded.info.model_type, loaded.device, loaded.info.dtype, backend.name, num_blocks,
        block_size,
    )  # fmt: skip
    rehearsal, _ = assemble(loaded.info, runner, settings, scratch)
    warm_up(rehearsal, items.take(loaded.info))
    gc.collect()
    gc.freeze()  # the model's objects stay: later collections need not walk them
    external = None
    if settings.kv.tiers:
        rope = rope_of(loaded.family.text_config)
        external = open_external(settings.kv, loaded.info, rope, runner.page_copier())
    pool = BlockPool(num_blocks, block_size)
    return assemble(loaded.info, runner, settings, pool, external)


def attention_of(loaded: LoadedModel, kv: KVConfig) -> tuple[AttentionBackend, int]:
    """What attends for this model, and tokens of a KV block. Raises `ConfigError`."""
    backend = select_backend(loaded.device, loaded.family.attention_features(loaded.dtype))
    return backend, resolve_block_size(backend, kv.block_size)


def make_runner(
    loaded: LoadedModel,
    settings: EngineSettings,
    backend: AttentionBackend,
    pool: BlockPool,
    threads: ThreadCounts | None = None,
) -> Runner:
    """A runner with as many blocks as `pool`; `threads` None: as torch has them."""
    return Runner(
        loaded,
        kv_pages=loaded.kv_pages(pool.num_blocks, pool.block_size),
        backend=backend,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
        threads=threads,
    )


def assemble(
    info: ModelInfo,
    runner: ModelRunner,
    settings: EngineSettings,
    pool: BlockPool,
    external: ExternalPrefixCache | None = None,
) -> tuple[EngineCore, Judge]:
    """A scheduler over `pool` and a runner with as many blocks make an engine.

    Raises `ConfigError` for a step too small for an item that no chunk may cut.
    """
    encoder_cache = EncoderCache(
        settings.encoder.cache_bytes, info.encoder_row_bytes, settings.encoder.host_cache_bytes
    )
    scheduler = Scheduler(
        block_pool=pool,
        encoder_cache=encoder_cache,
        model=info,
        config=settings.scheduler,
        prefix_caching=settings.kv.prefix_caching,
        external=external,
        fail_on_loss=settings.kv.load_failure_policy == "fail",
    )
    grammars = GrammarCompiler(settings.model.folder, info.vocab_size, info.eos_token_ids)
    door = Door(pool, encoder_cache, info, settings.scheduler.max_num_batched_tokens)
    return EngineCore(scheduler, runner, external), Judge(info, door, grammars.compile)


def _num_blocks(loaded: LoadedModel, kv: KVConfig, block_size: int) -> int:
    nbytes = loaded.family.kv_layout(block_size, loaded.dtype).block_bytes
    there = _memory_bytes(loaded.device)
    if kv.cache_bytes > there:
        raise ConfigError(
            f"--kv-cache-gb is {kv.cache_bytes / GIB:.1f}, but the {loaded.device.type} has "
            f"{there / GIB:.1f} GiB of memory"
        )
    num_blocks = kv.cache_bytes // nbytes
    if num_blocks == 0:
        raise ConfigError(
            f"--kv-cache-gb is too small: one block of {block_size} tokens takes {nbytes} bytes"
        )
    return num_blocks


def _memory_bytes(device: torch.device) -> int:
    """All of it, used or not; of a container what it may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(path.read_text()))
    return min(limits)


def _fitted(loaded: LoadedModel, kv_tokens: int) -> LoadedModel:
    """No sequence is longer than the KV cache: alone in it, it could not go on."""
    info = loaded.info
    if info.max_model_len <= kv_tokens:
        return loaded
    logger.warning(
        "the KV cache holds %d tokens: sequences are limited to that, not to the model's %d",
        kv_tokens, info.max_model_len,
    )  # fmt: skip
    fitted = msgspec.structs.replace(info, max_model_len=kv_tokens)
    return dataclasses.replace(loaded, info=fitted)
