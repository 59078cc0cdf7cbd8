"""Encoder outputs in external tiers: worker threads look for them, load them and store them.

    submit_load ──▶ loaders: look all outputs up at once, then read and verify one after the other
    store       ──▶ gatherer (device → host memory) ──▶ a writer per tier

An output is cut into pieces of one size (`types.kv.OutputLayout`), which tiers hold as they hold KV
blocks, under keys of their own. An output whose pieces are not all there and intact is not loaded:
it is encoded.

Loads go to memory of their own, so one that comes too late is dropped and harms nothing. All held
outputs are loaded: encoding one takes longer than reading it but from a tier that is all but dead,
and that is what circuit breakers are for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise

import numpy as np

from lookonce.kv.chain import TierChain
from lookonce.kv.objects import piece_keys
from lookonce.kv.transfer import (
    LOAD_SECONDS,
    LOOKUP_SECONDS,
    MAX_QUEUED_BYTES,
    SLICE_BYTES,
    TransferWorkers,
)
from lookonce.types.kv import LoadedOutput, OutputLayout
from lookonce.types.media import ITEM_SIZE, Array
from lookonce.types.ports import EncoderOutputCopier


class _Load:
    """Outputs (key, rows) that are to be loaded. Each is settled once: by the worker or by a
    deadline, whichever comes first."""

    def __init__(self, outputs: Sequence[tuple[bytes, int]]) -> None:
        self.outputs = outputs
        self.located = False
        """The tiers have said what they hold."""
        self._pending = dict.fromkeys(key for key, _ in outputs)
        self._lock = threading.Lock()

    def is_pending(self, key: bytes) -> bool:
        return key in self._pending

    def settle(self, key: bytes) -> bool:
        """True for the first call."""
        with self._lock:
            return key in self._pending and self._pending.pop(key) is None

    def settle_all(self) -> list[bytes]:
        """The keys that were not settled yet."""
        with self._lock:
            rest, self._pending = list(self._pending), {}
            return rest


class EncoderConnector:
    """Implements `types.ports.ExternalEncoderCache` over a chain of tiers.

    `wake` is called, from any thread, when there is something to poll.
    """

    def __init__(
        self,
        chain: TierChain,
        copier: EncoderOutputCopier,
        layout: OutputLayout,
        *,
        wake: Callable[[], None] = lambda: None,
        lookup_seconds: float = LOOKUP_SECONDS,
        load_seconds: float = LOAD_SECONDS,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self.wake = wake
        self._chain = chain
        self._copier = copier
        self._layout = layout
        self._lookup_seconds = lookup_seconds
        self._load_seconds = load_seconds
        self._loaded: deque[LoadedOutput] = deque()
        self._queries = 0
        self._hits: Counter[str] = Counter()
        """Tier → outputs it gave in time."""
        self._workers = TransferWorkers("encoder", chain, layout.piece_bytes, max_queued_bytes)

    # --- the step thread's side -----------------------------------------------------------------

    def submit_load(self, outputs: Sequence[tuple[bytes, int]]) -> None:
        job = _Load(outputs)
        self._queries += len(outputs)
        now = time.monotonic()

        def expire_lookup() -> None:
            if not job.located:
                self._give_up(job)

        deadlines = self._workers.deadlines
        deadlines.at(now + self._lookup_seconds, expire_lookup)
        deadlines.at(now + self._load_seconds, lambda: self._give_up(job))
        self._workers.load(lambda: self._load(job))

    def store(self, outputs: Sequence[tuple[bytes, int]]) -> None:
        for key, num_rows in outputs:
            pinned = self._copier.pin(key)
            if pinned is not None:
                self._store(key, num_rows, pinned)

    def poll(self) -> Sequence[LoadedOutput]:
        if not self._loaded:
            return ()
        taken = []
        while self._loaded:
            loaded = self._loaded.popleft()
            if loaded.output is not None:
                self._hits[loaded.tier] += 1
            taken.append(loaded)
        return taken

    def stats(self) -> dict[str, float]:
        hits = self._hits
        stats = {
            "external_encoder_cache_queries_total": float(self._queries),
            "external_encoder_cache_hits_total": float(sum(hits.values())),
        }
        for tier in self._chain.tiers:
            stats |= tier.output_stats()
            stats[f"encoder_tier_outputs_total:{tier.name}"] = float(hits[tier.name])
        return stats | self._workers.stats()

    def close(self) -> None:
        self._workers.close()

    # --- loaders --------------------------------------------------------------------------------

    def _load(self, job: _Load) -> None:
        pieces = [piece_keys(key, rows, self._layout) for key, rows in job.outputs]
        keys = [piece for output in pieces for piece in output]
        bounds = pairwise(accumulate(map(len, pieces), initial=0))
        sources: list[int | None] = []
        try:
            sources, _ = self._chain.locate(keys)
            job.located = True
            held = []
            for (key, rows), (start, stop) in zip(job.outputs, bounds, strict=True):
                held_by = [source for source in sources[start:stop] if source is not None]
                if held_by and len(held_by) == stop - start:
                    held.append((key, rows, keys[start:stop], held_by))
                elif job.settle(key):
                    self._tell(LoadedOutput(key))
            for key, rows, names, held_by in held:
                if not self._load_output(job, key, rows, names, held_by) and job.settle(key):
                    self._tell(LoadedOutput(key))
        finally:
            self._give_up(job)
            leased = [(k, s) for k, s in zip(keys, sources, strict=False) if s is not None]
            self._chain.release([k for k, _ in leased], [s for _, s in leased])

    def _load_output(
        self, job: _Load, key: bytes, num_rows: int, pieces: Sequence[bytes], sources: Sequence[int]
    ) -> bool:
        """Report the output if all of it is there and intact; whether it was."""
        size = self._layout.piece_bytes
        buffer = np.empty(len(pieces) * size, dtype=np.uint8)
        at = 0
        for tier, run in groupby(sources):
            end = at + len(list(run))
            while at < end:
                stop = min(end, at + max(1, SLICE_BYTES // size))
                if not job.is_pending(key) or not self._read(
                    tier, pieces[at:stop], buffer[at * size : stop * size]
                ):
                    return False
                at = stop
        if job.settle(key):
            name = self._chain.tiers[max(sources)].name
            self._tell(LoadedOutput(key, self._array(buffer, num_rows), name))
        return True

    def _read(
        self, tier: int, keys: Sequence[bytes], into: np.ndarray[tuple[int], np.dtype[np.uint8]]
    ) -> bool:
        """Whether all pieces are in `into` and intact. Those of a farther tier are stored in the
        nearer ones, too."""
        outcome, _ = self._chain.tiers[tier].read(keys, into.data)
        if outcome.reason is not None:
            return False
        if tier:
            self._workers.offer(keys, into.copy().data, nearer_than=tier)
        return True

    def _array(self, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]], num_rows: int) -> Array:
        """The rows [num_rows, width], in memory without the last piece's zeros."""
        layout = self._layout
        width = layout.row_bytes // ITEM_SIZE[layout.dtype]
        data = buffer[: num_rows * layout.row_bytes].copy()
        return Array(layout.dtype, (num_rows, width), data.data)

    def _give_up(self, job: _Load) -> None:
        """What has not been loaded is not waited for any more."""
        for key in job.settle_all():
            self._tell(LoadedOutput(key))

    def _tell(self, loaded: LoadedOutput) -> None:
        self._loaded.append(loaded)
        self.wake()

    # --- stores ---------------------------------------------------------------------------------

    def _store(self, key: bytes, num_rows: int, pinned: object) -> None:
        """Queue one output to be copied; dropped, and counted, where the queue is full."""
        nbytes = num_rows * self._layout.row_bytes
        self._workers.gather(nbytes, lambda: self._gather(key, num_rows, pinned))

    def _gather(self, key: bytes, num_rows: int, pinned: object) -> None:
        layout = self._layout
        nbytes = num_rows * layout.row_bytes
        buffer = np.empty(layout.num_pieces(num_rows) * layout.piece_bytes, dtype=np.uint8)
        buffer[nbytes:] = 0
        try:
            self._copier.copy(pinned, buffer[:nbytes].data)
            self._workers.offer(piece_keys(key, num_rows, layout), buffer.data)
        finally:
            self._workers.note_gathered(nbytes)
