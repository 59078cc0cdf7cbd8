"""What is remembered for tenants is divided between them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lookonce.types.tenant_lru import TenantLRU

CAPACITY = 12
PUTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=120)
SIZES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 8), st.integers(1, 14)), max_size=120
)


@given(PUTS)
def test_nobody_loses_any_to_another_tenant_before_it_has_more_than_an_equal_share(
    puts: list[tuple[str, int]],
) -> None:
    held = TenantLRU[int, int](CAPACITY)
    used: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for number, (tenant, key) in enumerate(puts):
        held.put(tenant, key, number)
        used[tenant] = [each for each in used[tenant] if each != key] + [key]
        held.check_integrity()
    last = {each: number for number, each in enumerate(puts)}
    for tenant, keys in used.items():
        for key in keys[-(CAPACITY // 3) :]:  # those used last, as many as its share
            assert held.get(tenant, key) == last[tenant, key]
    assert held.get("d", 1) is None


def test_what_is_used_is_kept_longest() -> None:
    held = TenantLRU[str, int](2)
    for number, key in enumerate("xy"):
        held.put("", key, number)
    assert held.get("", "x") == 0
    assert held.put("", "z", 2) == [("", "y")]
    assert [held.get("", key) for key in "xyz"] == [0, None, 2]


@given(SIZES)
def test_what_had_to_go_is_told_and_all_else_is_held(puts: list[tuple[str, int, int]]) -> None:
    held = TenantLRU[int, int](CAPACITY, lambda size: size)
    model: dict[tuple[str, int], int] = {}
    for tenant, key, size in puts:
        model[tenant, key] = size
        for gone in held.put(tenant, key, size):
            before = {t: sum(s for (u, _), s in model.items() if u == t) for t in "abc"}
            assert size > CAPACITY or before[gone[0]] == max(before.values())
            del model[gone]
        held.check_integrity()
        assert held.cost == sum(model.values())
        assert sorted(held) == sorted(model)
        assert len(held) == len(model)
        assert all(held.get(*each) == size for each, size in model.items())


def test_what_is_larger_than_all_room_drops_nothing_but_what_it_replaces() -> None:
    held = TenantLRU[str, int](10, lambda size: size)
    for key, size in [("x", 3), ("y", 4)]:
        held.put("", key, size)
    assert held.put("", "y", 11) == [("", "y")]
    assert list(held) == [("", "x")]
    held.remove("", "x")
    held.remove("", "x")
    assert held.cost == 0
    assert len(held) == 0
