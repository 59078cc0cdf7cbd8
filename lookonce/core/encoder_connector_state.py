"""Encoder outputs held by external tiers: requests that wait for them, and what has been loaded.

    try_admit ─▶ outputs that the prompt needs and the device lacks are looked for ─▶ LOADING
                 ─ all reported ─▶ WAITING ─▶ try_admit ─▶ ... ─▶ chunk: the output is received

A loaded output is kept in host memory for the requests that wait for it, until each has used it or
has ended. Tiers are asked once for a request, before its first admission. What they do not have, or
not in time, is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from lookonce.core.request import Request, Sequence
from lookonce.core.scheduler_state import SchedulerState
from lookonce.types.kv import LoadedOutput
from lookonce.types.media import Array
from lookonce.types.ports import ExternalEncoderCache

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class StagedOutput:
    """A loaded output that is not on the device yet."""

    output: Array
    tier: str
    requests: set[str] = field(default_factory=set)


class EncoderConnectorState:
    """The scheduler's side of `ExternalEncoderCache`; no method waits.

    Loads under way and loaded outputs take at most as many bytes as the encoder cache; an output
    that does not fit beside them is encoded.
    """

    def __init__(self, cache: ExternalEncoderCache, state: SchedulerState) -> None:
        self._cache = cache
        self._state = state
        self._row_bytes = state.encoder_cache.row_bytes
        self._max_bytes = state.encoder_cache.capacity_bytes
        self._asked: set[str] = set()
        """Requests for which the tiers were asked."""
        self._loading: dict[bytes, set[str]] = {}
        """Key of a load under way → the requests that wait for it."""
        self._sizes: dict[bytes, int] = {}
        """Bytes of every load under way and loaded output."""
        self._used_bytes = 0
        self._awaited: dict[str, set[bytes]] = {}
        """Request → keys under way that it waits for."""
        self._staged: dict[bytes, StagedOutput] = {}
        self._staged_for: dict[str, set[bytes]] = {}
        self._encoding: list[tuple[bytes, int]] = []
        """(key, rows) that the step being planned encodes, and that are to be kept."""
        state.on_end.append(self._finish)

    # --- before a sequence is admitted ----------------------------------------------------------

    def begin_load(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether the sequence is LOADING now, until the tiers have given what they hold of the
        outputs that its prompt needs from position `num_cached` on.

        Not for live sessions: their items are not seen again, and must not wait.
        """
        request = sequence.request
        if request.request_id in self._asked or request.session is not None:
            return False
        self._asked.add(request.request_id)
        new = self._join(request, num_cached)
        if new:
            self._cache.submit_load(new)
        if request.request_id not in self._awaited:
            return False
        self._state.begin_loading(sequence)
        return True

    def _join(self, request: Request, num_cached: int) -> list[tuple[bytes, int]]:
        """Let the request wait for what it needs. Returns (key, rows) of what must be loaded."""
        request_id, features = request.request_id, request.features
        new: list[tuple[bytes, int]] = []
        for feature in features.window(features.overlapping(num_cached, request.num_prompt_tokens)):
            key = feature.key
            if self._state.encoder_cache.has_anywhere(key):
                continue
            if key in self._staged:
                self._staged[key].requests.add(request_id)
                self._staged_for.setdefault(request_id, set()).add(key)
                continue
            if key not in self._loading:
                num_bytes = feature.num_embeds * self._row_bytes
                if not num_bytes or self._used_bytes + num_bytes > self._max_bytes:
                    continue
                self._loading[key] = set()
                self._sizes[key] = num_bytes
                self._used_bytes += num_bytes
                new.append((key, feature.num_embeds))
            self._loading[key].add(request_id)
            self._awaited.setdefault(request_id, set()).add(key)
        return new

    # --- what was loaded ------------------------------------------------------------------------

    def take_reports(self) -> None:
        for loaded in self._cache.poll():
            self._take(loaded)

    def _take(self, loaded: LoadedOutput) -> None:
        key = loaded.key
        requests = self._loading.pop(key)
        if loaded.output is None or not requests:
            self._forget_size(key)
        else:
            self._staged[key] = StagedOutput(loaded.output, loaded.tier, set(requests))
            for request_id in requests:
                self._staged_for.setdefault(request_id, set()).add(key)
        for request_id in requests:
            awaited = self._awaited[request_id]
            awaited.discard(key)
            if not awaited:
                del self._awaited[request_id]
                self._state.end_loading(self._state.queues.requests[request_id])

    def staged(self, request: Request, key: bytes) -> StagedOutput | None:
        """An output that was loaded for this request and not used by it yet."""
        if key not in self._staged_for.get(request.request_id, ()):
            return None
        return self._staged[key]

    def holds(self, key: bytes) -> bool:
        """Whether an output is loaded or being loaded, for whatever request."""
        return key in self._sizes

    def has_staged(self, request: Request) -> bool:
        return request.request_id in self._staged_for

    def release(self, request: Request, key: bytes) -> None:
        """The request holds the output on the device now."""
        keys = self._staged_for.get(request.request_id)
        if keys is not None and key in keys:
            keys.discard(key)
            if not keys:
                del self._staged_for[request.request_id]
            self._unstage(request.request_id, key)

    def release_all(self, request: Request) -> None:
        """The prompt is computed: what was loaded for it and not used, is dropped."""
        for key in self._staged_for.pop(request.request_id, ()):
            self._unstage(request.request_id, key)

    def _unstage(self, request_id: str, key: bytes) -> None:
        requests = self._staged[key].requests
        requests.discard(request_id)
        if not requests:
            del self._staged[key]
            self._forget_size(key)

    def _forget_size(self, key: bytes) -> None:
        self._used_bytes -= self._sizes.pop(key)

    def _finish(self, request: Request) -> None:
        """A load under way goes on, and what it brings is dropped."""
        self._asked.discard(request.request_id)
        for key in self._awaited.pop(request.request_id, ()):
            self._loading[key].discard(request.request_id)
        self.release_all(request)

    # --- stores ---------------------------------------------------------------------------------

    def note_encoding(self, request: Request, outputs: list[tuple[bytes, int]]) -> None:
        """The step that is being planned encodes (key, rows) for this request."""
        if request.session is None:
            self._encoding += outputs

    def take_encoding(self) -> list[tuple[bytes, int]]:
        """(key, rows) that the step that was planned last encodes, for `store_encoded`."""
        taken, self._encoding = self._encoding, []
        return taken

    def store_encoded(self, outputs: list[tuple[bytes, int]]) -> None:
        """Offer what a step has encoded to the tiers; what failed is not held, and is not."""
        if outputs:
            self._cache.store(outputs)

    # --- figures --------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        return self._cache.stats() | {
            "encoder_transfer_staged_bytes": float(self._used_bytes),
            "encoder_transfer_requests_loading": float(len(self._awaited)),
        }

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where loads, loaded outputs, requests and bytes disagree."""
        if self._sizes.keys() != self._loading.keys() | self._staged.keys():
            raise RuntimeError("an output is loaded that is not counted, or the reverse")
        if self._loading.keys() & self._staged.keys():
            raise RuntimeError("an output is loaded and being loaded")
        if self._used_bytes != sum(self._sizes.values()) or self._used_bytes > self._max_bytes:
            raise RuntimeError("bytes of loaded outputs differ from their sum")
        if _pairs(self._awaited) != _pairs(self._loading, turned=True):
            raise RuntimeError("requests and loads under way disagree")
        staged = {key: output.requests for key, output in self._staged.items()}
        if _pairs(self._staged_for) != _pairs(staged, turned=True):
            raise RuntimeError("requests and loaded outputs disagree")
        if not all(staged.values()):
            raise RuntimeError("an output is kept that no request needs")
        live = self._state.queues.requests.keys()
        if not self._awaited.keys() | self._staged_for.keys() | self._asked <= live:
            raise RuntimeError("outputs are kept for a request that has ended")


def _pairs(
    table: Mapping[_Key, set[_Value]], *, turned: bool = False
) -> set[tuple[object, object]]:
    return {
        (value, key) if turned else (key, value)
        for key, values in table.items()
        for value in values
    }
