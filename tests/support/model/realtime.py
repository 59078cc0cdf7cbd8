"""Voxtral Realtime: plain Hugging Face's streaming `generate`, and live sessions of our engine.

What Hugging Face gets is made by its own feature extractor, piece by piece as its documentation
shows; nothing of the renderer is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor

from lookonce.config import ModelConfig, SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerState
from lookonce.engine.process.engine_core import EngineCore
from lookonce.model.attention.select import select_backend
from lookonce.model.loader import LoadedModel, load_model
from lookonce.types.media import Array
from lookonce.types.request import GenerateRequest, TokenDelta
from lookonce.types.sampling import SamplingParams
from tests.support.model.cases import array
from tests.support.model.serving import Answer, CapturingRunner, reference_model

RATE, FRAME = 16000, 1280
LEFT_PAD = 32
MAX_SEQS = 8


@dataclass
class RealtimeSubject:
    """A folder, loaded for us and by plain Hugging Face."""

    folder: Path
    loaded: LoadedModel
    reference: Any
    extractor: Any

    @property
    def delay(self) -> int:
        return int(self.loaded.family.config.default_num_delay_tokens)


def realtime_subject(folder: Path) -> RealtimeSubject:
    loaded = load_model(ModelConfig(folder=str(folder), served_name="test"))
    return RealtimeSubject(
        folder,
        loaded,
        reference_model(folder, loaded.info),
        AutoFeatureExtractor.from_pretrained(folder),
    )


def mel_pieces(extractor: Any, wave: np.ndarray, num_prompt: int) -> Iterator[torch.Tensor]:
    """What streaming `generate` takes: the mel frames of the prompt's tokens [1, bins, frames],
    then those of one token each."""
    padded = np.concatenate((np.zeros(LEFT_PAD * FRAME, np.float32), wave))
    hop, window = extractor.hop_length, extractor.n_fft
    per_token = FRAME // hop
    frames = per_token * num_prompt
    first = padded[: (frames - 1) * hop + max(hop, window // 2)]  # the last mel frame is dropped
    yield _mel(extractor, first, center=True)
    while True:
        start = frames * hop - window // 2
        end = start + per_token * hop + window
        if end > len(padded):
            return
        yield _mel(extractor, padded[start:end], center=False)
        frames += per_token


def _mel(extractor: Any, samples: np.ndarray, *, center: bool) -> torch.Tensor:
    found = extractor(samples, sampling_rate=RATE, center=center, return_tensors="pt")
    mel: torch.Tensor = found["input_features"]
    return mel


def streaming_answer(
    subject: RealtimeSubject, pieces: Sequence[torch.Tensor], prompt: Sequence[int]
) -> Answer:
    """Greedy tokens and logits of Hugging Face's streaming `generate`, one session alone."""
    given = (piece for piece in pieces)
    return reference_answer(subject, torch.tensor([list(prompt)]), given)


def reference_answer(subject: RealtimeSubject, input_ids: torch.Tensor, features: Any) -> Answer:
    """Of Hugging Face's `generate`; `features` is a tensor, or a generator of pieces."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using the model-agnostic default `max_length`")
        found = subject.reference.generate(
            input_ids=input_ids,
            input_features=features,
            num_delay_tokens=subject.delay,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = found.sequences[0, input_ids.shape[1] :].tolist()
    return Answer(tokens, torch.cat(found.logits).float())


def frames_of(pieces: Sequence[torch.Tensor], mel_frames: int = 8) -> np.ndarray:
    """[frames, bins, mel frames of each], as the engine takes them."""
    mel = torch.cat([piece[0] for piece in pieces], dim=-1).numpy()
    return np.ascontiguousarray(mel.reshape(len(mel), -1, mel_frames).swapaxes(0, 1))


@dataclass
class LiveSessions:
    """An engine core with live sessions, whose frames are given by hand."""

    loaded: LoadedModel
    prompt: Sequence[int]
    budget: int = 64
    num_blocks: int = 400
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, TokenDelta] = field(default_factory=dict)

    def __post_init__(self) -> None:
        info = self.loaded.info
        scheduler = Scheduler(
            SchedulerState(
                BlockPool(self.num_blocks, 4),
                EncoderCache(1 << 20, info.encoder_row_bytes),
                prefix_caching=True,
            ),
            info,
            SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=self.budget),
        )
        family = self.loaded.family
        self.runner = CapturingRunner(
            self.loaded,
            kv_pages=self.loaded.kv_pages(self.num_blocks, 4),
            backend=select_backend("cpu", family.attention_features(self.loaded.dtype)),
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=self.budget,
            edit=lambda plan: plan,
        )
        self.core = EngineCore(scheduler, self.runner)

    def open(self, name: str, frames: np.ndarray, *, scope: bytes = bytes(32)) -> None:
        request = GenerateRequest(
            request_id=name,
            scope=scope,
            prompt=array(np.array(self.prompt, np.int32)),
            features=(),
            sampling=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            arrival=float(len(self.tokens)),
            frames=_array(frames),
        )
        self.core.add(request, {}, live=True)
        self.tokens[name] = []

    def extend(self, name: str, frames: np.ndarray) -> None:
        self.core.extend_frames(name, _array(frames))

    def step(self) -> None:
        output = self.core.step()
        self.core.check_integrity()
        for delta in output.deltas if output else ():
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def answer(self, index: int, name: str) -> Answer:
        return Answer(self.tokens[name], torch.stack(self.runner.captured[index]))

    def close(self) -> None:
        for name in self.tokens:
            self.core.abort(name)
        self.run()


def feed_side_by_side(
    live: LiveSessions, sounds: Sequence[np.ndarray], pieces: Callable[[int], int]
) -> None:
    """Open a session for each sound, one after the other, and give each its frames in pieces of
    its own lengths: `pieces(n)` is that of the n-th piece of all. Ends when all are computed."""
    given = [0] * len(sounds)
    count = 0
    while any(at < len(sound) for at, sound in zip(given, sounds, strict=True)):
        for index, sound in enumerate(sounds):
            if index > count or given[index] == len(sound):
                continue
            end = min(len(sound), given[index] + max(1, pieces(count + index)))
            if given[index] == 0:
                live.open(str(index), sound[:end])
            else:
                live.extend(str(index), sound[given[index] : end])
            given[index] = end
        count += 1
        live.step()
    live.run()


def _array(frames: np.ndarray) -> Array:
    return array(np.ascontiguousarray(frames, np.float32))
