"""Engines with a real model and real KV tiers, in this process.

Each `Served` is one engine with its own pages; two that share a disk folder or a Valkey are two
servers, or one before and after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lookonce.config import EncoderConfig, KVConfig, ModelConfig, SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.engine.process.build import assemble
from lookonce.engine.process.kv_tiers import open_external, open_external_outputs, rope_of
from lookonce.engine.process_io import EngineSettings
from lookonce.model.attention.select import select_backend
from lookonce.model.loader import LoadedModel, load_model
from lookonce.types.kv import ExternalCacheStats, TierSpec
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.model.cases import Case, CaseMaker, array, picture
from tests.support.model.serving import Answer, CapturingRunner, Difference, compare
from tests.support.model.serving import Subject as ParitySubject

BLOCK_SIZE = 4
NUM_TOKENS = 6
NUM_BLOCKS = 256
NUM_SNAPSHOTS = 32


class Served:
    """One engine in this process; a context manager."""

    def __init__(
        self, loaded: LoadedModel, *tiers: TierSpec, encoder_tiers: Sequence[TierSpec] = ()
    ) -> None:
        kv = KVConfig(
            block_size=BLOCK_SIZE,
            tiers=tiers,
            load_policy="always",
            state_cache_bytes=NUM_SNAPSHOTS * loaded.info.state_bytes,
        )
        self.settings = EngineSettings(
            model=ModelConfig(folder="", served_name="test"),
            scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8),
            kv=kv,
            encoder=EncoderConfig(tiers=tuple(encoder_tiers)),
            address="",
        )
        family = loaded.family
        self._runner = runner = CapturingRunner(
            loaded,
            edit=lambda plan: plan,
            kv_pages=loaded.kv_pages(NUM_BLOCKS, BLOCK_SIZE),
            backend=select_backend("cpu", family.attention_features(loaded.dtype)),
            max_num_seqs=8,
            max_num_batched_tokens=64,
            num_snapshots=kv.num_snapshots(loaded.info.state_bytes),
        )
        self.external = None
        if tiers:
            rope, pages = rope_of(family.text_config), runner.page_copier()
            self.external = open_external(kv, loaded.info, rope, pages, runner.state_copier())
        self.outputs = None
        if encoder_tiers:
            copier = runner.output_copier()
            self.outputs = open_external_outputs(self.settings.encoder, loaded.info, copier)
        pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.core, _ = assemble(
            loaded.info,
            runner,
            self.settings,
            pool,
            self.external,
            external_outputs=self.outputs,
        )
        self._count = 0

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.close()

    def answer(
        self, *cases: Case, num_tokens: int = NUM_TOKENS
    ) -> list[tuple[list[int], ExternalCacheStats | None]]:
        """All at once: greedy tokens, and what external tiers did."""
        first = self._count
        for case in cases:
            self.core.add(_request(str(self._count), case, num_tokens), case.items)
            self._count += 1
        tokens: dict[str, list[int]] = {str(i): [] for i in range(first, self._count)}
        external: dict[str, ExternalCacheStats | None] = {}
        ended = 0
        while ended < len(cases):
            output = self.core.step()
            if output is None:
                time.sleep(0.001)
                continue
            for delta in output.deltas:
                assert delta.error is None, delta.error
                tokens[delta.request_id] += delta.token_ids
                if delta.reuse_stats is not None:
                    external[delta.request_id] = delta.reuse_stats.external
                ended += delta.finish_reason is not None
        self.settle()
        self.core.check_integrity()
        return [(tokens[name], external.get(name)) for name in tokens]

    def logits_of_last(self) -> torch.Tensor:
        """[tokens, V] that the answer to the last case was chosen from."""
        return torch.stack(self._runner.captured[self._count - 1])

    def settle(self) -> None:
        end = time.monotonic() + 10.0
        while self.external is not None or self.outputs is not None:
            self.core.step()
            stats = self.core.stats()
            names = ("queue_bytes", "blocks_held", "states_held")
            waiting = [v for k, v in stats.items() if any(name in k for name in names)]
            if not any(waiting):
                return
            assert time.monotonic() < end, "stores do not come to an end"
            time.sleep(0.001)

    def forget_device(self) -> None:
        self.core.reset_prefix_cache()
        self.core.reset_encoder_cache()


def _request(name: str, case: Case, num_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        scope=bytes(32),
        prompt=array(case.token_ids),
        features=case.features,
        sampling=SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        arrival=0.0,
    )


class Subject:
    """A loaded model, prompts with pictures in their prefixes, and what it says to them."""

    def __init__(self, folder: Path) -> None:
        self.loaded = load_model(ModelConfig(folder=str(folder), served_name="test"))
        self.maker = CaseMaker(folder, self.loaded.family.config)
        one, two = picture(1), picture(2, 90, 140)
        self.cases = [
            self.maker.case("See: ", one, " what is it? Tell me about this please"),
            self.maker.case("A", two, " and B ", one, " which is the one that you like?"),
            self.maker.case("No picture at all in this one, only words and more words"),
        ]
        with Served(self.loaded) as plain:
            self.expected = [plain.answer(case)[0][0] for case in self.cases]


def check(subject: Subject, served: Served, *, warm: bool) -> None:
    """One after the other, so that nothing is shared but through the tiers."""
    for case, expected in zip(subject.cases, subject.expected, strict=True):
        served.forget_device()
        ((tokens, reuse_stats),) = served.answer(case)
        assert tokens == expected
        if warm:
            assert_all_loaded(case, reuse_stats)


def check_with_transformers(
    subject: ParitySubject, served: Served, *, warm: bool = False
) -> Difference:
    """The same with a model's answers in plain transformers; how ours differ from them."""
    answers = []
    for case, expected in zip(subject.cases, subject.expected, strict=True):
        served.forget_device()
        ((tokens, reuse_stats),) = served.answer(case, num_tokens=len(expected.token_ids))
        answers.append(Answer(tokens, served.logits_of_last()))
        if warm:
            assert_all_loaded(case, reuse_stats)
    return compare(answers, subject.expected)


def assert_all_loaded(case: Case, told: ExternalCacheStats | None) -> None:
    usable = (len(case.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert told is not None
    status = "loaded" if usable else "none"
    assert (told.status, told.matched, told.loaded) == (status, usable, usable)


HOST = TierSpec("host", capacity_bytes=32 << 20)
