"""What is remembered for tenants, with a share of the room for each of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class TenantLRU(Generic[K, V]):
    """(tenant, key) → value; all that is held costs at most `capacity` together.

    When it costs more, the tenant whose entries cost most loses the one it used longest ago: nobody
    loses any to another tenant before it has more than an equal share. Not for several threads.
    """

    def __init__(self, capacity: int, cost: Callable[[V], int] = lambda value: 1) -> None:
        """`cost`: of a value, the same whenever it is asked; in the units of `capacity`."""
        self._capacity, self._cost = capacity, cost
        self._tenants: dict[str, OrderedDict[K, V]] = {}
        """Each tenant's, the one used longest ago first."""
        self._costs: dict[str, int] = {}
        """Tenant → what its entries cost."""
        self.cost = 0
        """Of all that is held."""

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def __iter__(self) -> Iterator[tuple[str, K]]:
        """Tenants and keys of all entries."""
        for tenant, held in self._tenants.items():
            yield from ((tenant, key) for key in held)

    def get(self, tenant: str, key: K) -> V | None:
        """What is held for it; that is a use."""
        held = self._tenants.get(tenant)
        if held is None or key not in held:
            return None
        held.move_to_end(key)
        return held[key]

    def put(self, tenant: str, key: K, value: V) -> list[tuple[str, K]]:
        """Hold it instead of what was held; a use. What had to go for it, by tenant and key: itself
        where it costs more than there is room."""
        self.remove(tenant, key)
        cost = self._cost(value)
        if cost > self._capacity:
            return [(tenant, key)]
        self._tenants.setdefault(tenant, OrderedDict())[key] = value
        self._costs[tenant] = self._costs.get(tenant, 0) + cost
        self.cost += cost
        evicted = []
        while self.cost > self._capacity:
            most = max(self._costs, key=self._costs.__getitem__)
            oldest = next(iter(self._tenants[most]))
            self.remove(most, oldest)
            evicted.append((most, oldest))
        return evicted

    def remove(self, tenant: str, key: K) -> None:
        """Nothing happens where nothing is held for it."""
        held = self._tenants.get(tenant)
        if held is None or key not in held:
            return
        cost = self._cost(held.pop(key))
        self._costs[tenant] -= cost
        self.cost -= cost
        if not held:
            del self._tenants[tenant], self._costs[tenant]

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming the rule that is broken. O(n)."""
        costs = {
            tenant: sum(map(self._cost, held.values())) for tenant, held in self._tenants.items()
        }
        rules = {
            "what tenants hold costs what is told": costs == self._costs,
            "the sum is right, and allowed": sum(costs.values()) == self.cost <= self._capacity,
            "no tenant without entries is listed": all(self._tenants.values()),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise AssertionError(broken)
