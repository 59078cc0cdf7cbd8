"""What a router remembers for tenants is divided between them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lookonce.fleet.bindings import TenantBindings

MOST = 12
PUTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=120)


@given(PUTS)
def test_nobody_loses_any_to_another_tenant_before_it_has_more_than_an_equal_share(
    puts: list[tuple[str, int]],
) -> None:
    bindings = TenantBindings[int, int](MOST)
    used: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for number, (tenant, key) in enumerate(puts):
        bindings.put(tenant, key, number)
        used[tenant] = [each for each in used[tenant] if each != key] + [key]
        bindings.check_integrity()
    last = {each: number for number, each in enumerate(puts)}
    for tenant, keys in used.items():
        for key in keys[-(MOST // 3) :]:  # those used last, as many as its share
            assert bindings.get(tenant, key) == last[tenant, key]
    assert bindings.get("d", 1) is None


def test_what_is_used_is_kept_longest() -> None:
    bindings = TenantBindings[str, int](2)
    for number, key in enumerate("xy"):
        bindings.put("", key, number)
    assert bindings.get("", "x") == 0
    bindings.put("", "z", 2)
    assert [bindings.get("", key) for key in "xyz"] == [0, None, 2]
