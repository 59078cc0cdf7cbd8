"""Training on speech whose words have times: one target for each 80 ms, a word or nothing."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    PreTrainedTokenizerFast,
    VoxtralRealtimeFeatureExtractor,
    VoxtralRealtimeForConditionalGeneration,
)

from tools.ear import folder
from tools.ear.sentences import sentence
from tools.ear.speech import SAMPLE_RATE, VOICES, Spoken, any_voice, heard

FRAME = 1280
"""Samples of one token."""
LEFT_PADDING = (1, 33)
"""Frames of silence before the sound, at least and below."""
RIGHT_PADDING = 4
"""Frames of silence after the last word's token."""
IGNORED = -100
WARM_UP_STEPS = 100
LAST_SHARE = 0.02
CLIP = 1.0
REPORT_SECONDS = 30.0


Say = Callable[[random.Random, Sequence[str], Sequence[str]], Spoken]
"""Speaks words in one of the voices."""


@dataclass(frozen=True, slots=True)
class EarPlan:
    """The settings that, with the device's arithmetic, decide the weights."""

    seed: int = 1
    steps: int = 8000
    batch: int = 12
    rate: float = 2e-3
    workers: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class EarBatch:
    mel: torch.Tensor
    """float32 [sentences, mel bins, 8 * frames]."""
    token_ids: torch.Tensor
    """int64 [sentences, frames]: what was said until each frame."""
    targets: torch.Tensor
    """int64 [sentences, frames]: what to say after it; `IGNORED` inside the prompt and padding."""

    def to(self, device: torch.device) -> EarBatch:
        return EarBatch(self.mel.to(device), self.token_ids.to(device), self.targets.to(device))


class Sentences(IterableDataset[EarBatch]):
    """Batches without end. Every worker has sentences of its own."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, seed: int, size: int, say: Say = any_voice
    ) -> None:
        self._tokenizer, self._seed, self._size, self._say = tokenizer, seed, size, say
        self._extractor = VoxtralRealtimeFeatureExtractor(**_extractor_options())

    def __iter__(self) -> Iterator[EarBatch]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self._seed} {worker.id if worker else 0}")
        while True:
            yield self._batch(rng)

    def _batch(self, rng: random.Random) -> EarBatch:
        made = [self._example(rng) for _ in range(self._size)]
        frames = max(len(targets) for _, targets in made)
        mel = torch.zeros(self._size, folder.MEL_BINS, frames * folder.FRAMES_PER_TOKEN)
        token_ids = torch.full((self._size, frames), self.pad)
        targets = torch.full((self._size, frames), IGNORED)
        for row, (features, wanted) in enumerate(made):
            mel[row, :, : features.shape[1]] = features
            targets[row, : len(wanted)] = wanted
            said = torch.where(wanted == IGNORED, self.pad, wanted)
            token_ids[row, 1 : len(wanted)] = said[:-1]
            token_ids[row, 0] = self._tokenizer.bos_token_id
        return EarBatch(mel, token_ids, targets)

    @property
    def pad(self) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(folder.STREAMING_PAD))

    def _example(self, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        """Mel [bins, 8 * frames], and targets [frames]."""
        left = rng.randrange(*LEFT_PADDING)
        said: list[str] = []
        ends: list[float] = []
        waves, at = [], 0.0
        for _ in range(rng.choice((1, 1, 2))):  # two: the window moves on between them
            spoken = heard(
                rng, self._say(rng, sentence(rng, held_out=False), VOICES),
                before=rng.uniform(0, 0.6), after=rng.uniform(0, 0.4),
            )  # fmt: skip
            said += spoken.words
            ends += [end + at for end in spoken.ends]
            waves.append(torch.from_numpy(spoken.wave))
            at += len(spoken.wave) / SAMPLE_RATE
        places = emitted_at(ends, left=left, delay=folder.DELAY)
        frames = max(places[-1] + RIGHT_PADDING, left + math.ceil(at * SAMPLE_RATE / FRAME))
        wave = torch.zeros(frames * FRAME)
        sound = torch.cat(waves)
        wave[left * FRAME : left * FRAME + len(sound)] = sound
        features = self._extractor(
            [wave.numpy()], sampling_rate=SAMPLE_RATE, center=True, return_tensors="pt"
        ).input_features[0]
        targets = torch.full((frames,), self.pad)
        targets[: left + folder.DELAY] = IGNORED
        targets[places] = torch.tensor(
            [self._tokenizer.convert_tokens_to_ids(f" {word}") for word in said]
        )
        return features[:, : frames * folder.FRAMES_PER_TOKEN], targets


def emitted_at(ends: list[float], *, left: int, delay: int) -> list[int]:
    """The frame after which each word is said: `delay` after its end, one word for each frame."""
    places: list[int] = []
    for end in ends:
        frame = left + int(end * SAMPLE_RATE / FRAME) + delay
        places.append(max(frame, places[-1] + 1 if places else 0))
    return places


def _extractor_options() -> dict[str, object]:
    return {k: v for k, v in folder.FEATURES.items() if k != "feature_extractor_type"}


def train(
    target: Path,
    plan: EarPlan,
    tell: Callable[[str], None],
    *,
    save_each: float,
    say: Say = any_voice,
) -> None:
    """Trains the folder at `target`, made if it is not there; saves every `save_each` seconds."""
    if not (target / "config.json").exists():
        folder.make_untrained(target, seed=plan.seed)
    torch.manual_seed(plan.seed)
    device = torch.device(plan.device)
    model = VoxtralRealtimeForConditionalGeneration.from_pretrained(
        target, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    optimizer = _optimizer(model)
    sentences = Sentences(tokenizer, seed=plan.seed, size=plan.batch, say=say)
    loader = DataLoader(sentences, batch_size=None, num_workers=plan.workers)
    start = told = saved = time.monotonic()
    model.train()
    for number, batch in zip(range(plan.steps), loader, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * schedule(number, plan.steps)
        loss, right = _learn(model, optimizer, batch.to(device), sentences.pad)
        now = time.monotonic()
        if now - told > REPORT_SECONDS or number == 0:
            told = now
            tell(f"{now - start:6.0f} s  step {number}: loss {loss:.3f}, words right {right:.3f}")
        if now - saved > save_each:
            saved = now
            folder.save(model, target)
    folder.save(model, target)


def _learn(
    model: VoxtralRealtimeForConditionalGeneration,
    optimizer: torch.optim.Optimizer,
    batch: EarBatch,
    pad: int,
) -> tuple[float, float]:
    """One step: the loss, and the share of words that were right, given the words before them."""
    logits = model(
        input_ids=batch.token_ids, input_features=batch.mel, num_delay_tokens=folder.DELAY,
        use_cache=False,
    ).logits.float()  # fmt: skip
    kept = batch.targets != IGNORED
    logits, targets = logits[kept], batch.targets[kept]
    loss = functional.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    words = targets != pad
    right = (logits.argmax(-1)[words] == targets[words]).float().mean()
    return float(loss.detach()), float(right)


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up, then cosine decay."""
    warm_up = max(1, min(WARM_UP_STEPS, steps // 10))
    down = (1 + math.cos(math.pi * step / steps)) / 2
    return min(1.0, (step + 1) / warm_up) * (LAST_SHARE + (1 - LAST_SHARE) * down)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW: Muon's bf16 products take ten times the model's own on a CPU that has none."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def transcribe(
    model: VoxtralRealtimeForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    spoken: Spoken,
    *,
    left: int,
) -> tuple[str, ...]:
    """The words that the model hears, greedily, frame by frame, as in a live session."""
    options = _extractor_options()
    extractor = VoxtralRealtimeFeatureExtractor(**options)
    frames = left + math.ceil(len(spoken.wave) / FRAME) + folder.DELAY + RIGHT_PADDING
    wave = torch.zeros(frames * FRAME)
    wave[left * FRAME : left * FRAME + len(spoken.wave)] = torch.from_numpy(spoken.wave)
    mel = extractor(
        [wave.numpy()], sampling_rate=SAMPLE_RATE, center=True, return_tensors="pt"
    ).input_features[:, :, : frames * folder.FRAMES_PER_TOKEN]
    pad = int(tokenizer.convert_tokens_to_ids(folder.STREAMING_PAD))
    prompt = [tokenizer.bos_token_id, *[pad] * (left + folder.DELAY)]
    with torch.inference_mode():
        audio = model.model.get_audio_features(input_features=mel, use_cache=False).pooler_output
        said, cache, at = list(prompt), None, 0
        time_tensor = torch.full((1,), float(folder.DELAY))
        condition = model.model.time_embedding(time_tensor)[None]
        while at < frames:
            embeds = model.get_input_embeddings()(torch.tensor([said[at:]]))
            embeds = embeds + audio[:, at : len(said)]
            made = model.model.language_model(
                inputs_embeds=embeds, past_key_values=cache, use_cache=True, t_cond=condition
            )
            cache, at = made.past_key_values, len(said)
            said.append(int(model.lm_head(made.last_hidden_state[:, -1]).argmax(-1)))
    text: str = tokenizer.decode(said[len(prompt) :], skip_special_tokens=True)
    return tuple(text.split())
