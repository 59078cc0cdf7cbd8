"""The request log (`--request-log FILE`): a line of JSON for each prompt, for `lookonce simulate`.

It holds no contents: numbers of tokens, times, and digests keyed by a secret that is drawn when the
server starts, which tell equal beginnings of prompts and equal media of one scope, and nothing
else. All API processes append to one file, which is made for this user only.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from blake3 import blake3

from lookonce.config import RequestLogConfig
from lookonce.frontend.generation import PromptGeneration
from lookonce.render.media.picture_size import upright_size
from lookonce.types.request import RenderedPrompt
from lookonce.types.request_trace import (
    BLOCK_BYTES,
    LOG_BLOCK_TOKENS,
    LoggedMedium,
    LoggedRequest,
    encode_blocks,
)

logger = logging.getLogger(__name__)
_PLACE = struct.Struct("<32sqq")


class RequestLog:
    """Of one API process; a context manager. Lines that cannot be written are given up, which the
    log says once."""

    def __init__(self, config: RequestLogConfig) -> None:
        """Raises `OSError` for a file that cannot be opened."""
        self._secret = bytes.fromhex(config.secret)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(Path(config.file), flags, 0o600)
        self._failed = False
        self._is_torn = False
        """A line was written in part: the next one must not become part of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def note(
        self,
        generation: PromptGeneration,
        media: tuple[LoggedMedium, ...],
        arrival: float,
        tenant: str,
    ) -> None:
        """Write a line for a prompt whose answer has ended, however it did. `media`: what `media`
        said of the prompt; `arrival`: of its request, monotonic seconds. Of several samples the
        first is told."""
        line = msgspec.json.encode(self._line(generation, media, arrival, tenant)) + b"\n"
        if self._is_torn:
            line = b"\n" + line  # readers pass over empty lines
        try:
            self._is_torn = os.write(self._file, line) < len(line)
            problem = "the last line is torn: no room" if self._is_torn else None
        except OSError as error:
            problem = error.strerror
        if problem is not None:
            if not self._failed:
                logger.error("--request-log cannot be written: %s", problem)
            self._failed = True

    def _line(
        self,
        generation: PromptGeneration,
        media: tuple[LoggedMedium, ...],
        arrival: float,
        tenant: str,
    ) -> LoggedRequest:
        rendered, stats = generation.rendered, generation.reuse_stats
        now, output = time.monotonic(), generation.recorded or []
        first = generation.first_delta
        told = () if stats is None else stats.encoder
        cached = 0
        if stats is not None:
            cached = stats.prefix_cached_tokens + stats.external_cached_tokens
        return LoggedRequest(
            arrival=time.time() - (now - arrival),
            prompt_tokens=rendered.num_tokens,
            output_tokens=len(output),
            blocks=encode_blocks(self.blocks(rendered, output)),
            media=media,
            tenant=self._digest(tenant.encode(), 4).hex() if tenant else "",
            first_token=first - arrival if first else 0.0,
            seconds=now - arrival,
            cached_tokens=cached,
            encoder_runs=sum(outcome == "miss" for outcome in told),
            processed=sum(item.outcome in ("miss", "bypass") for item in rendered.items),
        )

    def blocks(self, rendered: RenderedPrompt, output: list[int]) -> bytes:
        """A digest for each 16 tokens of prompt and answer: of its scope, the adapter that it asks
        for, and all up to there."""
        total = rendered.num_tokens + len(output)
        raw = rendered.ids.tobytes() + struct.pack(f"<{len(output)}i", *output)
        hashed = blake3(rendered.scope + rendered.lora_name.encode(), key=self._secret)
        digests = bytearray()
        features, at = rendered.features, 0
        for start in range(0, total, LOG_BLOCK_TOKENS):
            hashed.update(raw[4 * start : 4 * (start + LOG_BLOCK_TOKENS)])
            while at < len(features) and features[at].offset < start + LOG_BLOCK_TOKENS:
                feature = features[at]
                hashed.update(_PLACE.pack(feature.key, feature.offset, feature.length))
                at += 1
            digests += hashed.digest(length=BLOCK_BYTES)
        return bytes(digests)

    def media(self, rendered: RenderedPrompt) -> tuple[LoggedMedium, ...]:
        """What is told of a prompt's media; their bytes are let go once the engine has them."""
        listed = []
        for feature, item in zip(rendered.features, rendered.items, strict=False):
            encoded = item.encoded or b""
            size = upright_size(encoded) if encoded and feature.modality == "image" else None
            listed.append(
                LoggedMedium(
                    key=self._digest(feature.key, 8).hex(),
                    modality=feature.modality,
                    offset=feature.offset,
                    length=feature.length,
                    num_bytes=len(encoded),
                    pixels=0 if size is None else size[0] * size[1],
                )
            )
        return tuple(listed)

    def _digest(self, content: bytes, num_bytes: int) -> bytes:
        return blake3(content, key=self._secret).digest(length=num_bytes)
