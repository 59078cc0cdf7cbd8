"""Live sessions: requests that are given more tokens and items while they run, as live audio is.

    extend ─▶ inbox ─ deliver ─▶ PREFILLING ─▶ (DECODING) ─▶ IDLE
                │                    ▲                         │  holds its KV, computes nothing
                └── extend again ────┴─────────────────────────┘

After each extension a session generates `max_tokens` tokens, or up to a stop token, and then waits
for the next. An item's arrays are let go as soon as its K/V are computed, so a session is as light
in its tenth hour as in its first minute, but cannot be computed again: it is never preempted. Where
blocks are short for another session, it ends with `session_evicted`; as does one that was idle for
long where another request waits for its place (`idleness`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.core.mm_features import EncoderInputs
from lookonce.core.preemption import Preemption
from lookonce.core.request import Request, Sequence, SequenceState, Session, SessionInput
from lookonce.core.request_validation import RequestValidator, check_places
from lookonce.core.scheduler_state import PendingOutput, RequestQueues, SchedulerState
from lookonce.errors import BadRequestError, TooLargeError
from lookonce.types.media import MediaFeature, ProcessedItem
from lookonce.types.step import Extension

UNADMITTED = (SequenceState.WAITING, SequenceState.LOADING)


class Sessions:
    """Opens sessions, takes what they are given, and delivers it between two steps."""

    def __init__(
        self,
        door: RequestValidator,
        roster: RequestQueues,
        lifecycle: SchedulerState,
        preemption: Preemption,
        outbox: PendingOutput,
    ) -> None:
        self._door = door
        self._roster = roster
        self._lifecycle = lifecycle
        self._preemption = preemption
        self._outbox = outbox
        self._given: dict[str, Request] = {}
        """Sessions with something in their inbox."""

    @property
    def has_deliverable(self) -> bool:
        return any(r.sequences[0].state not in UNADMITTED for r in self._given.values())

    def open(self, request: Request) -> None:
        """Make a request live before it is queued. Raises `BadRequestError` where it cannot be."""
        if request.sampling.n != 1:
            raise BadRequestError("a live session has one sample", param="n")
        if request.prompt_logprobs is not None:
            raise BadRequestError(
                "a live session has no prompt that is computed once", param="prompt_logprobs"
            )
        if request.missing:
            raise BadRequestError("a live session brings its items along", param="features")
        if isinstance(request.features, EncoderInputs):
            raise BadRequestError("a live session has a decoder alone", param="live")
        check_places(request.features, request.items)
        request.in_order = None
        request.session = Session(
            limit=self._door.longest_sequence,
            turn_tokens=request.sampling.max_tokens,
            block_size=self._door.block_size,
            unpassed=Counter(request.features.keys),
        )

    def extend(
        self,
        request: Request,
        token_ids: NDArray[np.int32],
        features: tuple[MediaFeature, ...],
        items: Mapping[bytes, ProcessedItem],
    ) -> None:
        """Raises a `RequestError`, with nothing changed, for what could never be computed."""
        session = request.session
        if session is None:
            raise BadRequestError(f"{request.request_id!r} is no live session", param="request_id")
        appendix = self._door.build_extension(token_ids, features, items)
        coming = session.num_coming + len(appendix.token_ids)
        total = len(request.sequences[0].tokens) + coming
        if total >= session.limit:
            raise TooLargeError(
                f"the session would have {total} tokens; the limit is {session.limit - 1}",
                param="prompt",
            )
        session.put(appendix)
        self._given[request.request_id] = request

    def deliver(self) -> None:
        """Append what has come to its sessions, with blocks for it. Before a step is planned."""
        for request in list(self._given.values()):
            sequence = request.sequences[0]
            if sequence.state is SequenceState.FINISHED:
                del self._given[request.request_id]
            elif sequence.state not in UNADMITTED:
                del self._given[request.request_id]
                self._empty_inbox(request, sequence)

    def _empty_inbox(self, request: Request, sequence: Sequence) -> None:
        session = request.session
        if session is None:
            return
        if len(sequence.tokens) + session.num_coming >= session.limit:
            self._lifecycle.end(request, "length")  # what it generated meanwhile took the room
            return
        while session.inbox:
            self._append(request, session, sequence, session.take())
        sequence.token_limit = session.turn_limit(len(sequence.tokens))
        if sequence.state is not SequenceState.PREFILLING:
            self._lifecycle.resume_prefill(sequence)
        self._preemption.complete_blocks(sequence)

    def _append(
        self, request: Request, session: Session, sequence: Sequence, appendix: SessionInput
    ) -> None:
        start = len(sequence.tokens)
        if not sequence.num_generated:
            request.num_prompt_tokens += len(appendix.token_ids)
        features = tuple(
            msgspec.structs.replace(feature, offset=start + feature.offset)
            for feature in appendix.features.as_tuple()
        )
        request.features.extend(features)
        request.items.update(appendix.items)
        session.unpassed.update(appendix.features.keys)
        sequence.tokens.extend(appendix.token_ids)
        if sequence.announced:
            self._outbox.extensions.append(
                Extension(sequence.seq_id, start, appendix.token_ids, features)
            )
