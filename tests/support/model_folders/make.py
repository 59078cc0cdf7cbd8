"""Complete Hugging Face folders with random weights, for tests and benchmarks.

A folder of the same kind, scale and seed is always the same. Weights are scaled so that greedy
decoding is decisive: logits spread by about one, so ties at float precision are rare.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lookonce.errors import ConfigError
from tests.support.model_folders.audio import SOUND_KINDS
from tests.support.model_folders.base import SCALES, FolderKind, Json
from tests.support.model_folders.general import general_kind
from tests.support.model_folders.general_media import MEDIA_KINDS, VARIANTS
from tests.support.model_folders.general_sound import SOUND_KINDS as MORE_SOUND_KINDS
from tests.support.model_folders.qwen import QWEN_KINDS
from tests.support.model_folders.text import TEXT_KINDS
from tests.support.model_folders.vision import VISION_KINDS

KINDS: dict[str, FolderKind] = {**TEXT_KINDS, **VISION_KINDS, **QWEN_KINDS, **SOUND_KINDS}
GENERAL_TEXT = "text:"
"""Before a `model_type`: a random folder from the defaults of its config."""
GENERAL_MEDIA = "media:"
"""Before a `model_type` with media and no family of its own."""
GENERAL_MEDIA_KINDS = {**MEDIA_KINDS, **MORE_SOUND_KINDS}
FolderMaker = Callable[..., Path]
"""The fixture `folder`: `folder(kind, seed=0, scale="tiny")` returns the folder of that kind."""
CORPUS = (
    "What is in this picture? There is a red circle to the left of a blue square. "
    "How many triangles do you see? The number is four hundred and seventy two. "
    "Listen to the sound: which word was spoken, and which picture came first? "
    "user assistant system model You are a helpful assistant. Grüße, 你好, Ünïcödé, 🙂. "
)
"""The text that the byte-level BPE is trained on."""


def make_folder(
    kind: str, target: Path, *, seed: int = 0, scale: str = "tiny", dtype: str = "float32"
) -> Path:
    """Write a folder of `kind` (see `KINDS`) at `scale` (see `SCALES`) to `target` and return it.

    `dtype` is the weights', "float32" or "bfloat16".

    Raises `ConfigError` for an unknown kind or scale.
    """
    known = kind in KINDS or kind.startswith((GENERAL_TEXT, GENERAL_MEDIA))
    if not known or scale not in SCALES:
        raise ConfigError(
            f"no random folder {kind!r} at scale {scale!r}; kinds: {', '.join(KINDS)}; "
            f"scales: {', '.join(SCALES)}"
        )
    target.mkdir(parents=True, exist_ok=True)
    chosen, sizes = kind_named(kind), SCALES[scale]
    ids = write_tokenizer(chosen, target, vocab_size=sizes.vocab)
    if chosen.preprocessor is not None:
        _write_json(target / "preprocessor_config.json", chosen.preprocessor(sizes))
    if chosen.processor:
        _write_json(target / "processor_config.json", chosen.processor)
    if chosen.video:
        _write_json(target / "video_preprocessor_config.json", chosen.video)
    config = chosen.config(sizes, ids)
    write_model(config, target, eos_token_id=ids["eos_token_id"], seed=seed, dtype=dtype)
    for number, (name, settings) in enumerate(chosen.adapters.items()):
        write_adapter(config, target / name, settings, seed=seed + 1 + number)
    return target


def kind_named(kind: str) -> FolderKind:
    """One of `KINDS`, or the kind of "text:TYPE" or "media:TYPE"."""
    if kind.startswith(GENERAL_TEXT):
        return general_kind(kind.removeprefix(GENERAL_TEXT))
    if kind.startswith(GENERAL_MEDIA):
        known = {**GENERAL_MEDIA_KINDS, **VARIANTS}
        return known[kind.removeprefix(GENERAL_MEDIA)]
    return KINDS[kind]


def write_tokenizer(kind: FolderKind, target: Path, *, vocab_size: int) -> dict[str, int]:
    """Train and write a byte-level BPE.

    Returns the ids of special tokens by their text and by `…_token_id`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(kind.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    if kind.adds_bos:
        _prepend_bos(tokenizer, kind.roles["bos_token"])
    written = _filled(json.loads(tokenizer.to_str()), vocab_size)
    last = {text: vocab_size + index for index, text in enumerate(kind.last_specials)}
    alike = written["added_tokens"][0]
    written["added_tokens"] += [
        {**alike, "id": index, "content": text} for text, index in last.items()
    ]
    _write_json(target / "tokenizer.json", written)
    _write_json(target / "tokenizer_config.json", _tokenizer_config(kind))
    (target / "chat_template.jinja").write_text(kind.template, encoding="utf-8")
    ids = {text: index for index, text in enumerate(kind.specials)} | last
    return ids | {f"{role}_id": ids[text] for role, text in kind.roles.items()}


def write_model(
    config: Any, target: Path, *, eos_token_id: int, seed: int, dtype: str = "float32"
) -> None:
    """Build the model of a transformers config with random weights and save it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    auto = AutoModelForMultimodalLM if config.sub_configs else AutoModelForCausalLM
    if config.sub_configs and type(config) not in auto._model_mapping:
        auto = AutoModelForSeq2SeqLM
    with torch.random.fork_rng(devices=[]):
        model = auto.from_config(config)
    randomise(model, seed)
    if dtype != "float32":
        model.to(getattr(torch, dtype))
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = eos_token_id
    disable_progress_bar()
    try:
        model.save_pretrained(target)
    finally:
        enable_progress_bar()


def write_adapter(config: Any, target: Path, settings: Json, *, seed: int) -> None:
    """Write a random LoRA adapter of the model of a transformers config, as PEFT does."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForMultimodalLM

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses what transformers will remove
        model = get_peft_model(AutoModelForMultimodalLM.from_config(config), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    model.save_pretrained(str(target))


def randomise(model: Any, seed: int) -> None:
    """Draw every matrix with unit gain, and small biases, so that every part changes the output."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = _gain(name, parameter.shape)
            if gain is not None:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain)


def _gain(name: str, shape: tuple[int, ...]) -> float | None:
    if len(shape) >= 2:
        if "embed_tokens" in name:
            return 1.0
        fan_in = shape[1] if len(shape) == 3 and "conv" not in name else math.prod(shape[1:])
        return 1 / math.sqrt(fan_in)
    return 0.1 if "bias" in name or "sinks" in name else None


def _prepend_bos(tokenizer: Any, bos: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
            ),
        ]
    )


def _filled(tokenizer: Json, vocab_size: int) -> Json:
    """Add words for the ids that training left free, so that every id has text."""
    vocab = tokenizer["model"]["vocab"]
    for token in range(len(vocab), vocab_size):
        vocab[f"Ġw{token}"] = token
    return tokenizer


def _tokenizer_config(kind: FolderKind) -> Json:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        **kind.roles,
    }


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
