"""Memory that keeps its address from step to step: a host array and its device twin."""

from __future__ import annotations

import torch
from torch import Tensor


class StaticBuffer:
    """On the CPU host and device are the same memory; on an accelerator the host side is pinned.

    `push` copies asynchronously: see `CopyFence` for when the host side may be filled again.
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
            _copy_rows(view, self._host[..., :size])
        return view


def _copy_rows(target: Tensor, source: Tensor) -> None:
    """Row by row: only contiguous pinned memory is copied without waiting."""
    if target.dim() == 1:
        target.copy_(source, non_blocking=True)
        return
    for target_row, source_row in zip(target, source, strict=True):
        _copy_rows(target_row, source_row)


class CopyFence:
    """Keeps a step from overwriting host memory that the step before is still copying from."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until all copies up to the last `mark` are done; at once where nothing is copied."""
        if self._event is not None:
            self._event.synchronize()

    def mark(self) -> None:
        if self._event is not None:
            self._event.record()
