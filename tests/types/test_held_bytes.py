"""Bytes that requests hold: limited in all and by tenant, and given back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lookonce.errors import QueueFullError
from lookonce.types.held_bytes import HeldBytes, TenantBytes

LIMIT = 1000


def test_one_tenant_has_half_where_there_are_others_and_all_where_it_is_alone():
    for shared, most in ((True, LIMIT // 2), (False, LIMIT)):
        of_all = TenantBytes(LIMIT, lambda shared=shared: shared)
        with HeldBytes(of_all, "a") as first, HeldBytes(of_all, "a") as second:
            first.take(most - 1)
            with pytest.raises(QueueFullError, match="your requests"):
                second.take(2)
            second.take(1)
        assert of_all.total == 0


def test_the_limit_of_all_is_kept():
    of_all = TenantBytes(LIMIT, lambda: True)
    with HeldBytes(of_all, "a") as a, HeldBytes(of_all, "b") as b, HeldBytes(of_all, "c") as c:
        a.take(LIMIT // 2)
        b.take(LIMIT // 2)
        with pytest.raises(QueueFullError, match="the requests"):
            c.take(1)
        assert of_all.of("c") == 0


def test_a_file_that_several_requests_hold_counts_once():
    of_all, data = TenantBytes(LIMIT), b"x" * 400
    with HeldBytes(of_all, "a") as first:
        with HeldBytes(of_all, "a") as second, HeldBytes(of_all, "b") as other:
            for held in (first, second, second, other):
                held.take_media(data)
            assert (of_all.of("a"), of_all.of("b")) == (400, 400)
            second.give_media(data)
            second.give_media(data)
            assert of_all.of("a") == 400
        assert of_all.total == 400
    first.give_media(data)  # after its end
    assert of_all.total == 0


class Holding(RuleBasedStateMachine):
    """Requests take, give back and end in any order; the sums agree with what each was let have."""

    def __init__(self):
        super().__init__()
        self.of_all = TenantBytes(LIMIT, lambda: True)
        self.files = [bytes(size) for size in (50, 120, 300)]
        self.open = []

    @rule(tenant=st.sampled_from("abc"))
    def begin(self, tenant):
        self.open.append((tenant, HeldBytes(self.of_all, tenant), [0], set()))

    @rule(number=st.integers(0, 9), nbytes=st.integers(1, 300))
    def take(self, number, nbytes):
        if self.open:
            _, held, taken, _ = self.open[number % len(self.open)]
            try:
                held.take(nbytes)
            except QueueFullError:
                return
            taken[0] += nbytes

    @rule(number=st.integers(0, 9), file=st.integers(0, 2), gives=st.booleans())
    def media(self, number, file, gives):
        if self.open:
            _, held, _, files = self.open[number % len(self.open)]
            if gives:
                held.give_media(self.files[file])
                files.discard(file)
                return
            try:
                held.take_media(self.files[file])
            except QueueFullError:
                return
            files.add(file)

    @rule(number=st.integers(0, 9))
    def end(self, number):
        if self.open:
            self.open.pop(number % len(self.open))[1].__exit__(None, None, None)

    @invariant()
    def sums_agree(self):
        total = 0
        for tenant in "abc":
            own = [each for each in self.open if each[0] == tenant]
            files = set().union(*(files for *_, files in own))
            expected = sum(taken[0] for _, _, taken, _ in own)
            expected += sum(len(self.files[file]) for file in files)
            assert self.of_all.of(tenant) == expected <= LIMIT // 2
            total += expected
        assert self.of_all.total == total <= LIMIT


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
