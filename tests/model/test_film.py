"""Films: answered like transformers, and looked at frame by frame."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.utils import is_torchvision_available

from lookonce.config import ModelConfig
from lookonce.errors import BadRequestError, TooLargeError
from lookonce.model.input_batch import MropePositions
from lookonce.model.loader import load_model
from lookonce.render.families.film import FilmInfo, plain_film
from lookonce.render.families.registry import load_family
from lookonce.types.media import MediaFeature
from lookonce.types.model import (
    FILMS_BY_FRAME,
    FILMS_BY_PAIR,
    GENERAL_MEDIA,
    WHOLE_FILMS,
    general_modalities,
)
from lookonce.types.request import RenderedPrompt
from tests.support.model.cases import ALL_MODELS, Case, picture
from tests.support.model.chats import PoolInProcess, make_renderer, render_content, sent_part
from tests.support.model.copies import copied
from tests.support.model.films import VIDEO_TYPES, film_part, film_reference
from tests.support.model.serving import (
    Subject,
    assert_parity,
    compare,
    expected_answers,
    load_general,
    missing_library,
    serve,
)

KINDS = (
    *("qwen2_5_vl", "qwen3_vl", "media:internvl", "qwen3_omni"),
    *(("qwen2_vl", "qwen3_5") if ALL_MODELS else ()),
)
FILMS = ((0, 1, 2, 3, 4), (2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6, 7))
"""A film with an odd number of frames; a window of it that moved on; a longer cut."""
FPS = 2.0
"""Qwen3-Omni's films take a rate at which two frames are a whole number of positions long."""
SLOW_FPS = 0.25
"""So slow that the positions of the film reach beyond those of the text after it."""


def message(numbers: Sequence[int], fps: float = FPS) -> list[dict[str, object]]:
    text = [{"type": "text", "text": text} for text in ("See: ", " what is it?")]
    content = [text[0], film_part(numbers, fps), text[1]]
    return [{"role": "user", "content": content}]


def film_case(folder: Path, numbers: Sequence[int], pool: PoolInProcess, fps: float = FPS) -> Case:
    prompt = asyncio.run(make_renderer(folder, pool).render_chat(message(numbers, fps)))
    items = {item.key: item.item for item in prompt.items if item.item is not None}
    reference = film_reference(folder, "See: ", numbers, " what is it?", fps)
    return Case(np.array(prompt.token_ids, np.int32), prompt.features, items, reference)


@pytest.fixture(scope="module", params=KINDS)
def subject(request, folder) -> Subject:
    path = folder(request.param)
    if request.param.startswith("media:"):
        loaded = load_general(path)
    else:
        loaded = load_model(ModelConfig(folder=str(path), served_name="test"))
    pool = PoolInProcess(path)
    films = FILMS[:2] if request.param == "qwen3_omni" else FILMS  # whose frames are large
    cases = [film_case(path, numbers, pool) for numbers in films]
    return Subject(loaded, cases, expected_answers(path, loaded.info, cases))


def test_a_film_has_the_tokens_that_transformers_gives_it(subject):
    assert "video" in subject.loaded.info.modalities
    for case in subject.cases:
        assert case.token_ids.tolist() == case.reference["input_ids"][0].tolist()


@pytest.mark.parametrize("budget", [16, 256])
def test_films_change_no_token(subject, budget):
    """Chunks cut films between frames and inside them; the last two films share frames."""
    cases = [*subject.cases, subject.cases[0]]
    served = serve(subject.loaded, cases, budget=budget)
    assert served.stats["encoder_cache_hits_total"] > 0
    assert served.stats["prefix_cache_hits_total"] > 0
    assert_parity(served, [*subject.expected, subject.expected[0]])


def test_frames_in_another_order_are_another_film(subject):
    """Negative control: the items of a film exchanged."""
    case = subject.cases[0]
    keys = [feature.key for feature in case.features]
    order = [keys[1], keys[0], *keys[2:]]
    features = tuple(
        msgspec.structs.replace(feature, key=key)
        for feature, key in zip(case.features, order, strict=True)
    )
    wrong = Case(case.token_ids, features, case.items, case.reference)
    served = serve(subject.loaded, [wrong], budget=256)
    assert compare(served.answers, subject.expected[:1]).max_logit_error > 1e-3


def test_positions_that_are_shifted_in_time_are_another_film(subject):
    """Negative control: the items of a film stand alone, one after the other."""
    case = subject.cases[0]
    if case.features[0].film_time is None:
        pytest.skip("this model's films are told apart by text")
    features = tuple(msgspec.structs.replace(each, film_time=None) for each in case.features)
    wrong = Case(case.token_ids, features, case.items, case.reference)
    served = serve(subject.loaded, [wrong], budget=256)
    assert compare(served.answers, subject.expected[:1]).max_logit_error > 1e-3


def test_text_that_does_not_go_on_after_a_films_time_differs(subject, monkeypatch):
    """Negative control, for models whose text does."""
    family = type(subject.loaded.family)
    if not family.text_after_film_time:
        pytest.skip("this model's text goes on after the size of the frames")
    monkeypatch.setattr(family, "text_after_film_time", False)
    served = serve(subject.loaded, subject.cases[:1], budget=256)
    assert compare(served.answers, subject.expected[:1]).max_logit_error > 1e-3


def test_a_film_whose_time_reaches_beyond_the_text_after_it(folder):
    """`generate` goes on at the prompt's last position all the same. The same items at another rate
    are other blocks: their keys depend on positions."""
    path = folder("qwen2_5_vl")
    loaded = load_model(ModelConfig(folder=str(path), served_name="test"))
    pool = PoolInProcess(path)
    cases = [film_case(path, FILMS[0], pool, fps) for fps in (FPS, SLOW_FPS)]
    slow = cases[1]
    assert (slow.features[-1].film_time or 0) > len(slow.token_ids) - slow.features[-1].end
    assert slow.items.keys() == cases[0].items.keys()
    # So many of the first that its blocks are held when the second comes.
    served = serve(loaded, [cases[0]] * 30 + [slow], budget=256)
    expected = expected_answers(path, loaded.info, cases)
    assert served.stats["prefix_cache_hits_total"] > 0
    assert_parity(served, [expected[0]] * 30 + [expected[1]])


def test_films_through_video_processors_are_listed():
    assert set(VIDEO_TYPES) == {*FILMS_BY_FRAME, *FILMS_BY_PAIR, *WHOLE_FILMS}
    assert all("video" in GENERAL_MEDIA[name] for name in VIDEO_TYPES)
    named = {"model_type": "gemma4", "vision_config": {}, "image_token_id": 5}
    assert general_modalities(named) == ("image",)
    assert general_modalities({**named, "video_token_id": 6}) == ("image", "video")


@pytest.fixture(scope="module", params=VIDEO_TYPES if ALL_MODELS else VIDEO_TYPES[:1])
def watching(request, folder) -> Subject:
    """Of a type without a family of its own, whose films transformers' video processor makes."""
    if not is_torchvision_available() or missing_library(request.param):
        pytest.skip("it needs torchvision, or timm")
    path = folder(f"media:{request.param}")
    loaded, pool = load_general(path), PoolInProcess(path)
    cases = [film_case(path, numbers, pool, 0.7) for numbers in FILMS]
    return Subject(loaded, cases, expected_answers(path, loaded.info, cases))


@pytest.mark.parametrize("budget", [80, 512])
def test_films_of_video_processors_change_no_token(watching, budget):
    """At a rate other than the one that loading compared them at."""
    for case in watching.cases:
        assert case.token_ids.tolist() == case.reference["input_ids"][0].tolist()
    served = serve(watching.loaded, [*watching.cases, watching.cases[0]], budget=budget)
    assert served.stats["prefix_cache_hits_total"] > 0
    assert_parity(served, [*watching.expected, watching.expected[0]])


def test_frames_of_video_processors_in_another_order_are_another_film(watching):
    """Negative control: the film's frames turned round."""
    first, path = watching.cases[0], Path(watching.loaded.info.name)
    other = film_case(path, FILMS[0][::-1], PoolInProcess(path), 0.7)
    if other.token_ids.tolist() != first.token_ids.tolist():
        pytest.skip("this model leaves out parts of frames that are as those before")
    wrong = Case(first.token_ids, other.features, other.items, first.reference)
    served = serve(watching.loaded, [wrong], budget=512)
    assert compare(served.answers, watching.expected[:1]).max_logit_error > 1e-3


def frames_of_item(watching: Subject) -> int:
    """Of a film of four."""
    kind = watching.loaded.info.model_type
    return 1 if kind in FILMS_BY_FRAME else 2 if kind in FILMS_BY_PAIR else 4


def test_a_film_is_looked_at_frame_by_frame_where_frames_are_encoded_alone(watching):
    """A window that moved on makes only new frames, or pairs; a whole film is made anew."""
    path = Path(watching.loaded.info.name)
    renderer, size = make_renderer(path, PoolInProcess(path)), frames_of_item(watching)
    by = size if size < 4 else 1
    first, moved = (rendered(renderer, numbers) for numbers in (range(4), range(by, 4 + by)))
    assert [item.outcome for item in first.items] == ["miss"] * (4 // size)
    assert [item.outcome for item in moved.items] == ["hit"] * (4 // size - 1) + ["miss"]
    assert sum(item.num_frames or 0 for item in moved.items) == 4


def test_a_whole_film_with_more_pixels_than_a_worker_holds_is_refused(watching):
    path = Path(watching.loaded.info.name)
    family = load_family(path, "float32")
    large = FilmInfo(20, 1.0, 3000, 2000, chosen=True)
    if (size := frames_of_item(watching)) < 4:
        assert len(family.film_layout(large, {}, 768).items) == 20 // size
        return
    with pytest.raises(TooLargeError, match="20 frames of 3000 x 2000"):
        family.film_layout(large, {}, 768)


@pytest.mark.parametrize("bounds", [(3136, 22_000), (60_000, 90_000)], ids=["large", "small"])
def test_pairs_of_frames_have_their_share_of_the_films_pixels(folder, tmp_path, bounds):
    """GLM: frames are as large as the bounds of the whole film let them be."""
    if not is_torchvision_available():
        pytest.skip("it needs torchvision")
    path = copied(folder("media:glm4v"), tmp_path)
    settings = json.loads((path / "preprocessor_config.json").read_text())
    kept = {name: settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size")}
    size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
    described = {**kept, "size": size, "video_processor_type": "Glm4vVideoProcessor"}
    (path / "video_preprocessor_config.json").write_text(json.dumps(described))
    counts = set()
    for numbers in ((0, 1), (0, 1, 2), range(6), range(20)):
        case = film_case(path, numbers, PoolInProcess(path))
        assert case.token_ids.tolist() == case.reference["input_ids"][0].tolist()
        patches = [
            np.frombuffer(item.arrays["pixel_values_videos"].data, np.float32)
            for item in (case.items[key] for key in case.keys("video"))
        ]
        theirs = case.reference["pixel_values_videos"].numpy()
        np.testing.assert_array_equal(np.concatenate(patches), theirs.reshape(-1))
        counts.add(case.features[0].length)
    assert len(counts) > 2


def test_pictures_beside_films_are_refused_where_transformers_takes_no_such_prompt(folder):
    if not is_torchvision_available():
        pytest.skip("it needs torchvision")
    content = [film_part((0, 1)), sent_part(picture(1))]
    with pytest.raises(BadRequestError, match="has pictures or films, and not both"):
        render_content(folder("media:glm4v"), content)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 8), ({"num_frames": 5}, 5), ({"fps": 0.5}, 10), ({"do_sample_frames": False}, 100)],
)
def test_frames_of_a_file_are_taken_evenly_from_the_first_on(options, expected):
    """The rule of transformers' `BaseVideoProcessor.sample_frames`."""
    found = plain_film(FilmInfo(100, 5.0, 90, 60), {}, options, 768)
    assert found == torch.arange(0, 100, 100 / expected).int().tolist()


def rendered(renderer, numbers: Sequence[int]) -> RenderedPrompt:
    return asyncio.run(renderer.render_chat(message(numbers)))


@pytest.mark.parametrize(("kind", "size"), [("qwen2_5_vl", 2), ("media:internvl", 1)])
def test_a_longer_cut_and_a_moved_window_make_only_new_frames(folder, kind, size):
    """The prompts are kept: what is at hand in one is not made again for another."""
    pool = PoolInProcess(folder(kind))
    renderer = make_renderer(folder(kind), pool)
    first = rendered(renderer, range(6))
    longer = rendered(renderer, range(10))
    moved = rendered(renderer, range(size, 10 + size))
    outcomes = [[item.outcome for item in each.items] for each in (first, longer, moved)]
    assert outcomes[0] == ["miss"] * (6 // size)
    assert outcomes[1] == ["hit"] * (6 // size) + ["miss"] * (4 // size)
    assert outcomes[2] == ["hit"] * (10 // size - 1) + ["miss"]
    assert sum(item.num_frames or 0 for item in moved.items) == 10


@pytest.fixture(scope="module")
def rope_model(folder):
    config = AutoConfig.from_pretrained(folder("qwen2_5_vl"))
    with torch.device("meta"):
        return AutoModelForMultimodalLM.from_config(config)


@pytest.mark.parametrize("seconds", [0.1, 0.3, 1.0, 7.5])
@pytest.mark.parametrize("films", [(3,), (5, 2)])
def test_positions_equal_get_rope_index(rope_model, seconds, films):
    config = rope_model.config
    speed = config.vision_config.tokens_per_second
    ids, features, grids = [11, 12], [], []
    for count in films:
        ids.append(config.vision_start_token_id)
        for number in range(count):
            time = int(np.float32(number) * np.float32(speed * seconds))
            features.append(MediaFeature(bytes(32), "video", len(ids), 6, 6, None, (1, 2, 3), time))
            ids += [config.video_token_id] * 6
        ids += [config.vision_end_token_id, 13]
        grids.append([count, 4, 6])
    tokens = torch.tensor([ids])
    found, _ = rope_model.model.get_rope_index(
        tokens,
        2 * (tokens == config.video_token_id).int(),
        video_grid_thw=torch.tensor(grids),
        second_per_grid_ts=torch.full((len(films),), seconds),
    )
    positions = MropePositions(features)
    out = np.empty((3, len(ids) + 4), np.int64)
    positions.fill(0, out)
    np.testing.assert_array_equal(out[:, : len(ids)], found[:, 0].numpy())
    np.testing.assert_array_equal(
        out[:, len(ids) :], out[:, len(ids) - 1 :][:, :1] + np.arange(1, 5)
    )
    for start in range(0, len(ids), 5):
        window = np.empty((3, 4), np.int64)
        positions.fill(start, window)
        np.testing.assert_array_equal(window, out[:, start : start + 4])
