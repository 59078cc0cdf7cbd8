"""Live sessions: requests that get more tokens and items while they run, such as live audio.

    extend ─▶ inputs ─ append_inputs ─▶ PREFILLING ─▶ (DECODING) ─▶ IDLE
                 │                          ▲                        │  keeps its K/V, computes
                 └───── extend again ───────┴────────────────────────┘  nothing

After each extension a session generates `max_tokens` tokens, or up to a stop token, and then waits
for the next. Items are dropped once their K/V are computed, so that memory does not grow with the
length of the session; therefore it cannot be computed again, and is never preempted. It ends with
`session_evicted` when blocks are short for another session, and when it has been idle for long
while another request waits for its place (`preemption`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.core.frame_digests import FrameDigests
from lookonce.core.mm_features import EncoderInputs, FrameInputs
from lookonce.core.preemption import Preemption
from lookonce.core.request import Request, Sequence, SequenceState, Session, SessionInput
from lookonce.core.request_validation import RequestValidator, refuse_unused_items
from lookonce.core.scheduler_state import SchedulerState
from lookonce.errors import BadRequestError, TooLargeError
from lookonce.types.media import Array, MediaFeature, ProcessedItem
from lookonce.types.step import Extension

NO_TOKENS = np.zeros(0, np.int32)
NOT_ADMITTED = (SequenceState.WAITING, SequenceState.LOADING)


class Sessions:
    """Opens sessions, queues what extends them, and appends it between two steps."""

    def __init__(
        self, state: SchedulerState, validator: RequestValidator, preemption: Preemption
    ) -> None:
        self._state = state
        self._validator = validator
        self._preemption = preemption
        self.extended: dict[str, Request] = {}
        """Request id → session with inputs that are not appended yet."""

    @property
    def has_appendable(self) -> bool:
        """Whether `append_inputs` has something to do."""
        return any(r.sequences[0].state not in NOT_ADMITTED for r in self.extended.values())

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
        if isinstance(request.features, FrameInputs) and (request.frames is None or request.items):
            raise BadRequestError(
                "a live session of this model begins with frames of sound, and has no clip",
                param="frames",
            )
        refuse_unused_items(request.features, request.items)
        request.items_in_order = None
        request.session = Session(
            limit=self._validator.longest_sequence,
            max_new_tokens=request.sampling.max_tokens,
            block_size=self._state.block_pool.block_size,
            remaining_keys=Counter(request.features.keys),
        )
        if request.initial_frames is not None:
            request.session.unsent_frames.append(request.initial_frames)
            request.initial_frames = None

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
        if request.frames is not None:
            raise BadRequestError("this session is extended by frames of sound", param="prompt")
        added = self._validator.build_session_input(token_ids, features, items)
        num_pending = session.num_pending_tokens + len(added.token_ids)
        total = len(request.sequences[0].tokens) + num_pending
        if total >= session.limit:
            raise TooLargeError(
                f"the session would have {total} tokens; the limit is {session.limit - 1}",
                param="prompt",
            )
        session.add_input(added)
        self.extended[request.request_id] = request

    def extend_frames(self, request: Request, frames: Array) -> None:
        """As `extend`, by frames of sound [n, *frame shape]."""
        session = request.session
        if session is None or request.frames is None:
            raise BadRequestError(
                f"{request.request_id!r} is no live session of sound", param="request_id"
            )
        self._validator.check_frames(frames)
        pending = sum(each.shape[0] for each in session.frame_inputs)
        total = request.frames.total + pending + frames.shape[0]
        if total >= session.limit:
            raise TooLargeError(
                f"the session would have {total} frames; the limit is {session.limit - 1}",
                param="frames",
            )
        session.frame_inputs.append(frames)
        self.extended[request.request_id] = request

    def append_inputs(self) -> None:
        """Append the queued inputs of all admitted sessions; called before a step is planned."""
        for request in list(self.extended.values()):
            sequence = request.sequences[0]
            if sequence.state is SequenceState.FINISHED:
                del self.extended[request.request_id]
            elif sequence.state not in NOT_ADMITTED and request.session is not None:
                del self.extended[request.request_id]
                if request.frames is None:
                    self._append_all(request, request.session, sequence)
                else:
                    self._append_frames(request.frames, request.session, sequence)

    def _append_all(self, request: Request, session: Session, sequence: Sequence) -> None:
        if len(sequence.tokens) + session.num_pending_tokens >= session.limit:
            self._state.end(request, "length")  # tokens generated since took the room
            return
        while session.inputs:
            self._append(request, session, sequence, session.take_input())
        num_tokens = len(sequence.tokens)
        sequence.token_limit = session.next_token_limit(num_tokens)
        if sequence.state is not SequenceState.PREFILLING:
            self._state.resume_prefill(sequence)
        num_missing = self._state.block_pool.blocks_for(num_tokens) - len(sequence.block_ids)
        if num_missing > 0:
            self._preemption.grow(sequence, num_missing)

    def _append_frames(self, frames: FrameDigests, session: Session, sequence: Sequence) -> None:
        """The session computes on to the position of its last frame."""
        while session.frame_inputs:
            added = session.frame_inputs.popleft()
            frames.extend(added)
            if sequence.announced:
                start = len(sequence.tokens)
                self._state.extensions.append(
                    Extension(sequence.seq_id, start, NO_TOKENS, (), added)
                )
            else:
                session.unsent_frames.append(added)
        sequence.token_limit = min(session.limit, frames.total + 1)
        if sequence.state is SequenceState.IDLE:
            self._state.resume_prefill(sequence)
            blocks = self._state.block_pool.blocks_for(len(sequence.tokens))
            if blocks > len(sequence.block_ids):
                self._preemption.grow(sequence, blocks - len(sequence.block_ids))

    def _append(
        self, request: Request, session: Session, sequence: Sequence, added: SessionInput
    ) -> None:
        start = len(sequence.tokens)
        if not sequence.num_generated:
            request.num_prompt_tokens += len(added.token_ids)
        features = tuple(
            msgspec.structs.replace(feature, offset=start + feature.offset)
            for feature in added.features.as_tuple()
        )
        request.features.extend(features)
        request.items.update(added.items)
        session.remaining_keys.update(added.features.keys)
        sequence.tokens.extend(added.token_ids)
        if sequence.announced:
            self._state.extensions.append(
                Extension(sequence.seq_id, start, added.token_ids, features)
            )
