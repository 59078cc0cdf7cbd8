"""Loads a Hugging Face folder (or hub id) into a model the runner can execute."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from lookonce.config import ModelConfig
from lookonce.errors import ModelLoadError
from lookonce.model.attention.hf_attention import ATTENTION_NAME
from lookonce.model.eos_tokens import stop_token_ids
from lookonce.model.families.base import Model, ModelFamily
from lookonce.model.families.registry import family_for
from lookonce.model.fusion import fuse_norms
from lookonce.model.inputs import DTYPES
from lookonce.model.quantized import unpacking
from lookonce.model.rope import longest_sequence
from lookonce.model.vision_patches import lean_towers
from lookonce.types.model import ModelInfo

Progress = Callable[[int, int], None]
"""Called with (weights loaded, weights in all), from (0, all) to (all, all)."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    family: ModelFamily
    info: ModelInfo
    dtype: torch.dtype
    device: torch.device


def load_model(config: ModelConfig, progress: Progress | None = None) -> LoadedModel:
    """Load weights and bind them to their family.

    Raises `ModelLoadError` that says what is wrong: no such folder, a broken config, a type that
    or a quantization that is not supported (with those that are), no safetensors, missing or
    unknown weights, a bad length.
    """
    raw_config = _read_config(config)
    family_class = family_for(str(raw_config.get("model_type")))
    dtype, device = DTYPES[config.dtype], torch.device(config.device)
    model = _read_weights(config, family_class, dtype, unpacking(raw_config), progress)
    digest = _weights_digest(model, raw_config)
    family = family_class(model.to(device))
    return LoadedModel(model, family, _model_info(config, family, digest), dtype, device)


def _model_info(config: ModelConfig, family: ModelFamily, digest: str) -> ModelInfo:
    return ModelInfo(
        name=config.folder,
        model_type=family.config.model_type,
        vocab_size=family.vocab_size,
        max_model_len=_max_model_len(config, family),
        eos_token_ids=_eos_token_ids(config, family),
        modalities=family.modalities,
        dtype=config.dtype,
        encoder_row_bytes=family.row_width * DTYPES[config.dtype].itemsize,
        unsplittable=family.unsplittable,
        largest_unsplittable=family.largest_unsplittable,
        weights_digest=digest,
    )


def _read_config(config: ModelConfig) -> Json:
    """config.json as it stands, before transformers judges it."""
    looks_local = config.folder.startswith((".", "/", "~")) or config.folder.count("/") > 1
    if looks_local and not Path(config.folder).is_dir():
        raise ModelLoadError(f"there is no model folder {config.folder}")
    try:
        raw, _ = PreTrainedConfig.get_config_dict(config.folder)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{config.folder} has no readable config.json: {error}") from error
    if "model_type" not in raw:
        raise ModelLoadError(f"{config.folder} has no config.json that names a model_type")
    return dict(raw)


def _read_weights(
    config: ModelConfig,
    family: type[ModelFamily],
    dtype: torch.dtype,
    unpacked: Json,
    progress: Progress | None,
) -> Model:
    """On the CPU, in `dtype`: attention of the text model through our pages, of towers on SDPA."""
    try:
        with _reported(progress):
            model, loading = family.transformers_class().from_pretrained(
                config.folder,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **unpacked,
            )
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"the weights of {config.folder} do not load: {error}") from error
    _check_names(config.folder, family, loading)
    composite = model.config.get_text_config(decoder=True) is not model.config
    model.set_attn_implementation({"text_config": ATTENTION_NAME} if composite else ATTENTION_NAME)
    model.eval().requires_grad_(False)
    fuse_norms(model)
    lean_towers(model)
    return model


def _check_names(folder: str, family: type[ModelFamily], loading: Json) -> None:
    """transformers makes missing weights up and leaves unknown ones out, scales among them."""
    if missing := sorted(loading["missing_keys"]):
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} weights, among them {', '.join(missing[:3])}"
        )
    if unknown := sorted(filter(family.misses, loading["unexpected_keys"])):
        raise ModelLoadError(
            f"{folder} has {len(unknown)} weights that a model of its config has no place for, "
            f"among them {', '.join(unknown[:3])}"
        )


@contextlib.contextmanager
def _reported(progress: Progress | None) -> Iterator[None]:
    """Sends transformers' own progress bars to `progress`, or nowhere."""

    def watch(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: Json) -> Any:
        if progress is not None and args and hasattr(args[0], "__len__"):
            return _counted(args[0], progress)
        return factory(*args, **{**kwargs, "disable": True})

    previous = transformers_logging.set_tqdm_hook(watch)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _counted(items: Any, progress: Progress) -> Iterator[Any]:
    total = len(items)
    progress(0, total)
    for done, item in enumerate(items, 1):
        yield item
        progress(done, total)


def _max_model_len(config: ModelConfig, family: ModelFamily) -> int:
    limit = longest_sequence(family.text_config)
    wanted = config.max_model_len
    if wanted is not None and not 1 <= wanted <= limit:
        raise ModelLoadError(f"--max-model-len is 1 to {limit} for this model, got {wanted}")
    return limit if wanted is None else wanted


def _eos_token_ids(config: ModelConfig, family: ModelFamily) -> tuple[int, ...]:
    """The generation config's word counts before the model config's. None lies beyond the logits,
    as an end that only the tokenizer knows might."""
    configs = [family.model.generation_config, family.config, family.text_config]
    found = stop_token_ids(config.folder, configs)
    return tuple(token for token in found if token < family.vocab_size)


def _weights_digest(model: Model, raw_config: Json) -> str:
    """Of config and every weight as loaded: what the KV of a token prefix is a function of."""
    digest = blake3(max_threads=blake3.AUTO)
    settled = {name: value for name, value in raw_config.items() if not name.startswith("_")}
    digest.update(json.dumps(settled, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        digest.update(f"|{name}|{weight.dtype}|{tuple(weight.shape)}|".encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
