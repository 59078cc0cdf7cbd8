"""Requests that lack items which cannot be sent again: answered whole, or refused at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.request_validation import RequestValidator
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import (
    ROW_BYTES,
    Limits,
    feature,
    items_for,
    model_info,
    request,
    text,
)
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import reference

LIMITS = Limits(num_blocks=24, block_size=4, model=model_info(max_model_len=96))
PICTURES = {"cat": 4, "dog": 6}


def about(
    picture: str, name: str, max_tokens: int | None = 1, *, n: int = 1, arrival: float = 0.0
) -> GenerateRequest:
    """The same 24 tokens about the same picture, under any name."""
    sampling = SamplingParams(temperature=0.0, n=n, max_tokens=max_tokens, ignore_eos=True)
    at = feature(picture, 4, PICTURES[picture])
    tokens = text(24, seed=PICTURES[picture])
    return request(name, tokens, [at], sampling=sampling, arrival=arrival)


def add_irreplaceable(engine: Engine, wire: GenerateRequest) -> None:
    """Its items are not there and cannot be had."""
    limits = engine.limits
    pool = BlockPool(limits.num_blocks, limits.block_size)
    encoder_cache = EncoderCache(limits.encoder_rows * ROW_BYTES, ROW_BYTES)
    validator = RequestValidator(pool, encoder_cache, limits.model, limits.max_num_batched_tokens)
    built = validator.build_request(wire, {})
    built.recoverable = False
    engine.scheduler.take_in(built)


def warmed() -> Engine:
    """Both pictures are computed, so a prefix stands for either."""
    engine = Engine(LIMITS)
    for picture in PICTURES:
        engine.add(about(picture, f"warm {picture}"))
        engine.run()
    engine.scheduler.reset_encoder_cache()
    return engine


def run(engine: Engine, non_preemptible: set[str]) -> set[str]:
    """Abort the requests whose items are asked for, as the client does. Returns their names."""
    refused: set[str] = set()
    for _ in range(2_000):
        for name, keys in engine.needs:
            if name not in non_preemptible:
                pictures = [feature(picture, 0, size) for picture, size in PICTURES.items()]
                items = items_for(pictures)
                engine.scheduler.supply(name, {key: items[key] for key in keys})
            elif name not in refused:
                assert name not in engine.accepted, "asked in the middle of its answer"
                engine.scheduler.abort(name)
                refused.add(name)
        engine.needs.clear()
        if not engine.scheduler.has_work:
            return refused
        engine.step()
    raise AssertionError("no end")


def test_it_is_served_from_the_prefix_where_its_whole_answer_has_room():
    engine = warmed()
    wire = about("cat", "bare", 40)
    add_irreplaceable(engine, wire)
    assert run(engine, {"bare"}) == set()
    assert engine.tokens["bare", 0] == reference(wire, 40)
    engine.assert_all_free()


def test_it_may_take_all_blocks_there_are():
    engine = warmed()
    add_irreplaceable(engine, about("cat", "bare", None))
    assert run(engine, {"bare"}) == set()
    assert engine.reason("bare") == "length"
    engine.assert_all_free()


def test_two_that_have_not_room_together_are_not_both_begun():
    engine = warmed()
    for picture, name in (("cat", "a"), ("dog", "b")):
        add_irreplaceable(engine, about(picture, name, 60))
    assert run(engine, {"a", "b"}) == {"b"}
    assert engine.reason("a") == "length"
    engine.assert_all_free()


def test_others_are_preempted_and_it_is_not():
    """The others lack an item too, and can be asked for it."""
    engine = warmed()
    add_irreplaceable(engine, about("cat", "bare", 30, arrival=2.0))
    for number in range(3):
        wire = about("dog", str(number), 40, arrival=float(number))
        engine.add(wire, missing=[wire.features[0].key])
    assert run(engine, {"bare"}) == set()
    assert engine.scheduler.stats()["num_preemptions_total"] > 0
    engine.assert_all_free()


def test_several_samples_are_not_begun_on_a_prefix():
    engine = warmed()
    add_irreplaceable(engine, about("cat", "bare", 4, n=2))
    assert run(engine, {"bare"}) == {"bare"}
    engine.assert_all_free()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["non_preemptible", "lacking", "complete"]),
            st.sampled_from(sorted(PICTURES)),
            st.integers(1, 70),
            st.sampled_from([1, 1, 2]),
            st.integers(0, 3),
            st.integers(0, 12),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_else_runs_nobody_is_asked_in_the_middle_of_an_answer(workload):
    engine = warmed()
    wires: dict[str, GenerateRequest] = {}
    bare: set[str] = set()
    for number, (kind, picture, tokens, n, arrival, steps) in enumerate(workload):
        name = str(number)
        wires[name] = about(picture, name, tokens, n=n, arrival=float(arrival))
        if kind == "non_preemptible":
            bare.add(name)
            add_irreplaceable(engine, wires[name])
        else:
            keys = [wires[name].features[0].key]
            engine.add(wires[name], missing=keys if kind == "lacking" else ())
        for _ in range(steps):
            engine.step()
    refused = run(engine, bare)
    for name, wire in wires.items():
        if name not in refused:
            for index in range(wire.sampling.n):
                wanted = reference(wire, wire.sampling.max_tokens or 0, index)
                assert engine.tokens[name, index] == wanted
    engine.assert_all_free()
