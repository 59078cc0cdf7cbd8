"""A scheduler, a runner that checks every position, and real transfer workers between them.

The fake runner's "K/V" are digests, so a block that was loaded wrongly, late, or into the wrong
place changes every token after it; `Pages` copies them as `model.kv_pages` copies tensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lookonce.config import SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerState
from lookonce.core.state_snapshots import StateSnapshots
from lookonce.kv.chain import TierChain
from lookonce.kv.connector import KVConnector
from lookonce.kv.encoder_connector import EncoderConnector
from lookonce.kv.tier import KVTier
from lookonce.types.kv import KVLayout, KVLoadPolicy, OutputLayout
from lookonce.types.request import GenerateRequest
from tests.support.core.builders import ROW_BYTES, Limits
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import FakeRunner, output_bytes, reference

ENTRY_BYTES = 16
"""Of one position's "K/V" in the fake runner."""
LAYOUT = KVLayout(num_layers=1, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")
assert LAYOUT.block_bytes == LAYOUT.block_size * ENTRY_BYTES


class Pages:
    """Implements `KVPageCopier` over the fake runner's slots."""

    layout = LAYOUT

    def __init__(self, runner: FakeRunner, pool: BlockPool) -> None:
        self._runner = runner
        self._pool = pool
        self.errors: list[str] = []
        """Blocks that were written though they were not the load's alone."""

    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        rows = [self._runner.kv[block, row] for block in block_ids for row in range(4)]
        out[:] = b"".join(rows)

    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
        for index, block in enumerate(block_ids):
            references = self._pool._references[block]
            if references != 1:
                self.errors.append(f"block {block} is loaded into with {references} references")
            for row in range(4):
                start = (4 * index + row) * ENTRY_BYTES
                self._runner.kv[block, row] = bytes(data[start : start + ENTRY_BYTES])


class Snapshots:
    """Implements `StateCopier` over the fake runner's snapshots, whose bytes are repeated."""

    def __init__(self, runner: FakeRunner, snapshots: StateSnapshots) -> None:
        self._runner = runner
        self._snapshots = snapshots
        self.state_bytes = snapshots.slot_bytes
        self.errors: list[str] = []
        """What was written to a slot that is not the load's alone, or is no whole state."""

    def describe(self) -> bytes:
        return b"digests"

    def gather(self, snapshot: int, out: memoryview) -> None:
        out[:] = self._whole(self._runner.snapshots[snapshot])

    def scatter(self, snapshot: int, data: memoryview) -> None:
        if snapshot not in self._snapshots._reserved:
            self.errors.append(f"snapshot {snapshot} is loaded into though it is not reserved")
        state = bytes(data[:ENTRY_BYTES])
        if self._whole(state) != data:
            self.errors.append(f"snapshot {snapshot} gets parts of several states")
        self._runner.snapshots[snapshot] = state

    def _whole(self, state: bytes) -> bytes:
        return (state * (self.state_bytes // len(state) + 1))[: self.state_bytes]


class World(Engine):
    """`tests.support.core.engine.Engine` with external tiers; use as a context manager."""

    def __init__(
        self,
        *tiers: KVTier,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        policy: KVLoadPolicy = "always",
        fail_on_loss: bool = False,
        lookup_seconds: float = 5.0,
        load_seconds: float = 5.0,
        max_queued_bytes: int = 1 << 20,
    ) -> None:
        super().__init__(limits)
        self.chain = TierChain(tiers)
        pool = BlockPool(limits.num_blocks, limits.block_size)
        self.pages = Pages(self.runner, pool)
        snapshots = self.states = None
        if limits.model.state_bytes:
            snapshots = StateSnapshots(limits.num_snapshots, limits.model.state_bytes)
            self.states = Snapshots(self.runner, snapshots)
        self.connector = KVConnector(
            self.chain,
            self.pages,
            states=self.states,
            policy=policy,
            lookup_seconds=lookup_seconds,
            load_seconds=load_seconds,
            max_queued_bytes=max_queued_bytes,
        )
        self.scheduler = Scheduler(
            SchedulerState(
                pool,
                EncoderCache(limits.encoder_rows * ROW_BYTES, ROW_BYTES),
                prefix_caching=limits.prefix_caching,
                snapshots=snapshots,
            ),
            limits.model,
            SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_encoder_tokens=limits.max_encoder_tokens,
                max_queue=limits.max_queue,
            ),
            self.connector,
            fail_on_loss=fail_on_loss,
        )

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.connector.close()

    def assert_all_free(self) -> None:
        super().assert_all_free()
        assert not self.pages.errors, self.pages.errors
        assert self.states is None or not self.states.errors, self.states.errors

    def settle(self, *, seconds: float = 60.0) -> None:
        """Step until every request has ended and every transfer is acknowledged."""
        end = time.monotonic() + seconds
        while True:
            if self.step() is None:
                stats = self.scheduler.stats()
                idle = not self.scheduler.num_waiting and not self.scheduler.num_running
                held = [stats["kv_transfer_blocks_held"], stats.get("kv_transfer_states_held")]
                if idle and not any(held):
                    return
                time.sleep(0.001)
            assert time.monotonic() < end, "the scheduler does not come to an end"

    def run_until_ended(self, name: str, *, or_hang: threading.Event | None = None) -> None:
        """Step until one request has ended, whatever transfers are under way.

        `or_hang` is let go when nothing can be done any more without it.
        """
        end = time.monotonic() + 60.0
        while (name, 0) not in self.ended:
            if self.step() is None:
                if or_hang is not None and self.scheduler.num_waiting:
                    or_hang.set()
                time.sleep(0.001)
            assert time.monotonic() < end, f"{name} does not come to an end"

    def wait_stored(self) -> None:
        """Until every tier has written what it was offered."""
        end = time.monotonic() + 60.0
        while any(v for k, v in self.connector.stats().items() if "queue_bytes" in k):
            assert time.monotonic() < end, "the stores do not come to an end"
            time.sleep(0.001)

    def serve(self, *requests: object) -> None:
        for one in requests:
            self.add(one)  # type: ignore[arg-type]
        self.settle()
        self.wait_stored()

    def serve_at_once(self, *requests: object) -> None:
        """`serve`, but no request begins before the tiers have answered for all of them."""
        for one in requests:
            self.add(one)  # type: ignore[arg-type]
        assert self.step() is None, "every request waits for its lookup"
        end = time.monotonic() + 60.0
        while len(self.connector._events) < len(requests):
            assert time.monotonic() < end, "the tiers do not answer"
            time.sleep(0.001)
        self.settle()
        self.wait_stored()

    def forget_device(self) -> None:
        """What a restart does: the device holds nothing any more, the tiers what they hold."""
        self.scheduler.reset_prefix_cache()


OUTPUTS = OutputLayout(ROW_BYTES, "float32", 2 * ROW_BYTES)
"""Two rows to a piece: most outputs have several, and some a last one that is not full."""


class Outputs:
    """Implements `EncoderOutputCopier` over the fake runner's outputs."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def pin(self, key: bytes) -> object | None:
        rows = self._runner.outputs.get(key)
        return None if rows is None else output_bytes(key, rows)

    def copy(self, pinned: object, out: memoryview) -> None:
        assert isinstance(pinned, bytes)
        out[:] = pinned


class OutputWorld(Engine):
    """`tests.support.core.engine.Engine` with tiers of encoder outputs; use as a context manager.

    The fake runner checks the bytes of every output that a tier gave.
    """

    def __init__(
        self,
        *tiers: KVTier,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        lookup_seconds: float = 60.0,
        load_seconds: float = 60.0,
        max_queued_bytes: int = 1 << 20,
    ) -> None:
        super().__init__(limits)
        self.chain = TierChain(tiers)
        self.connector = EncoderConnector(
            self.chain,
            Outputs(self.runner),
            OUTPUTS,
            lookup_seconds=lookup_seconds,
            load_seconds=load_seconds,
            max_queued_bytes=max_queued_bytes,
        )
        pool = BlockPool(limits.num_blocks, limits.block_size)
        cache = EncoderCache(limits.encoder_rows * ROW_BYTES, ROW_BYTES)
        self.scheduler = Scheduler(
            SchedulerState(pool, cache, prefix_caching=limits.prefix_caching),
            limits.model,
            SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_encoder_tokens=limits.max_encoder_tokens,
            ),
            external_outputs=self.connector,
        )

    def __enter__(self) -> OutputWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.connector.close()

    def forget_device(self) -> None:
        """What a restart does: the device holds nothing any more, the tiers what they hold."""
        self.scheduler.reset_prefix_cache()
        self.scheduler.reset_encoder_cache()

    def settle(self) -> None:
        """Step until every request has ended, and every store is done."""
        end = time.monotonic() + 60.0
        while self.step() is not None or self.unsettled():
            time.sleep(0.0005)
            assert time.monotonic() < end, "the scheduler does not come to an end"
        self.assert_all_free()

    def unsettled(self) -> bool:
        stats = self.scheduler.stats()
        waiting = any(value for name, value in stats.items() if "queue_bytes" in name)
        under_way = stats["encoder_transfer_staged_bytes"]
        return bool(
            self.scheduler.num_waiting or self.scheduler.num_running or waiting or under_way
        )

    def serve(self, *requests: GenerateRequest) -> None:
        """All at once; each gets the tokens that it must get."""
        for one in requests:
            self.add(one)
        self.settle()
        for one in requests:
            self.check(one)

    def serve_until_ended(self, one: GenerateRequest) -> None:
        """Step until this request has ended, whatever transfers are under way."""
        self.add(one)
        end = time.monotonic() + 60.0
        while (one.request_id, 0) not in self.ended:
            if self.step() is None:
                time.sleep(0.0005)
            assert time.monotonic() < end, "the request does not come to an end"

    def check(self, one: GenerateRequest) -> None:
        assert self.tokens[one.request_id, 0] == reference(one, one.sampling.max_tokens or 0)
