"""LoRA adapters with random matrices, written and applied by PEFT."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from lookonce.model.loader import LoadedModel
from lookonce.model.lora import LoRAAdapter
from lookonce.model.lora_files import WEIGHTS_FILE, adaptable_layers, read_adapter
from tests.support.model.cases import Case
from tests.support.model.serving import Answer, answers_of, reference_model

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STRENGTH = 0.15
"""Standard deviation of both matrices' numbers: answers with the adapter are other ones."""


def make_adapter(
    folder: Path,
    loaded: LoadedModel,
    target: Path,
    *,
    seed: int = 0,
    strength: float = STRENGTH,
    **settings: Any,
) -> Path:
    """Write a random adapter of the model in `folder`; `settings` are those of `LoraConfig`."""
    config = LoraConfig(**{"r": 4, "target_modules": list(PROJECTIONS), **settings})
    with _transformers_warns():
        get_peft_model(reference_model(folder, loaded.info), config).save_pretrained(target)
    _draw(target / WEIGHTS_FILE, seed, strength)
    return target


def another(adapter: Path, target: Path, *, seed: int = 1, strength: float = STRENGTH) -> Path:
    """Write an adapter of the same layers with other matrices."""
    shutil.copytree(adapter, target)
    _draw(target / WEIGHTS_FILE, seed, strength)
    return target


def _draw(file: Path, seed: int, strength: float) -> None:
    """Fill all matrices of a file with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(tensor.shape, generator=generator) * strength
        for name, tensor in sorted(load_file(file).items())
    }
    save_file(weights, file)


@contextmanager
def _transformers_warns() -> Iterator[None]:
    """In this block PEFT may use what transformers will remove."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def read(adapter: Path, loaded: LoadedModel, *, max_rank: int = 64) -> LoRAAdapter:
    like = torch.zeros(1, dtype=loaded.dtype)
    layers = adaptable_layers(loaded.family)
    return read_adapter(adapter, loaded.family, layers, max_rank=max_rank, like=like)


def answers_with(
    adapter: Path, folder: Path, loaded: LoadedModel, cases: Sequence[Case]
) -> list[Answer]:
    """PEFT's greedy answers over plain Hugging Face's model."""
    with _transformers_warns():
        model = PeftModel.from_pretrained(reference_model(folder, loaded.info), adapter).eval()
    return answers_of(model, cases)
