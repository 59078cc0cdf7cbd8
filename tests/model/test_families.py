"""Every family encodes a batch as it encodes each item alone, and refuses malformed items."""

from __future__ import annotations

import pytest
import torch

from lookonce.config import ModelConfig
from lookonce.errors import ModelLoadError
from lookonce.model.encoder_runner import item_tensors
from lookonce.model.families.registry import FAMILIES, family_for
from lookonce.model.loader import load_model
from lookonce.render.families.registry import FAMILIES as RENDER_FAMILIES
from lookonce.types.model import EMBEDDERS, SUPPORTED
from tests.support.model.cases import CaseMaker, picture, sound

BATCHED = [
    *((kind, "image") for kind in ("llava", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")),
    *((kind, modality) for kind in ("qwen2_5_omni", "nano") for modality in ("image", "audio")),
    ("qwen2_audio", "audio"),
    ("voxtral", "audio"),
]
ALONE = ("pixtral", "mistral3", "idefics3", "smolvlm")


def encoded(folder, kind, modality):
    """The family, and tensors and expansions of three different items."""
    loaded = load_model(ModelConfig(folder=str(folder(kind)), served_name="m"))
    maker = CaseMaker(folder(kind), loaded.family.config)
    if modality == "image":
        media = [picture(1), picture(2, 150, 60), picture(3, 60, 130)]
    else:
        media = [sound(1, 0.4), sound(2, 1.01), sound(3, 2.5)]
    items = [item for medium in media for item in maker.case(medium).items.values()]
    cpu = torch.device("cpu")
    tensors = [item_tensors(item, dtype=torch.float32, device=cpu) for item in items]
    return loaded.family, tensors, [item.expansion for item in items]


def copies(items):
    return [{name: tensor.clone() for name, tensor in item.items()} for item in items]


def assert_unchanged(items, before):
    """Inputs are the memory that messages came in, and later requests read it again."""
    for item, kept in zip(items, before, strict=True):
        assert all(torch.equal(tensor, kept[name]) for name, tensor in item.items())


@pytest.mark.parametrize(("kind", "modality"), BATCHED)
@torch.inference_mode()
def test_a_batch_is_encoded_as_each_item_alone(folder, kind, modality):
    family, tensors, expansions = encoded(folder, kind, modality)
    assert len({family.batch_key(modality, item) for item in tensors}) == 1
    before = copies(tensors)
    together = family.encode(modality, tensors)
    assert_unchanged(tensors, before)
    for item, rows, expansion in zip(tensors, together, expansions, strict=True):
        assert rows.shape == (expansion.num_embeds, family.row_width)
        torch.testing.assert_close(rows, family.encode(modality, [item])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ALONE)
@torch.inference_mode()
def test_items_of_other_families_are_encoded_alone(folder, kind):
    family, tensors, expansions = encoded(folder, kind, "image")
    for item, expansion in zip(tensors, expansions, strict=True):
        assert family.batch_key("image", item) is None
        before = copies([item])
        (rows,) = family.encode("image", [item])
        assert_unchanged([item], before)
        assert rows.shape == (expansion.num_embeds, family.row_width)


@torch.inference_mode()
def test_a_grid_that_does_not_match_its_patches_is_refused(folder):
    """Also where the product is right, of negative numbers or of 64 bits."""
    family, tensors, _ = encoded(folder, "qwen2_5_vl", "image")
    patches, odd = len(tensors[0]["pixel_values"]), (1 << 62) + 1
    wrapped = patches * pow(odd, -1, 1 << 64) % (1 << 64)
    wrapped -= (wrapped >> 63) << 64
    for grid in ([1, 10_000, 10_000], [1, -1, -patches], [1, odd, wrapped]):
        wrong = {**tensors[0], "image_grid_thw": torch.tensor(grid)}
        with pytest.raises(ValueError, match="image_grid_thw"):
            family.encode("image", [wrong])


class TestIdefics3Tiles:
    """Hugging Face takes a tile of zeros for padding of a batch, and drops it."""

    @staticmethod
    def item(folder, kind="idefics3"):
        family, tensors, expansions = encoded(folder, kind, "image")
        return family, tensors[0], expansions[0]

    @pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
    @torch.inference_mode()
    def test_a_tile_of_zeros_keeps_its_rows(self, folder, kind):
        family, item, expansion = self.item(folder, kind)
        pixels = item["pixel_values"].clone()
        pixels[1] = 0
        (rows,) = family.encode("image", [{**item, "pixel_values": pixels}])
        assert len(rows) == expansion.num_embeds
        theirs = torch.cat(family.model.model.get_image_features(pixels[None]).pooler_output)
        tiles = rows.view(len(pixels), -1, family.row_width)
        torch.testing.assert_close(torch.cat([tiles[0], *tiles[2:]]), theirs, rtol=0, atol=1e-5)

    @torch.inference_mode()
    def test_patches_of_padding_are_not_seen(self, folder):
        family, item, _ = self.item(folder)
        mask = torch.ones_like(item["pixel_attention_mask"])
        mask[0, 20:] = 0
        padded = {**item, "pixel_attention_mask": mask}
        (rows,) = family.encode("image", [padded])
        theirs = family.model.model.get_image_features(
            item["pixel_values"][None], pixel_attention_mask=mask[None].bool()
        ).pooler_output
        torch.testing.assert_close(rows, torch.cat(theirs), rtol=0, atol=1e-5)
        (unmasked,) = family.encode("image", [item])
        assert (rows - unmasked).abs().max() > 1e-2


@torch.inference_mode()
def test_a_text_model_takes_no_pictures(folder):
    family = load_model(ModelConfig(folder=str(folder("llama")), served_name="m")).family
    with pytest.raises(ValueError, match="takes no image"):
        family.encode("image", [{}])


SEES = {"vision_config": {}, "image_token_id": 5}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llamma"}, r"knows no such type.*did you mean llama"),
        ({"model_type": "qwen2_5_v1", **SEES}, r"knows no such type.*did you mean qwen2_5_vl"),
        ({"model_type": "vitdet"}, r"knows no text model"),
        ({}, "its config.json names no model_type"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "it is an encoder-decoder"),
    ],
)
def test_an_unknown_type_is_refused_with_the_reason_and_the_nearest_ones(config, message):
    with pytest.raises(ModelLoadError, match=message):
        family_for(config)


def test_both_floors_serve_the_types_that_are_promised_with_the_same_media():
    render = {name: family.modalities for name, family in RENDER_FAMILIES.items()}
    model = {name: family.modalities for name, family in FAMILIES.items()}
    served = SUPPORTED | EMBEDDERS
    assert model == served
    assert render == {name: modalities for name, modalities in served.items() if modalities}
