"""An engine is warm before it takes requests, and nothing tells of it afterwards but the log."""

from __future__ import annotations

import logging

import msgspec
import pytest

from lookonce.config import EncoderConfig, KVConfig, MediaConfig, ModelConfig, SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.engine.process.build import assemble
from lookonce.engine.process.load_engine import load_engine
from lookonce.engine.process.warmup import WarmUpItems, warm_up
from lookonce.engine.process_io import EngineSettings
from lookonce.errors import RequestFailedError
from lookonce.model.attention.select import select_backend
from lookonce.model.loader import load_model
from lookonce.model.runner import Runner
from lookonce.types.media import ProcessedItem
from lookonce.types.step import StepPlan, StepResult


def settings(folder, limits=None, max_model_len=None) -> EngineSettings:
    return EngineSettings(
        model=ModelConfig(str(folder), "m", max_model_len=max_model_len),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512),
        kv=KVConfig(cache_bytes=4 << 20),
        encoder=EncoderConfig(cache_bytes=1 << 20),
        address="/nowhere",
        media=MediaConfig(limit_per_prompt=limits or {"image": 8, "audio": 2}),
    )


class Stage:
    """A real runner that may be told to fail, and as many rehearsals with it as wanted."""

    def __init__(self, given: EngineSettings) -> None:
        self._settings = given
        self.loaded = load_model(given.model)
        self.runner = Runner(
            self.loaded,
            kv_pages=self.loaded.kv_pages(64, 16),
            backend=select_backend("cpu", self.loaded.family.attention_features(self.loaded.dtype)),
            max_num_seqs=4,
            max_num_batched_tokens=512,
        )
        self.plans: list[StepPlan] = []
        self.broken = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.broken and plan.encode:
            raise RuntimeError("out of luck")
        return self.runner.execute(plan)

    def items(self) -> list[ProcessedItem]:
        return WarmUpItems(self._settings).take(self.loaded.info)

    def rehearse(self) -> list[StepPlan]:
        self.plans = []
        core, _ = assemble(self.loaded.info, self, self._settings, BlockPool(64, 16))
        warm_up(core, self.items())
        core.check_integrity()
        return self.plans


@pytest.fixture
def warmed(caplog):
    """What the log says was warmed, in words."""
    caplog.set_level(logging.INFO, logger="lookonce.engine.process.warmup")

    def read() -> list[str]:
        return [record.args[0] for record in caplog.records if "warmed up" in record.msg]

    return read


def test_text_and_every_modality_are_warmed_and_the_log_says_so(folder, warmed):
    core, _ = load_engine(settings(folder("qwen2_5_omni")), lambda done, total: None)
    assert warmed() == ["text", "image", "audio"]
    assert all(value == 0 for value in core.stats().values())


def test_a_modality_with_limit_zero_is_not_warmed(folder, warmed):
    limits = {"image": 1, "audio": 0}
    load_engine(settings(folder("qwen2_5_omni"), limits), lambda done, total: None)
    assert warmed() == ["text", "image"]


def test_items_are_as_large_as_the_step_and_the_context_allow(folder):
    """A step has 512 tokens, of which ten are the text's and the answer's."""
    whole = Stage(settings(folder("qwen2_5_omni"))).items()
    assert [item.modality for item in whole] == ["image", "audio"]
    assert 400 < whole[1].expansion.length <= 502
    small = Stage(settings(folder("qwen2_5_omni"), max_model_len=60)).items()
    assert 40 < small[1].expansion.length <= 50


def test_items_are_made_again_where_the_model_turns_out_to_take_less(folder):
    given = settings(folder("qwen2_5_omni"))
    short = msgspec.structs.replace(load_model(given.model).info, max_model_len=60)
    assert 40 < WarmUpItems(given).take(short)[1].expansion.length <= 50


def test_the_runner_encodes_prefills_decodes_and_forgets(folder):
    stage = Stage(settings(folder("llava")))
    plans = stage.rehearse()
    encoded = [encode.key for plan in plans for encode in plan.encode]
    known = [new.seq_id for plan in plans for new in plan.new]
    chunks = [chunk for plan in plans for chunk in plan.scheduled]
    assert len(encoded) == 1
    assert sum(chunk.num_tokens == 1 for chunk in chunks) == len(known) == 2
    assert sorted(known) == sorted(seq_id for plan in plans for seq_id in plan.finished)
    assert stage.runner._encoder.num_bytes == 0


def test_warming_up_again_does_the_same_again(folder):
    stage = Stage(settings(folder("llava")))
    first, second = stage.rehearse(), stage.rehearse()
    assert [plan.num_tokens for plan in first] == [plan.num_tokens for plan in second]


def test_an_item_that_cannot_be_encoded_is_a_warning(folder, caplog):
    stage = Stage(settings(folder("llava")))
    stage.broken = True
    stage.rehearse()
    assert any("warm-up of image failed" in record.getMessage() for record in caplog.records)
    assert stage.runner._encoder.num_bytes == 0


def test_a_processor_that_breaks_is_a_warning(folder, caplog, monkeypatch):
    def breaks(*_: object) -> list[ProcessedItem]:
        raise RequestFailedError("no such processor")

    monkeypatch.setattr("lookonce.engine.process.warmup.processed_items", breaks)
    core, _ = load_engine(settings(folder("llava")), lambda done, total: None)
    assert "no such processor" in caplog.text
    assert core.num_waiting == 0
