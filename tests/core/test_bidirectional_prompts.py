"""Prompts whose every token sees the whole prompt: computed in one step, reused as a whole.

The fake runner objects to a plan that cuts one, or that does not name it as seen both ways.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.errors import BadRequestError, TooLargeError
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, model_info, request, text
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import reference

LONGEST = 16
MODEL = model_info(max_model_len=60, longest_bidirectional_prompt=LONGEST)
LIMITS = Limits(num_blocks=16, block_size=4, max_num_batched_tokens=20, model=MODEL)


def about(name: str, length: int, *, picture: str = "cat", tokens: int = 6) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return request(name, text(length), [feature(picture, 1, 4)], sampling=sampling)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(5, LONGEST), min_size=1, max_size=6),
    num_blocks=st.integers(7, 20),
    budget=st.integers(LONGEST, 20),
    encoder_rows=st.sampled_from([4, 8, 64]),
)
def test_whatever_the_workload_no_prompt_is_cut(lengths, num_blocks, budget, encoder_rows):
    engine = Engine(
        Limits(
            num_blocks=num_blocks,
            block_size=4,
            max_num_batched_tokens=budget,
            encoder_rows=encoder_rows,
            model=MODEL,
        )
    )
    requests = [
        about(str(index), length, picture=f"{length % 3}", tokens=8)
        for index, length in enumerate(lengths)
    ]
    for each in requests:
        engine.add(each)
        engine.step()
    engine.run()
    engine.assert_all_free()
    for each in requests:
        assert engine.tokens[each.request_id, 0] == reference(each, 8)


def test_an_equal_prompt_is_found_again_all_but_its_last_block():
    engine = Engine(LIMITS)
    for name in ("first", "again"):
        engine.add(about(name, 16))
        engine.run()
    assert engine.reuse_stats["first"].prefix_cached_tokens == 0
    assert engine.reuse_stats["again"].prefix_cached_tokens == 12


@pytest.mark.parametrize(("length", "picture"), [(15, "cat"), (16, "dog")])
def test_a_prompt_with_the_same_beginning_is_computed(length, picture):
    """Its first tokens see what follows them."""
    engine = Engine(LIMITS)
    engine.add(about("first", 16))
    engine.run()
    shorter = Engine(LIMITS)
    for each in (engine, shorter):
        each.add(about("other", length, picture=picture))
        each.run()
    assert engine.reuse_stats["other"].prefix_cached_tokens == 0
    assert engine.tokens["other", 0] == shorter.tokens["other", 0]


def test_samples_of_one_prompt_share_it():
    engine = Engine(LIMITS)
    sampling = SamplingParams(temperature=0.0, n=3, max_tokens=4, ignore_eos=True)
    engine.add(msgspec.structs.replace(about("a", 14), sampling=sampling))
    engine.run()
    engine.assert_all_free()
    assert len(engine.ended) == 3


@pytest.mark.parametrize(
    ("longest", "budget"), [(LONGEST, 20), (60, LONGEST)], ids=["window", "step"]
)
def test_a_prompt_that_no_step_can_hold_is_refused(longest, budget):
    model = model_info(max_model_len=60, longest_bidirectional_prompt=longest)
    engine = Engine(Limits(num_blocks=16, max_num_batched_tokens=budget, model=model))
    engine.add(about("fits", LONGEST))
    with pytest.raises(TooLargeError, match=f"takes at most {LONGEST}"):
        engine.add(about("long", LONGEST + 1))


def test_two_items_are_refused():
    engine = Engine(LIMITS)
    with pytest.raises(BadRequestError, match="has 2 items; this model takes one"):
        engine.add(request("a", text(12), [feature("cat", 0, 4), feature("dog", 6, 4)]))


CAUSAL_TEXTS = model_info(max_model_len=60, longest_bidirectional_prompt=LONGEST, causal_texts=True)


@pytest.mark.parametrize("model", [MODEL, CAUSAL_TEXTS], ids=["both ways", "causal"])
def test_texts_are_computed_as_the_model_says(model):
    """Both ways: whole, and for equal prompts alone. Causally: in chunks, beside prompts with items
    that are not cut, found again by prompts that begin alike, and as long as any."""
    engine = Engine(Limits(num_blocks=24, max_num_batched_tokens=20, model=model))
    engine.add(about("picture", LONGEST))
    for name, length in (("first", 12), ("longer", 15)):
        engine.add(request(name, text(length)))
        engine.run()
    assert engine.reuse_stats["first"].prefix_cached_tokens == 0
    shared = engine.reuse_stats["longer"].prefix_cached_tokens
    assert shared == (12 if model.causal_texts else 0)
    long = request("long", text(40))
    if model.causal_texts:
        engine.add(long)
        engine.run()
        assert engine.tokens["long", 0]
    else:
        with pytest.raises(TooLargeError, match=f"takes at most {LONGEST}"):
            engine.add(long)
    engine.assert_all_free()


def test_live_sessions_are_refused():
    engine = Engine(LIMITS)
    with pytest.raises(BadRequestError, match="no live sessions"):
        engine.scheduler.add(request("a", text(4)), {}, live=True)
