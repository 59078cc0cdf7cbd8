"""Warms up the engine at every start, before it takes requests, so that the first request need not
wait for code to be loaded, kernels to be compiled or buffers to be allocated.

    while weights load   the largest item of each modality is processed, in a thread
    then                 a text, and a prompt with each item, run through a scheduler of their own
                         and the real runner: encoder, prefill, decode
    at the end           that scheduler is dropped; nothing is cached, every counter is at zero
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lookonce.config import MediaConfig
from lookonce.engine.process.engine_core import EngineCore
from lookonce.engine.process_io import EngineSettings
from lookonce.errors import RequestFailedError, error_from_wire
from lookonce.render.families.base import ProcessorFamily, largest_media
from lookonce.render.families.registry import load_family
from lookonce.types.media import Array, MediaFeature, ProcessedItem, feature_at
from lookonce.types.model import ModelInfo
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams

logger = logging.getLogger(__name__)

TEXT_TOKENS = 8
NEW_TOKENS = 2
"""One by the prefill, one by a decode step."""
OVERHEAD_TOKENS = TEXT_TOKENS + NEW_TOKENS
SCOPE = bytes(32)


class WarmUpItems:
    """Processes the items while weights load, and again if they turn out too long."""

    def __init__(self, settings: EngineSettings) -> None:
        self._model, self._media = settings.model, settings.media
        limits = (settings.scheduler.max_num_batched_tokens, settings.model.max_model_len)
        self._max_tokens = min(filter(None, limits)) - OVERHEAD_TOKENS
        """At most the tokens of one step: how long a larger item takes is unknown."""
        threads = ThreadPoolExecutor(1, thread_name_prefix="warm-up")
        self._begun: Future[list[ProcessedItem]] = threads.submit(self._make, self._max_tokens)
        threads.shutdown(wait=False)

    def take(self, info: ModelInfo) -> list[ProcessedItem]:
        """The processed items; made again, smaller, where the model's context is shorter."""
        room = info.max_model_len - OVERHEAD_TOKENS
        try:
            items = self._begun.result()
            too_long = any(item.expansion.length > room for item in items)
            if too_long and not info.encoder_decoder:
                items = self._make(min(room, self._max_tokens))
        except Exception as error:  # noqa: BLE001  whatever it is, the model can be served
            logger.warning("warm-up made no media items: %r", error)
            return []
        return items

    def _make(self, max_tokens: int) -> list[ProcessedItem]:
        family = load_family(Path(self._model.folder), self._model.dtype)
        return [] if family is None else processed_items(family, self._media, max_tokens)


def processed_items(
    family: ProcessorFamily, media: MediaConfig, max_tokens: int
) -> list[ProcessedItem]:
    """The largest item of each modality that is served, with at most `max_tokens`."""
    return [
        family.process(largest.modality, largest.decoded(), {})
        for largest in largest_media(family, media, max_tokens)
    ]


def warm_up(
    core: EngineCore,
    items: Sequence[ProcessedItem],
    *,
    encoder_decoder: bool = False,
    in_prompt: bool = True,
) -> None:
    """Answer a text, and a prompt with each item. A failure is a warning.

    An encoder-decoder answers no text alone. `in_prompt` is `ModelInfo.items_in_prompt`.

    The caller drops `core` afterwards; its runner has freed everything by then.
    """
    if not encoder_decoder:
        _warm_up_with("text", core, _request("text", None), {})
    for item in items:
        request = _request(item.modality, item, in_prompt=in_prompt)
        _warm_up_with(item.modality, core, request, {_key(item): item})
    core.reset_encoder_cache()
    while core.step() is not None:
        pass


def _warm_up_with(
    what: str, core: EngineCore, request: GenerateRequest, items: dict[bytes, ProcessedItem]
) -> None:
    started, num_tokens = time.monotonic(), request.prompt.shape[0]
    try:
        core.add(request, items)
        _run(core)
    except Exception as error:  # noqa: BLE001  whatever it is, the start continues
        logger.warning("warm-up of %s failed, %d tokens: %s", what, num_tokens, error)
        core.abort(request.request_id)
    else:
        seconds = time.monotonic() - started
        logger.info("warmed up %s, %d tokens, in %.2f s", what, num_tokens, seconds)


def _run(core: EngineCore) -> None:
    """Step until all is answered. Raises what an answer failed with."""
    while core.has_work:
        output = core.step()
        for delta in output.deltas if output is not None else ():
            if delta.error is not None:
                raise error_from_wire(*delta.error)
        if output is None:
            raise RequestFailedError("nothing can be scheduled")


def _request(name: str, item: ProcessedItem | None, *, in_prompt: bool = True) -> GenerateRequest:
    """A short text with the item, if any, in its middle or beside it."""
    text = [0] * (TEXT_TOKENS // 2)
    placeholder = [] if item is None or not in_prompt else item.expansion.token_ids()
    ids = np.array([*text, *placeholder, *text], dtype=np.int32)
    features: tuple[MediaFeature, ...] = ()
    if item is not None:
        offset = len(text) if in_prompt else 0
        features = (feature_at(_key(item), item.modality, item.expansion, offset),)
    return GenerateRequest(
        request_id=f"warm-up {name}",
        scope=SCOPE,
        prompt=Array("int32", ids.shape, ids.data),
        features=features,
        sampling=SamplingParams(temperature=1.0, top_p=0.9, max_tokens=NEW_TOKENS, ignore_eos=True),
        arrival=time.monotonic(),
    )


def _key(item: ProcessedItem) -> bytes:
    return item.modality.encode().rjust(32, b"\0")
