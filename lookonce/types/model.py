"""Which models are served, and what every process knows about the loaded one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from lookonce.errors import ModelLoadError
from lookonce.types.lora import LoRAIdentity
from lookonce.types.media import EVERY_TOKEN, Modality
from lookonce.types.pooling import PoolingInfo
from lookonce.types.transformers_types import KnownTypes


class Comparison(msgspec.Struct, frozen=True):
    """What loading found where it compared a model that has no family of its own with transformers:
    how far they differ, and how the model is computed so that they do not."""

    error: float
    """The largest that was found: root mean square of the difference of logits over that of the
    logits around their mean."""
    allowed: float
    """A model with a larger error is refused."""
    modalities: tuple[Modality, ...] = ()
    encoder: Literal["features", "forward"] | None = None
    """Rows are what the model's `get_..._features` gives, or what its own forward gives its
    decoder; None: no media."""
    attention: Literal["causal", "items", "items_in_windows", "prompts"] = "causal"
    """What attends in both directions, and so is never cut by a chunk: nothing, items (in all
    layers, or in those with a sliding window alone), or whole prompts."""
    causal_texts: bool = False
    """Prompts attend in both directions, but not those without media."""
    states_by_token: bool = False
    """Layers with a state go on after it with one token alone."""
    logit_scale: float = 1.0

    def __str__(self) -> str:
        """In a line."""
        parts = [f"logits differ by {self.error:.1e} of their spread ({self.allowed:g} is allowed)"]
        if self.encoder is not None:
            by = {"features": "its encoder alone", "forward": "its whole forward"}[self.encoder]
            parts.append(f"{' and '.join(self.modalities)} encoded by {by}")
        parts.append(
            {
                "causal": "chunks end anywhere",
                "items": "items attend in both directions and are not cut",
                "items_in_windows": "items attend in both directions where layers have a sliding "
                "window, and are not cut",
                "prompts": "prompts attend in both directions and are not cut",
            }[self.attention]
        )
        if self.causal_texts:
            parts.append("those without media attend causally")
        if self.states_by_token:
            parts.append("states go on by single tokens")
        if self.logit_scale != 1.0:
            parts.append(f"logits are scaled by {self.logit_scale:g}")
        return "; ".join(parts)


class ModelInfo(msgspec.Struct, frozen=True, array_like=True):
    """Facts of the loaded model, resolved once by the engine process and sent to its clients."""

    name: str
    """Path or id the engine loaded."""
    model_type: str
    """`model_type` of the Hugging Face config, the key of both family tables."""
    vocab_size: int
    max_model_len: int
    """Prompt plus generated tokens of one sequence."""
    eos_token_ids: tuple[int, ...]
    modalities: tuple[Modality, ...]
    dtype: str
    """dtype name of weights and activations; processors cast floating arrays to it."""
    encoder_row_bytes: int
    """Bytes one row (one embed token) of encoder output takes in the encoder cache."""
    unsplittable: tuple[Modality, ...] = ()
    """Modalities whose items attend to themselves in both directions: never cut by a chunk."""
    largest_unsplittable: int = 0
    """Prompt tokens of the largest such item; a token budget below it is refused at start-up."""
    longest_bidirectional_prompt: int = 0
    """Not 0: every token of a prompt sees the whole prompt, also what follows it (PaliGemma). Then
    a prompt has at most so many tokens and one item, it is computed in one step, and its keys and
    values are reused for an equal prompt alone."""
    causal_texts: bool = False
    """With it: prompts without an item are as those of other models (PaliGemma 2)."""
    weights_digest: str = ""
    """Hex digest of what determines the weights: part of every external KV namespace."""
    encoder_decoder: bool = False
    """Items are inputs that cross-attention reads at every step; they take no prompt positions, and
    `unsplittable` is empty."""
    frame_shape: tuple[int, ...] = ()
    """Not empty: a row of sound is added to the embedding of every token, those that are generated
    included, and this is the shape of one frame, of which the encoder makes one row. A request has
    one clip, whose rows begin at position 0 and go on beyond the prompt; a live session has frames
    instead, and generates one token for each."""
    sliding_window: int = 0
    """Tokens that a token attends to at most, itself included, in whatever layer; 0: some layer
    attends to all."""
    max_positions: int = 0
    """Positions that the model was made for are below; 0: as `max_model_len`."""
    relative_positions: bool = False
    """Keys can be rotated to other positions: attention depends on distances alone."""
    pooling: PoolingInfo | None = None
    """The model gives embeddings or scores and generates nothing; None: it generates."""
    encoder_only: bool = False
    """A prompt is computed in one step, and no keys and values of it are kept."""
    state_bytes: int = 0
    """Bytes of a sequence's state beside keys and values (short convolutions, Mamba, linear
    attention); 0: none. Then a cached prefix can be used only up to a snapshot of the state."""
    comparison: Comparison | None = None
    """With transformers, at load; None for a family of its own."""

    def bidirectional_limit(self, num_items: int) -> int:
        """Most tokens of a prompt with so many items, each of whose tokens sees the whole prompt; 0
        where tokens see what comes before them alone."""
        return 0 if self.causal_texts and not num_items else self.longest_bidirectional_prompt

    media_adapters: tuple[tuple[Modality, LoRAIdentity], ...] = ()
    """The adapters that the model is published with for prompts with media, and that are served:
    the first one that a prompt has media for is its own."""

    @property
    def items_in_prompt(self) -> bool:
        """Whether items take positions of the prompt."""
        return not (self.encoder_decoder or self.frame_shape)


class RenderingFacts(msgspec.Struct, frozen=True):
    """What must be known of a loaded model where prompts are rendered for
    `/inference/v1/generate`, and their answers made of its tokens."""

    max_model_len: int
    vocab_size: int
    modalities: tuple[Modality, ...]

    @classmethod
    def of(cls, model: ModelInfo) -> RenderingFacts | None:
        """None for a model that does not answer prompts of token ids."""
        if model.pooling is not None or not model.items_in_prompt:
            return None
        return cls(model.max_model_len, model.vocab_size, model.modalities)


SUPPORTED: dict[str, tuple[Modality, ...]] = {
    "gemma2": (),
    "gemma3": ("image",),
    "gemma3_text": (),
    "gpt_oss": (),
    "idefics3": ("image",),
    "llama": (),
    "llava": ("image",),
    "mistral": (),
    "mistral3": ("image",),
    "moonshine": ("audio",),
    "moonshine_streaming": ("audio",),
    "qwen2": (),
    "qwen2_5_omni": ("image", "audio"),
    "qwen2_5_omni_thinker": ("image", "audio"),
    "qwen2_5_vl": ("image", "video"),
    "qwen2_audio": ("audio",),
    "qwen2_vl": ("image", "video"),
    "qwen3": (),
    "qwen3_5": ("image", "video"),
    "qwen3_5_moe": ("image", "video"),
    "qwen3_moe": (),
    "qwen3_omni_moe": ("image", "audio", "video"),
    "qwen3_omni_moe_thinker": ("image", "audio", "video"),
    "qwen3_vl": ("image", "video"),
    "qwen3_vl_moe": ("image", "video"),
    "smolvlm": ("image",),
    "voxtral": ("audio",),
    "voxtral_realtime": ("audio",),
    "whisper": ("audio",),
}

EMBEDDERS: dict[str, tuple[Modality, ...]] = {
    "bert": (),
    "clip": ("image",),
    "colqwen2": ("image",),
    "distilbert": (),
    "modernbert": (),
    "mpnet": (),
    "roberta": (),
    "siglip": ("image",),
    "xlm-roberta": (),
}
"""Types that give embeddings or scores and never generate. Types that generate give embeddings too,
where their folder's files or `--pooling` say so (`types.pooling`)."""

ENCODER_DECODER: tuple[str, ...] = ("moonshine", "moonshine_streaming", "whisper")
"""Types whose decoder cross-attends to the one sound of a request. They transcribe; they do not
chat."""

FRAME_BY_FRAME: tuple[str, ...] = ("voxtral_realtime",)
"""Types that hear one frame of sound with each token."""

TRANSCRIBES_ONLY = (*ENCODER_DECODER, *FRAME_BY_FRAME)
"""Types that give no embeddings."""


GENERAL_TEXT: tuple[str, ...] = (
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "axk1",
    "bamba",
    "beam",
    "biogpt",
    "bitnet",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "jamba",
    "jetmoe",
    "kolibri1",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "llama4_text",
    "longcat_flash",
    "mellum",
    "minicpm3",
    "minimax_m2",
    "minimax_m3_vl_text",
    "ministral",
    "ministral3",
    "mixtral",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "youtu",
)
"""Types of text-only models that the general family serves, each compared with transformers by
`make test-models`. Other types of text-only models are tried: loading compares them, too."""

GENERAL_MEDIA: dict[str, tuple[Modality, ...]] = {
    "aria": ("image",),
    "audioflamingo3": ("audio",),
    "aya_vision": ("image",),
    "cohere2_vision": ("image",),
    "cohere_compass": ("image",),
    "cosmos3_edge": ("image",),
    "cosmos3_omni": ("image",),
    "deepseek_ocr2": ("image",),
    "deepseek_vl": ("image",),
    "deepseek_vl_hybrid": ("image",),
    "emu3": ("image",),
    "ernie4_5_vl_moe": ("image",),
    "exaone4_5": ("image", "video"),
    "fast_vlm": ("image",),
    "fun_asr_nano": ("audio",),
    "gemma3n": ("image", "audio"),
    "gemma4": ("image", "audio", "video"),
    "gemma4_unified": ("image", "video"),
    "glm46v": ("image", "video"),
    "glm4v": ("image", "video"),
    "glm4v_moe": ("image", "video"),
    "glm_ocr": ("image",),
    "glmasr": ("audio",),
    "glmga": ("image",),
    "got_ocr2": ("image",),
    "granite4_vision": ("image",),
    "granite_docling": ("image",),
    "granite_speech": ("audio",),
    "granite_speech_plus": ("audio",),
    "hunyuan_vl": ("image",),
    "hyperclovax_vision_v2": ("image",),
    "idefics2": ("image",),
    "internvl": ("image", "video"),
    "janus": ("image",),
    "kimi_k25": ("image",),
    "lfm2_vl": ("image",),
    "lfm3_vl": ("image", "video"),
    "lighton_ocr": ("image",),
    "llama4": ("image",),
    "llava_next": ("image",),
    "llava_next_video": ("image", "video"),
    "llava_onevision": ("image", "video"),
    "minicpm_ocr": ("image", "video"),
    "minicpmv4_6": ("image", "video"),
    "minimax_m3_vl": ("image",),
    "molmo2": ("image",),
    "moss_transcribe_diarize": ("audio",),
    "musicflamingo": ("audio",),
    "muse_glimmer": ("image",),
    "nemotron_h_omni": ("image", "audio"),
    "ovis2": ("image",),
    "paddleocr_vl": ("image",),
    "paligemma": ("image",),
    "perception_lm": ("image", "video"),
    "phi4_multimodal": ("image", "audio"),
    "qianfan_ocr": ("image",),
    "qwen3_asr": ("audio",),
    "step3p7": ("image",),
    "video_llama_3": ("image", "video"),
    "video_llava": ("image", "video"),
    "vipllava": ("image",),
}
"""Types of models with media that the general family serves, each compared with transformers by
`make test-models`. Other types are tried: loading compares them, too."""

ONE_IN_A_PROMPT: tuple[str, ...] = (
    "audioflamingo3",
    "emu3",
    "fun_asr_nano",
    "gemma3n",
    "glmasr",
    "granite_speech",
    "granite_speech_plus",
    "idefics2",
    "llava_onevision",
    "minicpm_ocr",
    "minicpmv4_6",
    "molmo2",
    "musicflamingo",
    "paligemma",
    "perception_lm",
    "qwen3_asr",
)
"""Types of `GENERAL_MEDIA` whose processor takes one item in a prompt, or treats several otherwise
than each alone: they are served with one."""

ONE_SOUND_IN_A_PROMPT: tuple[str, ...] = ("phi4_multimodal",)
"""The same for sounds alone."""
SOUNDS_BESIDE_PICTURES: tuple[str, ...] = ("phi4_multimodal",)
"""Types that encode a sound otherwise where its prompt has pictures."""

KEEPS_STATES: tuple[str, ...] = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "lfm2_vl",
    "lfm3",
    "lfm3_vl",
    "minicpmv4_6",
    "nemotron_h",
    "nemotron_h_omni",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
"""Types whose layers keep states beside keys and values."""
KEEPS_LATENTS: tuple[str, ...] = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k25",
    "longcat_flash",
    "minicpm3",
    "youtu",
)
"""Types that keep one latent for a token in place of keys and values."""
WITHOUT_LINEAR_LAYERS: tuple[str, ...] = ("gpt-sw3", "gpt2")
"""Types whose decoders compute products otherwise: neither adapters nor `--quantize` find any."""
READ_FROM_GGUF: tuple[str, ...] = (
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "lfm2",
    "llama",
    "minimax_m2",
    "mistral",
    "nemotron",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "stablelm",
    "starcoder2",
)
"""Types whose GGUF files transformers reads."""

UNSERVABLE: dict[str, tuple[str, ...]] = {
    "its decoder cannot be run": (
        "axk2",
        "bert-generation",
        "bigbird_pegasus",
        "camembert",
        "cpmant",
        "data2vec-text",
        "deepseek_v32",
        "deepseek_v4",
        "doge",
        "electra",
        "ernie",
        "glm_moe_dsa",
        "hy_v4",
        "mimo_v2_flash",
        "minimax",
        "modernbert-decoder",
        "roberta-prelayernorm",
        "roc_bert",
        "xlm-roberta-xl",
        "xmod",
    ),
    "its attention does not use transformers' attention interface": (
        "bailing_hybrid",
        "big_bird",
        "bloom",
        "codegen",
        "falcon",
        "falcon_mamba",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "kimi_linear",
        "mamba",
        "megatron-bert",
        "mvp",
        "openai-gpt",
        "prophetnet",
        "rembert",
        "roformer",
        "rwkv",
        "trocr",
        "xglm",
        "xlm",
        "xlnet",
        "xlstm",
    ),
    "computed in chunks, its logits differ from transformers'": (
        "bart",
        "blenderbot-small",
        "marian",
        "mbart",
        "pegasus",
    ),
    "it cannot be computed in chunks": ("inkling2_text", "inkling_text", "zaya"),
    "its attention layers are not called once each": ("diffllama", "zamba2"),
    "some of its layers keep another state than keys and values": (
        "hrm_text",
        "recurrent_gemma",
    ),
}
"""Why → types of text-only models of transformers that loading would refuse. They are refused
before anything is loaded. `make test-models` compares this with what loading finds."""

UNSERVABLE_MEDIA: dict[str, tuple[str, ...]] = {
    "it adds random noise to sounds: no two answers would agree": ("vibevoice_asr",),
    "its pictures' tokens have positions that no grid describes": ("minicpmv4_7",),
    "it is an encoder-decoder": (
        "florence2",
        "pix2struct",
        "pp_formulanet",
        "t5gemma2",
        "udop",
        "vision-encoder-decoder",
    ),
    "its decoder cross-attends to what it is shown": ("evolla", "idefics", "mllama"),
    "its encoder reads the prompt as well": ("instructblip", "instructblipvideo"),
    "its pictures have no token of their own": ("blip", "kosmos-2", "kosmos-2.5"),
    "its processor adds tokens at the beginning or end of a prompt": (
        "blip-2",
        "chameleon",
        "fuyu",
    ),
    "its decoder selects keys by an index": ("dots3_note", "glm5_next", "mistral_large4"),
    "it generates by diffusion": ("diffusion_gemma",),
    "it gives actions, not text": ("pi0",),
    "the whole prompt, text as well, attends in both directions": ("git",),
}
"""Why → types of transformers that see or hear and are not served, refused before anything is
loaded. Types whose text model is in `UNSERVABLE` are refused with that reason."""

MEDIA_CONFIG = re.compile(
    r"(vision|visual|vit|vq|image|video|audio|speech|sound|acoustic|codec|encoder|qformer|perceiver"
    r"|thinker|talker)(_\w+)?_config"
)
"""Names of the parts of a config that describe an encoder of media."""


MEDIA_TOKENS: dict[Modality, tuple[str, ...]] = {
    "image": (
        "image_token_id",
        "image_token_index",
        "img_context_token_id",
        "image_patch_id",
    ),
    "audio": ("audio_token_id", "audio_token_index", "sound_context_token_id"),
    "video": ("video_token_id", "video_token_index"),
}
"""Modality → names in a config of the token whose positions take encoder outputs."""
FOUND_BY_CONFIG: tuple[Modality, ...] = ("image", "audio")
"""What a config alone tells that a model takes; whose films are served is listed."""
MEDIA_PARTS: dict[Modality, re.Pattern[str]] = {
    "image": re.compile(r"vision|visual|vit|vq|image"),
    "audio": re.compile(r"audio|speech|sound|acoustic|encoder"),
}
ENCODER_CONFIGS: dict[Modality, str] = {"image": "vision_config", "audio": "audio_config"}
"""Modality → the part of a config that may name its token, where the config itself does not."""
MEDIA_ADAPTERS: dict[str, dict[Modality, str]] = {
    "phi4_multimodal": {"image": "vision-lora", "audio": "speech-lora"},
}
"""Type → the media for which it is published with LoRA adapters, and the folders of these beneath
its own. A prompt with several media is computed with the adapter of the first one named here."""
FILMS_AS_PICTURES: tuple[str, ...] = ("internvl",)
"""Types of `GENERAL_MEDIA` that take a film as one picture for each frame, with text between, whose
rows stand at the token of pictures."""


NEEDED_PACKAGES: dict[str, tuple[str, ...]] = {
    "torchvision": (
        "cohere2_vision",
        "fast_vlm",
        "gemma3n",
        "gemma4_unified",
        "kimi_k25",
        "lfm2_vl",
        "llama4",
        "minicpm_ocr",
        "minicpmv4_6",
        "minimax_m3_vl",
        "molmo2",
        "muse_glimmer",
        "nemotron_h_omni",
        "perception_lm",
        "phi4_multimodal",
        "step3p7",
    ),
    "timm": ("fast_vlm", "gemma3n", "perception_lm"),
    "torchaudio": ("fun_asr_nano", "granite_speech", "granite_speech_plus"),
}
"""Package → types of `GENERAL_MEDIA` that transformers cannot process or compute without it."""

LISTED: tuple[Collection[str], ...] = (SUPPORTED, GENERAL_TEXT, GENERAL_MEDIA, EMBEDDERS)
"""The tables of types that are served."""


FILMS_BY_FRAME: tuple[str, ...] = (
    "gemma4",
    "gemma4_unified",
    "llava_next_video",
    "perception_lm",
    "video_llava",
)
"""Types of `GENERAL_MEDIA` whose films transformers' own video processor makes, which needs
torchvision. Their encoders take each frame by itself: it is an item."""
FILMS_BY_PAIR: tuple[str, ...] = ("glm46v", "glm4v", "glm4v_moe")
"""The same where two frames (a temporal patch) are an item. Its rows stand at the token of
pictures, and transformers takes no prompt with pictures and films."""
WHOLE_FILMS: tuple[str, ...] = (
    "exaone4_5",
    "lfm3_vl",
    "llava_onevision",
    "minicpm_ocr",
    "minicpmv4_6",
    "video_llama_3",
)
"""The same where a film is one item: its rows depend on all frames, or on how many there are."""


def general_modalities(config: Mapping[str, object]) -> tuple[Modality, ...]:
    """The media that the general family gives a model: those with an encoder and a token."""
    parts = [
        name for name, value in config.items() if value is not None and MEDIA_CONFIG.fullmatch(name)
    ]
    found: tuple[Modality, ...] = tuple(
        modality
        for modality in FOUND_BY_CONFIG
        if named_token(config, modality) is not None
        and any(MEDIA_PARTS[modality].search(part) for part in parts)
    )
    kind = config.get("model_type")
    by_processor = kind in (*FILMS_BY_FRAME, *FILMS_BY_PAIR, *WHOLE_FILMS)
    if kind in FILMS_AS_PICTURES or (by_processor and named_token(config, "video") is not None):
        return (*found, "video")
    return found


def media_token(config: Mapping[str, object], modality: Modality) -> int:
    """The id of the token whose positions take rows of an item; `EVERY_TOKEN` where the config
    names tokens around those which take rows as well (Ovis 2), where its pictures have a vocabulary
    of their own, which tokens around them are of (Gemma 3n), or where tokens around them attend in
    both directions with them (Molmo 2). Raises `KeyError` without any."""
    vision = config.get("vision_config")
    own_vocabulary = isinstance(vision, Mapping) and "vocab_offset" in vision
    attends_with_them = "low_res_image_start_token_id" in config
    if config.get("visual_indicator_token_ids") or own_vocabulary or attends_with_them:
        return EVERY_TOKEN
    return placeholder_token(config, modality)


def placeholder_token(config: Mapping[str, object], modality: Modality) -> int:
    """The id of the token of a modality that a config names; that of pictures for films that are
    taken as such. Raises `KeyError` without any."""
    if modality == "video" and config.get("model_type") in (*FILMS_AS_PICTURES, *FILMS_BY_PAIR):
        modality = "image"
    token = named_token(config, modality)
    if token is None:
        raise KeyError(MEDIA_TOKENS[modality][0])
    return token


def named_token(config: Mapping[str, object], modality: Modality) -> int | None:
    """The token that a config names, or else the config of its encoder."""
    encoder = config.get(ENCODER_CONFIGS[modality]) if modality in ENCODER_CONFIGS else None
    parts = [part for part in (config, encoder) if isinstance(part, Mapping)]
    found = (part.get(name) for part in parts for name in MEDIA_TOKENS[modality])
    return next((value for value in found if type(value) is int), None)


def num_axes(text_config: Mapping[str, object]) -> int:
    """How many axes positions have, in every layer or in those of a kind; 0: one, in the usual
    way."""
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling")
    kinds = rope.values() if isinstance(rope, Mapping) else ()
    sections = [
        part.get("mrope_section") or part.get("xdrope_section")
        for part in (rope, *kinds)
        if isinstance(part, Mapping)
    ]
    return max((len(each) for each in sections if isinstance(each, list | tuple)), default=0)


def has_axes(text_config: Mapping[str, object]) -> bool:
    """Whether positions have several axes."""
    return num_axes(text_config) > 0


def takes_media(config: Mapping[str, object]) -> bool:
    """Whether a Hugging Face config describes a model that sees or hears."""
    return any(value is not None and MEDIA_CONFIG.fullmatch(name) for name, value in config.items())


def check_served(config: Mapping[str, object]) -> None:
    """Raises `ModelLoadError` for a config whose type certainly is not served.

    Types that are not listed pass: what they are is found out on loading.
    """
    model_type = str(config.get("model_type", ""))
    if any(model_type in table for table in LISTED):
        return
    text = config.get("text_config")
    text_type = text.get("model_type") if isinstance(text, Mapping) else None
    for reason, types in (*UNSERVABLE_MEDIA.items(), *UNSERVABLE.items()):
        if model_type in types or text_type in types:
            raise unsupported(model_type, reason)
    if not model_type:
        raise unsupported(model_type, "its config.json names no model_type")
    if config.get("is_encoder_decoder"):
        raise unsupported(model_type, "it is an encoder-decoder")
    if takes_media(config) and not general_modalities(config):
        reason = "its config names no token for its pictures or sounds"
        raise unsupported(model_type, reason, like=(*SUPPORTED, *GENERAL_MEDIA))


def check_known(config: Mapping[str, object], known: KnownTypes) -> None:
    """Raises `ModelLoadError` for a config whose type has no family of its own, and that this
    version of transformers does not know, or knows no text model of."""
    model_type = str(config.get("model_type", ""))
    if model_type in SUPPORTED or model_type in EMBEDDERS:
        return
    sees = bool(general_modalities(config))
    if model_type not in known.configs:
        reason = f"transformers {known.version} knows no such type"
        raise unsupported(model_type, reason, like=(*SUPPORTED, *GENERAL_MEDIA) if sees else None)
    if not sees and model_type not in known.text_models:
        raise unsupported(model_type, "transformers knows no text model of this type")


def unsupported(
    model_type: str, reason: str = "", *, like: Iterable[str] | None = None
) -> ModelLoadError:
    """What to raise for a type that is not served: why, and those of the types `like` it, of all
    where none are given, that have a similar name. Of a type that is served in general: why this
    model of it is not."""
    listed = {name for table in LISTED for name in table}
    if reason and model_type in listed:
        return ModelLoadError(f"this model of type {model_type!r} cannot be served: {reason}")
    known = listed if like is None else set(like)
    near = difflib.get_close_matches(model_type, sorted(known - {model_type}), n=3)
    nearest = f" (did you mean {' or '.join(near)}?)" if near else ""
    because = f": {reason}" if reason else ""
    return ModelLoadError(
        f"models of type {model_type[:40]!r} are not supported{because}{nearest}; "
        "`lookonce models` lists the types that are"
    )
