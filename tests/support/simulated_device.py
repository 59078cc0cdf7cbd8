"""A device in name: it computes on the CPU, and what the host would wait for on a GPU is refused.

`torch.device("simulated")` has torch's interface of an accelerator. Its tensors hold CPU tensors,
so that a model runs on it with real values. Inside `Watch.refusing()` an operation raises
`DeviceWaitError` if on an accelerator the host would wait for it:

* reading a value back (`item`, `bool`, `tolist`), or copying to the host without `non_blocking`;
* a result whose shape depends on values (`nonzero`, boolean indices, `unique`);
* a copy from host memory that is not pinned, or without `non_blocking`.

Asynchronous copies are as late as they can be: the host side of a copy to it is garbage until an
event that was recorded later is waited for, and whoever writes to the host side of a copy from it
before then is told so.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.device import DEVICE, ON_CUDA

NAME = "simulated"
aten = torch.ops.aten


class DeviceWaitError(AssertionError):
    """The host would wait for the device, or did not wait where it must."""


READS_BACK = {
    each.default
    for each in (aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.allclose)
    if hasattr(each, "default")
}
SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
COMPOSITE = "CompositeImplicitAutograd"


class DeviceTensor(Tensor):
    """A tensor on the simulated device, and the CPU tensor that has its values."""

    values: Tensor
    made_by: Stream
    made_at: int

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
        )
        made.values = values
        made.note_made()
        return made

    def note_made(self) -> None:
        """Its values are those of what is enqueued now, in the stream that is current."""
        self.made_by, self.made_at = watch().stream, watch().now()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        pass  # memory is not used again here while anything refers to it

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.values})"

    def tolist(self) -> Any:
        if watch().refuses:
            raise DeviceWaitError("tolist reads values back")
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return watch().run(func, args, kwargs or {})


class Stream:
    """As `torch.cuda.Stream`. What one enqueues is for another one as if it had not happened, until
    that one waits for it."""

    def __init__(self, device: object = None) -> None:
        self._waited: dict[Stream, int] = {}

    def wait_stream(self, other: Stream) -> None:
        self._waited[other] = watch().now()

    def synchronize(self) -> None:
        watch().deliver(watch().now())

    def sees(self, tensor: DeviceTensor) -> bool:
        return tensor.made_by is self or self._waited.get(tensor.made_by, -1) > tensor.made_at


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at: int | None = None
        self._time = 0.0

    def record(self) -> None:
        self._at, self._time = watch().now(), time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return (end._time - self._time) * 1000

    def query(self) -> bool:
        """Whether it was waited for, or one that was recorded later."""
        return self._at is not None and self._at <= watch().waited_until

    def synchronize(self) -> None:
        if self._at is not None:
            watch().deliver(self._at)


class _Module:
    """As `torch.cuda`, where a step uses it."""

    Event = Event
    Stream = Stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, watch().stream = watch().stream, stream
        try:
            yield
        finally:
            watch().stream = before

    def current_stream(self, device: object = None) -> Stream:
        return watch().stream

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        self.chosen = device

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: object = None) -> None:
        if watch().refuses:
            raise DeviceWaitError("the whole device is waited for")
        watch().deliver(watch().now())


class Watch(TorchDispatchMode):
    """Computes what is on the device, and sees every operation while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False
        self.stream = Stream()
        """The current one."""
        self.num_waits = 0
        """Waits for events that had something to deliver."""
        self.recorded: list[tuple[Any, Any, Any, Any]] | None = None
        """While a graph is captured: each operation on the device with its arguments and result."""
        self._pinned: dict[int, Tensor] = {}
        """By address; kept, so that no other memory gets the address."""
        self.num_uploads = 0
        """Copies from the host."""
        self._clock = itertools.count()
        self.waited_until = -1
        """The latest moment that was waited for."""
        self._to_host: list[tuple[int, Tensor, Tensor]] = []
        """When, the pinned target, the values."""
        self._to_device: list[tuple[int, Tensor, Tensor]] = []
        """When, the pinned source, and its values then."""

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse what waits for the device; in the end nothing may be under way."""
        self.refuses = True
        try:
            yield
        finally:
            self.refuses = False

    def forget(self) -> None:
        """Nothing is under way, and no memory is pinned."""
        self._to_host, self._to_device = [], []
        self._pinned.clear()

    def now(self) -> int:
        return next(self._clock)

    def deliver(self, until: int) -> None:
        """What was enqueued before this moment is done."""
        self.waited_until = max(self.waited_until, until)
        due = [each for each in self._to_host if each[0] < until]
        self.num_waits += bool(due)
        for _, target, values in due:
            target.copy_(values)
        self._to_host = [each for each in self._to_host if each[0] >= until]
        for _, source, before in (each for each in self._to_device if each[0] < until):
            if not torch.equal(source.view(torch.uint8), before.view(torch.uint8)):
                raise DeviceWaitError("host memory was written while it was being copied")
        self._to_device = [each for each in self._to_device if each[0] >= until]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_composite(func):  # inference mode does not take it apart
            with self:
                return func.decompose(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        on_device = any(isinstance(each, DeviceTensor) for each in given)
        target = kwargs.get("device")
        to_device = on_device if target is None else torch.device(target).type == NAME
        if not on_device and not to_device:
            return self._on_host(func, args, kwargs)
        for each in given:
            if isinstance(each, DeviceTensor) and not self.stream.sees(each):
                raise DeviceWaitError("what another stream makes is used and was not waited for")
        if self.refuses:
            self._check(func, args, kwargs)
        if (moved := self._moved(func, args, kwargs, to_device=to_device)) is not None:
            return moved
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
        kwargs.pop("non_blocking", None)
        args, kwargs = tree_map(_values, args), tree_map(_values, kwargs)
        if func is aten.histc.default:  # of integers, only a GPU counts
            result = func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        else:
            result = func(*args, **kwargs)
        if self.recorded is not None:
            self.recorded.append((func, args, kwargs, result))
        if func in READS_BACK:
            return result
        there = {id(each.values): each for each in given if isinstance(each, DeviceTensor)}

        def wrapped(each: Any) -> Any:
            if not isinstance(each, Tensor) or not to_device:
                return each
            if id(each) not in there:
                return DeviceTensor(each)
            there[id(each)].note_made()
            return there[id(each)]

        return tree_map(wrapped, result)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pins = kwargs.pop("pin_memory", False)
        if func is aten._pin_memory.default or func is aten.pin_memory.default:
            func, pins = aten.clone.default, True
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        result = func(*args, **kwargs)
        if pins:
            self._pinned[result.untyped_storage().data_ptr()] = result
        return result

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in READS_BACK:
            raise DeviceWaitError(f"{func} reads a value back")
        if func in SHAPED_BY_VALUES:
            raise DeviceWaitError(f"the result of {func} has a shape that depends on values")
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            raise DeviceWaitError("repeat_interleave without output_size reads back")
        if func in INDEXED:
            for index in args[1]:
                if isinstance(index, DeviceTensor) and index.dtype in (torch.bool, torch.uint8):
                    raise DeviceWaitError("an index by a mask has a shape that depends on values")
                if isinstance(index, Tensor) and not isinstance(index, DeviceTensor):
                    raise DeviceWaitError("an index on the host is copied from memory not pinned")

    def _moved(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, to_device: bool
    ) -> Any:
        """The result of a copy between host and device; None for any other operation."""
        if self.recorded is not None and func is aten._to_copy.default and not to_device:
            raise DeviceWaitError("a graph holds no copy to the host")
        if func is aten.copy_.default:
            target, source = args[0], args[1]
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if isinstance(target, DeviceTensor) == isinstance(source, DeviceTensor):
                return None
            if source.dim() == 0 and not isinstance(source, DeviceTensor):
                return None  # a number, which travels with the call
            if self.recorded is not None:
                raise DeviceWaitError("a graph holds no copy between host and device")
            if isinstance(target, DeviceTensor):
                target.values.copy_(self._uploaded(source, waits))
                target.note_made()
                return target
            self._download(target, source, waits)
            return target
        if func is aten._to_copy.default and isinstance(args[0], DeviceTensor) != to_device:
            waits = not kwargs.get("non_blocking")
            source = args[0]
            kwargs = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
            if to_device:
                return DeviceTensor(aten._to_copy(self._uploaded(source, waits), **kwargs))
            if self.refuses:
                raise DeviceWaitError("a value is copied to host memory that is not pinned")
            return aten._to_copy(source.values, **kwargs)
        return None

    def _uploaded(self, source: Tensor, waits: bool) -> Tensor:
        self.num_uploads += 1
        if self.refuses and not self._is_pinned(source):
            raise DeviceWaitError("a copy from host memory that is not pinned waits")
        if self.refuses and waits:
            raise DeviceWaitError("a copy to the device without non_blocking waits")
        for _, target, values in self._to_host:
            if target.data_ptr() == source.data_ptr():  # it comes first, in the same stream
                return values
        if self._is_pinned(source):
            self._to_device.append((self.now(), source, source.clone()))
        return source

    def _download(self, target: Tensor, source: DeviceTensor, waits: bool) -> None:
        if self.refuses and (waits or not self._is_pinned(target)):
            raise DeviceWaitError("a copy to the host without non_blocking, or not pinned, waits")
        if waits:
            target.copy_(source.values)
            return
        self._to_host.append((self.now(), target, source.values.to(target.dtype, copy=True)))
        target.view(-1).view(torch.uint8).fill_(0xA5)


class SimulatedGraphs:
    """Captures as a GPU does: the operations of a body, which are computed again with the tensors
    that they had, so that whatever the host decided in between stays as it was."""

    def __init__(self, seen: Watch) -> None:
        self._watch = seen
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self._watch.recorded = recorded = []
        try:
            with self._watch.refusing():
                logits = body()
        finally:
            self._watch.recorded = None
        self.num_captured += 1

        def replay() -> Tensor:
            self.num_replayed += 1
            for func, args, kwargs, result in recorded:
                for old, new in zip(
                    tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True
                ):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return logits

        return replay


@cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE))


def _values(each: Any) -> Any:
    return each.values if isinstance(each, DeviceTensor) else each


@cache
def watch() -> Watch:
    """The one of this process: a name of a device can be registered once. Not beside a GPU: from
    then on torch pins memory for the device that was registered."""
    if ON_CUDA:
        pytest.skip("the GPU is tested, and the simulated device stands in for one")
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    return Watch()


@contextmanager
def simulated_device() -> Iterator[tuple[torch.device, Watch]]:
    """Tensors can be made on the device inside."""
    with torch.inference_mode(), watch() as mode:
        mode.forget()
        yield torch.device(NAME, 0), mode


class CudaWatch:
    """As `Watch`, on a real GPU: what torch itself takes for waiting is refused there."""

    num_waits = 0
    """Not counted."""

    @contextmanager
    def refusing(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def accelerator() -> Iterator[tuple[torch.device, Watch | CudaWatch]]:
    """The GPU where tests compute on one (`make test-cuda`), else the simulated device."""
    if not ON_CUDA:
        with simulated_device() as simulated:
            yield simulated
        return
    with torch.inference_mode(), torch.cuda.device(DEVICE):
        yield torch.device(DEVICE), CudaWatch()
