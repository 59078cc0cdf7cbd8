"""Every family gives what Hugging Face's own processors give: token counts and arrays, bit for bit.

Only sound is compared within rounding: Hugging Face itself has two implementations of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lookonce.errors import BadRequestError, ModelLoadError, UnprocessableMediaError
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.qwen_images import smart_size
from lookonce.render.families.registry import load_family
from lookonce.types.media import Array

FolderMaker = Callable[..., Path]

SIZES = [(1, 1), (28, 28), (64, 64), (300, 200), (37, 211), (1000, 30), (20, 1000), (640, 480)]
PICTURE_FOLDERS = ("llava", "qwen2_5_vl", "gemma3", "qwen2_5_omni", "nano")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """A rising tone that comes and goes, with a little noise."""
    time = np.arange(round(16000 * seconds)) / 16000
    tone = np.sin(2 * np.pi * (200 + 300 * time) * time) * np.exp(-6 * (time % 0.5))
    noise = np.random.default_rng(seed).normal(size=len(time)) * 1e-3
    return (tone + noise).astype(np.float32)


def numpy_of(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)


def load(folder: Path, dtype: str = "float32") -> ProcessorFamily:
    family = load_family(folder, dtype)
    assert family is not None
    return family


@cache
def hugging_face_images(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, backend="pil")


@cache
def hugging_face_processor(folder: Path) -> Any:
    """The full processor, without the video part, which needs torchvision."""
    from transformers import AutoFeatureExtractor, AutoTokenizer
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    def without_video(base: type) -> type:
        def check(self: Any, name: str, value: object) -> type:
            if name == "video_processor" and value is None:
                return type(None)
            return base.check_argument_for_proper_class(self, name, value)

        return type(base.__name__, (base,), {"check_argument_for_proper_class": check})

    images, tokenizer = hugging_face_images(folder), AutoTokenizer.from_pretrained(folder)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    if kind == "llava":
        given = json.loads((folder / "processor_config.json").read_text())
        given.pop("processor_class")
        return LlavaProcessor(images, tokenizer, **given)
    if kind == "gemma3":
        return Gemma3Processor(images, tokenizer, image_seq_length=16)
    if kind == "qwen2_5_vl":
        return without_video(Qwen2_5_VLProcessor)(images, tokenizer, None)
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    return without_video(Qwen2_5OmniProcessor)(images, None, extractor, tokenizer)


class TestPictures:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("kind", PICTURE_FOLDERS)
    def test_arrays_equal_the_hugging_face_image_processor_bit_for_bit(
        self, folder: FolderMaker, kind: str, size: tuple[int, int]
    ) -> None:
        image = picture(*size)
        item = load(folder(kind)).process("image", image, {})
        expected = hugging_face_images(folder(kind))(images=[image], return_tensors="np")
        ours = numpy_of(item.arrays["pixel_values"])
        theirs = expected["pixel_values"]
        assert ours.dtype == theirs.dtype == np.float32
        assert np.array_equal(ours, theirs.reshape(ours.shape))
        if "image_grid_thw" in expected:
            grid = numpy_of(item.arrays["image_grid_thw"])
            assert grid.tolist() == expected["image_grid_thw"][0].tolist()

    @pytest.mark.parametrize("size", [(64, 64), (300, 200), (37, 211)])
    @pytest.mark.parametrize("kind", PICTURE_FOLDERS)
    def test_the_expanded_prompt_equals_the_full_hugging_face_processor(
        self, folder: FolderMaker, kind: str, size: tuple[int, int]
    ) -> None:
        family, processor = load(folder(kind)), hugging_face_processor(folder(kind))
        image = picture(*size)
        token = processor.tokenizer.convert_ids_to_tokens(family.placeholder_token_id("image"))
        expected = processor(text=[f"one {token} two"], images=[image])["input_ids"][0]

        before, after = family.surroundings("image")
        ids = processor.tokenizer(f"one {before}{token}{after} two")["input_ids"]
        at = ids.index(family.placeholder_token_id("image"))
        expansion = family.process("image", image, {}).expansion
        assert ids[:at] + expansion.token_ids() + ids[at + 1 :] == list(expected)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("kind", PICTURE_FOLDERS)
    def test_the_expansion_is_known_from_the_size_alone(
        self, folder: FolderMaker, kind: str, size: tuple[int, int]
    ) -> None:
        family = load(folder(kind))
        known = family.expansion_of_size("image", size, {})
        assert known == family.process("image", picture(*size), {}).expansion

    @pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_5_omni", "nano"])
    def test_the_grid_counts_merged_patches(self, folder: FolderMaker, kind: str) -> None:
        item = load(folder(kind)).process("image", picture(300, 200), {})
        frames, height, width = numpy_of(item.arrays["image_grid_thw"]).tolist()
        assert item.expansion.grid == (frames, height // 2, width // 2)
        assert item.expansion.num_embeds == frames * height * width // 4

    @pytest.mark.parametrize("kind", ["llava", "nano"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_floats_are_cast_to_the_models_dtype_as_torch_casts_them(
        self, folder: FolderMaker, kind: str, dtype: str
    ) -> None:
        import torch

        image = picture(90, 70)
        exact = numpy_of(load(folder(kind)).process("image", image, {}).arrays["pixel_values"])
        array = load(folder(kind), dtype).process("image", image, {}).arrays["pixel_values"]
        expected = torch.from_numpy(exact.copy()).to(getattr(torch, dtype))
        assert array.dtype == dtype
        assert bytes(array.data) == expected.view(torch.uint8).numpy().tobytes()

    def test_an_older_llava_folder_takes_the_count_from_the_models_config(
        self, folder: FolderMaker, tmp_path: Path
    ) -> None:
        for name in ("config.json", "preprocessor_config.json"):
            (tmp_path / name).write_bytes((folder("llava") / name).read_bytes())
        expansion = load(tmp_path).expansion_of_size("image", (10, 10), {})
        assert expansion == load(folder("llava")).expansion_of_size("image", (10, 10), {})

    @settings(deadline=None)
    @given(
        width=st.integers(1, 5000),
        height=st.integers(1, 5000),
        low=st.integers(1, 1 << 16),
        extra=st.integers(0, 1 << 22),
    )
    def test_sizes_follow_smart_resize(self, width: int, height: int, low: int, extra: int) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        bounds = {"factor": 28, "min_pixels": low, "max_pixels": low + extra}
        try:
            expected = smart_resize(height, width, **bounds)
        except ValueError:
            with pytest.raises(UnprocessableMediaError):
                smart_size(width, height, **bounds)
        else:
            assert smart_size(width, height, **bounds) == expected[::-1]


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava-1.5": (
        {"model_type": "llava", "image_token_index": 32000, "vision_config": {"patch_size": 14}},
        {
            "crop_size": {"height": 336, "width": 336},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "CLIPImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "processor_class": "LlavaProcessor",
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "size": {"shortest_edge": 336},
        },
    ),
    "qwen2.5-vl": (
        {"model_type": "qwen2_5_vl", "image_token_id": 151655},
        {
            "min_pixels": 3136,
            "max_pixels": 1003520,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen2_5_VLProcessor",
        },
    ),
    "gemma3": (
        {
            "model_type": "gemma3",
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
        },
        {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 256,
            "image_std": [0.5, 0.5, 0.5],
            "pan_and_scan_max_num_crops": None,
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 896, "width": 896},
        },
    ),
    "llava-siglip": (
        {
            "model_type": "llava",
            "image_token_index": 7,
            "vision_feature_select_strategy": "full",
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14},
        },
        {
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "SiglipImageProcessor",
            "image_std": [0.5, 0.5, 0.5],
            "resample": 3,
            "size": {"height": 384, "width": 384},
        },
    ),
}
"""config.json (what matters of it) and preprocessor_config.json as models are published with."""
TOKENS_OF_500_BY_300 = {"llava-1.5": 576, "qwen2.5-vl": 198, "gemma3": 256, "llava-siglip": 729}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    config, preprocessor = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    image = picture(500, 300)
    item = load(tmp_path).process("image", image, {})
    theirs = hugging_face_images(tmp_path)(
        images=[image], do_convert_rgb=True, return_tensors="np"
    )["pixel_values"]
    ours = numpy_of(item.arrays["pixel_values"])
    assert np.array_equal(ours, theirs.reshape(ours.shape))
    assert item.expansion.num_embeds == TOKENS_OF_500_BY_300[name]


class TestSounds:
    @pytest.mark.parametrize("seconds", [0.05, 0.5, 1.003, 7.77, 29.995, 30.0])
    def test_features_equal_the_extractor_within_rounding(
        self, folder: FolderMaker, seconds: float
    ) -> None:
        samples = sound(seconds)
        item = load(folder("nano")).process("audio", samples, {})
        features = numpy_of(item.arrays["input_features"])
        expected = hugging_face_processor(folder("nano")).feature_extractor(
            samples, sampling_rate=16000, return_attention_mask=True, return_tensors="np"
        )
        frames = int(expected["attention_mask"].sum())
        assert features.shape == (128, frames)
        theirs = expected["input_features"][0][:, :frames]
        np.testing.assert_allclose(features, theirs, rtol=0, atol=3e-4)

    @pytest.mark.parametrize("seconds", [0.5, 7.77])
    def test_features_equal_the_extractors_numpy_path_to_the_last_digits(
        self, folder: FolderMaker, seconds: float
    ) -> None:
        samples = sound(seconds)
        extractor = hugging_face_processor(folder("nano")).feature_extractor
        padded = np.zeros(extractor.n_samples, np.float32)
        padded[: len(samples)] = samples
        theirs = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
        ours = numpy_of(load(folder("nano")).process("audio", samples, {}).arrays["input_features"])
        np.testing.assert_allclose(ours, theirs[:, : ours.shape[1]], rtol=0, atol=1e-6)

    def test_silence_is_silent(self, folder: FolderMaker) -> None:
        item = load(folder("nano")).process("audio", np.zeros(16000, np.float32), {})
        assert set(numpy_of(item.arrays["input_features"]).reshape(-1).tolist()) == {-1.5}

    @pytest.mark.parametrize("kind", ["qwen2_5_omni", "nano"])
    @pytest.mark.parametrize("seconds", [0.03, 0.5, 3.21, 30.0])
    def test_the_expanded_prompt_equals_the_full_hugging_face_processor(
        self, folder: FolderMaker, kind: str, seconds: float
    ) -> None:
        family, processor = load(folder(kind)), hugging_face_processor(folder(kind))
        samples = sound(seconds)
        text = f"one {processor.audio_token} two"
        expected = processor(text=[text], audio=[samples])["input_ids"][0]
        ids = processor.tokenizer(text)["input_ids"]
        at = ids.index(family.placeholder_token_id("audio"))
        expansion = family.process("audio", samples, {}).expansion
        assert ids[:at] + expansion.token_ids() + ids[at + 1 :] == list(expected)
        assert expansion == family.expansion_of_size("audio", samples.shape, {})
        assert expansion.grid is None

    def test_memory_follows_the_length_of_the_sound(self, folder: FolderMaker) -> None:
        family = load(folder("nano"))
        short, long = (family.process("audio", sound(s), {}).nbytes for s in (1, 10))
        assert 9 < long / short < 10

    def test_a_clip_too_short_for_one_token_is_refused(self, folder: FolderMaker) -> None:
        with pytest.raises(UnprocessableMediaError, match="too short"):
            load(folder("nano")).process("audio", np.zeros(100, np.float32), {})


class TestOptions:
    @pytest.mark.parametrize(
        "kwargs",
        [{"max_pixels": 12544}, {"min_pixels": 4000, "max_pixels": 12544}],
        ids=["max", "both"],
    )
    def test_pixel_bounds_change_the_picture_as_hugging_face_does(
        self, folder: FolderMaker, kwargs: dict[str, int]
    ) -> None:
        family, image = load(folder("nano")), picture(300, 200)
        item = family.process("image", image, family.item_options("image", kwargs))
        size = {"longest_edge": 12544, "shortest_edge": kwargs.get("min_pixels", 3136)}
        expected = hugging_face_images(folder("nano"))(
            images=[image], size=size, return_tensors="np"
        )
        assert np.array_equal(numpy_of(item.arrays["pixel_values"]), expected["pixel_values"])

    def test_both_spellings_of_the_bounds_mean_the_same(self, folder: FolderMaker) -> None:
        family = load(folder("nano"))
        size = {"size": {"shortest_edge": 3136, "longest_edge": 9000}}
        assert family.item_options("image", size) == family.item_options(
            "image", {"max_pixels": 9000}
        )

    def test_bounds_equal_to_the_folders_are_no_option(self, folder: FolderMaker) -> None:
        family = load(folder("nano"))
        assert family.item_options("image", {"max_pixels": family.images.max_pixels}) == {}  # type: ignore[attr-defined]
        assert family.item_options("image", {}) == {}

    def test_options_of_pictures_do_not_concern_sounds(self, folder: FolderMaker) -> None:
        assert load(folder("nano")).item_options("audio", {"max_pixels": 9000}) == {}

    @pytest.mark.parametrize(
        ("kind", "kwargs", "param"),
        [
            ("nano", {"num_crops": 4}, "num_crops"),
            ("llava", {"max_pixels": 9000}, "max_pixels"),
            ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
            ("nano", {"max_pixels": 1 << 40}, "max_pixels"),
            ("nano", {"max_pixels": 100}, "max_pixels"),
            ("nano", {"max_pixels": "9000"}, "max_pixels"),
            ("nano", {"max_pixels": True}, "max_pixels"),
            ("nano", {"min_pixels": -1}, "max_pixels"),
            ("nano", {"size": {"height": 3}}, "size"),
            ("nano", {"size": 7}, "size"),
        ],
    )
    def test_what_is_unknown_or_out_of_bounds_is_refused_by_name(
        self, folder: FolderMaker, kind: str, kwargs: dict[str, object], param: str
    ) -> None:
        with pytest.raises(BadRequestError) as raised:
            load(folder(kind)).check_options(kwargs)
        assert raised.value.param == f"mm_processor_kwargs.{param}"

    @pytest.mark.parametrize("kind", PICTURE_FOLDERS)
    def test_no_options_are_always_fine(self, folder: FolderMaker, kind: str) -> None:
        load(folder(kind)).check_options({})


class TestFamilies:
    def test_fingerprints_tell_folders_and_dtypes_apart(self, folder: FolderMaker) -> None:
        prints = [load(folder(kind)).fingerprint() for kind in PICTURE_FOLDERS]
        prints.append(load(folder("nano"), "bfloat16").fingerprint())
        assert all(len(each) == 32 for each in prints)
        assert len(set(prints)) == len(prints)

    def test_a_fingerprint_is_stable(self, folder: FolderMaker) -> None:
        assert load(folder("nano")).fingerprint() == load(folder("nano")).fingerprint()

    def test_any_change_of_the_processors_config_changes_the_fingerprint(
        self, folder: FolderMaker, tmp_path: Path
    ) -> None:
        for name in ("config.json", "preprocessor_config.json"):
            (tmp_path / name).write_bytes((folder("nano") / name).read_bytes())
        before = load(tmp_path).fingerprint()
        config = json.loads((tmp_path / "preprocessor_config.json").read_text())
        config["image_mean"][0] += 1e-6
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
        assert load(tmp_path).fingerprint() != before

    def test_a_nested_processor_config_is_read_as_a_flat_one(
        self, folder: FolderMaker, tmp_path: Path
    ) -> None:
        """transformers 5 saves all processors of a folder in processor_config.json."""
        config = json.loads((folder("nano") / "preprocessor_config.json").read_text())
        nested = {"image_processor": config, "feature_extractor": config}
        (tmp_path / "config.json").write_bytes((folder("nano") / "config.json").read_bytes())
        (tmp_path / "processor_config.json").write_text(json.dumps(nested))
        image = picture(99, 55)
        flat = load(folder("nano")).process("image", image, {})
        assert load(tmp_path).process("image", image, {}) == flat

    def test_a_text_model_has_no_family(self, folder: FolderMaker) -> None:
        assert load_family(folder("llama"), "float32") is None

    def test_media_of_an_unknown_model_are_an_error_not_a_guess(self, tmp_path: Path) -> None:
        config = {"model_type": "clairvoyant", "vision_config": {}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelLoadError, match="clairvoyant"):
            load_family(tmp_path, "float32")

    def test_a_folder_without_config_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"has no config\.json"):
            load_family(tmp_path, "float32")

    @pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
    def test_a_file_that_is_no_json_is_named(
        self, folder: FolderMaker, tmp_path: Path, name: str
    ) -> None:
        (tmp_path / "config.json").write_bytes((folder("nano") / "config.json").read_bytes())
        (tmp_path / name).write_text("{ not json")
        with pytest.raises(ModelLoadError, match=name):
            load_family(tmp_path, "float32")

    def test_a_name_that_is_neither_folder_nor_hub_id_is_an_error(self) -> None:
        with pytest.raises(ModelLoadError):
            load_family("/no/such/folder", "float32")

    def test_loading_a_family_imports_neither_torch_nor_transformers(
        self, nano_folder: Path
    ) -> None:
        program = (
            "import sys\n"
            "from lookonce.render.families.registry import load_family\n"
            f"family = load_family({str(nano_folder)!r}, 'float32')\n"
            "family.fingerprint(), family.expansion_of_size('image', (64, 64), {})\n"
            "print([name for name in ('torch', 'transformers') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        assert done.stdout.strip() == b"[]"
