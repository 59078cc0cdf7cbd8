"""Doubles with behaviour: a renderer whose tokens are bytes, and an engine that recites."""

from __future__ import annotations

import asyncio
import codecs
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from lookonce.engine.client.engine_client import KnownAdapters
from lookonce.errors import BadRequestError, LookOnceError, error_to_wire
from lookonce.render.prompt.long_texts import LongTextThreads
from lookonce.types.fair_queue import LoopTurns
from lookonce.types.media import Expansion, Modality, feature_at
from lookonce.types.model import ModelInfo
from lookonce.types.request import (
    PrefillStats,
    PromptLogprob,
    RenderedItem,
    RenderedPrompt,
    TokenDelta,
    TokenLogprob,
)
from lookonce.types.sampling import SamplingParams

T = TypeVar("T")
IMAGE_TOKEN = 300
END_TOKEN = 301
MEDIA_FIELDS: dict[str, Modality] = {
    "image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
EXPANSION = Expansion(runs=((IMAGE_TOKEN, 4),), embed_token_id=IMAGE_TOKEN)

MODEL = ModelInfo(
    name="recital",
    model_type="recital",
    vocab_size=512,
    max_model_len=200,
    eos_token_ids=(END_TOKEN,),
    modalities=("image",),
    dtype="float32",
    encoder_row_bytes=64,
)


class ByteText:
    """Tokens are UTF-8 bytes; text that may become a stop string is held back."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.stopped: str | None = None
        self._stop = sampling.stop
        self._keep = sampling.include_stop_str_in_output
        self._held = ""
        self._characters = codecs.getincrementaldecoder("utf-8")()
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self.num_tokens += len(token_ids)
        self._held += self._characters.decode(bytes(t for t in token_ids if t < 256))
        for stop in self._stop:
            if stop in self._held:
                self.stopped = stop
                before, _, _ = self._held.partition(stop)
                return before + (stop if self._keep else "")
        hold = max((len(stop) - 1 for stop in self._stop), default=0)
        cut = len(self._held) - hold
        out, self._held = self._held[: max(cut, 0)], self._held[max(cut, 0) :]
        return out

    def finish(self) -> str:
        return self._held


class ByteRenderer:
    """Text parts are their bytes; every picture, film or sound is four placeholder tokens, and a
    file is its name in brackets."""

    modalities: tuple[Modality, ...] = ("image", "audio")
    fingerprint = bytes(16)
    speech = None
    transcribes_live = False
    max_audio_seconds = math.inf

    def __init__(self) -> None:
        self.rendering = 0
        self.template_variables: frozenset[str] = frozenset()
        self.rendered: list[RenderedPrompt] = []
        self.released: list[RenderedPrompt] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.turns = LongTextThreads()
        self.loop_turns = LoopTurns()

    async def loop_turn(self, tenant: str, nbytes: int) -> None:
        await self.loop_turns.turn(tenant, nbytes)

    async def in_turn_if(self, large: bool, tenant: str, work: Callable[[], T]) -> T:
        return await self.turns.run(work, tenant, 1) if large else work()

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tenant: str,
        cache_salt: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        self.rendering += 1
        self.options = options or {}
        try:
            await self.gate.wait()
            return self._chat(messages, f"{tenant}/{cache_salt}".encode())
        finally:
            self.rendering -= 1

    def _chat(self, messages: list[dict[str, Any]], scope: bytes) -> RenderedPrompt:
        tokens: list[int] = []
        items, features = [], []
        for number, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(content, str | list):
                param = f"messages[{number}].content"
                raise BadRequestError(f"{param}: text or parts are needed", param=param)
            for part in [{"text": content}] if isinstance(content, str) else content:
                if "text" in part:
                    tokens += part["text"].encode()
                    continue
                if "file" in part:
                    tokens += f"[{part['file']['filename']}]".encode()
                    continue
                field = next(field for field in MEDIA_FIELDS if field in part)
                kind = MEDIA_FIELDS[field]
                source = part[field].get("url") or part[field]["data"]
                key = str(source).encode().rjust(32, b"0")[-32:]
                features.append(feature_at(key, kind, EXPANSION, len(tokens)))
                items.append(RenderedItem(key, key, kind, EXPANSION, None, outcome="hit"))
                tokens += EXPANSION.token_ids()
        prompt = RenderedPrompt(tokens, tuple(features), items, scope)
        self.rendered.append(prompt)
        return prompt

    async def render_completion(
        self, prompt: str | list[int], *, tenant: str, cache_salt: str | None = None, **_: Any
    ) -> RenderedPrompt:
        tokens = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        self.rendered.append(RenderedPrompt(tokens, scope=f"{tenant}/{cache_salt}".encode()))
        return self.rendered[-1]

    async def render_tokens(
        self, token_ids: list[int], media: Sequence[object] = (), *, tenant: str = "", **fields: Any
    ) -> RenderedPrompt:
        assert not media, "this double takes text only"
        return await self.render_completion(
            token_ids, tenant=tenant, cache_salt=fields.get("cache_salt")
        )

    async def item_of(self, part: RenderedItem) -> None:
        """A name alone stands for every item."""

    def release(self, prompt: RenderedPrompt) -> None:
        self.released.append(prompt)

    def detokenizer(
        self, sampling: SamplingParams, context: Sequence[int] = (), keep: Sequence[str] = ()
    ) -> ByteText:
        self.kept = tuple(keep)
        return ByteText(sampling)

    def skipped(self, sampling: SamplingParams, keep: Sequence[str] = ()) -> tuple[int, ...]:
        return (END_TOKEN,) if sampling.skip_special_tokens else ()

    def token_text(self, token_id: int) -> str | None:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<|end|>"

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode()


class RecitingEngine:
    """Answers every request with `answer`, one byte a step, as long as `gate` is open.

    `running` holds what it computes for now; `failure` breaks requests after `fail_after` tokens.
    """

    def __init__(self, answer: str = "a red circle") -> None:
        self.answer = answer
        self.state = "ready"
        self.silence: float | None = None
        self.adapters = KnownAdapters()
        self.model = MODEL
        self.running: dict[str, set[int]] = {}
        self.tokens_made: Counter[tuple[str, int]] = Counter()
        self.prompts: list[RenderedPrompt] = []
        self.samplings: list[SamplingParams] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: LookOnceError | None = None
        self.failure: LookOnceError | None = None
        self.fail_after = 3
        self.resets: list[str] = []
        self.counters: dict[str, float] = {"num_requests_running": 0.0}

    async def silent_seconds(self) -> float | None:
        return self.silence

    async def generate(
        self, rendered: RenderedPrompt, sampling: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        if self.refusal is not None:
            raise self.refusal
        self.prompts.append(rendered)
        self.samplings.append(sampling)
        self.running[request_id] = set(range(sampling.n))
        try:
            async for delta in self._recite(rendered, sampling, request_id):
                yield delta
        finally:
            del self.running[request_id]

    async def _recite(
        self, rendered: RenderedPrompt, sampling: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        tokens = [*self.answer.encode(), END_TOKEN][: sampling.max_tokens]
        for position, token in enumerate(tokens):
            await asyncio.sleep(0)
            await self.gate.wait()
            for index in sorted(self.running[request_id]):
                self.tokens_made[request_id, index] += 1
                delta = TokenDelta(request_id, index, [token])
                if sampling.logprobs is not None:
                    delta.logprobs = [TokenLogprob(-0.5, ((token, -0.5), (END_TOKEN, -2.0)))]
                if position == 0 and index == 0:
                    delta.reuse_stats = self._reuse_stats(rendered)
                    delta.prompt_logprobs = self._scores(rendered, sampling.prompt_logprobs)
                if self.failure is not None and position == self.fail_after:
                    delta.error, delta.finish_reason = error_to_wire(self.failure), "error"
                elif position == len(tokens) - 1:
                    delta.finish_reason = "stop" if token == END_TOKEN else "length"
                yield delta

    @staticmethod
    def _scores(rendered: RenderedPrompt, wanted: int | None) -> list[PromptLogprob] | None:
        """Each token is the second likeliest, after the end."""
        if wanted is None:
            return None
        likeliest = lambda token: ((END_TOKEN, -0.5), (token, -1.5))[:wanted]  # noqa: E731
        return [PromptLogprob(-1.5, 2, likeliest(token)) for token in rendered.token_ids[1:]]

    @staticmethod
    def _reuse_stats(rendered: RenderedPrompt) -> PrefillStats:
        count = len(rendered.features)
        return PrefillStats(2, 1, encoder=("miss",) * count, encode_ms=(1.5,) * count)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        self.running[request_id] -= {index}

    async def stats(self) -> dict[str, float]:
        return {**self.counters, "num_requests_running": float(len(self.running))}

    async def reset_cache(self, tier: str) -> None:
        self.resets.append(tier)
