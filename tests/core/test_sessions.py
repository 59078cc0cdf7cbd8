"""Live sessions: extended while they run, of bounded memory, never computed twice."""

from __future__ import annotations

import numpy as np
import pytest

from lookonce.core import mm_features
from lookonce.core.mm_features import MultiModalFeatures
from lookonce.errors import BadRequestError, TooLargeError
from lookonce.types.media import MediaFeature
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import (
    INTERRUPT,
    Limits,
    feature,
    items_for,
    key,
    model_info,
    prompt_with,
    request,
    text,
)
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import advance, reference, row_at, sample

ONE_A_TURN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
THREE_A_TURN = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class Live:
    """A session driven like its client would, which knows what it gave and what it got."""

    def __init__(
        self, engine: Engine, name: str = "live", *, sampling: SamplingParams = ONE_A_TURN
    ) -> None:
        self.engine, self.name, self.sampling = engine, name, sampling
        first = feature(f"{name} 0", 2, 3, modality="audio")
        self.request = request(name, text(8), [first], sampling=sampling)
        engine.scheduler.add(self.request, items_for([first]), live=True)
        self.given: list[tuple[list[int], list[MediaFeature]]] = [
            (prompt_with(text(8), [first]), [first])
        ]

    def give(self, *names: str, length: int = 2, tail: int = 1) -> None:
        """One extension with an item for each name."""
        features = [
            feature(f"{self.name} {n}", i * length, length, modality="audio")
            for i, n in enumerate(names)
        ]
        tokens = prompt_with(text(len(names) * length + tail, seed=len(self.given)), features)
        self.engine.scheduler.extend(
            self.name, np.array(tokens, np.int32), tuple(features), items_for(features), INTERRUPT
        )
        self.given.append((tokens, features))

    @property
    def items(self) -> dict:
        return self.engine.scheduler._state.queues.requests[self.name].items

    @property
    def got(self) -> list[int]:
        return self.engine.tokens[self.name, 0]

    def expected(self) -> list[int]:
        """The tokens generated when each extension comes after the answer to the one before."""
        tokens: list[int] = []
        features, generated, state = MultiModalFeatures(), [], b""
        for given, coming in self.given:
            for at in coming:
                shifted = MediaFeature(
                    at.key, at.modality, len(tokens) + at.offset, at.length, at.num_embeds
                )
                features.append(shifted)
            tokens += given
            for _ in range(self.sampling.max_tokens):
                state = b""
                for position, token in enumerate(tokens):
                    state = advance(state, token, row_at(features, position))
                generated.append(sample(state, 0))
                tokens.append(generated[-1])
        return generated


@pytest.mark.parametrize("sampling", [ONE_A_TURN, THREE_A_TURN])
@pytest.mark.parametrize("max_tokens", [4, 32])
def test_a_session_computes_what_one_long_prompt_would(
    sampling: SamplingParams, max_tokens: int
) -> None:
    engine = Engine(Limits(max_num_batched_tokens=max_tokens))
    live = Live(engine, sampling=sampling)
    for number in range(12):
        engine.run()
        live.give(str(number + 1))
    engine.run()
    assert live.got == live.expected()
    assert len(engine.runner.encoded) == 13


def test_a_session_waits_for_more_and_costs_no_steps_meanwhile() -> None:
    engine = Engine()
    live = Live(engine)
    engine.run()
    assert not engine.scheduler.has_work
    assert engine.step() is None
    assert engine.scheduler.num_running == 1
    live.give("x")
    assert engine.scheduler.has_work


def test_what_comes_while_it_computes_or_waits_is_kept_for_it() -> None:
    engine = Engine(Limits(max_num_batched_tokens=4))
    live = Live(engine)
    live.give("x")
    engine.step()
    live.give("y", "z")
    engine.run()
    live.give("later")
    engine.run()
    assert len(live.got) == 2, "what comes together is answered together"
    assert len(engine.runner.encoded) == 5


def test_the_caller_may_reuse_the_memory_of_an_extension() -> None:
    """Also before it is appended: the memory of the tokens, and the mapping of the items."""
    engine = Engine(Limits(max_num_batched_tokens=4))
    live = Live(engine)
    at = feature("live x", 1, 2, modality="audio")
    tokens, items = np.array(prompt_with(text(6), [at]), np.int32), items_for([at])
    engine.step()
    engine.scheduler.extend("live", tokens, (at,), items, INTERRUPT)
    live.given.append((tokens.tolist(), [at]))
    tokens[:] = 7
    items.clear()
    engine.run()
    first, second = live.given
    whole = request("whole", first[0] + second[0], [*first[1], feature("live x", 9, 2)])
    assert live.got == reference(whole, 1)


def test_tokens_may_have_gaps_between_them_in_memory() -> None:
    engine = Engine()
    live = Live(engine)
    engine.run()
    spread = np.array([5, 900, 6, 900, 7, 900], np.int32)[::2]
    engine.scheduler.extend("live", spread, (), {}, INTERRUPT)
    live.given.append(([5, 6, 7], []))
    engine.run()
    assert live.got == live.expected()


def test_the_first_token_carries_the_reuse_stats_even_when_extended_before_it() -> None:
    engine = Engine(Limits(max_num_batched_tokens=4))
    live = Live(engine)
    live.give("x")
    engine.run()
    assert live.name in engine.reuse_stats


def test_an_item_is_dropped_as_soon_as_its_kv_is_computed() -> None:
    engine = Engine()
    live = Live(engine)
    for number in range(20):
        engine.run()
        assert live.items == {}
        live.give(str(number))
    engine.step()
    assert live.items == {}


@pytest.mark.parametrize("max_tokens", [3, 32])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_features_are_forgotten_once_their_blocks_are_full(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, prefix_caching: bool
) -> None:
    monkeypatch.setattr(mm_features, "SPARE_FEATURES", 1)
    limits = Limits(max_num_batched_tokens=max_tokens, prefix_caching=prefix_caching)
    engine = Engine(limits)
    live = Live(engine)
    for number in range(30):
        engine.run()
        live.give(str(number))
        if number == 20:
            engine.scheduler.reset_prefix_cache()
    engine.run()
    features = engine.scheduler._state.queues.requests["live"].features
    assert len(features) == 31
    assert len(features._features) < 4
    assert live.got == live.expected()


def test_an_item_that_comes_again_is_kept_until_its_last_place_is_computed() -> None:
    engine = Engine(Limits(max_num_batched_tokens=4, encoder_rows=4))
    live = Live(engine)
    engine.run()
    live.give("x", "y", "x", length=4)
    for _ in range(3):
        engine.step()
    assert key("live x") in live.items
    engine.run()
    assert live.items == {}
    assert live.got == live.expected()


def test_stop_tokens_end_the_turn_and_not_the_session() -> None:
    engine = Engine()
    first = Live(engine, "a", sampling=THREE_A_TURN)
    engine.run()
    stopping = SamplingParams(temperature=0.0, max_tokens=3, stop_token_ids=(first.got[0],))
    live = Live(engine, "a2", sampling=stopping)
    live.request = request("b", text(8), first.given[0][1], sampling=stopping)
    engine.scheduler.add(live.request, items_for(first.given[0][1]), live=True)
    engine.run()
    assert engine.tokens["b", 0] == first.got[:1]
    assert ("b", 0) not in engine.ended


def test_a_session_ends_by_abort_and_gives_everything_back() -> None:
    engine = Engine()
    live = Live(engine)
    engine.run()
    live.give("x")
    engine.scheduler.abort("live")
    engine.run()
    assert engine.reason("live") == "abort"
    live.give("too late")
    engine.run()
    engine.assert_all_free()


def test_a_session_at_its_limit_ends_by_length() -> None:
    engine = Engine(Limits(model=model_info(max_model_len=20)))
    live = Live(engine)
    engine.run()
    with pytest.raises(TooLargeError, match="the limit is 19"):
        live.give("x", length=12)
    live.give("y", length=9)
    engine.run()
    assert engine.reason("live") == "length"
    engine.assert_all_free()


class TestRefusals:
    @pytest.fixture
    def live(self) -> Live:
        engine = Engine()
        live = Live(engine)
        engine.run()
        return live

    def extend(self, live: Live, tokens: list[int], features: list[MediaFeature], **items) -> None:
        live.engine.scheduler.extend(
            live.name,
            np.array(tokens, np.int32),
            tuple(features),
            items or items_for(features),
        )

    @pytest.mark.parametrize(
        ("tokens", "features", "message"),
        [
            ([5], [feature("x", 0, 2)], "ends at position 2 of 1"),
            ([5] * 5, [feature("x", 0, 2), feature("y", 1, 2)], "items 0 and 1 overlap"),
            ([5000], [], "outside the vocabulary"),
        ],
    )
    def test_what_could_never_be_computed_is_refused_and_changes_nothing(
        self, live: Live, tokens: list[int], features: list[MediaFeature], message: str
    ) -> None:
        with pytest.raises(BadRequestError, match=message):
            self.extend(live, tokens, features)
        assert not live.engine.scheduler.has_work

    def test_an_item_must_come_along(self, live: Live) -> None:
        with pytest.raises(BadRequestError, match="item 0 does not come along"):
            self.extend(live, [5] * 4, [feature("x", 0, 2)], other=None)

    def test_an_item_without_a_feature_is_refused(self, live: Live) -> None:
        """One without would be kept for as long as the session lives."""
        at, homeless = feature("x", 0, 2), feature("y", 2, 2)
        with pytest.raises(BadRequestError, match=r"1 of the 2 items .* no place") as refused:
            live.engine.scheduler.extend(
                live.name, np.array([5] * 4, np.int32), (at,), items_for([at, homeless])
            )
        assert refused.value.param == "features"
        assert not live.engine.scheduler.has_work
        opened = request("b", text(8), [at])
        with pytest.raises(BadRequestError, match="no place"):
            live.engine.scheduler.add(opened, items_for([at, homeless]), live=True)

    @pytest.mark.parametrize(
        "tokens",
        [
            np.array([5, 6, 7], np.int64),
            np.array([5, 6, 7], ">i4"),
            np.array([5, 6, 7], np.uint32),
            np.array([5.0, 6.0], np.float32),
            np.array([[5, 6], [7, 8]], np.int32),
            np.array(5, np.int32),
            np.array([], np.int32),
        ],
        ids=str,
    )
    def test_tokens_are_int32_in_one_dimension(self, live: Live, tokens: np.ndarray) -> None:
        """Others would be read as other tokens, and more of them."""
        with pytest.raises(BadRequestError, match="they are int32 with one dim") as refused:
            live.engine.scheduler.extend(live.name, tokens, (), {})
        assert refused.value.param == "prompt"
        assert not live.engine.scheduler.has_work

    def test_only_a_live_request_is_extended(self) -> None:
        engine = Engine()
        engine.add(request("a", text(8)))
        with pytest.raises(BadRequestError, match="no live session"):
            engine.scheduler.extend("a", np.array([5], np.int32), (), {})

    def test_a_session_has_one_sample_and_brings_its_items(self) -> None:
        engine = Engine()
        two = request("a", text(8), sampling=SamplingParams(n=2))
        scored = request("b", text(8), sampling=SamplingParams(prompt_logprobs=1))
        with pytest.raises(BadRequestError, match="computed once"):
            engine.scheduler.add(scored, {}, live=True)
        with pytest.raises(BadRequestError, match="one sample"):
            engine.scheduler.add(two, {}, live=True)
        at = feature("x", 0, 2)
        with pytest.raises(BadRequestError, match="brings its items"):
            engine.scheduler.add(request("b", text(8), [at]), {}, (at.key,), live=True)


class TestShortOfBlocks:
    def test_others_are_preempted_before_a_session_is_given_up(self) -> None:
        engine = Engine(Limits(num_blocks=8))
        live = Live(engine)
        engine.run()
        engine.add(request("other", text(12, seed=3), arrival=-1.0))
        engine.step()
        live.give("long", length=6, tail=8)
        for _ in range(20):
            engine.step()
        assert engine.scheduler.stats()["num_preemptions_total"] >= 1
        assert live.got == live.expected()
        engine.scheduler.abort("live")
        engine.run()
        assert engine.reason("other") == "length"
        engine.assert_all_free()

    def test_a_session_without_blocks_ends_with_session_evicted(self) -> None:
        engine = Engine(Limits(num_blocks=6))
        older, newer = Live(engine, "older"), Live(engine, "newer")
        newer.request = older.request
        engine.run()
        older.give("long", length=6, tail=8)
        engine.run()
        assert engine.ended["newer", 0].error[0] == "SessionEvictedError"
        assert older.got == older.expected()
        engine.scheduler.check_integrity()
