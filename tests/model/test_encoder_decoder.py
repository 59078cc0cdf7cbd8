"""Encoder-decoders through scheduler and runner equal transformers, token for token and logit for
logit; each piece of special handling, broken on purpose, does not."""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForSpeechSeq2Seq

from lookonce.config import ModelConfig
from lookonce.errors import LookOnceError
from lookonce.model.families.encoder_decoder import CrossAttendingDecoder, EncoderDecoderFamily
from lookonce.model.loader import load_model
from lookonce.render.families.arrays import int64_array
from lookonce.render.families.registry import load_family
from lookonce.render.families.speech import SpeechProcessing
from lookonce.types.media import feature_at
from lookonce.types.model import ENCODER_DECODER
from lookonce.types.step import StepPlan
from tests.support.model.cases import MAX_LOGIT_ERROR, Case, sound
from tests.support.model.serving import (
    NUM_TOKENS,
    Answer,
    Subject,
    assert_parity,
    blocks_for_preemption,
    compare,
    serve,
)
from tests.support.model_folders.speech import SPEECH_KINDS

BLOCK = 4
PROMPTS = [[301, 302, 305, 309], [301, 40, 41, 42, 43, 44, 45, 46, 47, 48], [301, 50]]
"""Token ids; their meaning does not matter here."""


@pytest.fixture(scope="module", params=sorted(SPEECH_KINDS))
def subject(request, tmp_path_factory) -> Subject:
    folder = SPEECH_KINDS[request.param](tmp_path_factory.mktemp(request.param))
    loaded = load_model(ModelConfig(folder=str(folder), served_name="test"))
    family = load_family(folder, "float32")
    assert isinstance(family, SpeechProcessing)
    clips = [sound(1, 0.9), sound(2, 1.603)]
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float32).eval()
    heard = [(0, 0), (1, 1), (0, 1), (2, 0), (0, 0)]
    cases = [make_case(family, PROMPTS[prompt], clips[clip]) for prompt, clip in heard]
    return Subject(loaded, cases, [greedy(model, case) for case in cases])


def make_case(family: SpeechProcessing, prompt: list[int], clip: np.ndarray) -> Case:
    whole = family.process("audio", clip, {})
    family.check_processed(whole)
    longer = {**whole.arrays, "num_samples": int64_array(len(clip) + 16_000 * 60)}
    with pytest.raises(LookOnceError):  # whoever cuts windows out of it would never come to its end
        family.check_processed(msgspec.structs.replace(whole, arrays=longer))
    item = family.window(whole, 0)
    name, array = next(iter(item.arrays.items()))
    key = hashlib.sha256(bytes(array.data)).digest()
    values = torch.from_numpy(np.frombuffer(array.data, np.float32).reshape(array.shape).copy())
    reference = {name: values[None]}
    if name == "input_values":
        reference["attention_mask"] = (torch.arange(len(values)) < len(clip)).long()[None]
    feature = feature_at(key, "audio", item.expansion, 0)
    return Case(np.array(prompt, np.int32), (feature,), {key: item}, reference)


@torch.no_grad()
def greedy(model, case: Case) -> Answer:
    """The whole sequence computed anew for every token: no cache is involved."""
    ids, logits = case.token_ids.tolist(), []
    for _ in range(NUM_TOKENS):
        given = torch.tensor([ids])
        logits.append(model(**case.reference, decoder_input_ids=given).logits[0, -1].float())
        ids.append(int(logits[-1].argmax()))
    return Answer(ids[len(case.token_ids) :], torch.stack(logits))


def test_every_encoder_decoder_is_compared() -> None:
    assert set(SPEECH_KINDS) == set(ENCODER_DECODER)


@pytest.mark.parametrize("budget", [16, 64])
def test_sequences_with_different_clips_are_batched_and_a_clip_is_encoded_once(subject, budget):
    served = serve(subject.loaded, subject.cases, budget=budget)
    assert_parity(served, subject.expected)
    assert served.stats["encoder_runs_total"] == 2
    assert served.stats["encoder_cache_queries_total"] == len(subject.cases)


def test_preemption_encodes_nothing_again(subject) -> None:
    cases, expected = subject.cases[1:4], subject.expected[1:4]
    num_blocks = blocks_for_preemption(cases[:2], BLOCK)
    served = serve(subject.loaded, cases, budget=32, num_blocks=num_blocks, block_size=BLOCK)
    assert served.stats["num_preemptions_total"] > 0
    assert served.stats["encoder_runs_total"] == 2
    assert_parity(served, expected)


def test_a_request_without_a_sound_fails_alone(subject) -> None:
    silent = dataclasses.replace(subject.cases[0], features=(), items={})
    with pytest.raises(AssertionError, match="needs a sound"):
        serve(subject.loaded, [silent], budget=16)


def assert_parted(served, expected) -> None:
    assert compare(served.answers, expected).wrong > 0


def test_keys_for_values_part(subject, monkeypatch) -> None:
    right = EncoderDecoderFamily.cross_states

    def swapped(self, output):
        states = right(self, output)
        pairs = states.view(-1, 2, *states.shape[1:]).flip(1)
        return pairs.reshape(states.shape)

    monkeypatch.setattr(EncoderDecoderFamily, "cross_states", swapped)
    assert_parted(serve(subject.loaded, subject.cases, budget=64), subject.expected)


def test_layers_in_another_order_part(subject, monkeypatch) -> None:
    right = EncoderDecoderFamily.cross_states

    def turned(self, output):
        states = right(self, output)
        pairs = states.view(-1, 2, *states.shape[1:]).flip(0)
        return pairs.reshape(states.shape)

    monkeypatch.setattr(EncoderDecoderFamily, "cross_states", turned)
    assert_parted(serve(subject.loaded, subject.cases, budget=64), subject.expected)


def test_the_clip_of_another_sequence_parts(subject) -> None:
    keys = {case.features[0].key for case in subject.cases}
    first, second = sorted(keys)
    other = {first: second, second: first}

    def swapped(plan: StepPlan) -> StepPlan:
        new = tuple(
            msgspec.structs.replace(
                each,
                features=tuple(msgspec.structs.replace(f, key=other[f.key]) for f in each.features),
            )
            for each in plan.new
        )
        return msgspec.structs.replace(plan, new=new)

    # Both clips are encoded by the first two cases; the others then hear the wrong one.
    cases, expected = subject.cases, subject.expected
    served = serve(subject.loaded, cases, budget=64, edit=late(swapped))
    assert_parted(served, expected)


def late(edit):
    """Plans are edited once both clips have been encoded."""
    seen = 0

    def edited(plan: StepPlan) -> StepPlan:
        nonlocal seen
        ready = seen >= 2
        seen += len(plan.encode)
        return edit(plan) if ready else plan

    return edited


def test_other_positions_part(subject, monkeypatch) -> None:
    right = CrossAttendingDecoder.forward

    def moved(self, *, inputs_embeds, position_ids, **options):
        other = position_ids * 5 % 44
        return right(self, inputs_embeds=inputs_embeds, position_ids=other, **options)

    monkeypatch.setattr(CrossAttendingDecoder, "forward", moved)
    served = serve(subject.loaded, subject.cases, budget=64)
    # With rotary positions and a loud input the best tokens may stay the same; the logits do not.
    assert compare(served.answers, subject.expected).max_logit_error > 100 * MAX_LOGIT_ERROR
