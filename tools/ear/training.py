"""Training on rows whose words have times: one target for each 80 ms, a word or nothing.

A throwaway linear head on the encoder names the phoneme that sounds, which teaches it in minutes
what words alone teach it in hours. What is saved are averaged weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerFast, VoxtralRealtimeForConditionalGeneration

from tools.ear import folder
from tools.ear.corpus import PHONEMES, SHARD, Say, Utterance, read_shard, write_shard
from tools.ear.dense import DenseForward
from tools.ear.optimizer import Optimizer
from tools.ear.rows import IGNORED, NOISE_SECONDS, EarBatch, Rows
from tools.ear.speech import any_voice

WARM_UP_STEPS = 50
CLIP = 1.0
AVERAGED = 0.99
PHONEME_WEIGHT = 0.5
REPORT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EarPlan:
    """The settings that, with the device's arithmetic, decide the weights."""

    seed: int = 1
    steps: int = 3000
    rows: int = 10
    """Rows of one step."""
    frames: int = 80
    """Frames of 80 ms in a row."""
    rate: float = 2.5e-3
    decay: float = 0.35
    """Share of the steps, the last ones, in which the rate falls to nothing."""
    sentences: int = 24_000
    """Different ones to train on."""
    device: str = "cpu"


def train(
    target: Path,
    work: Path,
    plan: EarPlan,
    tell: Callable[[str], None],
    *,
    save_each: float,
    say: Say = any_voice,
) -> None:
    """Trains the folder at `target`. Corpus and state are kept in `work`, saved every `save_each`
    seconds: the same call goes on where one was ended."""
    utterances = corpus(work / "corpus", plan, tell, say)
    trainer = Trainer(target, plan)
    if (work / "state.safetensors").exists():
        trainer.restore(work / "state.safetensors")
    start = told = saved = time.monotonic()
    first = trainer.steps
    tell(f"step {first} of {plan.steps}, {len(utterances)} sentences")
    rows = Rows(trainer.tokens, seed=plan.seed + first, frames=plan.frames,
                noise_seconds=NOISE_SECONDS)  # fmt: skip
    while trainer.steps < plan.steps:
        loss, right, phonemes = trainer.learn(rows.batch(utterances, plan.rows))
        now = time.monotonic()
        if now - told > REPORT_SECONDS or trainer.steps == first + 1:
            told = now
            tell(
                f"{now - start:6.0f} s  step {trainer.steps}: loss {loss:.3f}, words right"
                f" {right:.3f}, phonemes right {phonemes:.3f}"
            )
        if now - saved > save_each:
            saved = now
            trainer.save(work / "state.safetensors")
    trainer.save(work / "state.safetensors")


def corpus(where: Path, plan: EarPlan, tell: Callable[[str], None], say: Say) -> list[Utterance]:
    """The sentences of this plan, said now where they have not been."""
    size = min(SHARD, plan.sentences)
    shards = [where / f"{number:03d}.safetensors" for number in range(plan.sentences // size)]
    for number, shard in enumerate(shards):
        if not shard.exists():
            tell(f"speaks sentences {number * size} to {(number + 1) * size}")
            write_shard(shard, f"{plan.seed} {number}", size=size, say=say)
    return [each for shard in shards for each in read_shard(shard)]


class Trainer:
    """A model, its optimizer and the average of its weights."""

    def __init__(self, target: Path, plan: EarPlan) -> None:
        if not (target / "config.json").exists():
            folder.make_untrained(target, seed=plan.seed)
        torch.manual_seed(plan.seed)
        self._target, self._plan = target, plan
        self._device = torch.device(plan.device)
        self.model = VoxtralRealtimeForConditionalGeneration.from_pretrained(
            target, dtype=torch.float32
        )
        head = nn.Linear(self.model.config.audio_config.hidden_size, len(PHONEMES))
        self._forward = DenseForward(self.model, plan.frames).to(self._device)
        self._head = head.to(self._device)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
        self.tokens = folder.token_numbers(tokenizer)
        self._parameters = {
            **dict(self.model.named_parameters()),
            **{f"phoneme_head.{name}": each for name, each in self._head.named_parameters()},
        }
        self._optimizer = Optimizer(self._parameters)
        self._average = {name: each.detach().clone() for name, each in self._parameters.items()}
        self.steps = 0

    def learn(self, batch: EarBatch) -> tuple[float, float, float]:
        """One step: the loss, and the shares of words, given the words before them, and of
        phonemes that were right."""
        plan, batch = self._plan, batch.to(self._device)
        logits, heard = self._forward(batch.mel, batch.token_ids)
        sounds = self._head(heard)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED
        )
        loss_of_sounds = functional.cross_entropy(
            sounds.flatten(0, 1), batch.phonemes.flatten(), ignore_index=IGNORED
        )
        (loss + PHONEME_WEIGHT * loss_of_sounds).backward()
        nn.utils.clip_grad_norm_(list(self._parameters.values()), CLIP)
        self._optimizer.step(plan.rate * schedule(self.steps, plan.steps, plan.decay))
        self.steps += 1
        kept = min(AVERAGED, self.steps / (self.steps + 9))
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._average[name].lerp_(parameter, 1 - kept)
        words = batch.targets >= self.tokens.first_word
        voiced = batch.phonemes > 0
        return (
            float(loss.detach()),
            float((logits.argmax(-1)[words] == batch.targets[words]).float().mean()),
            float((sounds.argmax(-1)[voiced] == batch.phonemes[voiced]).float().mean()),
        )

    def save(self, state: Path) -> None:
        """The averaged model to its folder, and all that training goes on from to `state`."""
        held = {"steps": torch.tensor(self.steps)}
        for name, parameter in self._parameters.items():
            held[f"parameter.{name}"] = parameter.detach()
            held[f"average.{name}"] = self._average[name]
        held |= {f"optimizer.{name}": tensor for name, tensor in self._optimizer.state.items()}
        state.parent.mkdir(parents=True, exist_ok=True)
        partial = state.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, partial)
        partial.rename(state)
        folder.save(self.model, self._average, self._target)

    def restore(self, state: Path) -> None:
        held = load_file(state, device=str(self._device))
        self.steps = int(held["steps"])
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(held[f"parameter.{name}"])
                self._average[name] = held[f"average.{name}"]
        for name in self._optimizer.state:
            self._optimizer.state[name] = held[f"optimizer.{name}"]


def schedule(step: int, steps: int, decay: float) -> float:
    """Factor of the learning rate: linear warm-up, constant, in the share `decay` linearly to
    nothing."""
    warm_up = max(1, min(WARM_UP_STEPS, steps // 10))
    down = (steps - step) / max(1.0, decay * steps)
    return min(1.0, (step + 1) / warm_up, down)
