"""What senders owe: items the engine asked for, in answers that are still to come."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Debt:
    keys: set[bytes] = field(default_factory=set)
    num_answers: int = 0


class PendingResends:
    """By request. One may be asked for more than once: what is owed is the sum of all asks."""

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def ask(self, request_id: str, keys: Collection[bytes]) -> None:
        debt = self._debts.setdefault(request_id, _Debt())
        debt.keys.update(keys)
        debt.num_answers += 1

    def unpaid_after(self, request_id: str, came: Collection[bytes]) -> bool:
        """Take an answer: whether items that were asked for are in none of the answers."""
        debt = self._debts.get(request_id, _Debt())
        debt.keys.difference_update(came)
        debt.num_answers -= 1
        return bool(debt.keys) and debt.num_answers <= 0

    def forget(self, request_id: str) -> None:
        self._debts.pop(request_id, None)
