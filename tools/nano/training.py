"""Training in two stages: first the towers with dense losses, then the whole model on answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from lookonce.types.cpu import cpu_multiplies_bf16
from tools.nano import folder
from tools.nano.batches import Answers, Batch, Towers
from tools.nano.dense import Heads
from tools.nano.encoding import IGNORED
from tools.nano.world.conversations import Materials

DENSE_WEIGHT = 0.25
"""Weight of the dense losses in the second stage."""
WARM_UP_STEPS = 60
LAST_SHARE = 0.02
"""Factor of the learning rate at the end of a stage."""
CLIP = 1.0
REPORT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The settings that, with the device's arithmetic, decide the weights."""

    seed: int = 1
    tower_steps: int = 1500
    answer_steps: int = 6000
    batch: int = 24
    collages: int = 3
    """More pictures in each batch, for the vision tower alone."""
    tower_rate: float = 2e-3
    answer_rate: float = 1.4e-3
    workers: int = 1
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Figures of one step. `accuracy`: share of answer tokens that were right before the step."""

    stage: str
    number: int
    loss: float
    accuracy: float | None = None


class Trainer:
    """A model and its optimizers; `train` yields every step."""

    def __init__(self, source: Path, plan: TrainingPlan) -> None:
        torch.manual_seed(plan.seed)
        self._plan = plan
        self._device = torch.device(plan.device)
        self._has_bf16 = plan.device != "cpu" or cpu_multiplies_bf16()
        # On a CPU, the backward pass of fused attention is slower than plain attention's here.
        attention = "eager" if plan.device == "cpu" else "sdpa"
        self.model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(
            source, dtype=torch.float32,
            attn_implementation={"text_config": attention, "vision_config": "sdpa",
                                 "audio_config": "sdpa"},
        ).to(self._device)  # fmt: skip
        self._heads = Heads(self.model.config.text_config.hidden_size).to(self._device)
        self._optimizers = _optimizers(self.model, self._heads)

    def train(self, materials: Materials, tokenizer: Path) -> Iterator[TrainingStep]:
        plan = self._plan
        towers = Towers(materials, seed=plan.seed, size=plan.batch)
        yield from self._stage("towers", towers, plan.tower_steps, plan.tower_rate)
        answers = Answers(
            materials, tokenizer, seed=plan.seed, size=plan.batch, collages=plan.collages
        )
        yield from self._stage("answers", answers, plan.answer_steps, plan.answer_rate)

    def _stage(
        self, name: str, batches: IterableDataset[Batch], steps: int, rate: float
    ) -> Iterator[TrainingStep]:
        loader = DataLoader(batches, batch_size=None, num_workers=self._plan.workers)
        self.model.train()
        for number, batch in zip(range(steps), loader, strict=False):
            self._set_rate(rate * schedule(number, steps))
            loss, accuracy = self._learn(batch.to(self._device))
            yield TrainingStep(name, number, loss, accuracy)

    def _set_rate(self, rate: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _learn(self, batch: Batch) -> tuple[float, float | None]:
        """One step: the loss and, where there are answers, the share of their tokens right."""
        # Where a CPU does not multiply bfloat16, float32 is several times faster.
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._has_bf16):
            loss, accuracy = self._loss(batch)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self._heads.parameters()], CLIP)
        with nullcontext() if self._has_bf16 else _Float32():
            for optimizer in self._optimizers:
                optimizer.step()
        return float(loss.detach()), accuracy

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, float | None]:
        base = self.model.model
        dense, seen, heard = torch.zeros((), device=self._device), None, None
        if len(batch.grids):
            seen = base.visual(batch.patches, grid_thw=batch.grids).pooler_output
            dense = dense + self._heads.picture_loss(seen, batch.cells)
        if len(batch.frames):
            heard = base.audio_tower(batch.mel, feature_lens=batch.frames).last_hidden_state
            dense = dense + self._heads.sound_loss(heard, batch.moments)
        if not batch.token_ids.numel():
            return dense, None
        answer, accuracy = self._answer_loss(batch, seen, heard)
        return answer + DENSE_WEIGHT * dense, accuracy

    def _answer_loss(
        self, batch: Batch, seen: torch.Tensor | None, heard: torch.Tensor | None
    ) -> tuple[torch.Tensor, float]:
        """Cross-entropy over the answers' tokens; hidden states of other positions are skipped."""
        model, config = self.model, self.model.config
        embeds = model.model.language_model.embed_tokens(batch.token_ids)
        for outputs, token in ((seen, config.image_token_id), (heard, config.audio_token_id)):
            if outputs is not None:
                places = (batch.token_ids == token)[..., None].expand_as(embeds)
                embeds = embeds.masked_scatter(places, outputs.to(embeds.dtype))
        hidden = model.model.language_model(
            inputs_embeds=embeds, attention_mask=batch.attended,
            position_ids=self._positions(batch), use_cache=False,
        ).last_hidden_state  # fmt: skip
        said = batch.labels[:, 1:] != IGNORED
        logits = model.lm_head(hidden[:, :-1][said]).float()
        targets = batch.labels[:, 1:][said]
        accuracy = (logits.argmax(-1) == targets).float().mean().item()
        return functional.cross_entropy(logits, targets), accuracy

    def _positions(self, batch: Batch) -> torch.Tensor:
        """int64 [3, examples, length]. Collages after the examples' pictures have no positions."""
        starts = batch.token_ids == self.model.config.vision_start_token_id
        pictures, sounds = int(starts.sum()), len(batch.frames)
        positions, _ = self.model.get_rope_index(
            batch.token_ids, image_grid_thw=batch.grids[:pictures] if pictures else None,
            attention_mask=batch.attended, audio_seqlens=batch.frames if sounds else None,
        )  # fmt: skip
        return positions.to(self._device)


class _Float32(TorchFunctionMode):
    """Lets `Tensor.bfloat16` copy: torch's Muon computes in the type that it gives."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up, then cosine decay."""
    warm_up = max(1, min(WARM_UP_STEPS, steps // 10))
    down = (1 + math.cos(math.pi * step / steps)) / 2
    return min(1.0, (step + 1) / warm_up) * (LAST_SHARE + (1 - LAST_SHARE) * down)


def _optimizers(model: nn.Module, heads: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside the model, AdamW for the rest."""
    matrices, others = [], list(heads.parameters())
    for name, parameter in model.named_parameters():
        outside = any(part in name for part in ("embed", "lm_head", "audio_bos"))
        (others if parameter.ndim != 2 or outside else matrices).append(parameter)
    return [
        torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.02,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.985), weight_decay=0.0),
    ]  # fmt: skip


def train(
    target: Path,
    materials: Materials,
    plan: TrainingPlan,
    *,
    texts: int,
    tell: Callable[[str], None],
) -> list[TrainingStep]:
    """Makes a trained model folder at `target` from nothing. Returns the figures of every step."""
    folder.make_untrained(target, materials, seed=plan.seed, texts=texts)
    trainer = Trainer(target, plan)
    steps, start, told = [], time.monotonic(), 0.0
    for step in trainer.train(materials, target):
        steps.append(step)
        if (now := time.monotonic() - start) - told > REPORT_SECONDS or len(steps) == 1:
            told = now
            accuracy = "" if step.accuracy is None else f", {step.accuracy:.3f} of tokens right"
            tell(f"{now:6.0f} s  {step.stage} {step.number}: loss {step.loss:.3f}{accuracy}")
    folder.save(trainer.model, target)
    return steps
