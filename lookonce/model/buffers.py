"""Memory that keeps its address from step to step: a host array and its device twin."""

from __future__ import annotations

import torch
from torch import Tensor


class StaticBuffer:
    """On the CPU host and device are the same memory; on an accelerator the host side is pinned.

    `push` copies asynchronously: whoever fills the host side again must have waited for the step
    before (fetching its sampled tokens does).
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=not on_cpu)
        self._device = self._host if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        self.host = self._host.numpy()

    def push(self, size: int) -> Tensor:
        """The first `size` entries of the last dimension, on the device."""
        view = self._device[..., :size]
        if self._device is not self._host:
            view.copy_(self._host[..., :size], non_blocking=True)
        return view
