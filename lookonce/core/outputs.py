"""One encoder output in the books of the encoder cache: its size, who holds it, when it leaves."""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, gc=False):
    """An output that the device holds.

    Nearly always one holder holds it once: `holder`, without a dict. `holders` is for the rest.
    """

    key: bytes
    num_bytes: int
    cost_per_byte: float
    holder: int | None = None
    """Who alone holds it, once."""
    holders: dict[int, int] | None = None
    """Holder → how many times it holds this entry; None while `holder` is enough."""
    lane: float | None = None
    """In which lane of the eviction order its place is; None where it has none."""
    place: int = 0
    used: float = 0.0
    """The order's clock when it was used last."""
    condemned: bool = False
    """Cleared while held: leaves with its last holder."""

    @property
    def is_held(self) -> bool:
        return self.holder is not None or self.holders is not None

    def hold(self, holder: int) -> None:
        """Count one more hold."""
        if self.holders is None:
            if self.holder is None:
                self.holder = holder
                return
            self.holders, self.holder = {self.holder: 1}, None
        self.holders[holder] = self.holders.get(holder, 0) + 1

    def release(self, holder: int) -> bool:
        """Count one hold less; whether the holder has none any more. `KeyError` if it had none."""
        if self.holders is None:
            if self.holder != holder:
                raise KeyError(holder)
            self.holder = None
            return True
        self.holders[holder] -= 1
        if self.holders[holder]:
            return False
        self.forget(holder)
        return True

    def forget(self, holder: int) -> None:
        """As if the holder had never held it."""
        if self.holders is None:
            self.holder = None
        elif len(self.holders) > 1:
            del self.holders[holder]
        else:
            self.holders = None

    def all_holders(self) -> tuple[int, ...]:
        if self.holders is not None:
            return tuple(self.holders)
        return () if self.holder is None else (self.holder,)
