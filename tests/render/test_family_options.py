"""What a family takes of a request, and what makes it another family: options and fingerprints.

What it makes of pictures and sounds is specified in `test_family_pictures`, `test_family_sounds`
and, for folders as they are published, `test_family_published`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.families.registry import load_family
from tests.support.render import hugging_face
from tests.support.render.samples import PICTURE_KINDS, SOUND_KINDS, load, numpy_of, picture

FolderMaker = Callable[..., Path]
MEDIA_KINDS = tuple(dict.fromkeys((*PICTURE_KINDS, *SOUND_KINDS)))


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
        expected = hugging_face.image_processor(folder("nano"))(
            images=[image], size=size, return_tensors="np"
        )
        assert np.array_equal(numpy_of(item.arrays["pixel_values"]), expected["pixel_values"])

    @pytest.mark.parametrize(
        ("kind", "kwargs"),
        [
            ("pixtral", {"size": {"longest_edge": 64}}),
            ("mistral3", {"size": {"longest_edge": 96}}),
            ("idefics3", {"size": {"longest_edge": 40}}),
            ("idefics3", {"do_image_splitting": False}),
            ("smolvlm", {"size": {"longest_edge": 48}, "do_image_splitting": True}),
            ("qwen2_vl", {"size": {"shortest_edge": 3136, "longest_edge": 12544}}),
            ("qwen3_vl", {"size": {"shortest_edge": 4096, "longest_edge": 9000}}),
        ],
    )
    def test_options_change_arrays_and_prompt_as_in_the_full_processor(
        self, folder: FolderMaker, kind: str, kwargs: dict[str, object]
    ) -> None:
        """Whose image processor takes the same options by the same names."""
        family, image = load(folder(kind)), picture(300, 200)
        family.check_options(kwargs)
        options = family.item_options("image", kwargs)
        item = family.process("image", image, options)
        token = hugging_face.token(folder(kind), family.placeholder_token_id("image"))
        found = hugging_face.full_inputs(folder(kind), token, images=[[image]], **kwargs)
        theirs = np.asarray(found["pixel_values"])
        assert np.array_equal(numpy_of(item.arrays["pixel_values"]).ravel(), theirs.ravel())
        expansion = item.expansion.token_ids()
        assert list(found["input_ids"][0])[-len(expansion) :] == expansion
        assert item.expansion == family.expansion_of_size("image", image.size, options)
        family.check_processed(item)

    @pytest.mark.parametrize(
        ("kind", "kwargs"),
        [
            ("pixtral", {"size": {"longest_edge": 128}}),
            ("idefics3", {"size": {"longest_edge": 64}, "do_image_splitting": True}),
            ("qwen3_vl", {"size": {"longest_edge": 28224}}),
        ],
    )
    def test_what_the_folder_says_anyway_is_no_option(
        self, folder: FolderMaker, kind: str, kwargs: dict[str, object]
    ) -> None:
        """So that it is the same item, and held already."""
        assert load(folder(kind)).item_options("image", kwargs) == {}

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
            ("nano", {"min_pixels": -1}, "min_pixels"),
            ("nano", {"min_pixels": 0}, "min_pixels"),
            ("nano", {"max_pixels": 0}, "max_pixels"),
            ("nano", {"max_pixels": 9000, "size": {"longest_edge": 9001}}, "max_pixels"),
            ("nano", {"size": {"height": 3}}, "size"),
            ("nano", {"size": {"shortest_edge": 0.5}}, "min_pixels"),
            ("nano", {"size": 7}, "size"),
            ("nano", {"size": []}, "size"),
            ("qwen3_vl", {"do_resize": False}, "do_resize"),
            ("pixtral", {"size": {"longest_edge": 129}}, "size"),
            ("mistral3", {"size": {"longest_edge": 31}}, "size"),
            ("mistral3", {"size": {"longest_edge": 64, "shortest_edge": 64}}, "size"),
            ("mistral3", {"patch_size": 8}, "patch_size"),
            ("idefics3", {"size": {"longest_edge": 65}}, "size"),
            ("smolvlm", {"size": {"longest_edge": "64"}}, "size"),
            ("smolvlm", {"do_image_splitting": 1}, "do_image_splitting"),
            ("qwen2_audio", {"sampling_rate": 8000}, "sampling_rate"),
            ("voxtral", {"max_source_positions": 1}, "max_source_positions"),
        ],
    )
    def test_what_is_unknown_or_out_of_bounds_is_refused_by_name(
        self, folder: FolderMaker, kind: str, kwargs: dict[str, object], param: str
    ) -> None:
        with pytest.raises(BadRequestError) as raised:
            load(folder(kind)).check_options(kwargs)
        assert raised.value.param == f"mm_processor_kwargs.{param}"

    @pytest.mark.parametrize("kind", MEDIA_KINDS)
    def test_no_options_are_always_fine(self, folder: FolderMaker, kind: str) -> None:
        load(folder(kind)).check_options({})


class TestFamilies:
    def test_fingerprints_tell_folders_and_dtypes_apart(self, folder: FolderMaker) -> None:
        prints = [load(folder(kind)).fingerprint() for kind in MEDIA_KINDS]
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

    @pytest.mark.parametrize("setting", [{"do_pan_and_scan": True}, {"do_resize": False}])
    @pytest.mark.parametrize("nested", [False, True])
    def test_settings_of_gemma3_that_are_not_offered_are_refused(
        self, folder: FolderMaker, tmp_path: Path, setting: dict[str, bool], nested: bool
    ) -> None:
        (tmp_path / "config.json").write_bytes((folder("gemma3") / "config.json").read_bytes())
        config = json.loads((folder("gemma3") / "preprocessor_config.json").read_text()) | setting
        name = "processor_config.json" if nested else "preprocessor_config.json"
        (tmp_path / name).write_text(json.dumps({"image_processor": config} if nested else config))
        with pytest.raises(ModelLoadError, match=r"do_pan_and_scan|does not resize"):
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
