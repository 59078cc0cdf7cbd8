"""Copies between host and device that are enqueued and not waited for, and a step's one wait.

A step enqueues all it has to do. What its result needs on the host is copied to pinned memory on
the way (`StepReads.later`) and waited for once, at the end: perhaps after the next step was
enqueued, which takes the tokens that are not on the host yet from the device (`SampledTokens`). On
a CPU host and device are one memory and nothing is copied.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(
    values: Tensor | NDArray[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Values of the host on `device`, in `dtype` (None: their own), through pinned memory.

    On a CPU memory is shared where it can be. Memory that was pinned may be freed at once, as the
    allocator keeps it until the copy is done, and must not be written before the copy has ended.
    """
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cpu" or host.device == device:
        return host if dtype is None else host.to(dtype)
    wanted = dtype or host.dtype
    if host.dtype != wanted or not host.is_pinned():
        host = torch.empty(host.shape, dtype=wanted, pin_memory=True).copy_(host)
    return host.to(device, non_blocking=True)


class CopyStream:
    """Copies between host and device beside what the device computes, in an order of their own.

    A copy to the device may begin while earlier steps are computed; whatever is computed after it
    was asked for waits for it. A copy to the host begins once what was enqueued before is done, and
    nothing that is computed later waits for it. On a CPU host and device are one memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None
        self._stream: Any = None
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    def to_device(self, values: Tensor | NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """As the function `to_device`."""
        if self._stream is None:
            return to_device(values, self._device, dtype)
        computing = self._module.current_stream(self._device)
        with self._module.stream(self._stream):
            there = to_device(values, self._device, dtype)
        computing.wait_stream(self._stream)
        there.record_stream(computing)  # its memory is not used again before that has ended
        return there

    def to_host(self, values: Tensor) -> Tensor:
        """The values in pinned memory, once the copy is done: copies of this stream that are asked
        for later see them. On a CPU the same tensor. `values` may be freed at once. Raises
        `RuntimeError` if there is no memory to pin."""
        if self._stream is None:
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            host.copy_(values, non_blocking=True)
        values.record_stream(self._stream)
        return host

    def wait(self) -> None:
        """Wait until all copies that were asked for are done."""
        if self._stream is not None:
            self._stream.synchronize()


def current_device(name: str) -> torch.device:
    """The device of that name, numbered: from now on it is the current one of this thread, to whose
    stream events are recorded and whose work is captured."""
    device = torch.empty(0, device=name).device
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def new_event(device: torch.device, *, timed: bool = False) -> Any:
    """An event of the current device's stream; None on a CPU, where nothing is enqueued."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module.Event(enable_timing=True) if timed else module.Event()


class StepReads:
    """What a step reads from the device, waited for once."""

    def __init__(self, device: torch.device) -> None:
        self._event = new_event(device)
        self._is_waited_for = False
        self._is_closed = False

    def later(self, tensor: Tensor) -> Tensor:
        """The tensor on the host; its values are there after `wait`. Raises `RuntimeError` if there
        is no memory to pin."""
        if self._event is None or tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._is_waited_for = True
        return host.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Nothing more is read: `wait` does not wait for what is enqueued from now on."""
        if self._is_waited_for:
            self._event.record()
            self._is_closed = True

    def wait(self) -> None:
        """Wait until all that was enqueued before now, or `close`, is done; if anything is read."""
        if self._is_waited_for:
            if not self._is_closed:
                self._event.record()
            self._event.synchronize()
            self._is_waited_for = self._is_closed = False


class DeviceTimer:
    """How long the device works on what is enqueued between its making and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._begin, self._end = new_event(device, timed=True), new_event(device, timed=True)
        self._started, self._seconds = time.perf_counter(), 0.0
        if self._begin is not None:
            self._begin.record()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started
        if self._end is not None:
            self._end.record()

    @property
    def is_done(self) -> bool:
        """Whether the device has ended what was enqueued before `stop`."""
        return self._end is None or bool(self._end.query())

    @property
    def seconds(self) -> float:
        """Once the step was waited for, or `is_done`."""
        if self._begin is None:
            return self._seconds
        return float(self._begin.elapsed_time(self._end)) / 1000


class DeviceTimes:
    """How long each step takes on an accelerator, from its first operation to the end of its last:
    asked for when it has ended, never waited for.

    The host's clock cannot tell it: a step that samples nothing has no result to wait for. A device
    that is idle while the host enqueues the operations of a step one by one waits within that time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: DeviceTimer | None = None
        self._enqueued: deque[tuple[int, DeviceTimer]] = deque()

    def begin(self) -> None:
        """A step begins. One that raised before its `end` has no time."""
        self._begun = None

    def working(self) -> None:
        """An operation of the step is enqueued next. Its time begins with the first one: while the
        host still builds its inputs, the device may have nothing to do."""
        if self._begun is None:
            self._begun = DeviceTimer(self._device)

    def end(self, step_id: int) -> None:
        """All of the step that was begun is enqueued."""
        timer = self._begun or DeviceTimer(self._device)  # it may have had no operation
        timer.stop()
        self._enqueued.append((step_id, timer))

    def take(self, last: int) -> tuple[tuple[int, float], ...]:
        """(step, seconds) of those up to step `last` that have ended and were not taken before, in
        their order. Later ones, whose results nobody has yet, stay."""
        taken = []
        while self._enqueued and self._enqueued[0][0] <= last and self._enqueued[0][1].is_done:
            step_id, timer = self._enqueued.popleft()
            taken.append((step_id, timer.seconds))
        return tuple(taken)
