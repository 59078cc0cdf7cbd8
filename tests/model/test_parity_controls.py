"""Negative controls: take one piece of handling away, and parity must break.

They prove that the parity tests look at each piece: a control that still agreed with Hugging Face
would mean a test that cannot see it. With some types of model; in `make test-models` with all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest
from torch import Tensor

from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.families.base import ModelFamily, TextFamily
from lookonce.model.families.idefics3 import Idefics3Family
from lookonce.model.families.qwen2_audio import Qwen2AudioFamily
from lookonce.model.families.qwen3_vl import Qwen3VLFamily
from lookonce.model.families.voxtral import VoxtralFamily
from lookonce.model.input_batch import MropePositions
from lookonce.types.step import EmbedSlice, ScheduledSequence, StepPlan
from tests.support.model.cases import ALL_MODELS
from tests.support.model.serving import Subject, compare, serve

WHOLE = 256
"""A token budget that takes each prompt in one chunk."""
VISIBLE_ERROR = 1e-2


def logit_error(subject: Subject, family: type[ModelFamily] | None = None, **taken_away) -> float:
    """With the subject's own family, or another one for the same model."""
    loaded = subject.loaded
    if family is not None:
        loaded = dataclasses.replace(loaded, family=family(loaded.model))
    options = {"budget": WHOLE, "backend": ReferenceBackend(), **taken_away}
    served = serve(loaded, subject.cases, **options)
    return compare(served.answers, subject.expected).max_logit_error


def edit_chunks(change: Callable[[ScheduledSequence], ScheduledSequence]):
    def edit(plan: StepPlan) -> StepPlan:
        return msgspec.structs.replace(plan, scheduled=tuple(map(change, plan.scheduled)))

    return edit


def edit_embeds(change: Callable[[EmbedSlice], tuple[EmbedSlice, ...]]):
    return edit_chunks(
        lambda chunk: msgspec.structs.replace(
            chunk, embeds=tuple(part for old in chunk.embeds for part in change(old))
        )
    )


class IgnoringBackend(ReferenceBackend):
    """Attention that drops one thing of what is asked of it."""

    def __init__(self, ignored: str, family: ModelFamily) -> None:
        self._instead = {ignored: family.head_dim**-0.5 if ignored == "scale" else None}

    def forward(self, *args) -> Tensor:
        *tensors, call = args
        return super().forward(*tensors, call._replace(**self._instead))


MROPE_KINDS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni", "nano"),
    *("qwen3_5", "qwen3_5_moe"),
)
SOUND_KINDS = ("qwen2_audio", "voxtral")
MEDIA_KINDS = (
    *("llava", "pixtral", "mistral3", "gemma3", "idefics3", "smolvlm"),
    *MROPE_KINDS,
    *SOUND_KINDS,
)
if not ALL_MODELS:
    MROPE_KINDS = ("qwen3_vl", "nano")
    MEDIA_KINDS = ("pixtral", "gemma3", "idefics3", *MROPE_KINDS, *SOUND_KINDS)


def here(*kinds: str) -> tuple[str, ...]:
    """Those of these that are tested now."""
    known = (*MEDIA_KINDS, "gemma2", "gpt_oss")
    return tuple(kind for kind in kinds if ALL_MODELS or kind in known)


@pytest.mark.parametrize("kind", MEDIA_KINDS)
def test_nothing_taken_away_agrees(subjects, kind):
    assert logit_error(subjects(kind)) < 1e-4


@pytest.mark.parametrize("kind", MROPE_KINDS)
def test_linear_instead_of_multi_axis_positions_differ(subjects, kind):
    def linear(plan: StepPlan) -> StepPlan:
        new = tuple(
            msgspec.structs.replace(
                sequence,
                features=tuple(msgspec.structs.replace(f, grid=None) for f in sequence.features),
            )
            for sequence in plan.new
        )
        return msgspec.structs.replace(plan, new=new)

    assert logit_error(subjects(kind), edit=linear) > VISIBLE_ERROR


@pytest.mark.parametrize("kind", MROPE_KINDS)
def test_text_that_does_not_go_on_right_after_a_picture_differs(subjects, kind, monkeypatch):
    """Its positions are the indices then, as if the picture stood on a line."""
    monkeypatch.setattr(MropePositions, "tail_delta", 0)
    assert logit_error(subjects(kind)) > VISIBLE_ERROR


@pytest.mark.parametrize(
    ("kind", "modality"),
    [
        *((kind, "image") for kind in MEDIA_KINDS if kind not in SOUND_KINDS),
        *((kind, "audio") for kind in here(*SOUND_KINDS, "qwen3_omni", "nano")),
    ],
)
def test_encoder_rows_off_by_one_differ(subjects, kind, modality):
    subject = subjects(kind)
    keys = {key for case in subject.cases for key in case.keys(modality)}

    def rolled(part: EmbedSlice) -> tuple[EmbedSlice, ...]:
        if part.key not in keys:
            return (part,)
        return (
            EmbedSlice(part.key, part.end - 1, part.end, part.row),
            EmbedSlice(part.key, part.start, part.end - 1, part.row + 1),
        )

    assert logit_error(subject, edit=edit_embeds(rolled)) > VISIBLE_ERROR


@pytest.mark.parametrize("kind", here("pixtral", "mistral3", "idefics3", "smolvlm"))
def test_embeddings_that_slip_over_the_words_between_them_differ(subjects, kind):
    """Line breaks and the names of tiles stand among a picture's tokens and have no row."""

    def slipped(chunk: ScheduledSequence) -> ScheduledSequence:
        first: dict[bytes, EmbedSlice] = {}
        embeds = [
            EmbedSlice(part.key, part.start, part.end, begin.row + part.start - begin.start)
            for part in chunk.embeds
            for begin in (first.setdefault(part.key, part),)
        ]
        return msgspec.structs.replace(chunk, embeds=tuple(embeds))

    assert logit_error(subjects(kind), edit=edit_chunks(slipped)) > VISIBLE_ERROR


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
        return msgspec.structs.replace(chunk, embeds=tuple(embeds))

    assert logit_error(subjects(kind), edit=edit_chunks(swapped)) > VISIBLE_ERROR


@pytest.mark.parametrize("kind", MEDIA_KINDS)
def test_placeholders_without_embeddings_differ(subjects, kind):
    def emptied(chunk: ScheduledSequence) -> ScheduledSequence:
        return msgspec.structs.replace(chunk, embeds=())

    assert logit_error(subjects(kind), edit=edit_chunks(emptied)) > VISIBLE_ERROR


@pytest.mark.parametrize("kind", here("qwen3_vl", "qwen3_vl_moe"))
def test_pictures_that_do_not_feed_the_first_layers_differ(subjects, kind):
    class WithoutDeepstack(Qwen3VLFamily):
        def place(self, embeds: Tensor, at: Tensor, rows: Tensor) -> dict[str, object]:
            embeds.index_copy_(0, at, rows[:, : self.hidden_size])
            return {}

    assert logit_error(subjects(kind), WithoutDeepstack) > VISIBLE_ERROR


@pytest.mark.parametrize("kind", here("qwen3_vl", "qwen3_vl_moe"))
def test_pictures_that_feed_the_first_layers_in_another_order_differ(subjects, kind):
    class ReversedDeepstack(Qwen3VLFamily):
        def place(self, embeds: Tensor, at: Tensor, rows: Tensor) -> dict[str, object]:
            extras = super().place(embeds, at, rows)
            extras["deepstack_visual_embeds"] = extras["deepstack_visual_embeds"][::-1]
            return extras

    assert logit_error(subjects(kind), ReversedDeepstack) > VISIBLE_ERROR


@pytest.mark.parametrize(
    ("kind", "family", "array"),
    [
        *((kind, Idefics3Family, "pixel_values") for kind in here("idefics3", "smolvlm")),
        ("voxtral", VoxtralFamily, "input_features"),
    ],
)
def test_parts_of_an_item_in_another_order_differ(subjects, kind, family, array):
    """Tiles of a picture, spans of a sound."""

    class ReversedParts(family):
        def encode(self, modality, items) -> list[Tensor]:
            return super().encode(
                modality, [{**item, array: item[array].flip(0)} for item in items]
            )

    assert logit_error(subjects(kind), ReversedParts) > VISIBLE_ERROR


def test_sound_that_attends_to_its_padding_differs(subjects):
    class Unmasked(Qwen2AudioFamily):
        def padding_mask(self, lengths: Tensor, like: Tensor) -> None:
            return None

    assert logit_error(subjects("qwen2_audio"), Unmasked) > VISIBLE_ERROR


def test_causal_pictures_differ(subjects):
    def causal(chunk: ScheduledSequence) -> ScheduledSequence:
        return msgspec.structs.replace(chunk, bidirectional=())

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
            lambda chunk: msgspec.structs.replace(chunk, bidirectional=spans[chunk.seq_id])
        )(plan)

    cut = {"info": splittable, "edit": with_spans}
    assert logit_error(subject, **cut) < 1e-4  # whole prompts in one chunk: nothing is cut
    assert logit_error(subject, budget=7, **cut) > VISIBLE_ERROR


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        *((kind, "sliding_window") for kind in here("gemma3", "mistral", "gemma2", "gemma3_text")),
        ("gemma2", "softcap"),
        *((kind, "scale") for kind in here("gemma2", "gemma3_text", "gemma3")),
        ("gpt_oss", "sliding_window"),
        ("gpt_oss", "sinks"),
    ],
)
def test_an_ignored_attention_argument_differs(subjects, kind, argument):
    subject = subjects(kind)
    assert logit_error(subject) < 1e-4
    deaf = IgnoringBackend(argument, subject.loaded.family)
    assert logit_error(subject, backend=deaf) > VISIBLE_ERROR


def test_logits_without_the_final_softcap_differ(subjects):
    class Uncapped(TextFamily):
        final_softcap = None

    assert logit_error(subjects("gemma2"), Uncapped) > VISIBLE_ERROR
