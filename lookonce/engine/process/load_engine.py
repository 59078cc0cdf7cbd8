"""Loads the model of an engine, sizes its KV cache, and warms it up: the one module of this floor
that needs torch."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import msgspec
import torch
from blake3 import blake3

from lookonce.config import GIB, KVConfig, LoRAConfig, ModelConfig
from lookonce.core.block_pool import BlockPool
from lookonce.engine.process.adapters import EngineAdapters
from lookonce.engine.process.build import assemble
from lookonce.engine.process.cache_events import Load
from lookonce.engine.process.engine_core import EngineCore, RequestPreprocessor
from lookonce.engine.process.grammar import GrammarCompiler
from lookonce.engine.process.kv_tiers import open_external, open_external_outputs, rope_of
from lookonce.engine.process.tensor_parallel import ParallelRunner, Ranks
from lookonce.engine.process.warmup import WarmUpItems, warm_up
from lookonce.engine.process_io import EngineSettings
from lookonce.errors import BadRequestError, ConfigError, ModelLoadError
from lookonce.model.attention.backend import AttentionBackend
from lookonce.model.attention.select import resolve_block_size, select_backend
from lookonce.model.decode_graphs import SCRATCH_BLOCKS, CudaGraphs, decode_sizes
from lookonce.model.loader import LoadedModel, load_model, media_adapters
from lookonce.model.lora_files import AdapterStore, why_no_adapters
from lookonce.model.runner import Runner, ThreadCounts
from lookonce.model.tensor_parallel import TensorParallelGroup
from lookonce.render.families.registry import media_examples
from lookonce.types.cpu import affinity, cpu_quota, usable_cores
from lookonce.types.lora import LoRAInfo
from lookonce.types.media import Modality
from lookonce.types.model import MEDIA_ADAPTERS
from lookonce.types.ports import ModelRunner

logger = logging.getLogger(__name__)

CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Linux's files of a container's memory limit: cgroup v2 and v1."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux's name of this run of the machine, which all of its containers see."""
ENCODER_ONLY_TOKENS = 1 << 17
"""KV slots of a model that keeps no keys and values: tokens of prompts under way."""
Progress = Callable[[int, int], None]
"""Called with (number of weights loaded, number of weights in all)."""


def load_engine(
    settings: EngineSettings, progress: Progress
) -> tuple[EngineCore, RequestPreprocessor]:
    """Load the model, size the caches, and warm up.

    Raises `ConfigError` for settings the model cannot be served with, and `ModelLoadError`.
    """
    ranks = None
    if settings.model.tensor_parallel_size > 1:
        ranks = Ranks(settings, on_end=_end_engine)
    items = WarmUpItems(settings)  # processed while weights load
    if ranks is None:
        threads = ThreadCounts.of_machine()
        fitted = _load_fitted(settings, settings.model, progress)
    else:
        threads = None
        fitted = load_rank(settings, 0, str(ranks.rendezvous), progress)
    loaded, backend = fitted.loaded, fitted.backend
    num_blocks, block_size = fitted.num_blocks, fitted.block_size
    scratch = BlockPool(num_blocks, block_size)
    runner = make_runner(loaded, settings, backend, scratch, threads)
    steps: ModelRunner = runner if ranks is None else ParallelRunner(runner, ranks)
    logger.info(
        "serving %s on %s: %s%s, attention %s, %d KV blocks of %d tokens",
        loaded.info.model_type,
        loaded.device,
        loaded.info.dtype,
        f", weights {settings.model.quantize}" if settings.model.quantize else "",
        backend.name,
        num_blocks,
        block_size,
    )
    own = _media_adapters(loaded, settings)
    adapters = load_adapters(loaded, runner, settings.lora, own, restarted=settings.restarted)
    if adapters is not None:
        told = msgspec.structs.replace(loaded.info, media_adapters=adapters.for_media)
        loaded = dataclasses.replace(loaded, info=told)
    info = loaded.info
    grammars = GrammarCompiler(settings.model.folder, info.vocab_size, info.eos_token_ids)
    runner.capture()
    warm_up_engine, _ = assemble(loaded.info, steps, settings, scratch)
    if settings.events is not None:
        warm_up_engine.load = _load_on(loaded.device, threads)
    warm_up(
        warm_up_engine,
        items.take(info),
        encoder_decoder=info.encoder_decoder,
        in_prompt=info.items_in_prompt,
    )
    gc.collect()
    gc.freeze()  # the model's objects stay: later collections need not walk them
    gc.enable()  # `__main__` has disabled it
    external = None
    if settings.kv.tiers:
        rope, pages = rope_of(loaded.family.text_config), runner.page_copier()
        external = open_external(settings.kv, info, rope, pages, runner.state_copier())
    outputs = None
    if settings.encoder.tiers:
        copier = runner.output_copier()
        outputs = open_external_outputs(settings.encoder, loaded.info, copier)
    pool = BlockPool(num_blocks, block_size)
    grammars.load_soon()
    core, preprocessor = assemble(loaded.info, steps, settings, pool, external, grammars, outputs)
    core.load = warm_up_engine.load  # the first rates that a router knows
    preprocessor.adapters = adapters
    return core, preprocessor


def _load_on(device: torch.device, threads: ThreadCounts | None) -> Load:
    """No load yet, and which cores it will be on; `threads` None: ranks compute on all of them."""
    if device.type != "cpu":
        return Load()
    try:
        boot = BOOT_ID.read_bytes()
    except OSError:
        return Load()  # whether others share them cannot be told
    cores, quota = usable_cores(), cpu_quota()
    shared = repr(sorted(affinity()))
    if quota is not None and quota.cores < len(affinity()):
        shared = f"quota of {quota.group}"  # who is in another container has one of its own
    named = blake3(boot + shared.encode()).digest(8)
    heavy = cores if threads is None else threads.heavy
    return Load(machine=int.from_bytes(named, "big") or 1, cores=cores, threads=heavy)


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A loaded model, and the KV cache that it gets."""

    loaded: LoadedModel
    backend: AttentionBackend
    num_blocks: int
    block_size: int


def load_rank(
    settings: EngineSettings, rank: int, rendezvous: str, progress: Progress | None = None
) -> FittedModel:
    """Load one rank's part of the model, once all ranks have come to the file `rendezvous`."""
    size, model = settings.model.tensor_parallel_size, settings.model
    if model.device == "cuda":
        model = dataclasses.replace(model, device=f"cuda:{rank}")
        torch.cuda.set_device(rank)
    torch.set_num_threads(max(1, usable_cores() // size))
    group = TensorParallelGroup(rank, size, Path(rendezvous), torch.device(model.device))
    return _load_fitted(settings, model, progress, group)


def _load_fitted(
    settings: EngineSettings,
    model: ModelConfig,
    progress: Progress | None,
    group: TensorParallelGroup | None = None,
) -> FittedModel:
    examples = partial(media_examples, model.folder, model.dtype)
    loaded = load_model(model, progress, examples, group)
    backend, block_size = attention_of(loaded, settings.kv)
    num_blocks = _num_blocks(loaded, settings.kv, block_size)
    num_tokens = num_blocks * block_size
    loaded = _fitted(loaded, num_tokens, "the KV cache holds %d tokens")
    if loaded.info.encoder_only:
        step = settings.scheduler.max_num_batched_tokens
        loaded = _fitted(loaded, step, "a step computes %d tokens (--max-num-batched-tokens)")
    return FittedModel(loaded, backend, num_blocks, block_size)


def _end_engine(reason: str) -> NoReturn:
    """In any thread: what this process computes with is gone. Its supervisor starts another."""
    logger.error("%s: the engine ends", reason)
    logging.shutdown()
    os._exit(1)


def attention_of(loaded: LoadedModel, kv: KVConfig) -> tuple[AttentionBackend, int]:
    """The attention backend of this model, and tokens per KV block. Raises `ConfigError`."""
    backend = select_backend(loaded.device, loaded.family.attention_features(loaded.dtype))
    return backend, resolve_block_size(backend, kv.block_size)


def make_runner(
    loaded: LoadedModel,
    settings: EngineSettings,
    backend: AttentionBackend,
    pool: BlockPool,
    threads: ThreadCounts | None = None,
) -> Runner:
    """A runner with as many blocks as `pool`; `threads` None: torch's setting stays."""
    sizes: tuple[int, ...] = ()
    capture = None
    captures = loaded.device.type == "cuda" and settings.model.cuda_graph_bytes > 0
    if captures and loaded.group is None and loaded.info.pooling is None:
        sizes = decode_sizes(settings.scheduler.max_num_seqs)
        capture = CudaGraphs(loaded.device, settings.model.cuda_graph_bytes)
    spare = SCRATCH_BLOCKS if sizes else 0
    return Runner(
        loaded,
        kv_pages=loaded.kv_pages(pool.num_blocks + spare, pool.block_size),
        decode_sizes=sizes,
        capture=capture,
        backend=backend,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
        threads=threads,
        adapters=settings.lora is not None or bool(_media_adapters(loaded, settings)),
        num_snapshots=settings.kv.num_snapshots(loaded.info.state_bytes),
    )


def load_adapters(
    loaded: LoadedModel,
    runner: Runner,
    lora: LoRAConfig | None,
    own: Mapping[Modality, str] = MappingProxyType({}),
    *,
    restarted: bool = False,
) -> EngineAdapters | None:
    """The adapters that are loaded at start; `own` are the folders of those that the model has for
    its media. Raises `ConfigError` for a model without support for adapters, and `ModelLoadError`
    for an adapter that cannot be served. An engine that is `restarted` serves without one of
    `--lora` whose folder changed so: the model and the other adapters do not depend on it."""
    _warn_of_missing(loaded.info.model_type, own)
    if lora is None and not own:
        return None
    lora = lora or LoRAConfig(max_loras=0)
    reason = why_no_adapters(loaded.family)
    if loaded.info.pooling is not None:
        reason = "adapters are not served for models that give embeddings or scores"
    if reason is not None or runner.lora is None:
        raise ConfigError(f"--lora, --lora-dir: {reason}")
    like = torch.zeros((), dtype=loaded.dtype, device=loaded.device)
    store = AdapterStore(loaded.family, runner.lora, max_rank=lora.max_rank, like=like)
    infos = []
    for name, path in lora.adapters:
        try:
            identity, rank, install = store.load(path)
        except BadRequestError as error:
            if not restarted:
                raise ModelLoadError(f"--lora {name}: {error.message}") from error
            logger.error("the adapter %s is not served any more: %s", name, error.message)
            continue
        install()
        logger.info("serving the adapter %s: rank %d, %s", name, rank, path)
        infos.append(LoRAInfo(name, identity, rank, path))
    for_media = {}
    for modality, path in own.items():
        try:
            for_media[modality], _, install = store.load(path, any_rank=True)
        except BadRequestError as error:
            raise ModelLoadError(f"{path}: {error.message}") from error
        install()
    return EngineAdapters(store, max_loras=lora.max_loras, loaded=tuple(infos), for_media=for_media)


def _media_adapters(loaded: LoadedModel, settings: EngineSettings) -> dict[Modality, str]:
    return media_adapters(settings.model.folder, loaded.info.model_type)


def _warn_of_missing(model_type: str, own: Mapping[Modality, str]) -> None:
    """A folder without them may have weights into which one was merged."""
    for modality, folder in MEDIA_ADAPTERS.get(model_type, {}).items():
        if modality not in own:
            logger.warning(
                "the model's folder has no %s: prompts with %s are computed without it, which is "
                "right only if it was merged into the weights",
                folder,
                modality,
            )


def _num_blocks(loaded: LoadedModel, kv: KVConfig, block_size: int) -> int:
    nbytes = loaded.family.kv_layout(block_size, loaded.dtype).block_bytes
    if loaded.info.encoder_only:  # blocks only count tokens
        return max(1, -(-ENCODER_ONLY_TOKENS // block_size))
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
    """All memory of the device, used or not; in a container at most its limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(path.read_text()))
    return min(limits)


def _fitted(loaded: LoadedModel, num_tokens: int, reason: str) -> LoadedModel:
    """Limit `max_model_len` to what there is room for: a longer sequence could not go on even alone
    in the KV cache, and a model that computes prompts whole takes none that no step can hold."""
    info = loaded.info
    if info.max_model_len <= num_tokens:
        return loaded
    logger.warning(
        reason + ": sequences are limited to that, not to the model's %d",
        num_tokens,
        info.max_model_len,
    )
    fitted = msgspec.structs.replace(info, max_model_len=num_tokens)
    return dataclasses.replace(loaded, info=fitted)
