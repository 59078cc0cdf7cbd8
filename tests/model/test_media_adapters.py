"""Models that are published with LoRA adapters for their media: each prompt gets its own."""

from __future__ import annotations

import logging
import shutil

import pytest

from lookonce import LLM, SamplingParams
from lookonce.engine.process.adapters import EngineAdapters
from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.types.model import MEDIA_ADAPTERS
from tests.support.engine.loading import build, settings
from tests.support.model.adapters import make_adapter
from tests.support.model.cases import ALL_MODELS, picture, sound
from tests.support.model.chats import render
from tests.support.model.copies import copied
from tests.support.model.serving import (
    assert_parity,
    blocks_for_preemption,
    compare,
    load_general,
    make_general_subject,
    make_subject,
    missing_library,
    serve,
)

BLOCK = 4
EARS = "ears"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def hears(folder, tmp_path_factory):
    """Qwen2-Audio as if it were published with an adapter for sounds, above --max-lora-rank."""
    path = copied(folder("qwen2_audio"), tmp_path_factory.mktemp("hears"))
    subject = make_subject(path)
    make_adapter(path, subject.loaded, path / EARS, r=65)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MEDIA_ADAPTERS, "qwen2_audio", {"audio": EARS})
        yield path, subject, make_subject(path)


def test_prompts_with_sounds_are_computed_with_the_adapter_and_others_without(hears):
    _, plain, subject = hears
    served = serve(subject.loaded, subject.cases, budget=64)
    assert served.stats["prefix_cache_hits_total"] > 0
    assert_parity(served, subject.expected)
    differ = [compare([a], [b]).wrong for a, b in zip(served.answers, plain.expected, strict=True)]
    assert differ == [int(bool(case.features)) for case in plain.cases]


def test_without_the_adapter_answers_are_wrong(hears, monkeypatch):
    _, _, subject = hears
    monkeypatch.setattr(EngineAdapters, "own", lambda self, modalities: None)
    served = serve(subject.loaded, subject.cases, budget=64)
    assert compare(served.answers, subject.expected).wrong


def test_preemption_keeps_the_adapter(hears):
    _, _, subject = hears
    cases, expected = ([all_[i] for i in (1, 0)] for all_ in (subject.cases, subject.expected))
    blocks = blocks_for_preemption(cases, BLOCK)
    served = serve(subject.loaded, cases, budget=32, num_blocks=blocks, block_size=BLOCK)
    assert served.stats["num_preemptions_total"] > 0
    assert_parity(served, expected)


def test_an_engine_reads_them_at_start_under_no_name(hears):
    _, preprocessor = build(settings(hears[0]))
    assert preprocessor.adapters.own({"audio"}) is not None
    assert preprocessor.adapters.own({"image"}) is None
    assert preprocessor.adapters.listed == ()


def test_a_folder_without_one_is_served_with_a_warning(hears, tmp_path, caplog):
    path = copied(hears[0], tmp_path)
    shutil.rmtree(path / EARS)
    with caplog.at_level(logging.WARNING):
        _, preprocessor = build(settings(path))
    assert preprocessor.adapters is None
    assert "has no ears: prompts with audio are computed without it" in caplog.text


def test_a_broken_one_is_refused_with_its_folder(hears, tmp_path):
    path = copied(hears[0], tmp_path)
    (path / EARS / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"ears: this adapter cannot be served: peft_type"):
        build(settings(path))


# --- Phi-4-multimodal ---------------------------------------------------------------------------

phi4 = pytest.mark.skipif(
    not ALL_MODELS or missing_library("phi4_multimodal") is not None,
    reason="in `make test-models`, with torchvision",
)


@phi4
def test_each_of_its_adapters_is_needed(folder, monkeypatch):
    subject = make_general_subject(folder("media:phi4_multimodal"))
    kinds = [{feature.modality for feature in case.features} for case in subject.cases]
    for modality in ("image", "audio"):
        own = EngineAdapters.own
        with monkeypatch.context() as patch:
            patch.setattr(
                EngineAdapters, "own", lambda self, m, o=own, w=modality: o(self, m - {w})
            )
            served = serve(subject.loaded, subject.cases, budget=64)
        differ = [
            compare([a], [b]).wrong for a, b in zip(served.answers, subject.expected, strict=True)
        ]
        wanted = ["image" if "image" in kind else "".join(kind) for kind in kinds]
        assert differ == [int(each == modality) for each in wanted]


@phi4
def test_two_sounds_are_refused(folder):
    with pytest.raises(BadRequestError, match="2 parts of type audio, 1 are allowed"):
        render(folder("media:phi4_multimodal"), ("Hear ", sound(1), " and ", sound(2)))


@phi4
def test_a_whole_engine_chooses_by_what_a_request_shows(folder, tmp_path):
    """Through processes and the public interface; text is that of a folder without adapters."""
    path = folder("media:phi4_multimodal")
    bare = copied(path, tmp_path)
    for name in MEDIA_ADAPTERS["phi4_multimodal"].values():
        shutil.rmtree(bare / name)
    text = {"type": "text", "text": "what is it?"}
    look = [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture(1)}, text]}]
    read = [{"role": "user", "content": [text]}]
    answers = []
    for each in (path, bare):
        with LLM(str(each), kv_cache_gb=0.05) as llm:
            assert llm.loras == []
            if each == path:
                with (
                    pytest.raises(BadRequestError, match="no live sessions"),
                    llm.session(read, GREEDY) as session,
                ):
                    session.answer()
            answers.append([llm.chat(chat, GREEDY)[0].text for chat in (look, read)])
    assert answers[0][0] != answers[1][0]
    assert answers[0][1] == answers[1][1]


@phi4
@pytest.mark.parametrize("rule", ["ONE_SOUND_IN_A_PROMPT", "SOUNDS_BESIDE_PICTURES"])
def test_without_a_rule_about_its_sounds_it_is_refused(folder, monkeypatch, rule):
    monkeypatch.setattr(f"lookonce.render.families.general.{rule}", ())
    with pytest.raises(ModelLoadError, match="logits differ"):
        load_general(folder("media:phi4_multimodal"))
