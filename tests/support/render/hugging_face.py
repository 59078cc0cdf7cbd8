"""Hugging Face's own processors of a folder, as they would be built where torchvision is installed.

Full processors refuse to be built without it, for their video part's sake, although pictures and
sounds need none of it. Here that part is left out; everything else is theirs.
"""

from __future__ import annotations
import __future__

import ast
import json
import math
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import transformers
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    ProcessorMixin,
)

PROCESSORS = {
    "llava": "llava.processing_llava.LlavaProcessor",
    "mistral3": "pixtral.processing_pixtral.PixtralProcessor",
    "gemma3": "gemma3.processing_gemma3.Gemma3Processor",
    "idefics3": "idefics3.processing_idefics3.Idefics3Processor",
    "smolvlm": "smolvlm.processing_smolvlm.SmolVLMProcessor",
    "qwen2_vl": "qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor",
    "qwen2_5_vl": "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    "qwen3_vl": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    "qwen3_vl_moe": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    "qwen3_5": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    "qwen3_5_moe": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    "qwen2_5_omni_thinker": "qwen2_5_omni.processing_qwen2_5_omni.Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe.processing_qwen3_omni_moe.Qwen3OmniMoeProcessor",
    "qwen2_audio": "qwen2_audio.processing_qwen2_audio.Qwen2AudioProcessor",
}
"""`model_type` → the processor class. Voxtral's needs mistral_common and its own tokenizer."""
FLAT = ("got_ocr2",)
"""Types whose processor takes no list of pictures for each prompt: `apply_chat_template` fails."""
ASKED_FOR_KINDS = ("cosmos3_edge",)
"""Types whose model needs to know which tokens are of pictures; the processor says it if asked."""
WITHOUT_VIDEO = (
    *("smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("qwen3_5", "qwen3_5_moe"),
)


@cache
def _tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@cache
def image_processor(folder: Path) -> Any:
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil")
    except ValueError:  # there is none of this backend
        return AutoImageProcessor.from_pretrained(folder)


@cache
def feature_extractor(folder: Path) -> Any:
    """By its NumPy path: torch's differs from it by rounding in single precision."""
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
    return extractor


@cache
def processor(folder: Path) -> Any:
    """The full processor of a folder with media."""
    kind = model_type(folder)
    tokenizer = _tokenizer(folder)
    given = _read_json(folder / "processor_config.json")
    given.pop("processor_class", None)
    if kind not in PROCESSORS:
        built = _general_processor(folder, given)
    elif kind == "qwen2_audio":
        built = _class(kind)(feature_extractor(folder), tokenizer)
    elif kind in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
        extractor = feature_extractor(folder)
        built = _without_video(_class(kind))(image_processor(folder), None, extractor, tokenizer)
    elif kind in WITHOUT_VIDEO:
        built = _without_video(_class(kind))(image_processor(folder), tokenizer, None, **given)
    else:
        built = _class(kind)(image_processor(folder), tokenizer, **given)
    built.chat_template = tokenizer.chat_template
    return built


def model_type(folder: Path) -> str:
    config = _read_json(folder / "config.json")
    pixtral = (config.get("vision_config") or {}).get("model_type") == "pixtral"
    of_mistral = pixtral and config["model_type"] == "llava"
    return "mistral3" if of_mistral else str(config["model_type"])


def image_arrays(folder: Path, image: Any, **options: Any) -> dict[str, Any]:
    """What the model gets of one picture, as the full processor asks its image processor."""
    kind = model_type(folder)
    if kind == "mistral3":
        full = processor(folder)
        options["patch_size"] = full.patch_size * full.spatial_merge_size
    if kind in ("idefics3", "smolvlm"):
        options["return_row_col_info"] = True
    return dict(image_processor(folder)(images=[image], return_tensors="np", **options))


def full_inputs(folder: Path, text: str, **given: Any) -> dict[str, Any]:
    """The full processor's, of a text with placeholders and `images` or `audio` for them."""
    return dict(processor(folder)(text=[text], **given))


def prompt_ids(folder: Path, text: str, **media: Any) -> list[int]:
    return [int(token) for token in full_inputs(folder, text, **media)["input_ids"][0]]


def token_ids(folder: Path, text: str) -> list[int]:
    return list(_tokenizer(folder)(text)["input_ids"])


def token(folder: Path, token_id: int) -> str:
    return str(_tokenizer(folder).convert_ids_to_tokens(token_id))


def chat_inputs(folder: Path, conversation: list[dict[str, Any]]) -> dict[str, Any]:
    """Arguments of `generate`. Pictures and waves are in the conversation's parts."""
    # SmolVLM's own method only adds settings of the video part.
    if model_type(folder) in FLAT:
        parts = [part for message in conversation for part in message["content"]]
        pictures = [part["image"] for part in parts if part["type"] == "image"]
        text = template_text(folder, conversation)
        if not pictures:
            return encoded(folder, text)
        return dict(processor(folder)(images=pictures, text=[text], return_tensors="pt"))
    kinds = {"return_mm_token_type_ids": True} if model_type(folder) in ASKED_FOR_KINDS else {}
    found = ProcessorMixin.apply_chat_template(
        processor(folder),
        conversation,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=kinds,
    )
    # Llama 4's processor gives bfloat16 to whatever model.
    return {k: v.float() if v.is_floating_point() else v for k, v in found.items()}


def text_inputs(folder: Path, text: str) -> dict[str, Any]:
    """The same of a model without media, by its tokenizer; one user message."""
    found = _tokenizer(folder).apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    return dict(found)


def template_text(folder: Path, conversation: list[dict[str, Any]]) -> str:
    return str(
        _tokenizer(folder).apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
    )


def encoded(folder: Path, text: str) -> dict[str, Any]:
    """A template's text, whose special tokens are all written in it."""
    return dict(_tokenizer(folder)(text, add_special_tokens=False, return_tensors="pt"))


def voxtral_features(folder: Path, wave: np.ndarray) -> np.ndarray:
    """By the processor's own method, for an encoder whose span need not be 30 seconds."""
    extractor = feature_extractor(folder)
    voxtral = import_module("transformers.models.voxtral.processing_voxtral").VoxtralProcessor
    settings = {**voxtral.audio_kwargs, "pad_to_multiple_of": extractor.n_samples}
    settings["max_source_positions"] = extractor.nb_max_frames
    features = voxtral._retrieve_input_features(
        SimpleNamespace(feature_extractor=extractor), [wave], **settings
    )
    return np.asarray(features)


def realtime_inputs(folder: Path, waves: list[np.ndarray]) -> dict[str, Any]:
    """Token ids and features for Voxtral Realtime's `generate`: mistral_common, which writes its
    prompt and the silence around the sound, is not at hand, so its rule is written down here."""
    import torch

    (wave,) = waves
    delay = _read_json(folder / "config.json")["default_num_delay_tokens"]
    after = -len(wave) % 1280 + 1280 * (delay + 1 + 10)
    padded = np.pad(wave, (1280 * 32, after))
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    found = extractor(padded, sampling_rate=16000, return_tensors="pt")
    begin, pad = _tokenizer(folder).convert_tokens_to_ids(["<s>", "[STREAMING_PAD]"])
    tokens = torch.tensor([[begin] + [pad] * (32 + delay)])
    return {"input_ids": tokens, "features": found["input_features"]}


def _general_processor(folder: Path, given: dict[str, Any]) -> Any:
    """Of a type that is not in `PROCESSORS`: the class that the folder names."""
    named = _read_json(folder / "processor_config.json")["processor_class"]
    base = getattr(transformers, named)
    made = {
        "tokenizer": lambda: _tokenizer(folder),
        "image_processor": lambda: image_processor(folder),
        "feature_extractor": lambda: AutoFeatureExtractor.from_pretrained(folder),
        "audio_processor": lambda: AutoFeatureExtractor.from_pretrained(folder),
        "video_processor": lambda: None,
    }
    parts = {name: made[name]() for name in base.get_attributes()}
    try:
        return _without_video(base)(**parts, **given)
    except AttributeError:  # it reads settings of the part for films
        parts["video_processor"] = transformers.AutoVideoProcessor.from_pretrained(folder)
        return base(**parts, **given)


def _class(kind: str) -> Any:
    module, _, name = PROCESSORS[kind].rpartition(".")
    _stand_in_for_torchvision()
    loaded = import_module(f"transformers.models.{module}")
    if kind == "smolvlm":
        loaded.num2words = loaded.num2words or str  # writes the number of a video's frames
    return getattr(loaded, name)


def video_rules(model_type: str) -> SimpleNamespace:
    """`smart_resize` and `sample_frames` of a type's video processor, by their source: its module
    cannot be imported without torchvision, which these two do not use."""
    import torch

    source = Path(transformers.__file__).parent / "models" / model_type
    tree = ast.parse((source / f"video_processing_{model_type}.py").read_text())
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("smart_resize", "sample_frames")
    ]
    flags = __future__.annotations.compiler_flag
    module = ast.Module(found, [])  # type: ignore[arg-type]
    names: dict[str, Any] = {"math": math, "np": np, "torch": torch}
    exec(compile(module, str(source), "exec", flags), names)
    return SimpleNamespace(**{node.name: names[node.name] for node in found})


def _stand_in_for_torchvision() -> None:
    """Pixtral's processor takes one function from a module that imports torchvision."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    if name not in sys.modules:
        pil = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
        module = ModuleType(name)
        module.get_resize_output_image_size = pil.get_resize_output_image_size
        sys.modules[name] = module


def _without_video(base: type) -> type:
    def check(self: Any, name: str, value: object) -> type:
        if name == "video_processor" and value is None:
            return type(None)
        return base.check_argument_for_proper_class(self, name, value)

    return type(base.__name__, (base,), {"check_argument_for_proper_class": check})


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
