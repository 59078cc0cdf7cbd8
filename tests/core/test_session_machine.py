"""Sessions that drop tokens and are sent to by credits, beside requests that want their blocks.

Every token is compared with what one long computation gives: the runner's K/V hold all that came
before, dropped or not. The runner objects to tokens that are dropped from within a window, to keys
that are not rotated, and to positions that the model does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lookonce.core.request import SequenceState, Session
from lookonce.core.sessions import Sessions
from lookonce.errors import BadRequestError
from lookonce.types.request import ExtendOptions, SessionOptions, TokenDelta
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, items_for, model_info, prompt_with, text
from tests.support.core.builders import request as request_for
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import advance, sample

CONTEXT, WINDOW, POSITIONS = 64, 11, 64
CREDITS = 12
SLIDING = msgspec.structs.replace(
    model_info(max_model_len=CONTEXT),
    sliding_window=WINDOW,
    max_positions=POSITIONS,
    relative_positions=True,
)
FULL = msgspec.structs.replace(SLIDING, sliding_window=0, max_positions=CONTEXT)


@dataclass
class Live:
    """What one session was given, and what it has said."""

    given: list[list[bytes | int]]
    """By extension, 0 for the opening: each position's entry, a token or a row of an item."""
    turn: int
    state: bytes = b""
    taken_in: int = -1
    """The last extension that is part of `state`."""
    num_sent: int = 0
    num_back: int = 0
    """Tokens sent, and credits that came back for them."""
    last: int = 0
    ended: str | None = None
    answers: dict[int, str] = field(default_factory=dict)
    asked: dict[int, bool] = field(default_factory=dict)

    def hear(self, delta: TokenDelta) -> None:
        assert delta.error is None or delta.error[0] == "SessionEvictedError", delta.error
        if delta.finish_reason is not None:
            self.ended = delta.finish_reason
            return
        said = delta.session
        self.num_back += said.credits
        for number in range(self.taken_in + 1, said.extension + 1):
            for entry in self.given[number]:
                row = entry if isinstance(entry, tuple) else None
                self.state = advance(self.state, entry if row is None else 0, row)
            self.taken_in = number
        for token in delta.token_ids:
            assert token == sample(self.state, 0), "as if nothing had been dropped"
            self.state = advance(self.state, token, None)
        if said.ended:
            assert self.asked[said.extension], "only what asks for an answer gets one"
            assert said.extension not in self.answers, "an answer ends once"
            self.answers[said.extension] = said.ended


class SessionMachine(RuleBasedStateMachine):
    @initialize(
        sliding=st.booleans(),
        block_size=st.sampled_from([2, 4]),
        budget=st.sampled_from([5, 9, 32]),
        num_blocks=st.sampled_from([60, 120]),
        prefix_caching=st.booleans(),
    )
    def start(
        self, sliding: bool, block_size: int, budget: int, num_blocks: int, prefix_caching: bool
    ) -> None:
        self.engine = Engine(
            Limits(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_batched_tokens=budget,
                max_num_seqs=5,
                encoder_rows=64,
                prefix_caching=prefix_caching,
                model=SLIDING if sliding else FULL,
            )
        )
        self.engine.runner.allows_unanswered = True
        self.sliding = sliding
        self.sessions: dict[str, Live] = {}
        self.heard = 0
        self.deltas: list[TokenDelta] = []
        take = self.engine.take

        def noting(output) -> None:
            self.deltas += output.deltas
            take(output)

        self.engine.take = noting
        self.broken = False
        plain_step = self.engine.step

        def step():
            try:
                return plain_step()
            except BaseException:
                self.broken = True
                raise

        self.engine.step = step
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return str(self.count)

    @property
    def live(self) -> list[str]:
        return [name for name, live in self.sessions.items() if live.ended is None]

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        length=st.integers(1, 30),
        turn=st.sampled_from([1, 3, None]),
        answer=st.booleans(),
        keep=st.sampled_from([None, 0, 6]),
    )
    def open(self, length: int, turn: int | None, answer: bool, keep: int | None) -> None:
        name, tokens = self.name(), text(length)
        options = SessionOptions(
            answer=answer,
            overflow="end" if self.sliding else "compact",
            keep_tokens=keep,
            credits=CREDITS,
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=turn, ignore_eos=True)
        request = request_for(name, tokens, sampling=sampling, arrival=float(self.count))
        self.engine.scheduler.add(request, {}, live=True, options=options)
        self.sessions[name] = Live([list(tokens)], turn or 0, asked={0: answer})

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        length=st.integers(1, 8),
        rows=st.integers(0, 3),
        interrupt=st.booleans(),
        answer=st.booleans(),
        max_tokens=st.sampled_from([None, 1, 4]),
    )
    def extend(self, data, length, rows, interrupt, answer, max_tokens) -> None:
        """A client that has credits left sends; one that has none would be refused."""
        name = data.draw(st.sampled_from(self.live))
        live = self.sessions[name]
        number = len(live.given)
        items = [feature(f"{name} {number}", 0, rows, modality="audio")] if rows else []
        plain = text(length + rows, seed=number)
        tokens = np.array(prompt_with(plain, items), np.int32)
        give = (name, tokens, tuple(items), items_for(items))
        options = ExtendOptions(interrupt, answer, max_tokens)
        if live.num_sent - live.num_back >= CREDITS:
            if name in self.engine.scheduler._state.queues.requests:
                try:
                    self.engine.scheduler.extend(*give, options)
                except BadRequestError:
                    return
                raise AssertionError("more than the credits was taken")
            return
        self.engine.scheduler.extend(*give, options)
        live.num_sent += len(tokens)
        live.given.append([(items[0].key, i) for i in range(rows)] + plain[rows:])
        live.asked[number] = answer

    @rule(length=st.integers(1, 40), max_tokens=st.integers(1, 8))
    def request(self, length: int, max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        made = request_for(self.name(), text(length), sampling=sampling, arrival=float(self.count))
        self.engine.add(made)

    @rule(steps=st.integers(1, 16))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self.hear()

    @precondition(lambda self: self.live)
    @rule(turns=st.integers(1, 12), length=st.integers(1, 8))
    def talk(self, turns: int, length: int) -> None:
        """All sessions are given something again and again."""
        for _ in range(turns):
            for name in self.live:
                live = self.sessions[name]
                if live.num_sent - live.num_back < CREDITS:
                    number = len(live.given)
                    tokens = text(length, seed=number)
                    array = np.array(tokens, np.int32)
                    self.engine.scheduler.extend(
                        name, array, (), {}, ExtendOptions(True, max_tokens=2)
                    )
                    live.num_sent += length
                    live.given.append(list(tokens))
                    live.asked[number] = True
            self.step(3)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data) -> None:
        self.engine.scheduler.abort(data.draw(st.sampled_from(self.live)))
        self.engine.step()
        self.hear()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def hear(self) -> None:
        while self.heard < len(self.deltas):
            delta = self.deltas[self.heard]
            self.heard += 1
            if delta.request_id in self.sessions:
                self.sessions[delta.request_id].hear(delta)

    @invariant()
    def credits_are_never_given_twice(self) -> None:
        for live in getattr(self, "sessions", {}).values():
            assert 0 <= live.num_back <= live.num_sent, "credits come back once"

    def settle(self) -> None:
        """Until nothing is computed; a request, or a session with what it was given since, may wait
        for the place of an idle session."""
        scheduler = self.engine.scheduler
        queues = scheduler._state.queues
        for _ in range(1000):
            waiting = {sequence.request.request_id for sequence in queues.waiting}
            taken = scheduler._sessions.extended.keys() <= waiting
            waits = queues.idle and not queues.num_computing and taken
            if not scheduler.has_work or (waits and self.engine.step() is None):
                return
            self.engine.step()
        raise AssertionError("the sessions do not come to rest")

    def teardown(self) -> None:
        if not hasattr(self, "engine") or self.broken:
            return
        for name in self.live:  # endless answers end before the rest is judged
            tokens = np.array([7], np.int32)
            live = self.sessions[name]
            if live.num_sent - live.num_back < CREDITS:
                self.engine.scheduler.extend(
                    name, tokens, (), {}, ExtendOptions(True, answer=False)
                )
                live.num_sent += 1
                live.given.append([7])
                live.asked[len(live.given) - 1] = False
            elif live.turn == 0:
                self.engine.scheduler.abort(name)
        self.settle()
        self.hear()
        for name in self.live:
            live = self.sessions[name]
            sequence = self.engine.scheduler._state.queues.requests[name].sequences[0]
            waits = sequence.state is SequenceState.WAITING
            assert live.num_back <= live.num_sent, "credits come back once"
            assert waits or live.num_back == live.num_sent, "all that is computed is credited"
            if self.sliding:
                most = WINDOW + 2 * self.engine.limits.block_size
                assert len(sequence.tokens) <= most, "nothing behind the window is kept"
            self.engine.scheduler.abort(name)
        self.engine.run()
        self.engine.step()
        self.engine.assert_all_free()


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


_slide, _take_credits = Sessions._slide, Session.take_credits


def early(self, request, session, sequence) -> None:
    session.window -= 1
    _slide(self, request, session, sequence)
    session.window += 1


def twice(self, num_computed: int) -> int:
    return 2 * _take_credits(self, num_computed)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "rule_broken"),
    [
        (Sessions, "_slide", early, "what the next token attends to stays"),
        (
            Session,
            "take_credits",
            lambda *given: 2 * _take_credits(*given),
            "credits come back once",
        ),
    ],
)
def test_the_machine_notices(owner, name, broken, rule_broken: str, monkeypatch) -> None:
    monkeypatch.setattr(owner, name, broken)
    noticing = settings(
        max_examples=60,
        stateful_step_count=25,
        deadline=None,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )
    with pytest.raises(AssertionError, match=rule_broken):
        run_state_machine_as_test(SessionMachine, settings=noticing)


class FirstSession:
    """Draws the session that was opened first."""

    def draw(self, strategy: object) -> str:
        return "1"


def talk_past_the_last_position() -> None:
    machine = SessionMachine()
    machine.start(sliding=True, block_size=4, budget=5, num_blocks=60, prefix_caching=False)
    machine.open(length=14, turn=1, answer=False, keep=None)
    machine.extend(FirstSession(), 1, 2, False, False, None)
    machine.talk(turns=7, length=6)
    assert not machine.broken


def test_positions_begin_again_before_the_last_one_though_no_block_leaves_in_between() -> None:
    talk_past_the_last_position()


def test_the_machine_notices_positions_that_do_not_begin_again(monkeypatch) -> None:
    monkeypatch.setattr(Session, "nears_last_position", lambda *_: False)
    with pytest.raises(AssertionError, match="the model has every position"):
        talk_past_the_last_position()
