"""Encoder-decoder requests: the input is at offset 0 and is read at every decoder position."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from lookonce.errors import BadRequestError, TooLargeError
from lookonce.types.media import MediaFeature
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import Alignment, SamplingParams
from tests.support.core.builders import (
    GREEDY,
    Limits,
    feature,
    items_for,
    model_info,
    request,
    text,
)
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import reference

MODEL = msgspec.structs.replace(model_info(), encoder_decoder=True)
LIMITS = Limits(model=MODEL, max_num_batched_tokens=8)
SOUND, OTHER = feature("sound", 0, 30, modality="audio"), feature("other", 0, 30, modality="audio")


def transcription(
    name: str,
    *inputs: MediaFeature,
    num_tokens: int = 6,
    sampling: SamplingParams = GREEDY,
    arrival: float = 0.0,
) -> GenerateRequest:
    """A decoder prompt, far shorter than the input."""
    prompt = request(name, text(num_tokens), sampling=sampling, arrival=arrival)
    return msgspec.structs.replace(prompt, features=inputs)


def expected(one: GenerateRequest, index: int = 0) -> list[int]:
    return reference(one, one.sampling.max_tokens or 0, index, encoder_decoder=True)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_every_position_reads_the_input_and_it_is_encoded_once(prefix_caching: bool) -> None:
    engine = Engine(replace(LIMITS, prefix_caching=prefix_caching))
    for name, sound in (("a", SOUND), ("b", OTHER), ("c", SOUND)):
        one = transcription(name, sound, num_tokens=21)
        engine.add(one)
        engine.run()
        assert engine.tokens[name, 0] == expected(one)
    assert engine.runner.encoded == [SOUND.key, OTHER.key]
    assert engine.tokens["a", 0] != engine.tokens["b", 0]
    engine.assert_all_free()


def test_the_output_is_held_until_the_sequence_ends() -> None:
    """Another input that needs its room waits until then."""
    engine = Engine(replace(LIMITS, encoder_rows=40))
    first, second = transcription("a", SOUND), transcription("b", OTHER, arrival=1.0)
    engine.add(first)
    engine.add(second)
    engine.step()
    while not engine.ended:
        engine.scheduler.reset_encoder_cache()
        assert list(engine.runner.outputs) == [SOUND.key]
        engine.step()
    engine.run()
    assert engine.tokens["a", 0] == expected(first)
    assert engine.tokens["b", 0] == expected(second)
    engine.assert_all_free()


def test_a_cached_prefix_needs_the_input_all_the_same() -> None:
    engine = Engine(LIMITS)
    engine.add(transcription("a", SOUND, num_tokens=21))
    engine.run()
    engine.scheduler.reset_encoder_cache()
    one = transcription("b", SOUND, num_tokens=21)
    engine.add(one)
    engine.run()
    assert engine.reuse_stats["b"].prefix_cached_tokens == 20
    assert engine.reuse_stats["b"].encoder == ("miss",)
    assert engine.tokens["b", 0] == expected(one)


def test_a_preempted_sequence_takes_its_input_again() -> None:
    engine = Engine(replace(LIMITS, num_blocks=8, encoder_rows=60))
    lasting = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    both = [
        transcription(name, sound, sampling=lasting, arrival=at)
        for name, sound, at in (("a", SOUND, 0.0), ("b", OTHER, 1.0))
    ]
    for one in both:
        engine.add(one)
    engine.run()
    assert engine.scheduler.stats()["num_preemptions_total"] > 0
    for one in both:
        assert engine.tokens[one.request_id, 0] == expected(one)
    engine.assert_all_free()


@pytest.mark.parametrize("samples", [1, 3])
def test_an_input_that_is_missing_is_asked_for_once_and_not_accepted_before(samples: int) -> None:
    engine = Engine(LIMITS)
    params = SamplingParams(n=samples, max_tokens=5, ignore_eos=True)
    one = transcription("a", SOUND, sampling=params)
    engine.add(one, missing=[SOUND.key])
    engine.run()
    assert engine.needs == [("a", (SOUND.key,))]
    assert engine.accepted == []
    engine.supply(one)
    engine.run()
    for index in range(samples):
        assert engine.tokens["a", index] == expected(one, index)
    assert len(engine.runner.encoded) == 1
    engine.assert_all_free()


def test_an_input_whose_output_is_held_is_not_asked_for() -> None:
    engine = Engine(LIMITS)
    engine.add(transcription("a", SOUND))
    engine.run()
    one = transcription("b", SOUND, num_tokens=7)
    engine.add(one, missing=[SOUND.key])
    engine.run()
    assert engine.needs == []
    assert engine.tokens["b", 0] == expected(one)


@pytest.mark.parametrize("num_blocks", range(10, 18))
def test_an_input_that_is_missed_once_all_of_the_prompt_is_cached_is_asked_for(
    num_blocks: int,
) -> None:
    """Two share few blocks; the one that gives way comes back with its prompt cached whole, and
    finds the output gone that made the input unnecessary at first."""
    engine = Engine(replace(LIMITS, num_blocks=num_blocks, encoder_rows=64))
    for name, sound in (("first", SOUND), ("second", OTHER)):
        engine.add(transcription(name, sound, num_tokens=4))
        engine.run()
    lasting = [msgspec.structs.replace(GREEDY, max_tokens=count) for count in (26, 30)]
    inputs = {
        "old": transcription("old", SOUND, num_tokens=5, sampling=lasting[0], arrival=0.5),
        "new": transcription("new", OTHER, num_tokens=5, sampling=lasting[1], arrival=1.0),
    }
    for one in inputs.values():
        engine.add(one, missing=[one.features[0].key])
    preempted, asked = 0.0, 0
    for _ in range(200):
        engine.step()
        if engine.scheduler.stats()["num_preemptions_total"] > preempted:
            preempted = engine.scheduler.stats()["num_preemptions_total"]
            engine.scheduler.reset_encoder_cache()
        for name, _keys in engine.needs[asked:]:
            engine.supply(inputs[name])
        asked = len(engine.needs)
    for name, one in inputs.items():
        assert engine.tokens[name, 0] == expected(one)[: len(engine.tokens[name, 0])]
        assert engine.reason(name) == "length"
    engine.assert_all_free()


def test_a_failing_input_ends_its_request_alone() -> None:
    engine = Engine(LIMITS)
    engine.runner.failing_items = {SOUND.key}
    engine.add(transcription("a", SOUND))
    other = transcription("b", OTHER)
    engine.add(other)
    engine.run()
    assert engine.reason("a") == "error"
    assert engine.tokens["b", 0] == expected(other)
    engine.assert_all_free()


def test_text_alone_needs_no_input() -> None:
    engine = Engine(LIMITS)
    one = transcription("a")
    engine.add(one)
    engine.run()
    assert engine.tokens["a", 0] == expected(one)


class TestRefusals:
    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ([feature("x", 2, 30, modality="audio")], "at offset 2"),
            ([SOUND, OTHER], "one input"),
        ],
    )
    def test_inputs_elsewhere_and_further_ones(
        self, inputs: list[MediaFeature], message: str
    ) -> None:
        with pytest.raises(BadRequestError, match=message):
            Engine(LIMITS).add(transcription("a", *inputs))

    def test_an_input_that_never_fits(self) -> None:
        with pytest.raises(TooLargeError, match="encoder cache"):
            Engine(LIMITS).add(transcription("a", feature("x", 0, 65, modality="audio")))

    def test_a_live_session(self) -> None:
        one = transcription("a", SOUND)
        with pytest.raises(BadRequestError, match="decoder alone"):
            Engine(LIMITS).scheduler.add(one, items_for([SOUND]), live=True)

    def test_an_alignment_by_a_model_without_cross_attention(self) -> None:
        asked = SamplingParams(
            prompt_logprobs=0, alignment=Alignment(heads=((0, 0),), start=0, positions=9)
        )
        Engine(LIMITS).add(transcription("a", SOUND, sampling=asked))
        with pytest.raises(BadRequestError, match="cross-attention"):
            Engine(Limits()).add(request("a", text(6), sampling=asked))
