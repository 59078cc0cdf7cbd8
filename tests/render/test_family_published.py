"""Folders as models are published with are understood as Hugging Face understands them.

What matters of their JSON is written down here; weights are not needed to process a picture.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookonce.render.families.base import ProcessorFamily
from tests.support.render import hugging_face
from tests.support.render.samples import load, numpy_of, picture, sound

Json = dict[str, Any]
FolderMaker = Callable[..., Path]

CLIP: Json = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF: Json = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS: Json = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 0.00392156862745098,
}
SOUND: Json = {
    "chunk_length": 30,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 16000,
}
OMNI_TOKENS: Json = {"audio_token_index": 151646, "image_token_index": 151655}
OMNI_PREPROCESSOR: Json = {
    **SOUND,
    **CLIP,
    "chunk_length": 300,
    "dither": 0.0,
    "image_processor_type": "Qwen2VLImageProcessor",
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "padding_side": "left",
    "patch_size": 14,
    "processor_class": "Qwen2_5OmniProcessor",
    "temporal_patch_size": 2,
}


@dataclass(frozen=True)
class Published:
    config: Json
    preprocessor: Json
    num_embeds: int
    """Of a picture of 500 x 300 pixels, or of three seconds of sound."""
    processor: Json = field(default_factory=dict)
    wording: str = ""
    """The random folder whose tokenizer stands in for a published one."""

    def write(self, target: Path, folder: FolderMaker) -> Path:
        config = self.config
        if self.wording:
            source = folder(self.wording)
            known = json.loads((source / "config.json").read_text())
            config = {**config, "image_token_id": _image_token_id(known)}
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (target / name).write_bytes((source / name).read_bytes())
        (target / "config.json").write_text(json.dumps(config))
        (target / "preprocessor_config.json").write_text(json.dumps(self.preprocessor))
        if self.processor:
            (target / "processor_config.json").write_text(json.dumps(self.processor))
        return target


def _image_token_id(config: Json) -> int:
    return int(config.get("image_token_id") or config["image_token_index"])


PICTURES = {
    "llava-1.5": Published(
        {"model_type": "llava", "image_token_index": 32000, "vision_config": {"patch_size": 14}},
        {
            **STEPS,
            **CLIP,
            "crop_size": {"height": 336, "width": 336},
            "do_center_crop": True,
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "resample": 3,
            "size": {"shortest_edge": 336},
        },
        num_embeds=576,
    ),
    "llava-siglip": Published(
        {
            "model_type": "llava",
            "image_token_index": 7,
            "vision_feature_select_strategy": "full",
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14},
        },
        {
            **HALF,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_processor_type": "SiglipImageProcessor",
            "resample": 3,
            "size": {"height": 384, "width": 384},
        },
        num_embeds=729,
    ),
    "pixtral-12b": Published(
        {"model_type": "llava", "vision_config": {"model_type": "pixtral", "patch_size": 16}},
        {
            **STEPS,
            **CLIP,
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 16, "width": 16},
            "processor_class": "PixtralProcessor",
            "resample": 3,
            "size": {"longest_edge": 1024},
        },
        num_embeds=32 * 19,
        processor={"processor_class": "PixtralProcessor", "patch_size": 16},
        wording="pixtral",
    ),
    "mistral-small-3.1": Published(
        {
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "patch_size": 14},
        },
        {
            **STEPS,
            **CLIP,
            "image_processor_type": "PixtralImageProcessorFast",
            "patch_size": 14,
            "processor_class": "PixtralProcessor",
            "resample": 3,
            "size": {"longest_edge": 1540},
        },
        num_embeds=18 * 11,
        processor={
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
        wording="mistral3",
    ),
    "gemma3": Published(
        {
            "model_type": "gemma3",
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
        },
        {
            **STEPS,
            **HALF,
            "do_convert_rgb": None,
            "do_pan_and_scan": None,
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 256,
            "pan_and_scan_max_num_crops": None,
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "size": {"height": 896, "width": 896},
        },
        num_embeds=256,
    ),
    "idefics3-8b": Published(
        {"model_type": "idefics3", "vision_config": {"image_size": 364, "patch_size": 14}},
        {
            **STEPS,
            **HALF,
            "do_image_splitting": True,
            "do_pad": True,
            "image_processor_type": "Idefics3ImageProcessor",
            "max_image_size": {"longest_edge": 364},
            "processor_class": "Idefics3Processor",
            "resample": 1,
            "size": {"longest_edge": 1456},
        },
        num_embeds=(4 * 3 + 1) * 169,
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 169},
        wording="idefics3",
    ),
    "smolvlm2": Published(
        {
            "model_type": "smolvlm",
            "scale_factor": 4,
            "vision_config": {"image_size": 512, "patch_size": 16},
        },
        {
            **STEPS,
            **HALF,
            "do_image_splitting": True,
            "do_pad": True,
            "image_processor_type": "SmolVLMImageProcessor",
            "max_image_size": {"longest_edge": 512},
            "processor_class": "SmolVLMProcessor",
            "resample": 1,
            "size": {"longest_edge": 2048},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
        },
        num_embeds=(4 * 3 + 1) * 64,
        wording="smolvlm",
    ),
    "qwen2-vl": Published(
        {"model_type": "qwen2_vl", "image_token_id": 151655},
        {
            **CLIP,
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
        },
        num_embeds=198,
    ),
    "qwen2.5-vl": Published(
        {"model_type": "qwen2_5_vl", "image_token_id": 151655},
        {
            **CLIP,
            "min_pixels": 3136,
            "max_pixels": 1003520,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen2_5_VLProcessor",
        },
        num_embeds=198,
    ),
    "qwen2.5-omni": Published(
        {"model_type": "qwen2_5_omni", "thinker_config": OMNI_TOKENS},
        OMNI_PREPROCESSOR,
        num_embeds=198,
    ),
    "qwen3-vl": Published(
        {"model_type": "qwen3_vl", "image_token_id": 151655},
        {
            **HALF,
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
        },
        num_embeds=16 * 9,
    ),
}
SOUNDS = {
    "qwen2.5-omni": Published(
        {"model_type": "qwen2_5_omni", "thinker_config": OMNI_TOKENS},
        OMNI_PREPROCESSOR,
        num_embeds=75,
    ),
    "qwen2-audio": Published(
        {"model_type": "qwen2_audio", "audio_token_index": 151646},
        {**SOUND, "processor_class": "Qwen2AudioProcessor"},
        num_embeds=75,
    ),
    "voxtral-mini": Published(
        {
            "model_type": "voxtral",
            "audio_token_id": 24,
            "audio_config": {
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "max_source_positions": 1500,
            },
        },
        {**SOUND, "dither": 0.0, "processor_class": "VoxtralProcessor"},
        num_embeds=375,
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_hugging_face_makes_of_them(
    name: str, tmp_path: Path, folder: FolderMaker
) -> None:
    published = PICTURES[name]
    family = load(published.write(tmp_path, folder))
    image = picture(500, 300)
    item = family.process("image", image, {})
    theirs = hugging_face.image_processor(tmp_path)(
        images=[image], do_convert_rgb=True, return_tensors="np", **_asked(family)
    )["pixel_values"]
    assert np.array_equal(numpy_of(item.arrays["pixel_values"]).ravel(), theirs.ravel())
    assert item.expansion.num_embeds == published.num_embeds
    family.check_processed(item)


def _asked(family: ProcessorFamily) -> Json:
    """What the full processor of Pixtral's pictures tells its image processor."""
    stated = family.files.processor
    if stated.get("processor_class") != "PixtralProcessor":
        return {}
    return {"patch_size": stated["patch_size"] * stated.get("spatial_merge_size", 1)}


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds_are_what_hugging_face_makes_of_them(
    name: str, tmp_path: Path, folder: FolderMaker
) -> None:
    published = SOUNDS[name]
    family = load(published.write(tmp_path, folder))
    item = family.process("audio", sound(3), {})
    found = hugging_face.feature_extractor(tmp_path)(
        sound(3), sampling_rate=16000, return_attention_mask=True, return_tensors="np"
    )
    theirs = found["input_features"]
    if name == "qwen2.5-omni":  # whose model cuts the padding off
        theirs = theirs[0][:, found["attention_mask"][0].astype(bool)]
    ours = numpy_of(item.arrays["input_features"])
    np.testing.assert_allclose(ours.ravel(), theirs.ravel(), rtol=0, atol=1e-6)
    assert item.expansion.num_embeds == published.num_embeds
    family.check_processed(item)
