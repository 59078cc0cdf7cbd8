"""What the engine process sends to the other ranks of tensor parallelism: settings, then plans.

A plan is sent as `types.step` has it, but for what only rank 0 uses (grammars) and what is not
served on several ranks (external tiers, adapters, states).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.errors import ProtocolError
from lookonce.ipc.codec import MessageDecoder, MessageEncoder
from lookonce.types.media import Array, Buffer, MediaFeature
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import (
    DropTokens,
    EncodeItem,
    Extension,
    NewSequence,
    ScheduledSequence,
    StepPlan,
)


class JoinGroup(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """The first message to a rank."""

    settings: bytes
    """`EngineSettings` as JSON."""
    rank: int
    rendezvous: str


class _NewSequence(msgspec.Struct, frozen=True, array_like=True):
    seq_id: int
    token_ids: bytes
    num_prompt_tokens: int
    features: tuple[MediaFeature, ...]
    sampling: SamplingParams
    sample_index: int


class _Change(msgspec.Struct, frozen=True, array_like=True):
    """An `Extension`, or `drop` alone."""

    seq_id: int
    start: int = 0
    token_ids: bytes = b""
    features: tuple[MediaFeature, ...] = ()
    drop: DropTokens | None = None


class RankPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One `StepPlan`."""

    step_id: int
    finished: tuple[int, ...]
    dropped_host: tuple[bytes, ...]
    offload: tuple[bytes, ...]
    dropped_outputs: tuple[bytes, ...]
    restore: tuple[bytes, ...]
    new: tuple[_NewSequence, ...]
    extended: tuple[_Change, ...]
    encode: tuple[EncodeItem, ...]
    scheduled: tuple[ScheduledSequence, ...]


RankMessage = JoinGroup | RankPlan


class RankEncoder(MessageEncoder):
    """Sends arrays themselves, also those that lie in shared memory."""

    def _array(self, value: object) -> object:
        if isinstance(value, Array) and value.place is not None:
            value = Array(value.dtype, value.shape, bytes(value.data))
        return super()._array(value)


def rank_decoder() -> MessageDecoder[RankMessage]:
    """The decoder of a rank."""
    return MessageDecoder(RankMessage)


def rank_plan(plan: StepPlan) -> RankPlan:
    """What the other ranks are sent of a plan."""
    return RankPlan(
        plan.step_id,
        plan.finished,
        plan.dropped_host,
        plan.offload,
        plan.dropped_outputs,
        plan.restore,
        tuple(
            _NewSequence(
                new.seq_id,
                new.token_ids.tobytes(),
                new.num_prompt_tokens,
                new.features,
                new.sampling,
                new.sample_index,
            )
            for new in plan.new
        ),
        tuple(map(_sent_change, plan.extended)),
        plan.encode,
        plan.scheduled,
    )


def _sent_change(change: Extension | DropTokens) -> _Change:
    if isinstance(change, DropTokens):
        return _Change(change.seq_id, drop=change)
    return _Change(change.seq_id, change.start, change.token_ids.tobytes(), change.features)


def step_plan(message: RankMessage) -> StepPlan:
    """The plan as the runner takes it. Raises `ProtocolError` for another message."""
    if not isinstance(message, RankPlan):
        raise ProtocolError("a rank that has joined is sent plans")
    return StepPlan(
        message.step_id,
        finished=message.finished,
        dropped_host=message.dropped_host,
        offload=message.offload,
        dropped_outputs=message.dropped_outputs,
        restore=message.restore,
        new=tuple(
            NewSequence(
                new.seq_id,
                _tokens(new.token_ids),
                new.num_prompt_tokens,
                new.features,
                new.sampling,
                new.sample_index,
            )
            for new in message.new
        ),
        extended=tuple(
            Extension(change.seq_id, change.start, _tokens(change.token_ids), change.features)
            if change.drop is None
            else change.drop
            for change in message.extended
        ),
        encode=message.encode,
        scheduled=message.scheduled,
    )


def _tokens(data: Buffer) -> NDArray[np.int32]:
    return np.frombuffer(data, np.int32)
