"""An endless, seeded stream of training batches, made in worker processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import AutoTokenizer

from tools.nano import folder
from tools.nano.dense import cell_targets, token_targets
from tools.nano.encoding import IGNORED, ConversationEncoder, Example, grid, mel, patches
from tools.nano.materials import collage
from tools.nano.world.conversations import Conversation, Materials, conversation
from tools.nano.world.scenes import Scene
from tools.nano.world.sounds import Sound

POOL = 5
"""Batches that are drawn together and sorted by length, so that there is little padding."""

SYSTEM = "You are a helpful assistant."


@dataclass(slots=True)
class Batch:
    """Tensors of several examples. Pictures and sounds of all examples are one after another."""

    token_ids: torch.Tensor
    """int64 [examples, length], padded at the end; length 0 while only towers learn."""
    labels: torch.Tensor
    attended: torch.Tensor
    """int64 [examples, length]: 1 where there is a token."""
    patches: torch.Tensor
    """float32 [patches, values]."""
    grids: torch.Tensor
    """int64 [pictures, 3]: time, rows and columns of patches."""
    cells: torch.Tensor
    """int64 [cells, 3]: `cell_targets`."""
    mel: torch.Tensor
    """float32 [bins, frames]."""
    frames: torch.Tensor
    """int64 [sounds]."""
    moments: torch.Tensor
    """int64 [audio tokens]: `token_targets`."""

    def to(self, device: torch.device) -> Self:
        return type(self)(*(getattr(self, f.name).to(device) for f in fields(self)))


def collate(
    examples: Sequence[Example], pad: int,
    pictures: Sequence[Scene] = (), sounds: Sequence[Sound] = (),
) -> Batch:  # fmt: skip
    """`pictures` and `sounds` come after those of the examples and have dense losses only."""
    length = max((len(example.token_ids) for example in examples), default=0)
    shape = (len(examples), length)
    token_ids, labels = torch.full(shape, pad), torch.full(shape, IGNORED)
    attended = torch.zeros(shape, dtype=torch.long)
    for row, example in enumerate(examples):
        count = len(example.token_ids)
        token_ids[row, :count] = torch.tensor(example.token_ids)
        labels[row, :count] = torch.tensor(example.labels)
        attended[row, :count] = 1
    scenes = [scene for example in examples for scene in example.pictures] + list(pictures)
    heard = [sound for example in examples for sound in example.sounds] + list(sounds)
    mels = [mel(sound.wave) for sound in heard]
    return Batch(
        token_ids, labels, attended,
        patches=torch.cat([patches(scene.image) for scene in scenes] or [torch.zeros(0, 1)]),
        grids=torch.tensor([(1, *grid(scene.image)) for scene in scenes]),
        cells=_targets([cell_targets(scene) for scene in scenes]),
        mel=torch.cat(mels or [torch.zeros(1, 0)], dim=1),
        frames=torch.tensor([one.shape[1] for one in mels], dtype=torch.long),
        moments=_targets([token_targets(sound) for sound in heard]),
    )  # fmt: skip


def _targets(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, dtype=torch.long)


class Towers(IterableDataset[Batch]):
    """Endless batches of pictures and sounds without questions."""

    def __init__(self, materials: Materials, *, seed: int, size: int) -> None:
        self._materials, self._seed, self._size = materials, seed, size

    def __iter__(self) -> Iterator[Batch]:
        rng = _worker_rng(self._seed)
        while True:
            count = max(1, self._size * 3 // 4)
            pictures = [self._picture(rng) for _ in range(count)]
            sounds = [self._timed_sound(rng) for _ in range(max(1, self._size - count))]
            yield collate([], 0, pictures, sounds)

    def _picture(self, rng: random.Random) -> Scene:
        if rng.random() < 0.65:
            return collage(rng, self._materials.fonts)
        return self._materials.scene(rng)

    def _timed_sound(self, rng: random.Random) -> Sound:
        while (sound := self._materials.sound(rng)).segments is None:
            pass
        return sound


class Answers(IterableDataset[Batch]):
    """Endless batches of conversations with some collages."""

    def __init__(
        self, materials: Materials, tokenizer: Path, *, seed: int, size: int, collages: int
    ) -> None:
        self._materials, self._seed, self._size = materials, seed, size
        self._collages = collages
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def __iter__(self) -> Iterator[Batch]:
        rng, encoder = _worker_rng(self._seed), ConversationEncoder(self._tokenizer)
        pad = self._tokenizer.convert_tokens_to_ids(folder.PAD)
        while True:
            drawn = [self._example(rng, encoder) for _ in range(self._size * POOL)]
            drawn.sort(key=lambda example: len(example.token_ids) + rng.random() * 20)
            batches = [drawn[at : at + self._size] for at in range(0, len(drawn), self._size)]
            rng.shuffle(batches)
            for batch in batches:
                extra = [collage(rng, self._materials.fonts) for _ in range(self._collages)]
                yield collate(batch, pad, extra)

    def _example(self, rng: random.Random, encoder: ConversationEncoder) -> Example:
        turns = varied(rng, conversation(rng, self._materials))
        system = None
        if rng.random() < 0.15:
            system = SYSTEM if rng.random() < 0.7 else rng.choice(self._materials.lines)
        return encoder.encode(turns, system=system, media_last=rng.random() < 0.2)


def varied(rng: random.Random, turns: Conversation) -> Conversation:
    """The same questions, some in lower case or without final punctuation; "say" stays as it is."""
    return [turn if turn.asked.kind == "say" else replace(turn, asked=replace(
        turn.asked, question=_careless(rng, turn.asked.question)
    )) for turn in turns]  # fmt: skip


def _careless(rng: random.Random, question: str) -> str:
    chance = rng.random()
    if chance < 0.06:
        return question.lower()
    return question.rstrip("?.") if chance < 0.1 else question


def _worker_rng(seed: int) -> random.Random:
    worker = get_worker_info()
    if worker is not None:
        torch.set_num_threads(1)
    return random.Random(seed * 1000 + (worker.id if worker else 0))
