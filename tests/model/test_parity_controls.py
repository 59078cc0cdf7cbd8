"""Negative controls: take one piece of handling away, and parity must break.

They prove that the parity tests look at each piece: a control that still agreed with Hugging Face
would mean a test that cannot see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest
from torch import Tensor

from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.families.base import ModelFamily
from lookonce.model.families.qwen2_audio import Qwen2AudioFamily
from lookonce.model.families.qwen3_vl import Qwen3VLFamily
from lookonce.types.step import EmbedSlice, ScheduledSequence, StepPlan
from tests.model.serving import Subject, compare, serve

WHOLE = 256
"""A token budget that takes each prompt in one chunk."""
VISIBLE_ERROR = 1e-2


def logit_error(subject: Subject, **taken_away) -> float:
    options = {"budget": WHOLE, "backend": ReferenceBackend(), **taken_away}
    served = serve(subject.loaded, subject.cases, **options)
    return compare(served.answers, subject.expected).max_logit_error


def edit_chunks(change: Callable[[ScheduledSequence], ScheduledSequence]):
    def edit(plan: StepPlan) -> StepPlan:
        return dataclasses.replace(plan, scheduled=tuple(map(change, plan.scheduled)))

    return edit


class IgnoringBackend(ReferenceBackend):
    """Attention that drops some of its keyword arguments."""

    def __init__(self, *ignored: str) -> None:
        self._ignored = dict.fromkeys(ignored)

    def forward(self, *args, **kwargs) -> Tensor:
        return super().forward(*args, **{**kwargs, **self._ignored})


MROPE_KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "nano")
MEDIA_KINDS = (
    *("llava", "pixtral", "mistral3", "gemma3", "idefics3", "smolvlm"),
    *MROPE_KINDS,
    *("qwen2_audio", "voxtral"),
)


@pytest.mark.parametrize("kind", MEDIA_KINDS)
def test_nothing_taken_away_agrees(subjects, kind):
    assert logit_error(subjects(kind)) < 1e-4


@pytest.mark.parametrize("kind", MROPE_KINDS)
def test_linear_instead_of_multi_axis_positions_differ(subjects, kind):
    def linear(plan: StepPlan) -> StepPlan:
        new = tuple(
            dataclasses.replace(
                sequence,
                features=tuple(msgspec.structs.replace(f, grid=None) for f in sequence.features),
            )
            for sequence in plan.new
        )
        return dataclasses.replace(plan, new=new)

    assert logit_error(subjects(kind), edit=linear) > VISIBLE_ERROR


@pytest.mark.parametrize("kind", MEDIA_KINDS)
def test_encoder_rows_off_by_one_differ(subjects, kind):
    def rolled(chunk: ScheduledSequence) -> ScheduledSequence:
        embeds = [
            shifted
            for part in chunk.embeds
            for shifted in (
                EmbedSlice(part.key, part.end - 1, part.end, part.row),
                EmbedSlice(part.key, part.start, part.end - 1, part.row + 1),
            )
        ]
        return dataclasses.replace(chunk, embeds=tuple(embeds))

    assert logit_error(subjects(kind), edit=edit_chunks(rolled)) > VISIBLE_ERROR


@pytest.mark.parametrize("kind", MEDIA_KINDS)
def test_embeddings_of_another_item_differ(subjects, kind):
    """Every row comes from the step's last item; rows repeat where that one is shorter."""

    def swapped(chunk: ScheduledSequence) -> ScheduledSequence:
        if len(chunk.embeds) < 2:
            return chunk
        other = chunk.embeds[-1]
        embeds = [
            EmbedSlice(other.key, row % other.end, row % other.end + 1, part.row + row)
            for part in chunk.embeds
            for row in range(part.end - part.start)
        ]
        return dataclasses.replace(chunk, embeds=tuple(embeds))

    assert logit_error(subjects(kind), edit=edit_chunks(swapped)) > VISIBLE_ERROR


@pytest.mark.parametrize("kind", MEDIA_KINDS)
def test_placeholders_without_embeddings_differ(subjects, kind):
    def emptied(chunk: ScheduledSequence) -> ScheduledSequence:
        return dataclasses.replace(chunk, embeds=())

    assert logit_error(subjects(kind), edit=edit_chunks(emptied)) > VISIBLE_ERROR


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_pictures_that_do_not_feed_the_first_layers_differ(subjects, kind, monkeypatch):
    def place_first_part(family, embeds: Tensor, at: Tensor, rows: Tensor) -> dict[str, object]:
        embeds.index_copy_(0, at, rows[:, : family.hidden_size])
        return {}

    monkeypatch.setattr(Qwen3VLFamily, "place", place_first_part)
    assert logit_error(subjects(kind)) > VISIBLE_ERROR


def test_sound_that_attends_to_its_padding_differs(subjects, monkeypatch):
    monkeypatch.setattr(Qwen2AudioFamily, "_mask", lambda *_: None)
    assert logit_error(subjects("qwen2_audio")) > VISIBLE_ERROR


def test_causal_pictures_differ(subjects):
    def causal(chunk: ScheduledSequence) -> ScheduledSequence:
        return dataclasses.replace(chunk, bidirectional=())

    assert logit_error(subjects("gemma3"), edit=edit_chunks(causal)) > VISIBLE_ERROR


def test_cut_pictures_differ(subjects):
    """The scheduler cuts pictures; each part still sees itself in both directions."""
    subject = subjects("gemma3")
    splittable = msgspec.structs.replace(
        subject.loaded.info, unsplittable=(), largest_unsplittable=0
    )
    spans = {}

    def with_spans(plan: StepPlan) -> StepPlan:
        for new in plan.new:
            spans[new.seq_id] = tuple((f.offset, f.end) for f in new.features)
        return edit_chunks(
            lambda chunk: dataclasses.replace(chunk, bidirectional=spans[chunk.seq_id])
        )(plan)

    cut = {"info": splittable, "edit": with_spans}
    assert logit_error(subject, **cut) < 1e-4  # whole prompts in one chunk: nothing is cut
    assert logit_error(subject, budget=7, **cut) > VISIBLE_ERROR


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("gemma3", "sliding_window"),
        ("mistral", "sliding_window"),
        ("gemma2", "sliding_window"),
        ("gemma2", "softcap"),
        ("gpt_oss", "sliding_window"),
        ("gpt_oss", "sinks"),
    ],
)
def test_an_ignored_attention_argument_differs(subjects, kind, argument):
    assert logit_error(subjects(kind)) < 1e-4
    assert logit_error(subjects(kind), backend=IgnoringBackend(argument)) > VISIBLE_ERROR


def test_logits_without_the_final_softcap_differ(subjects, monkeypatch):
    monkeypatch.setattr(ModelFamily, "final_softcap", None)
    assert logit_error(subjects("gemma2")) > VISIBLE_ERROR
