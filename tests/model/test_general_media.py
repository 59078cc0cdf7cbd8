"""Models with media and no family of their own: answered like transformers, or refused.

A few types here; every listed type in `make test-models`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from transformers.utils import is_torchvision_available

from lookonce.config import MediaConfig, ModelConfig
from lookonce.errors import BadRequestError, LookOnceError, ModelLoadError
from lookonce.model.families.general import DeeperRows, GeneralMediaFamily
from lookonce.model.families.registry import FAMILIES
from lookonce.model.input_batch import NumberedPictures
from lookonce.model.loader import load_model
from lookonce.model.proof import _cuts_inside, largest, prove_media
from lookonce.render.families.arrays import int64_array
from lookonce.render.families.general import GeneralProcessing
from lookonce.render.families.registry import FAMILIES as RENDER_FAMILIES
from lookonce.render.families.registry import load_family, media_examples
from lookonce.render.media.external_items import item_from_arrays
from lookonce.render.media.processing import processing_settings
from lookonce.render.media.worker import load_decoders, warm_up
from lookonce.render.prompt.encoder import ChatOptions, load_encoder
from lookonce.types.media import EVERY_TOKEN, Expansion, MediaExample
from lookonce.types.model import (
    FILMS_AS_PICTURES,
    GENERAL_MEDIA,
    SUPPORTED,
    UNSERVABLE,
    UNSERVABLE_MEDIA,
    check_served,
    unsupported,
)
from tests.support.model.cases import MAX_LOGIT_ERROR, Case, picture
from tests.support.model.chats import render
from tests.support.model.copies import copied
from tests.support.model.listed import assert_as_listed
from tests.support.model.serving import (
    Subject,
    assert_parity,
    blocks_for_preemption,
    compare,
    expected_answers,
    load_general,
    missing_library,
    serve,
)
from tests.support.model_folders.general_media import VARIANTS
from tests.support.model_folders.make import GENERAL_MEDIA_KINDS

SAMPLE = (
    "internvl",  # tiles, with text tokens around each picture's
    "glm4v",  # positions on three axes
    "qwen3_asr",  # sound, one in a prompt
)
REFUSED = {
    "pp_chart2table": "has places for",  # its template writes the tokens of a picture
}
NEW = ("cosmos3_omni", "cosmos3_edge", "cohere_compass", "glmga", "got_ocr2")
"""Types that are served with nothing of ours but their name in `GENERAL_MEDIA`."""
ALL = bool(os.environ.get("ALL_MODELS"))
BLOCK = 4


@pytest.fixture(scope="module", params=[*GENERAL_MEDIA, *VARIANTS] if ALL else SAMPLE)
def subject(request, subjects) -> Subject:
    if library := missing_library(request.param):
        pytest.skip(f"it needs {library}")
    return subjects(f"media:{request.param}")


def test_every_listed_type_has_a_random_folder():
    assert set(GENERAL_MEDIA_KINDS) == {*GENERAL_MEDIA, *REFUSED}


@pytest.mark.parametrize("model_type", REFUSED if ALL else tuple(REFUSED)[:1])
def test_what_differs_is_refused_with_the_reason(folder, monkeypatch, model_type):
    monkeypatch.setattr("lookonce.types.model.UNSERVABLE_MEDIA", {})
    with pytest.raises(ModelLoadError, match=REFUSED[model_type]):
        load_general(folder(f"media:{model_type}"))


def test_a_folder_without_the_settings_of_its_processor_is_refused(folder, tmp_path):
    """By the engine and by media workers: whichever comes first, nothing is started again."""
    lacking = copied(folder("media:vipllava"), tmp_path)
    (lacking / "processor_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"model of type 'vipllava' cannot be served.*refuses"):
        media_examples(lacking, "float32")
    model = ModelConfig(folder=str(lacking), served_name="m")
    decoders = load_decoders(processing_settings(model, MediaConfig()))
    with pytest.raises(ModelLoadError, match=r"of a sample.*processor refuses the image.*NoneType"):
        warm_up(decoders)


def test_a_type_is_listed_once():
    reasons = {**UNSERVABLE, **UNSERVABLE_MEDIA}
    listed = [*GENERAL_MEDIA, *SUPPORTED, *(name for types in reasons.values() for name in types)]
    assert len(listed) == len(set(listed))


def test_a_type_with_a_text_model_that_is_not_served_is_refused_for_that_reason():
    config = {
        "model_type": "griffin_vl",
        "text_config": {"model_type": "recurrent_gemma"},
        "vision_config": {},
    }
    with pytest.raises(ModelLoadError, match="keep another state than keys and values"):
        check_served(config)


def test_a_refused_type_is_not_told_to_be_itself():
    assert "mean internvl" not in str(unsupported("internvl", "its logits differ"))
    assert "did you mean internvl" in str(unsupported("internvl9"))


def test_the_media_are_those_that_are_listed(subject):
    info = subject.loaded.info
    takes = GENERAL_MEDIA[info.model_type]
    if info.model_type not in FILMS_AS_PICTURES and not is_torchvision_available():
        takes = tuple(each for each in takes if each != "video")
    has_ears = getattr(subject.loaded.family.config, "audio_config", True) is not None
    if not has_ears:
        takes = tuple(each for each in takes if each != "audio")
    assert info.modalities == takes


def least_budget(subject: Subject) -> int:
    """Tokens of a step that can hold what is computed whole."""
    info = subject.loaded.info
    longest = max(len(case.token_ids) for case in subject.cases)
    return max(info.largest_unsplittable, longest if info.longest_bidirectional_prompt else 0)


def test_it_is_what_lookonce_models_says(subject):
    assert_as_listed(subject.loaded)


@pytest.mark.parametrize("budget", [16, 64])
def test_mixed_batches_and_prefix_hits_change_no_token(subject, budget):
    budget = max(budget, least_budget(subject))
    served = serve(subject.loaded, subject.cases, budget=budget)
    assert served.stats["prefix_cache_hits_total"] > 0
    assert_parity(served, subject.expected)


def test_forced_preemption_changes_no_token(subject):
    """Two prompts fit, their answers do not: the later one, which has media, is preempted."""
    cases, expected = ([all_[i] for i in (1, 0)] for all_ in (subject.cases, subject.expected))
    num_blocks = blocks_for_preemption(cases, BLOCK)
    budget = max(32, least_budget(subject))
    served = serve(subject.loaded, cases, budget=budget, num_blocks=num_blocks, block_size=BLOCK)
    assert served.stats["num_preemptions_total"] > 0
    assert_parity(served, expected)


@pytest.mark.parametrize("model_type", NEW if ALL else NEW[:1])
def test_a_type_that_is_not_listed_is_tried(folder, monkeypatch, model_type):
    monkeypatch.setattr("lookonce.types.model.GENERAL_MEDIA", {})
    info = load_general(folder(f"media:{model_type}")).info
    assert info.modalities == ("image",)
    family = load_family(folder(f"media:{model_type}"), "float32")
    assert family.modalities == ("image",)


def test_a_prompt_with_more_items_than_its_processor_takes_is_refused(folder):
    with pytest.raises(BadRequestError, match="2 parts of type image, 1 are allowed"):
        render(folder("media:idefics2"), ("See ", picture(1), " and ", picture(2)))


def test_processed_items_are_refused(folder):
    family = load_family(folder("media:internvl"), "float32")
    item = family.process("image", picture(1), {})
    with pytest.raises(BadRequestError, match="takes no processed image items"):
        item_from_arrays(family, "image", item.arrays)
    family.check_processed(item)
    for wrong in (
        replace(item, expansion=Expansion(item.expansion.runs, item.expansion.embed_token_id + 1)),
        replace(item, expansion=replace(item.expansion, grid=(1, 2, 2))),
        replace(item, arrays={**item.arrays, "image_grid_thw": int64_array(1, 1 << 30, 1 << 30)}),
    ):
        with pytest.raises(LookOnceError):
            family.check_processed(wrong)


def test_items_whose_every_token_takes_a_row_pass_the_check(folder):
    family = load_family(folder("media:ovis2"), "float32")
    item = family.process("image", picture(1), {})
    assert item.expansion.embed_token_id == EVERY_TOKEN
    family.check_processed(item)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_passes(folder, dtype):
    load_general(folder("media:internvl"), dtype=dtype)


# --- what the comparison at load finds ----------------------------------------------------------


@pytest.fixture(scope="module")
def proven(folder) -> tuple[GeneralMediaFamily, tuple[MediaExample, ...]]:
    path = folder("media:internvl")
    family = load_general(path).family
    assert isinstance(family, GeneralMediaFamily)
    return family, media_examples(path, "float32")


def assert_refused(family, examples, reason: str = "logits differ") -> None:
    with pytest.raises(ModelLoadError, match=reason):
        prove_media(family, examples, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "encoder", "attention"),
    [
        ("media:internvl", "features", "causal"),
        ("media:cosmos3_omni", "forward", "causal"),
        ("media:paligemma", "features", "prompts"),
        ("text:granite", None, "causal"),
    ],
)
def test_what_was_found_is_kept_and_logged(folder, caplog, kind, encoder, attention):
    """In one line; `/server_info` shows it."""
    with caplog.at_level("INFO", "lookonce.model.loader"):
        info = load_general(folder(kind)).info
    found = info.comparison
    assert found is not None
    assert 0 < found.error < 1e-4 < found.allowed
    assert (found.encoder, found.attention) == (encoder, attention)
    assert found.modalities == info.modalities
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"compared {info.model_type} with transformers: {found}"
    assert f"differ by {found.error:.1e}" in line


def test_the_comparison_passes_without_a_fault(proven):
    assert prove_media(*proven, torch.float32, torch.device("cpu")) < 1e-4


def test_without_prompts_nothing_is_served(folder):
    config = ModelConfig(folder=str(folder("media:internvl")), served_name="test")
    with pytest.raises(ModelLoadError, match="no prompts with media"):
        load_model(config)


def test_items_in_another_order_are_found(proven):
    """Two pictures of one size, each in the other's place."""
    family, examples = proven
    single, several, *films = examples
    (first, one), between, (last, other) = several.items
    assert one.expansion == other.expansion
    swapped = msgspec.structs.replace(several, items=((first, other), between, (last, one)))
    assert_refused(family, (single, swapped, *films))


class Reversed:
    """`encode` that gives an item's rows in the wrong order."""

    def __init__(self, encode) -> None:
        self._encode = encode

    def __call__(self, modality, items):
        return [rows.flip(0) for rows in self._encode(modality, items)]


def test_rows_in_another_order_are_found(proven, monkeypatch):
    family, examples = proven
    monkeypatch.setattr(family, "encode", Reversed(family.encode))
    assert_refused(family, examples)


def test_films_that_differ_are_not_served_and_pictures_are(proven, monkeypatch, caplog):
    family, examples = proven
    encode = family.encode

    def wrong_films(modality, items):
        rows = encode(modality, items)
        return [each.flip(0) for each in rows] if modality == "video" else rows

    with monkeypatch.context() as patch:
        patch.setattr(family, "encode", wrong_films)
        assert prove_media(family, examples, torch.float32, torch.device("cpu")) < 1e-4
    assert family.modalities == ("image",)
    assert "films are not served: this model of type 'internvl'" in caplog.text
    prove_media(family, examples, torch.float32, torch.device("cpu"))
    assert family.modalities == ("image", "video")


def test_films_that_no_prompt_can_be_made_of_are_not_served(folder, monkeypatch, caplog):
    def refuse(self, frames):
        raise ModelLoadError("no film")

    monkeypatch.setattr(GeneralProcessing, "_film_example", refuse)
    assert load_general(folder("media:internvl")).info.modalities == ("image",)
    assert "films are not served" in caplog.text


def test_rows_of_another_number_are_found(proven, monkeypatch):
    family, examples = proven
    encode = family.encode
    monkeypatch.setattr(family, "encode", lambda *given: [rows[1:] for rows in encode(*given)])
    assert_refused(family, examples, "has places for")


class Shifted(nn.Module):
    """A decoder whose every chunk begins at position 0."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, *, position_ids, **arguments):
        return self.decoder(position_ids=position_ids - position_ids[..., :1], **arguments)


def test_shifted_positions_are_found(proven, monkeypatch):
    family, examples = proven
    monkeypatch.setattr(family, "decoder", Shifted(family.decoder))
    assert_refused(family, examples)


# --- what some types have beside rows of embeddings ---------------------------------------------


def load_with_examples(path) -> tuple[GeneralMediaFamily, tuple[MediaExample, ...]]:
    family = load_general(path).family
    assert isinstance(family, GeneralMediaFamily)
    return family, media_examples(path, "float32")


needs_all = pytest.mark.skipif(not ALL, reason="in `make test-models`")


def test_features_for_later_layers_that_are_dropped_are_found(folder, monkeypatch):
    family, examples = load_with_examples(folder("media:cosmos3_omni"))
    assert family.row_width == 3 * family.hidden_size
    monkeypatch.setattr(DeeperRows, "arguments", lambda *_: {})
    assert_refused(family, examples)


@needs_all
def test_features_for_other_layers_are_found(folder, monkeypatch):
    """Granite Vision names the layers that get them."""
    family, examples = load_with_examples(folder("media:granite4_vision"))
    arguments = DeeperRows.arguments
    monkeypatch.setattr(
        DeeperRows, "arguments", lambda *given: arguments(*given[:-1], list(given[-1])[::-1])
    )
    assert_refused(family, examples)


@needs_all
def test_kinds_of_tokens_that_are_dropped_are_found(folder, monkeypatch):
    family, examples = load_with_examples(folder("media:ernie4_5_vl_moe"))
    monkeypatch.setattr(family, "step_arguments", lambda *_: {})
    assert_refused(family, examples)


@needs_all
def test_tokens_around_rows_that_take_none_are_found(folder, monkeypatch):
    path = folder("media:ovis2")
    assert load_with_examples(path)[0].merges
    for module in ("model.families.general", "render.families.general"):
        monkeypatch.setattr(f"lookonce.{module}.media_token", plain_token)
    with pytest.raises(ModelLoadError, match="logits differ"):
        load_general(path)


def plain_token(config, modality) -> int:
    return int(config["image_token_id"])


@needs_all
def test_embeddings_of_each_layer_that_are_dropped_are_found(folder, monkeypatch):
    family, examples = load_with_examples(folder("media:gemma4"))
    assert len({layer.head_dim for layer in family._attention}) == 2
    given = family.step_arguments

    def zeros(*arguments):
        return {name: torch.zeros_like(value) for name, value in given(*arguments).items()}

    monkeypatch.setattr(family, "step_arguments", zeros)
    assert_refused(family, examples)


@needs_all
def test_an_item_longer_than_a_window_is_refused(folder, without_own):
    """Where items attend to themselves in both directions, what lies beyond a window differs, and
    none that was compared was as long."""
    family = without_own(folder("gemma3"))[0].family
    family.attend_both_ways(("image",), 6)
    with pytest.raises(ValueError, match="the image has 40 tokens, but the model's sliding window"):
        family.encode("image", [{"input_ids": torch.zeros(1, 40, dtype=torch.int64)}])


# --- own families' types, served without them ---------------------------------------------------


@pytest.fixture
def without_own(monkeypatch):
    """Loads a kind as if its type had no family of its own."""

    def load(path):
        model_type = json.loads((path / "config.json").read_text())["model_type"]
        for families in (FAMILIES, RENDER_FAMILIES):
            monkeypatch.delitem(families, model_type)
        loaded = load_general(path)
        assert isinstance(loaded.family, GeneralMediaFamily)
        return loaded, media_examples(path, "float32")

    return load


def test_pictures_that_attend_both_ways_are_not_cut(folder, without_own, monkeypatch):
    loaded, examples = without_own(folder("gemma3"))
    assert loaded.info.unsplittable == ("image",)
    assert loaded.info.comparison.attention == "items"
    assert loaded.info.largest_unsplittable == loaded.family.config.mm_tokens_per_image
    with monkeypatch.context() as patch:
        patch.setattr("lookonce.model.proof._cuts_outside", _cuts_inside)
        assert_refused(loaded.family, examples)
    with monkeypatch.context() as patch:
        patch.setattr("lookonce.model.proof._spans_both_ways", lambda *_: [])
        assert_refused(loaded.family, examples)
    assert prove_media(loaded.family, examples, torch.float32, torch.device("cpu")) < 1e-4


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_on_three_axes_are_found(folder, without_own, kind):
    loaded, examples = without_own(folder(kind))
    assert loaded.family.position_axes == 3
    grid = [item.expansion.grid for example in examples for _, item in example.items]
    assert None not in grid
    without = tuple(
        msgspec.structs.replace(
            example, items=tuple((start, _without_grid(item)) for start, item in example.items)
        )
        for example in examples
    )
    assert_refused(loaded.family, without)


def test_prompts_that_attend_both_ways_are_found(folder, monkeypatch):
    """PaliGemma; not its pictures alone, and no chunk of a prompt."""
    path = folder("media:paligemma")
    family, examples = load_with_examples(path)
    assert family.bidirectional_prompts
    assert not family.unsplittable
    with monkeypatch.context() as patch:
        patch.setattr(
            "lookonce.model.proof._spans_both_ways", lambda _, chunk: [(0, chunk.end - 1)]
        )
        assert_refused(family, examples)
    with monkeypatch.context() as patch:
        patch.setattr("lookonce.model.proof._error_over_prompts", lambda *_: math.inf)
        assert_refused(family, examples)


@pytest.mark.parametrize("kind", ["paligemma", "paligemma-gemma"])
def test_texts_without_a_picture_are_read_as_transformers_reads_them(folder, kind):
    """PaliGemma 2 causally. PaliGemma 1 both ways: its layers say that they are not causal, and
    transformers makes them no mask. Budgets that cut them where that changes nothing."""
    path = folder(f"media:{kind}")
    loaded = load_general(path)
    assert loaded.info.causal_texts == (kind == "paligemma")
    texts = [np.arange(5, 5 + length, dtype=np.int64) for length in (9, 30, 20)]
    cases = [
        Case(ids.astype(np.int32), (), {}, {"input_ids": torch.from_numpy(ids)[None]})
        for ids in texts
    ]
    budget = 16 if loaded.info.causal_texts else 40
    served = serve(loaded, cases, budget=budget)
    expected = expected_answers(path, loaded.info, cases)
    assert_parity(served, expected)
    other_way = replace(loaded.info, causal_texts=not loaded.info.causal_texts)
    wrong = serve(loaded, cases, budget=40, info=other_way)
    assert compare(wrong.answers, expected).max_logit_error > 10 * MAX_LOGIT_ERROR


def test_a_prompt_is_no_longer_than_the_shortest_window(folder):
    """transformers lets a prompt see beyond it."""
    assert load_general(folder("media:paligemma")).info.longest_bidirectional_prompt == 64


def test_a_folder_without_a_chat_template_has_that_of_its_type(folder, tmp_path):
    """As PaliGemma is published: the picture and the text, as transformers' processor completes
    them."""
    without = copied(folder("media:paligemma"), tmp_path)
    (without / "chat_template.jinja").unlink()
    family = load_family(without, "float32")
    encoder = load_encoder(str(without), None, family)
    content = [{"type": "text", "text": "what is it?"}, {"type": "image"}]
    prompt = asyncio.run(encoder.encode_chat([{"role": "user", "content": content}], ChatOptions()))
    assert prompt.text == "<image><bos>what is it?\n"


def test_pictures_on_an_axis_of_their_own_are_found(folder, monkeypatch):
    """HunYuanVL: the second picture of a prompt has another number than the first."""
    path = folder("media:hunyuan_vl")
    family, examples = load_with_examples(path)
    assert (family.numbers_pictures, family.position_axes) == (True, 4)
    with monkeypatch.context() as patch:
        patch.setattr(family, "numbers_pictures", False)
        assert_refused(family, examples)
    fill = NumberedPictures._fill_item

    def all_first(self, item, first, last, out):
        fill(self, item, first, last, out)
        out[2] = 0

    monkeypatch.setattr(NumberedPictures, "_fill_item", all_first)
    assert_refused(family, examples)


def _without_grid(item):
    expansion = msgspec.structs.replace(item.expansion, grid=None)
    return msgspec.structs.replace(item, expansion=expansion)


def test_an_error_that_is_not_a_number_is_the_largest() -> None:
    assert largest([0.1, 0.3]) == 0.3
    assert math.isnan(largest([0.1, math.nan]))
