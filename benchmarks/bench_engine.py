"""Engines without a process of their own, for `lookonce bench kv` and `lookonce bench prefetch`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from lookonce.config import EncoderConfig, KVConfig, ModelConfig, SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.engine.process.build import assemble
from lookonce.engine.process.kv_tiers import open_external, open_external_outputs, rope_of
from lookonce.engine.process_io import EngineSettings
from lookonce.kv.connector import KVConnector
from lookonce.kv.encoder_connector import EncoderConnector
from lookonce.model.attention.select import resolve_block_size, select_backend
from lookonce.model.kv_pages import PageCopier
from lookonce.model.loader import LoadedModel, load_model
from lookonce.model.lora import LoRAAdapter
from lookonce.model.runner import Runner
from lookonce.types.kv import TierSpec
from lookonce.types.media import Array, Expansion, MediaFeature, ProcessedItem
from lookonce.types.ports import ModelRunner
from lookonce.types.request import GenerateRequest, TokenDelta
from lookonce.types.sampling import SamplingParams

NUM_BLOCKS = 512
PICTURE_ROWS = 16
PICTURE_SHAPE = (3, 56, 56)


class BenchEngine:
    """An engine core that the benchmark steps itself; a context manager."""

    def __init__(
        self,
        loaded: LoadedModel,
        *tiers: TierSpec,
        encoder_tiers: Sequence[TierSpec] = (),
        scheduler: SchedulerConfig = SchedulerConfig(),  # noqa: B008 - frozen
        stopwatch: Callable[[KVConnector], None] = lambda connector: None,
        watched: Callable[[ModelRunner], ModelRunner] = lambda runner: runner,
        adapters: Sequence[LoRAAdapter] = (),
    ) -> None:
        """`watched`: the runner that the engine gets instead of its own. `adapters` are loaded;
        without any, none is served."""
        kv = KVConfig(tiers=tiers, load_policy="always")
        settings = EngineSettings(
            model=ModelConfig(folder="", served_name="bench"),
            scheduler=scheduler,
            kv=kv,
            encoder=EncoderConfig(tiers=tuple(encoder_tiers)),
            address="",
        )
        family = loaded.family
        backend = select_backend(loaded.device, family.attention_features(loaded.dtype))
        block_size = resolve_block_size(backend, None)
        runner = Runner(
            loaded,
            kv_pages=loaded.kv_pages(NUM_BLOCKS, block_size),
            backend=backend,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            adapters=bool(adapters),
        )
        if runner.lora is not None:
            for adapter in adapters:
                runner.lora.loaded = runner.lora.loaded.with_adapter(adapter)
        _touch(runner.page_copier())
        self.page_layout = runner.page_copier().layout
        self.external: KVConnector | None = None
        self._woken = threading.Event()
        if tiers:
            rope = rope_of(family.text_config)
            self.external = open_external(kv, loaded.info, rope, runner.page_copier())
            stopwatch(self.external)
        self.outputs: EncoderConnector | None = None
        if encoder_tiers:
            copier = runner.output_copier()
            self.outputs = open_external_outputs(settings.encoder, loaded.info, copier)
        pool = BlockPool(NUM_BLOCKS, block_size)
        self.core, _ = assemble(
            loaded.info,
            watched(runner),
            settings,
            pool,
            self.external,
            external_outputs=self.outputs,
        )
        self.core.wake_with(self._woken.set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.close()

    def run(
        self, requests: Sequence[tuple[GenerateRequest, dict[bytes, ProcessedItem]]]
    ) -> tuple[float, list[TokenDelta]]:
        """Run requests until all have ended: seconds to the first token, and all deltas."""
        started = time.perf_counter()
        for request, items in requests:
            self.core.add(request, items)
        first, deltas, ended = 0.0, list[TokenDelta](), 0
        while ended < len(requests):
            self._woken.clear()
            output = self.core.step()
            if output is None:
                self._woken.wait(1.0)
                continue
            if output.deltas and not first:
                first = time.perf_counter() - started
            deltas += output.deltas
            ended += sum(delta.finish_reason is not None for delta in output.deltas)
        return first, deltas

    def settle(self) -> None:
        """Step until every store of the tiers is done."""
        while self.external is not None or self.outputs is not None:
            self.core.step()
            stats = self.core.stats()
            if not any(v for k, v in stats.items() if "queue_bytes" in k or "blocks_held" in k):
                return
            time.sleep(0.002)

    def forget_device(self) -> None:
        self.core.reset_prefix_cache()
        self.core.reset_encoder_cache()


def _touch(copier: PageCopier) -> None:
    """Write every KV block once, so that its memory is mapped, as in a server that has run a while.

    Else loads would pay for page faults that computed prompts spread over many steps.
    """
    zeros = memoryview(bytes(copier.layout.block_bytes))
    for block in range(NUM_BLOCKS):
        copier.scatter([block], zeros)


def load_bench_model(folder: str) -> LoadedModel:
    return load_model(ModelConfig(folder=folder, served_name="bench"))


def prompt_with_pictures(
    name: str, num_tokens: int, num_pictures: int, *, seed: int, max_tokens: int = 1
) -> tuple[GenerateRequest, dict[bytes, ProcessedItem]]:
    """Random text with pictures spread over it, and the processed pictures."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20, 300, num_tokens, dtype=np.int32)
    features, items = [], {}
    for index in range(num_pictures):
        offset = 8 + index * (num_tokens // num_pictures)
        key = bytes([index]) + rng.bytes(31)
        pixels = rng.standard_normal(PICTURE_SHAPE).astype(np.float32)
        expansion = Expansion(((3, PICTURE_ROWS),), embed_token_id=3)
        array = Array("float32", PICTURE_SHAPE, pixels.data)
        items[key] = ProcessedItem("image", {"pixel_values": array}, expansion)
        features.append(MediaFeature(key, "image", offset, PICTURE_ROWS, PICTURE_ROWS))
        tokens[offset : offset + PICTURE_ROWS] = 3
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = GenerateRequest(
        request_id=name,
        scope=bytes(32),
        prompt=Array("int32", (num_tokens,), tokens.data),
        features=tuple(features),
        sampling=sampling,
        arrival=time.monotonic(),
    )
    return request, items
