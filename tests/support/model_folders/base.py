"""The parts of a kind of random folder, and the scales that it can have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Config = Any
"""A transformers `PretrainedConfig`; the library is untyped here."""

CLIP_STATS: Json = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
PIXELS: Json = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
}

HALF_STATS: Json = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
SOUND: Json = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "dither": 0.0,
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the text model and of its vision tower."""

    vocab: int = 320
    hidden: int = 64
    ffn: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vision_hidden: int = 32
    vision_layers: int = 2
    max_pixels: int = 28224
    """Largest picture of the families that keep its size; 28224 is 168 x 168."""
    max_length: int = 4096

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def text(self, tokens: Mapping[str, int], **over: Any) -> Json:
        """Arguments that every text config of transformers takes."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.max_length,
            "tie_word_embeddings": False,
            **{name: tokens[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
            **over,
        }

    def qwen_vision(self) -> Json:
        """Arguments of the Qwen2.5 vision tower: windows of 4 merged patches, one full layer."""
        return {
            "depth": self.vision_layers,
            "hidden_size": self.vision_hidden,
            "intermediate_size": 2 * self.vision_hidden,
            "num_heads": 2,
            "patch_size": 14,
            "out_hidden_size": self.hidden,
            "window_size": 112,
            "fullatt_block_indexes": [self.vision_layers - 1],
        }

    def mrope(self) -> Json:
        half = self.head_dim // 2
        rest = (half - half // 4) // 2
        section = [half - 2 * rest, rest, rest]
        return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}


SCALES: dict[str, Scale] = {
    "tiny": Scale(),
    "live": Scale(layers=2, vision_layers=1),
    "8m": Scale(
        vocab=4096,
        hidden=256,
        ffn=768,
        layers=6,
        heads=4,
        kv_heads=2,
        vision_hidden=128,
        vision_layers=4,
        max_pixels=1024 * 1024,
        max_length=32768,
    ),
    # As many parameters, but distributed as in small published models: half of them are the
    # vocabulary's, and the vision tower holds 7 % (8 % in Qwen2.5-VL 7B; 15 % above).
    "8m-small-tower": Scale(
        vocab=8192,
        hidden=256,
        ffn=768,
        layers=4,
        heads=4,
        kv_heads=2,
        vision_hidden=80,
        vision_layers=4,
        max_pixels=1024 * 1024,
        max_length=32768,
    ),
    "1b": Scale(  # as Llama 3.2 1B, with a smaller vocabulary
        vocab=49152, hidden=2048, ffn=8192, layers=16, heads=32, kv_heads=8, max_length=8192
    ),
    "135m": Scale(  # as SmolLM2-135M
        vocab=49152, hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, max_length=8192
    ),
}


ConfigBuilder = Callable[[Scale, Mapping[str, int]], Config]
"""From a scale and token ids, by text and by `…_token_id`, to the model's config."""


@dataclass(frozen=True, slots=True)
class FolderKind:
    specials: tuple[str, ...]
    """Special tokens in id order, from 0."""
    roles: Mapping[str, str]
    """tokenizer_config entries, e.g. `eos_token`, to the special token's text."""
    template: str
    config: ConfigBuilder
    preprocessor: Callable[[Scale], Json] | None = None
    processor: Json = field(default_factory=dict)
    """Content of processor_config.json."""
    video: Json = field(default_factory=dict)
    """Content of video_preprocessor_config.json."""
    last_specials: tuple[str, ...] = ()
    """Special tokens whose ids lie behind the scale's vocabulary."""
    adds_bos: bool = False
    """Whether plain encoding prepends the bos token, as this family's tokenizers do."""
    adapters: Mapping[str, Json] = field(default_factory=dict)
    """Folder beneath the model's → arguments of PEFT's `LoraConfig` of the adapter in it."""


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The first special tokens of every Qwen."""

QWEN_ROLES = {"pad_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}

GEMMA = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
)
GEMMA_ROLES = {
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
}

MISTRAL_ROLES = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
