"""Memory that keeps its address from step to step: a host array and its device twin."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_VIEWS = 512
"""Views kept per buffer; a decode loop asks for the same few again and again."""


class StaticBuffer:
    """On the CPU host and device are the same memory; on an accelerator the host side is pinned.

    `push` copies asynchronously: see `CopyFence` for when the host side may be filled again.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=not on_cpu)
        self._device = self._host if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        self._views: dict[tuple[int, ...], Tensor] = {}
        self.host = self._host.numpy()

    def push(self, *used: int) -> Tensor:
        """The first `used` entries of the last dimensions, on the device."""
        view = self._views.get(used)
        if view is None:
            view = self._remember(used)
        if self._device is not self._host:
            _copy_rows(view, _first(self._host, used))
        return view

    def _remember(self, used: tuple[int, ...]) -> Tensor:
        """Making a view costs more than filling it, for the few numbers of a decode step."""
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        self._views[used] = view = _first(self._device, used)
        return view


def _first(tensor: Tensor, used: tuple[int, ...]) -> Tensor:
    for dimension, size in enumerate(used, tensor.dim() - len(used)):
        tensor = tensor.narrow(dimension, 0, size)
    return tensor


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
