"""Runs media encoders, and holds their outputs by key on the device and in host memory.

Which outputs are held, moved or dropped is the scheduler's decision, told in each step's plan.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lookonce.errors import DeviceLostError, LookOnceError, RequestFailedError
from lookonce.model.device import CopyStream, DeviceTimer, StepReads
from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.model.lora import RunnerLoRA
from lookonce.model.tensor_parallel import TensorParallelGroup
from lookonce.types.media import ITEM_SIZE, Array, Modality, ProcessedItem
from lookonce.types.step import EmbedSlice, EncodeItem, ReceivedOutput, StepPlan

logger = logging.getLogger(__name__)
COMPUTE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError)
"""What a model raises if its input is wrong or memory runs out: only that request fails."""


@dataclass(slots=True)
class EncodeReport:
    """What happened to the items of one step, by key."""

    failed: dict[bytes, LookOnceError] = field(default_factory=dict)
    seconds: dict[bytes, float] = field(default_factory=dict)
    """How long each item took to encode; items of one call share its time equally."""
    lost_copies: list[bytes] = field(default_factory=list)
    """Outputs that could not be copied to host memory."""
    made: list[_Made] = field(default_factory=list)
    """Outputs of which it is not known yet whether they are finite; `EncoderRunner.check` empties
    it."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Outputs of one call."""

    modality: Modality
    keys: tuple[bytes, ...]
    finite: Tensor
    """[len(keys)] on the host, once the step was waited for."""
    timer: DeviceTimer


@dataclass(frozen=True, slots=True)
class _Job:
    key: bytes
    num_embeds: int
    tensors: Tensors
    adapter: bytes = b""


_BatchKey = tuple[Modality, Hashable, bytes | None, bytes]
"""Items with equal keys are encoded in one call: modality, the family's batch key, and the key of
an item that must be encoded alone, and the adapter that changes the encoder."""


class EncoderRunner:
    """Encoder outputs [num_embeds, row_width] on the device, each in memory of its own."""

    def __init__(
        self,
        family: ModelFamily,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup | None = None,
    ) -> None:
        """`group`: the other ranks, which hold the same outputs."""
        self._family = family
        self._group = group
        self._dtype = dtype
        self.device = device
        self._outputs: dict[bytes, Tensor] = {}
        self._failed: frozenset[bytes] = frozenset()
        self.failed: frozenset[bytes] = frozenset()
        """Items that failed in the last step or in the one before it, whose result was not there
        when the last one was planned."""
        self._copies = CopyStream(device)
        self._host = HostCopies(self._copies)
        self.lora: RunnerLoRA | None = None
        """Set where adapters are served."""

    @property
    def num_bytes(self) -> int:
        return sum(output.nbytes for output in self._outputs.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._outputs

    @property
    def num_host_bytes(self) -> int:
        return self._host.num_bytes

    def execute(self, plan: StepPlan, reads: StepReads) -> EncodeReport:
        """Move and drop outputs as the plan says, then encode its items. Once `reads` were waited
        for, `check` completes the report. Raises `DeviceLostError` where other ranks have failed
        with other items."""
        report, failed_before = EncodeReport(), self._failed
        self._host.drop(plan.dropped_host)
        for key in plan.offload:
            self._offload(key, report)
        self.drop(plan.dropped_outputs)
        for key in plan.restore:
            self._restore(key, report)
        for received in plan.received:
            self._receive(received, report)
        self._encode_all(plan.encode, report, reads)
        if self._group is not None and (plan.encode or plan.restore or plan.received):
            self._compare(report, self._group)
        self._failed = frozenset(report.failed)
        self.failed = failed_before | self._failed
        return report

    def _compare(self, report: EncodeReport, group: TensorParallelGroup) -> None:
        """Ranks that compute different sequences would wait for each other for ever."""
        if not group.is_same(hashlib.sha256(b"".join(sorted(report.failed))).digest()):
            reasons = {error.message for error in report.failed.values()}
            raise DeviceLostError(
                "an item was encoded by some ranks of tensor parallelism alone; on rank "
                f"{group.rank}: {'; '.join(sorted(reasons)) or 'nothing failed'}"
            )

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._outputs.pop(key, None)

    def run(self, items: Sequence[EncodeItem]) -> EncodeReport:
        """Encode each item that is not held yet. An item that fails does not fail the others."""
        report, reads = EncodeReport(), StepReads(self.device)
        self._encode_all(items, report, reads)
        reads.wait()
        self.check(report)
        return report

    def _encode_all(
        self, items: Sequence[EncodeItem], report: EncodeReport, reads: StepReads
    ) -> None:
        groups: dict[_BatchKey, list[_Job]] = {}
        for item in items:
            if item.key not in self._outputs:
                self._prepare(item, groups, report)
        for (modality, _, _, _), jobs in groups.items():
            self._encode_group(modality, jobs, report, reads)

    def check(self, report: EncodeReport) -> bool:
        """Complete a report, once its reads were waited for; outputs that are not finite are
        dropped: one must never be reused. Whether there was any."""
        before = len(report.failed)
        for made in report.made:
            share = made.timer.seconds / len(made.keys)
            for key, is_finite in zip(made.keys, made.finite.tolist(), strict=True):
                if is_finite:
                    report.seconds[key] = share
                    continue
                self.drop([key])
                logger.warning("an encoder output is not finite", extra={"modality": made.modality})
                report.failed[key] = RequestFailedError(
                    f"the {made.modality} could not be encoded: the output is not finite"
                )
        report.made.clear()
        return len(report.failed) > before

    def output(self, key: bytes) -> Tensor:
        """The output [num_embeds, row_width]. Raises `KeyError` for a key that is not held."""
        return self._outputs[key]

    def rows(self, slices: Sequence[EmbedSlice]) -> Tensor:
        """The rows of all slices in order. Raises `KeyError` for a key that is not held."""
        parts = [self._outputs[part.key][part.start : part.end] for part in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _offload(self, key: bytes, report: EncodeReport) -> None:
        try:
            self._host.offload(key, self._outputs[key])
        except torch.AcceleratorError:
            raise
        except (KeyError, RuntimeError) as error:
            logger.warning("an encoder output was not kept on the host", exc_info=error)
            report.lost_copies.append(key)

    def _restore(self, key: bytes, report: EncodeReport) -> None:
        try:
            self._outputs[key] = self._host.restore(key)
        except torch.AcceleratorError:
            raise
        except (KeyError, RuntimeError) as error:
            logger.warning("an encoder output was not brought back", exc_info=error)
            report.failed[key] = RequestFailedError("an encoder output was lost")

    def _receive(self, received: ReceivedOutput, report: EncodeReport) -> None:
        try:
            output = to_tensor(received.output)
            self._outputs[received.key] = self._copies.to_device(output, self._dtype)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            logger.warning("an encoder output could not be copied to the device", exc_info=error)
            report.failed[received.key] = RequestFailedError("an encoder output was lost")

    def _prepare(
        self, item: EncodeItem, groups: dict[_BatchKey, list[_Job]], report: EncodeReport
    ) -> None:
        modality = item.item.modality
        try:
            tensors = item_tensors(
                item.item,
                dtype=self._dtype,
                device=self.device,
                copies=self._copies,
                on_host=self._family.host_arrays,
            )
            batch = self._family.batch_key(modality, tensors)
        except COMPUTE_ERRORS as error:
            report.failed[item.key] = _failure(modality, error)
            return
        job = _Job(item.key, item.item.expansion.num_embeds, tensors, item.adapter)
        alone = item.key if batch is None else None
        groups.setdefault((modality, batch, alone, item.adapter), []).append(job)

    def _encode_group(
        self, modality: Modality, jobs: list[_Job], report: EncodeReport, reads: StepReads
    ) -> None:
        """Encode all in one call; if that fails, each alone, so that only faulty items fail."""
        timer = DeviceTimer(self.device)
        try:
            outputs = self._encode(modality, jobs)
            finite = reads.later(torch.stack([output.isfinite().all() for output in outputs]))
        except torch.AcceleratorError:
            raise  # the device is lost, not the item
        except COMPUTE_ERRORS as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._encode_group(modality, [job], report, reads)
            else:
                report.failed[jobs[0].key] = _failure(modality, error)
            return
        timer.stop()
        keys = tuple(job.key for job in jobs)
        self._outputs.update(zip(keys, outputs, strict=True))
        report.made.append(_Made(modality, keys, finite, timer))

    def _encode(self, modality: Modality, jobs: list[_Job]) -> list[Tensor]:
        tensors = [job.tensors for job in jobs]
        adapter = jobs[0].adapter
        if adapter:
            if self.lora is None:
                raise KeyError("an adapter that is not loaded")
            with self.lora.encoding(adapter):
                outputs = self._family.encode(modality, tensors)
        else:
            outputs = self._family.encode(modality, tensors)
        for job, output in zip(jobs, outputs, strict=True):
            expected = (job.num_embeds, self._family.row_width)
            if output.shape != expected:
                raise ValueError(f"encoder gave {tuple(output.shape)} rows, not {expected}")
        return [_owned(output, self._dtype) for output in outputs]


class OutputCopier:
    """Implements `types.ports.EncoderOutputCopier`. Outputs are never written once they are made,
    so a worker may read one beside the steps, on a stream of its own. PyTorch releases the
    interpreter while it copies."""

    def __init__(self, encoder: EncoderRunner) -> None:
        self._encoder = encoder
        self._copies = CopyStream(encoder.device)

    def pin(self, key: bytes) -> object | None:
        return self._encoder.output(key) if key in self._encoder else None

    @torch.inference_mode()
    def copy(self, pinned: object, out: memoryview) -> None:
        if not isinstance(pinned, Tensor):
            raise TypeError("what is copied must have been pinned")
        host = self._copies.to_host(pinned)
        self._copies.wait()
        torch.frombuffer(out, dtype=torch.uint8).copy_(host.view(-1).view(torch.uint8))


def _owned(output: Tensor, dtype: torch.dtype) -> Tensor:
    """The output in memory of its own: a view would keep the whole batch in memory."""
    output = output.to(dtype)
    if output.untyped_storage().nbytes() > output.nbytes or not output.is_contiguous():
        return output.clone(memory_format=torch.contiguous_format)
    return output


def _failure(modality: Modality, error: Exception) -> RequestFailedError:
    logger.warning("encoding failed", extra={"modality": modality}, exc_info=error)
    return RequestFailedError(f"the {modality} could not be encoded ({type(error).__name__})")


class HostCopies:
    """Copies of encoder outputs in host memory, by key, so that none is encoded again.

    On the CPU host and device are one memory: a copy is the output itself. On CUDA copies are
    pinned, and made on a stream of their own: an output may be freed right after `offload`, and a
    copy right after `restore`, because the allocators wait for the stream.
    """

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._copies: dict[bytes, Tensor] = {}

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    def offload(self, key: bytes, output: Tensor) -> None:
        """Copy an output to the host. Raises `RuntimeError` if there is no memory to pin."""
        self._copies[key] = self._stream.to_host(output)

    def restore(self, key: bytes) -> Tensor:
        """The output on the device; the copy stays. Raises `KeyError` if there is none."""
        return self._stream.to_device(self._copies[key])

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._copies.pop(key, None)


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZE}
"""dtype name of an `Array` → torch's dtype."""


def to_tensor(array: Array) -> Tensor:
    """The array's memory as a CPU tensor of its shape; it may be read-only.

    Memory that is not aligned for its dtype (a small message received inline) is copied.
    """
    dtype = DTYPES[array.dtype]
    if array.nbytes == 0:
        return torch.empty(array.shape, dtype=dtype)
    raw = np.frombuffer(array.data, np.uint8)
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    # from_dlpack takes read-only memory without the warning of from_numpy and frombuffer.
    tensor: Tensor = from_dlpack(raw)
    return tensor.view(dtype).view(array.shape)


def item_tensors(
    item: ProcessedItem,
    *,
    dtype: torch.dtype,
    device: torch.device,
    copies: CopyStream | None = None,
    on_host: Collection[str] = (),
) -> dict[str, Tensor]:
    """An item's arrays on the device, by name; floating ones in the model's dtype. Those named in
    `on_host` stay there. `copies` makes the copies; None: a new one."""
    copies = copies or CopyStream(device)
    tensors = {}
    for name, array in item.arrays.items():
        tensor = to_tensor(array)
        if name in on_host:
            tensors[name] = tensor
            continue
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        tensors[name] = copies.to_device(tensor, wanted)
    return tensors
