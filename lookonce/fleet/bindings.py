"""What a router remembers for tenants, with a share of the room for each of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class TenantBindings(Generic[K, V]):
    """(tenant, key) → value; `most` of all tenants together.

    When there are too many, the tenant that has most loses the one it used longest ago: nobody
    loses any to another tenant before it has more than an equal share.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = 0
        self._tenants: dict[str, OrderedDict[K, V]] = {}
        """Each tenant's, the one used longest ago first."""

    def __len__(self) -> int:
        return self._num

    def get(self, tenant: str, key: K) -> V | None:
        """What is bound to it, if it is still remembered; that is a use."""
        bound = self._tenants.get(tenant)
        if bound is None or key not in bound:
            return None
        bound.move_to_end(key)
        return bound[key]

    def put(self, tenant: str, key: K, value: V) -> None:
        bound = self._tenants.setdefault(tenant, OrderedDict())
        self._num += key not in bound
        bound[key] = value
        bound.move_to_end(key)
        if self._num > self._most:
            tenant, bound = max(self._tenants.items(), key=lambda each: len(each[1]))
            bound.popitem(last=False)
            self._num -= 1
            if not bound:
                del self._tenants[tenant]

    def check_integrity(self) -> None:
        """Raises `AssertionError`. O(tenants)."""
        assert self._num == sum(map(len, self._tenants.values())) <= self._most
        assert all(self._tenants.values())
