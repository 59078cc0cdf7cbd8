"""Reads LoRA adapters from PEFT's folders, and finds the layers of a model that they change.

Files of others are read here: no pickle, no more bytes than an adapter of this model may have, and
whatever would change answers in a way that is not served is refused by name.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import regex
import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from lookonce.errors import BadRequestError
from lookonce.model.families.base import ModelFamily
from lookonce.model.fused_modules import GatedProduct
from lookonce.model.lora import (
    AdaptableLayers,
    LoRAAdapter,
    LoRALayer,
    RunnerLoRA,
    linear_sizes,
)
from lookonce.model.state import StepForward
from lookonce.types.lora import LoRAIdentity, ReadAdapter

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 256
"""Of ranks and of alphas: each is compared with each layer's name."""
FILE_SLACK = 64 << 20
"""Bytes of a header."""
MATCH_SECONDS = 0.2
"""How long an expression may take for one layer."""
PREFIX = "base_model.model."
"""PEFT's own, before the name of a layer in the model that was trained."""
MATRIX_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<which>[AB])\.weight")
TRAINED_FROM_OTHER_WEIGHTS = ("corda", "lora_ga", "loftq", "olora", "pissa")
"""Beginnings of `init_lora_weights` that change the model's own weights before training."""
IGNORED_SETTINGS = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
        *("ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode"),
        *("init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config"),
        *("lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
        *("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
        *("runtime_config", "target_modules", "task_type", "use_rslora"),
    }
)
"""Keys of an adapter's config that are read here, or that say nothing about a trained adapter. Any
other that is set changes what is computed in a way that is not served."""
REASONS = {
    "use_dora": "DoRA scales the model's own weights",
    "modules_to_save": "whole layers take the place of the model's",
    "trainable_token_indices": "it changes token embeddings",
    "target_parameters": "it changes weights that are no linear layer",
    "fan_in_fan_out": "its matrices are stored transposed",
    "lora_bias": "it has biases",
    "layer_replication": "it repeats layers of the model",
    "alora_invocation_tokens": "it begins inside of the prompt",
}


def adaptable_layers(family: ModelFamily) -> AdaptableLayers:
    """The layers of a loaded model that adapters may change. They are seen by hooks, which see all
    tokens of a step in order: others are refused."""
    layers = AdaptableLayers()
    decoder = set(family.decoder.modules())
    outside = {family.lm_head, family.embed_tokens}
    for name, module in family.model.named_modules():
        if isinstance(vars(module).get("forward"), GatedProduct):
            layers.gated_products.append(module)
        if linear_sizes(module) is None:
            continue
        if module in outside:
            layers.refused[name] = "it is the output head"
        elif module not in decoder:
            layers.encoder[name] = module
        elif reason := _why_not(family, name):
            layers.refused[name] = reason
        else:
            layers.decoder[name] = module
    return layers


def _why_not(family: ModelFamily, name: str) -> str | None:
    """Why a hook at a layer of the decoder would not see all tokens of a step in order."""
    parts = name.split(".")
    if "experts" in parts:
        return "it is an expert, which sees some of the tokens"
    if family.keeps_latents and parts[-1] == "kv_b_proj":
        return "latent attention does not compute it"
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    modules = (family.model.get_submodule(each) for each in above)
    if any(isinstance(vars(module).get("forward"), StepForward) for module in modules):
        return "it is part of a layer with a state"
    return None


def why_no_adapters(family: ModelFamily) -> str | None:
    """Why this model cannot be served with adapters; None where it can."""
    if family.encoder_decoder or family.encoder_only:
        return "adapters are served for decoders alone"
    if family.frame_encoder is not None:
        return "adapters are not served for models that hear frame by frame"
    return None


def read_adapter(
    folder: Path, family: ModelFamily, layers: AdaptableLayers, *, max_rank: int, like: Tensor
) -> LoRAAdapter:
    """The adapter of a folder as PEFT writes it, in dtype and on the device of `like`.

    Raises `BadRequestError` that names what is wrong or not served: another method than plain LoRA,
    layers that the model lacks, matrices of other sizes, or a rank above `max_rank`.
    """
    config = _read_config(folder)
    _refuse_settings(config)
    try:
        # Read, not mapped: a page of a file that somebody cuts short would end this process.
        tensors = load_tensors(_read_file(folder / WEIGHTS_FILE, _most_bytes(layers, max_rank)))
        pairs = _pairs(list(tensors))
        digests = _Digests()
        found: dict[str, LoRALayer] = {}
        for trained in sorted(pairs):
            name, module = _find(family, layers, trained)
            if name in found:
                raise _refused(f"it changes {name} twice")
            if not _is_targeted(config, trained):
                raise _refused(f"it has matrices for {trained}, not one of its target_modules")
            a, b = (tensors[key] for key in pairs[trained])
            rank, scale = _rank_and_scale(config, trained)
            _check_shapes(trained, [tuple(a.shape), tuple(b.shape)], rank, module, max_rank)
            if not (a.is_floating_point() and b.is_floating_point()):
                raise _refused(f"its matrices for {trained} are {a.dtype} and {b.dtype}")
            digests.add(name, a, b, scale, changes_encoder=name in layers.encoder)
            layer = LoRALayer(a.to(like), b.t().to(like).contiguous(), scale)
            if not bool(layer.a.isfinite().all() and layer.b.isfinite().all()):
                raise _refused(f"its matrices for {trained} are not finite as {like.dtype}")
            found[name] = layer
    except FileNotFoundError:
        raise _no_weights(folder) from None
    except (OSError, SafetensorError) as error:
        raise _refused(f"{WEIGHTS_FILE} cannot be read ({type(error).__name__})") from None
    if not found:
        raise _refused(f"{WEIGHTS_FILE} has no matrices")
    return LoRAAdapter(digests.identity(), max(len(layer.a) for layer in found.values()), found)


def _most_bytes(layers: AdaptableLayers, max_rank: int) -> int:
    """Of a file of weights: many times what an adapter of the highest rank takes in float64, so
    that a rank above it is refused as such."""
    sizes = (linear_sizes(each) for each in (*layers.decoder.values(), *layers.encoder.values()))
    return FILE_SLACK + 16 * 8 * max_rank * sum(sum(each) for each in sizes if each is not None)


def _read_file(path: Path, most: int) -> bytes:
    """Raises `BadRequestError` for what is no plain file, or has more than `most` bytes, and
    `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # no pipe is waited for
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(f"{path.name} is no file")
        if status.st_size > most:
            raise _refused(f"{path.name} has {status.st_size} bytes, at most {most} are read")
        return file.read(status.st_size)


class _Digests:
    def __init__(self) -> None:
        self._all, self._encoder = blake3(b"lookonce.lora.1\0"), blake3(b"lookonce.lora.e\0")
        self._changes_encoder = False

    def add(self, name: str, a: Tensor, b: Tensor, scale: float, *, changes_encoder: bool) -> None:
        head = json.dumps([name, str(a.dtype), str(b.dtype), a.shape, b.shape, scale]).encode()
        parts = [len(head).to_bytes(8, "little"), head, _bytes_of(a), _bytes_of(b)]
        self._changes_encoder |= changes_encoder
        for digest in (self._all, self._encoder) if changes_encoder else (self._all,):
            for part in parts:
                digest.update(part)

    def identity(self) -> LoRAIdentity:
        encoder = self._encoder.digest() if self._changes_encoder else b""
        return LoRAIdentity(self._all.digest(), encoder)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def _find(family: ModelFamily, layers: AdaptableLayers, trained: str) -> tuple[str, nn.Module]:
    """The name here, and the layer, of one that was trained under the name `trained`, also by an
    older transformers. Raises `BadRequestError` for one that no adapter may change."""
    known = {**layers.decoder, **layers.encoder}
    name = trained
    if name not in known and name not in layers.refused:
        name = _renamed(family, trained)
    if name in known:
        return name, known[name]
    if name in layers.refused:
        raise _refused(f"it changes {trained}: {layers.refused[name]}")
    raise _refused(f"it changes {trained}, which is no linear layer of this model")


def _renamed(family: ModelFamily, trained: str) -> str:
    renamings = [
        each
        for each in get_model_conversion_mapping(family.model)
        if isinstance(each, WeightRenaming)
    ]
    renamed: str = apply_renamings(f"{trained}.weight", renamings)
    return renamed.removesuffix(".weight")


# --- PEFT's files -------------------------------------------------------------------------------


def _refused(reason: str) -> BadRequestError:
    return BadRequestError(f"this adapter cannot be served: {reason}", param="lora_path")


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read_file(folder / CONFIG_FILE, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        raise _refused(f"its folder has no {CONFIG_FILE}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(f"{CONFIG_FILE} cannot be read ({type(error).__name__})") from None
    if not isinstance(config, dict):
        raise _refused(f"{CONFIG_FILE} is no JSON object")
    for name in ("rank_pattern", "alpha_pattern"):
        if isinstance(config.get(name), dict) and len(config[name]) > MAX_PATTERNS:
            raise _refused(f"{name} has more than {MAX_PATTERNS} entries")
    return config


def _no_weights(folder: Path) -> BadRequestError:
    if (folder / PICKLE_FILE).exists():
        return _refused(
            f"{PICKLE_FILE} is a pickle, which can run any code; save it as {WEIGHTS_FILE}"
        )
    return _refused(f"its folder has no {WEIGHTS_FILE}")


def _refuse_settings(config: dict[str, Any]) -> None:
    """Raises `BadRequestError` for a setting that would change what is computed."""
    if config.get("peft_type") != "LORA":
        raise _refused(f"peft_type is {config.get('peft_type')!r}, and only 'LORA' is served")
    if config.get("bias", "none") != "none":
        raise _refused(f"bias is {config['bias']!r}: the model's biases stay as they are")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(TRAINED_FROM_OTHER_WEIGHTS):
        raise _refused(
            f"init_lora_weights is {init!r}: it belongs to changed weights of the model; convert "
            "it when it is saved (path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        if value and name not in IGNORED_SETTINGS:
            reason = REASONS.get(name, "it is not known here")
            raise _refused(f"{name} is set: {reason}")
    targets = config.get("target_modules")
    if not targets or not isinstance(targets, str | list):
        raise _refused("target_modules names no layers")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise _refused(f"{name} is no object")


def _pairs(keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Layer → the keys of its A and B. Raises `BadRequestError` for other weights."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        match = MATRIX_NAME.fullmatch(key.removeprefix(PREFIX))
        if match is None:
            kind = "token embeddings" if "lora_embedding" in key else "no matrix of a linear layer"
            raise _refused(f"{WEIGHTS_FILE} has {key[:200]}, {kind}")
        found.setdefault(match["layer"], {})[match["which"]] = key
    for layer, pair in found.items():
        if len(pair) != 2:
            missing = "B" if "A" in pair else "A"
            raise _refused(f"{layer} lacks its matrix {missing}")
    return {layer: (pair["A"], pair["B"]) for layer, pair in found.items()}


def _is_targeted(config: dict[str, Any], layer: str) -> bool:
    targets, excluded = config["target_modules"], config.get("exclude_modules") or ()
    if _names(excluded, layer):
        return False
    return targets == "all-linear" or _names(targets, layer)


def _names(patterns: str | Sequence[str], layer: str) -> bool:
    """A text is a regular expression of the whole name; each of a list ends it."""
    if isinstance(patterns, str):
        return _matches(patterns, layer)
    return any(layer == each or layer.endswith(f".{each}") for each in patterns)


def _rank_and_scale(config: dict[str, Any], layer: str) -> tuple[int, float]:
    rank = _pattern_value(config.get("rank_pattern"), layer, config.get("r"))
    alpha = _pattern_value(config.get("alpha_pattern"), layer, config.get("lora_alpha"))
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise _refused(f"r or lora_alpha of {layer} is no number")
    try:
        scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except OverflowError:
        scale = math.inf
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise _refused(f"lora_alpha of {layer} is not finite")
    return rank, scale


def _pattern_value(patterns: dict[str, Any] | None, layer: str, default: Any) -> Any:
    """Of the first pattern that the layer's name ends with."""
    for pattern, value in (patterns or {}).items():
        if _matches(rf"(.*\.)?({pattern})", layer):
            return value
    return default


def _matches(expression: str, layer: str) -> bool:
    """Whether an expression of somebody else's file is the whole name. Python's own module would
    search for as long as it takes, and keep the engine from everything else meanwhile."""
    try:
        found = regex.fullmatch(expression, layer, timeout=MATCH_SECONDS, concurrent=True)
    except regex.error:
        raise _refused(f"{expression[:200]!r} in its config is no expression") from None
    except TimeoutError:
        raise _refused(f"{expression[:200]!r} in its config takes too long") from None
    return found is not None


def _check_shapes(
    layer: str,
    shapes: Sequence[tuple[int, ...]],
    rank: int,
    module: nn.Module,
    max_rank: int,
) -> None:
    if rank > max_rank:
        raise _refused(f"its rank is {rank}, above {max_rank} (--max-lora-rank)")
    inputs, outputs = linear_sizes(module) or (0, 0)
    expected = [(rank, inputs), (outputs, rank)]
    if list(shapes) != expected:
        raise _refused(
            f"the matrices of {layer} are {shapes[0]} and {shapes[1]}; of rank {rank} for this "
            f"model they are {expected[0]} and {expected[1]}"
        )


class AdapterStore:
    """The adapters of a runner. One thread at a time calls it, beside the steps: what it makes is
    installed by the step thread, between two steps."""

    def __init__(
        self, family: ModelFamily, runner: RunnerLoRA, *, max_rank: int, like: Tensor
    ) -> None:
        """`like` has the dtype and the device of activations."""
        self._family = family
        self._runner = runner
        self._max_rank = max_rank
        self._loaded = runner.loaded
        self._like = like

    def load(self, path: str, *, any_rank: bool = False) -> ReadAdapter:
        """Read the adapter in a folder, also one above the largest rank if it may have `any_rank`.
        Raises `BadRequestError`."""
        rank = sys.maxsize if any_rank else self._max_rank
        adapter = read_adapter(
            Path(path), self._family, self._runner.layers, max_rank=rank, like=self._like
        )
        self._loaded = self._loaded.with_adapter(adapter)
        return ReadAdapter(adapter.identity, adapter.rank, self._install())

    def drop(self, digest: bytes) -> Callable[[], None]:
        """Make what is held without this adapter, which no sequence uses any more."""
        self._loaded = self._loaded.without(digest)
        return self._install()

    def _install(self) -> Callable[[], None]:
        return partial(setattr, self._runner, "loaded", self._loaded)
