"""Encoder outputs in host memory, so that what left the device need not be encoded again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Copies by key. On the CPU host and device are one memory: a copy is the output itself.

    On CUDA copies are pinned and made on the stream that computes: an output may be freed right
    after `keep`, and a copy right after `bring`, because the allocators wait for the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[bytes, Tensor] = {}

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    def keep(self, key: bytes, output: Tensor) -> None:
        """Raises `RuntimeError` when there is no memory to pin."""
        if self._device.type == "cpu":
            self._copies[key] = output
            return
        copy = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        self._copies[key] = copy.copy_(output, non_blocking=True)

    def bring(self, key: bytes) -> Tensor:
        """The output on the device; the copy stays. Raises `KeyError` when there is none."""
        return self._copies[key].to(self._device, non_blocking=True)

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._copies.pop(key, None)
