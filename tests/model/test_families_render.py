"""What the renderer's processors make of media is what the model's families take.

The two floors never import each other; they meet in the names and shapes of an item's arrays.
"""

from __future__ import annotations

import pytest
import torch

from lookonce.config import ModelConfig
from lookonce.model.encoder_runner import item_tensors
from lookonce.model.loader import load_model
from lookonce.render.families.registry import load_family
from tests.support.model.cases import CaseMaker, picture, sound
from tests.support.render.samples import PICTURE_KINDS, SOUND_KINDS

MEDIA = [
    *((kind, "image") for kind in PICTURE_KINDS),
    *((kind, "audio") for kind in SOUND_KINDS),
]


@pytest.mark.parametrize(("kind", "modality"), MEDIA)
@torch.inference_mode()
def test_rendered_items_are_encoded_as_hugging_faces(folder, kind, modality):
    family = load_model(ModelConfig(folder=str(folder(kind)), served_name="m")).family
    processing = load_family(folder(kind), "float32")
    medium = picture(5, 150, 90) if modality == "image" else sound(5, 0.7)
    theirs = next(iter(CaseMaker(folder(kind), family.config).case(medium).items.values()))
    ours = processing.process(modality, medium, processing.item_options(modality, {}))
    encoded = [
        family.encode(
            modality, [item_tensors(item, dtype=torch.float32, device=torch.device("cpu"))]
        )[0]
        for item in (ours, theirs)
    ]
    assert ours.expansion.num_embeds == len(encoded[0])
    torch.testing.assert_close(*encoded, rtol=0, atol=2e-3)
