"""Loads a Hugging Face model folder or hub id: reads its config and weights, and checks them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import transformers
from blake3 import blake3
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.auto_factory import _get_model_class
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from lookonce.config import ModelConfig
from lookonce.errors import ModelLoadError
from lookonce.model.attention.hf_attention import ATTENTION_NAME, set_text_attention
from lookonce.model.bf16_products import widen_products
from lookonce.model.device import current_device
from lookonce.model.encoder_runner import DTYPES
from lookonce.model.families.base import Model, ModelFamily
from lookonce.model.families.general import GeneralMediaFamily, GeneralTextFamily
from lookonce.model.families.registry import family_for
from lookonce.model.fused_modules import fuse_norms, patch_vision_modules
from lookonce.model.int8_weights import quantize_linears
from lookonce.model.key_rotation import key_rotation
from lookonce.model.kv_pages import KVPages
from lookonce.model.pooling import Head, SparseHead, make_head, make_sparse_head, pooling_info
from lookonce.model.proof import comparison, largest, prove, prove_media
from lookonce.model.quantized_weights import PackedWeights, unpacked_methods
from lookonce.model.state import StatePool
from lookonce.model.tensor_parallel import OPTION, TensorParallelGroup, divide
from lookonce.model.text_model import PLAIN_DECODERS
from lookonce.types.media import MediaExample, Modality
from lookonce.types.model import (
    MEDIA_ADAPTERS,
    SUPPORTED,
    TRANSCRIBES_ONLY,
    Comparison,
    ModelInfo,
    takes_media,
)
from lookonce.types.pooling import PoolingFiles, read_pooling

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (weights loaded, weights in all), from (0, all) to (all, all)."""
Examples = Callable[[], Sequence[MediaExample]]
Json = dict[str, Any]
LEXICALLY_EMPTY = ("cls_token", "eos_token", "pad_token", "unk_token")
"""Roles of tokens that BGE-M3's lexical head gives no weight."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    family: ModelFamily
    info: ModelInfo
    dtype: torch.dtype
    device: torch.device
    head: Head | SparseHead | None = None
    """What a model that pools has after its hidden states."""
    group: TensorParallelGroup | None = None
    """The ranks that compute it; None: this process alone."""

    def kv_pages(self, num_blocks: int, block_size: int) -> KVPages:
        """Zeroed pages for the keys and values of `num_blocks` blocks, on the model's device."""
        layout = self.family.kv_layout(block_size, self.dtype)
        return KVPages(layout, num_blocks, self.device, self.family.layer_numbers)

    def state_pool(self, num_rows: int, num_snapshots: int = 0) -> StatePool | None:
        """Zeroed states of so many sequences, and room for snapshots; None for a model that keeps
        keys and values alone."""
        layout = self.family.states
        if not layout:
            return None
        return StatePool(layout, num_rows=num_rows, num_snapshots=num_snapshots, device=self.device)


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    examples: Examples | None = None,
    group: TensorParallelGroup | None = None,
) -> LoadedModel:
    """Load weights and bind them to their family.

    `examples` makes prompts for the comparison of a model with media that has no family of its own.
    With `group` only this rank's part of the decoder is kept. The model's device is the current one
    of this thread from then on.

    Raises `ModelLoadError` that says what is wrong: no such folder, a broken config, a model type,
    quantization or rope that is not supported, no safetensors, missing or unknown weights, or a bad
    `max_model_len`.
    """
    raw_config = _read_config(config)
    _refuse_adapters(config.folder, raw_config)
    pooling = read_pooling(config.folder, raw_config, config.pooling)
    if pooling is not None and raw_config["model_type"] in TRANSCRIBES_ONLY:
        raise ModelLoadError("this model transcribes and gives no embeddings: leave out --pooling")
    family_class = family_for(raw_config)
    dtype, device = DTYPES[config.dtype], current_device(config.device)
    if dtype == torch.float32:  # cuDNN would compute convolutions with 10 bits of mantissa
        torch.backends.cudnn.allow_tf32 = False
    declared = _declared_quantization(raw_config)
    if declared is not None:
        logger.info(
            "weights quantized by %s are unpacked while they load", declared["quant_method"]
        )
    model = _read_weights(config, family_class, dtype, declared, progress, pooling)
    digest = _weights_digest(model, raw_config)
    if group is not None:
        _divide(family_class, model, group, pooling)
    family = family_class(model.to(device))
    family.num_ranks = 1 if group is None else group.size
    info = _model_info(config, family, digest, _compared(family, dtype, device, examples))
    if pooling is None:
        if info.encoder_only:
            raise ModelLoadError("this model generates nothing: leave out --pooling none")
        return LoadedModel(model, family, info, dtype, device, group=group)
    with torch.inference_mode():
        family.check_kind(pooling.kind)
        separator = _role_text(config.folder, "sep_token")
        if separator is not None and pooling.head == "classifier":
            family.separator_id = _token_id(config.folder, separator)
        like = torch.zeros(1, family.hidden_size, dtype=dtype, device=device)
        head = _pooling_head(config.folder, family, pooling, like)
        pools = pooling_info(pooling, head, like, encoder_only=info.encoder_only)
        info = msgspec.structs.replace(info, pooling=pools)
    return LoadedModel(model, family, info, dtype, device, head)


def _compared(
    family: ModelFamily, dtype: torch.dtype, device: torch.device, examples: Examples | None
) -> Comparison | None:
    """Compare a model that has no family of its own with transformers. Raises `ModelLoadError`
    where they differ."""
    if not isinstance(family, GeneralTextFamily):
        return None
    errors = [prove(family, dtype, device)]
    if isinstance(family, GeneralMediaFamily):
        errors.append(prove_media(family, examples() if examples else (), dtype, device))
    found = comparison(family, largest(errors), dtype)
    logger.info("compared %s with transformers: %s", family.config.model_type, found)
    return found


def _divide(
    family: type[ModelFamily],
    model: Model,
    group: TensorParallelGroup,
    pooling: PoolingFiles | None,
) -> None:
    """Raises `ModelLoadError` for a model that is not computed by several ranks."""
    generating = family.generating_part(model)
    decoder = None if generating is None else generating.get_decoder()
    known = not issubclass(family, (GeneralTextFamily, GeneralMediaFamily))
    by_frame = family.frame_encoder is not ModelFamily.frame_encoder
    plain = type(decoder).__name__ in PLAIN_DECODERS
    if decoder is None or pooling is not None or by_frame or not (known and plain):
        raise ModelLoadError(
            f"{OPTION} is for answers of plain decoders (Llama, Mistral, Qwen2, Qwen3 and what is "
            "built on them); this model is computed by one process"
        )
    divide(model, decoder, model.get_output_embeddings(), group)


def _pooling_head(
    folder: str, family: ModelFamily, pooling: PoolingFiles, like: torch.Tensor
) -> Head | SparseHead | None:
    """What a model that pools has after its hidden states. Raises `ModelLoadError`."""
    if pooling.kind != "sparse":
        lm_head = getattr(family, "lm_head", None)
        return make_head(Path(folder), pooling, family.pooling_head(), lm_head, like)
    texts = (_role_text(folder, role) for role in LEXICALLY_EMPTY)
    found = (_token_id(folder, text) for text in texts if text is not None)
    special = [token for token in found if token is not None and token < family.vocab_size]
    return make_sparse_head(
        Path(folder), pooling, family.pooling_head(), like, family.vocab_size, special
    )


def _read_config(config: ModelConfig) -> Json:
    """The contents of config.json, before transformers checks them."""
    looks_local = config.folder.startswith((".", "/", "~")) or config.folder.count("/") > 1
    if looks_local and not Path(config.folder).is_dir():
        raise ModelLoadError(f"there is no model folder {config.folder}")
    try:
        raw, _ = PreTrainedConfig.get_config_dict(config.folder)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{config.folder} has no readable config.json: {error}") from error
    if not raw and any(Path(config.folder).glob("*.gguf")):
        raise ModelLoadError(
            f"{config.folder} has a GGUF file alone: put config.json and the tokenizer's files "
            "of the model that it was made from beside it"
        )
    if "model_type" not in raw:
        raise ModelLoadError(f"{config.folder} has no config.json that names a model_type")
    return dict(raw)


def _refuse_adapters(folder: str, raw_config: Json) -> None:
    """Raises `ModelLoadError` for a model with media that is published with LoRA adapters: without
    them its answers about media would be others."""
    if not takes_media(raw_config):
        return
    served = media_adapters(folder, str(raw_config.get("model_type"))).values()
    found = [
        path.parent.name
        for path in Path(folder).glob(f"*/{ADAPTER}")
        if str(path.parent) not in served
    ]
    if found or raw_config.get("has_lora_adapter") or (Path(folder) / ADAPTER).is_file():
        where = f" in {', '.join(sorted(found))}" if found else ""
        raise ModelLoadError(
            f"the model has LoRA adapters for its media{where}, which are not served; merge them "
            "into its weights"
        )


def media_adapters(folder: str, model_type: str) -> dict[Modality, str]:
    """The folders of the LoRA adapters that are published beside this model's weights, by the media
    that they are for, in the order of `MEDIA_ADAPTERS`."""
    named = MEDIA_ADAPTERS.get(model_type, {})
    folders = {modality: Path(folder) / name for modality, name in named.items()}
    return {each: str(path) for each, path in folders.items() if (path / ADAPTER).is_file()}


ADAPTER = "adapter_config.json"
DEQUANTIZED = {"mxfp4": "Mxfp4Config"}
"""`quant_method` of a config → the class in transformers that dequantizes it on loading."""


def _declared_quantization(raw_config: Json) -> Json | None:
    """What the config says of quantized weights; None for plain ones.

    Raises `ModelLoadError` for an unsupported method: transformers would load the weights of a
    method it does not know without their scales.
    """
    # Where transformers looks: in the config (of Omni the thinker's) and in its text config.
    config = raw_config.get("thinker_config") or raw_config
    text_config = config.get("text_config") or {}
    declared = config.get("quantization_config") or text_config.get("quantization_config")
    if declared is None:
        return None
    method = declared.get("quant_method")
    if method is None and (declared.get("load_in_4bit") or declared.get("load_in_8bit")):
        method = "bitsandbytes"
    known = sorted((*DEQUANTIZED, *unpacked_methods()))
    if method not in known:
        raise ModelLoadError(
            f"weights quantized by {method!r} are not supported; supported are "
            f"{', '.join(known)}, and weights that are not quantized"
        )
    return {**declared, "quant_method": method}


GGUF_PACKAGES = ("gguf", "accelerate")
"""By which transformers reads GGUF."""


def _gguf_file(folder: str) -> str | None:
    """The name of the GGUF file of a local folder that has no safetensors; None: there is none.

    Raises `ModelLoadError` for several, and where a package is missing that reads it.
    """
    found = sorted(path.name for path in Path(folder).glob("*.gguf"))
    if not found or any(Path(folder).glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise ModelLoadError(f"{folder} has several GGUF files, of which one may be there")
    if not all(map(find_spec, GGUF_PACKAGES)):
        raise ModelLoadError("GGUF needs the optional extra: pip install 'lookonce[gguf]'")
    return found[0]


class _Source(NamedTuple):
    """What reads the weights by its `from_pretrained`, and from where."""

    reader: Any
    folder: str | None
    """None: the options have the weights."""
    options: Json


def _weights_of(folder: str, reader: Any, declared: Json | None, dtype: torch.dtype) -> _Source:
    """Raises `ModelLoadError`."""
    gguf = _gguf_file(folder)
    if gguf is not None:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return _Source(reader, folder, {"config": config, "gguf_file": gguf})
    if declared is None:
        return _Source(reader, folder, {})
    if declared["quant_method"] in DEQUANTIZED:
        config_class = getattr(import_module("transformers"), DEQUANTIZED[declared["quant_method"]])
        return _Source(reader, folder, {"quantization_config": config_class(dequantize=True)})
    is_auto = hasattr(reader, "_model_mapping")
    config_class = transformers.AutoConfig if is_auto else reader.config_class
    config = config_class.from_pretrained(folder, trust_remote_code=False)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if is_auto:  # which reads no state dict
        reader = _get_model_class(config, reader._model_mapping)
    weights = PackedWeights(folder, declared, dtype).state_dict()
    return _Source(reader, None, {"config": config, "state_dict": weights})


def _read_weights(
    config: ModelConfig,
    family: type[ModelFamily],
    dtype: torch.dtype,
    declared: Json | None,
    progress: Progress | None,
    pooling: PoolingFiles | None = None,
) -> Model:
    """The model on the CPU in `dtype`: paged attention in the text model, SDPA elsewhere."""
    masked = pooling is not None and pooling.head == "masked_lm"
    reader = transformers.AutoModelForMaskedLM if masked else family.transformers_class()
    try:
        reader, source, options = _weights_of(config.folder, reader, declared, dtype)
        with _reported(progress):
            model, loading = reader.from_pretrained(
                source,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"the weights of {config.folder} do not load: {error}") from error
    if "config" in options and model.can_generate():
        model.generation_config = _generation_config(config.folder, model)
    if pooling is not None:
        _settle_heads(model, pooling, loading)
    _check_names(config.folder, family, loading)
    generating = family.generating_part(model)
    if generating is not None:
        set_text_attention(generating, ATTENTION_NAME)
    model.eval().requires_grad_(False)
    fuse_norms(model)
    patch_vision_modules(model)
    if config.quantize is not None:
        _quantize(generating, with_head=pooling is None)
    widen_products(model)
    return model


def _quantize(generating: Model | None, *, with_head: bool) -> None:
    """Quantize the decoder, and the output head of a model that answers. Raises `ModelLoadError`
    for a model without either."""
    if generating is None:
        raise ModelLoadError("this model generates nothing: leave out --quantize")
    decoder, head = generating.get_decoder(), generating.get_output_embeddings()
    if quantize_linears(decoder) == 0:
        raise ModelLoadError("the model has no linear layers that --quantize could quantize")
    for module in list(generating.modules()) if with_head else ():
        if any(child is head for child in module.children()):
            quantize_linears(module, only=head)


def _generation_config(folder: str, model: Model) -> GenerationConfig:
    """The folder's, or what the model's config makes."""
    with contextlib.suppress(OSError):
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(model.config)


def _settle_heads(model: Model, pooling: PoolingFiles, loading: Json) -> None:
    """A model that pools may lack the output head, which then is its embeddings', and may have a
    head of its own (`model.pooling`)."""
    output = model.get_output_embeddings()
    absent = {name for name in loading["missing_keys"] if name.endswith("lm_head.weight")}
    if absent and output is not None and pooling.head != "logit_score":
        output.weight = model.get_input_embeddings().weight
        loading["missing_keys"] = set(loading["missing_keys"]) - absent
    if pooling.head == "classifier":
        loading["unexpected_keys"] = {
            name for name in loading["unexpected_keys"] if not name.startswith("score.")
        }


def _check_names(folder: str, family: type[ModelFamily], loading: Json) -> None:
    """Refuse missing weights, which transformers would make up, and unknown ones, which it skips.

    Quantization scales are among the unknown ones.
    """
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
    """In this block transformers' progress bars are off and call `progress` instead."""

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


def _weights_digest(model: Model, raw_config: Json) -> str:
    """A digest of the config and every weight as loaded, on which the KV of a prefix depends."""
    digest = blake3(max_threads=blake3.AUTO)
    settled = {name: value for name, value in raw_config.items() if not name.startswith("_")}
    digest.update(json.dumps(settled, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        digest.update(f"|{name}|{weight.dtype}|{tuple(weight.shape)}|".encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _model_info(
    config: ModelConfig, family: ModelFamily, digest: str, compared: Comparison | None
) -> ModelInfo:
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
        longest_bidirectional_prompt=family.longest_bidirectional_prompt,
        causal_texts=family.causal_texts,
        weights_digest=digest,
        frame_shape=() if family.frame_encoder is None else family.frame_encoder.frame_shape,
        sliding_window=family.sliding_window if family.config.model_type in SUPPORTED else 0,
        max_positions=_max_positions(family),
        relative_positions=key_rotation(family) is not None,
        encoder_decoder=family.encoder_decoder,
        encoder_only=family.encoder_only,
        state_bytes=family.states.num_bytes,
        comparison=compared,
    )


def _max_positions(family: ModelFamily) -> int:
    """Positions that the model has."""
    return family.longest_sequence or _longest_sequence(family.text_config)


def _max_model_len(config: ModelConfig, family: ModelFamily) -> int:
    limit = _max_positions(family)
    wanted = config.max_model_len
    if wanted is not None and not 1 <= wanted <= limit:
        raise ModelLoadError(f"--max-model-len is 1 to {limit} for this model, got {wanted}")
    return limit if wanted is None else wanted


STRETCHING = ("linear", "yarn")
"""Kinds of rope that extend the length a model was trained on. `llama3` does too, but configs with
it state the extended length."""


SPARSE_LAYERS = "minimax_m3_sparse"
"""What MiniMax M3's config calls layers with an index of blocks."""


def _longest_sequence(text_config: Any) -> int:
    """Most tokens of one sequence: what the config states, or what its rope extends that to.

    `longrope` rotates a whole batch by other frequencies once its longest sequence is longer than
    the model was first trained for, and `dynamic` beyond what the config states. Keys would depend
    on their batch, and cached ones would be wrong: sequences end before that.

    Some configs state the length before the extension (Qwen's with YaRN), others the extended one
    (gpt-oss, and Gemma 3, whose layers have different ropes).
    """
    stated = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(stated, int):
        raise ModelLoadError("config.json does not say max_position_embeddings")
    plain = _plain_lengths(text_config)
    stated = min([stated, *plain])
    rope = _rope_parameters(text_config)
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    first_trained = [
        int(kind.get("original_max_position_embeddings") or stated)
        for kind in kinds
        if _is_longrope(kind)
    ]
    if first_trained:
        return min(stated, *first_trained)
    if rope.get("rope_type") not in STRETCHING:
        return stated
    original = rope.get("original_max_position_embeddings") or stated
    return min([max(stated, int(original * (rope.get("factor") or 1.0))), *plain])


def _plain_lengths(text_config: Any) -> list[int]:
    """Most tokens up to which layers attend to all keys by the plain rule, one number for each way
    in which longer sequences differ. `proof.prove` cannot find these: its prompts are shorter."""
    lengths = []
    if chunk := getattr(text_config, "attention_chunk_size", None):
        lengths.append(int(chunk))  # layers see their own chunk only
    if getattr(text_config, "attn_temperature_tuning", False):
        lengths.append(int(text_config.floor_scale) - 1)  # queries are scaled from there on
    if SPARSE_LAYERS in (getattr(text_config, "layer_types", None) or ()):
        # Each query sees a number of blocks of keys that an index selects.
        lengths.append(text_config.index_topk_blocks * text_config.index_block_size)
    return lengths


def _is_longrope(rope: Json) -> bool:
    return rope.get("rope_type") == "longrope"


def _rope_parameters(text_config: Any) -> dict[str, Any]:
    return getattr(text_config, "rope_parameters", None) or {}


def _eos_token_ids(config: ModelConfig, family: ModelFamily) -> tuple[int, ...]:
    """Ids of the tokens that end an answer, each within the vocabulary of the logits.

    They are those of the first config that names any (the generation config, then the model's), and
    the tokenizer's end of sequence: fine-tunes that end their turns with another token often name
    it in `tokenizer_config.json` alone. Raises `ModelLoadError` for a broken tokenizer file.
    """
    configs = [getattr(family.model, "generation_config", None), family.config, family.text_config]
    found = next((ids for ids in map(_named_by, configs) if ids), [])
    text = _role_text(config.folder, "eos_token")
    if text is not None and (token := _token_id(config.folder, text)) is not None:
        found = [*found, token]
    return tuple(token for token in dict.fromkeys(found) if token < family.vocab_size)


Content = TypeVar("Content")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that names tokens; the file may be large, the rest is skipped."""

    added_tokens: list[_AddedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    """{text: id}; of a unigram model [(text, score)] in the order of ids."""


def _named_by(config: Any) -> list[int]:
    found = getattr(config, "eos_token_id", None)
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [int(found)]


def _role_text(folder: str, role: str) -> str | None:
    """The text of the tokenizer's token for a role, which files hold plainly or in an object."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(folder, name, Json).get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            return text
    return None


def _token_id(folder: str, text: str) -> int | None:
    file = _read(folder, "tokenizer.json", _TokenizerFile)
    for added in file.added_tokens:
        if added.content == text:
            return added.id
    vocab = _decode("tokenizer.json", bytes(file.model), _Vocabulary).vocab
    if isinstance(vocab, dict):
        return vocab.get(text)
    return next((index for index, (token, _) in enumerate(vocab) if token == text), None)


def _read(folder: str, name: str, kind: type[Content]) -> Content:
    """The decoded file; empty if there is no such file."""
    path = cached_file(
        folder,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return _decode(name, b"{}" if path is None else Path(path).read_bytes(), kind)


def _decode(name: str, content: bytes, kind: type[Content]) -> Content:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"the model's {name} cannot be read: {error}") from None
