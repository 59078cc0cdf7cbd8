"""Live sessions: requests that get more tokens and items while they run, such as live audio.

    extend ─▶ inputs ─ append_inputs ─▶ PREFILLING ─▶ (DECODING) ─▶ IDLE
                 │                          ▲                        │  keeps its K/V, computes
                 └───── extend again ───────┴────────────────────────┘  nothing

After each extension a session generates `max_tokens` tokens, or up to a stop token, and then waits
for the next. An extension that does not interrupt waits until the answer before it has ended. Items
are dropped once their K/V are computed, so that memory does not grow with the length of the
session; therefore it cannot be computed again, and is never preempted. It ends with
`session_evicted` when blocks are short for another session, and when it has been idle for long
while another request waits for its place (`preemption`).

Tokens leave a session in whole KV blocks (`DropTokens`):

    slide     [dropped dropped│ window of the next token │ not computed]   where all layers slide
    compact   [kept beginning │dropped dropped│ newest   │ not computed]   where it was asked for

Indices count the tokens that are there; a token's position is its index plus `Session.shift`. When
positions would pass the model's last, a slide also rotates the kept keys: the shift is 0 again.
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
from lookonce.errors import BadRequestError, SessionEvictedError, TooLargeError
from lookonce.types.media import Array, MediaFeature, ProcessedItem
from lookonce.types.request import EXTEND, ExtendOptions, SessionOptions, SessionUpdate, TokenDelta
from lookonce.types.step import DropTokens, Extension

NO_TOKENS = np.zeros(0, np.int32)
MIN_SPARE_BLOCKS = 6
"""KV blocks beside the window that a session needs to slide; with fewer it ends at its context."""
MIN_COMPACTED_BLOCKS = 12
"""KV blocks of the shortest context that can be compacted."""
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
        self.filling: dict[str, Request] = {}
        """Request id → session whose answer has filled its context, and which will compact it."""

    @property
    def has_appendable(self) -> bool:
        """Whether `append_inputs` has something to do."""
        return any(r.sequences[0].state not in NOT_ADMITTED for r in self.extended.values())

    def open(self, request: Request, options: SessionOptions) -> None:
        """Make a request live before it is queued. Raises `BadRequestError` where it cannot be."""
        if request.pooling is not None:
            raise BadRequestError("this model generates nothing", param="live")
        if request.sampling.n != 1:
            raise BadRequestError("a live session has one sample", param="n")
        if request.prompt_logprobs is not None:
            raise BadRequestError(
                "a live session has no prompt that is computed once", param="prompt_logprobs"
            )
        if request.sampling.grammar is not None:
            raise BadRequestError("a live session's answers have no grammar", param="grammar")
        if request.missing:
            raise BadRequestError("a live session brings its items along", param="features")
        if self._validator.model.longest_bidirectional_prompt:
            raise BadRequestError(
                "this model has no live sessions: its prompts are computed whole", param="live"
            )
        if isinstance(request.features, EncoderInputs):
            raise BadRequestError("a live session has a decoder alone", param="live")
        if isinstance(request.features, FrameInputs) and (request.frames is None or request.items):
            raise BadRequestError(
                "a live session of this model begins with frames of sound, and has no clip",
                param="frames",
            )
        refuse_unused_items(request.features, request.items)
        model, limit = self._validator.model, self._validator.longest_sequence
        block_size = self._state.block_pool.block_size
        if options.overflow == "compact" and not model.relative_positions:
            raise BadRequestError(
                "this model's sessions cannot be compacted: its keys depend on their positions",
                param="overflow",
            )
        if options.overflow == "compact" and limit < MIN_COMPACTED_BLOCKS * block_size:
            raise BadRequestError(
                f"a context of {limit} tokens is too short to be compacted", param="overflow"
            )
        request.items_in_order = None
        window = model.sliding_window
        slides = 0 < window <= limit - MIN_SPARE_BLOCKS * block_size
        request.session = session = Session(
            limit=limit,
            max_new_tokens=request.sampling.max_tokens,
            block_size=block_size,
            remaining_keys=Counter(request.features.keys),
            options=options,
            window=window if slides else 0,
            max_positions=model.max_positions or model.max_model_len,
            relative_positions=model.relative_positions,
            max_step_tokens=self._validator.token_budget,
            num_opening_tokens=request.num_prompt_tokens,
            answering=options.answer,
        )
        if session.has_no_end and request.num_prompt_tokens + session.spare_tokens >= limit:
            raise TooLargeError(
                f"the session's prompt has {request.num_prompt_tokens} tokens; the limit is "
                f"{limit - session.spare_tokens - 1}",
                param="prompt",
            )
        session.begin_answer(request.num_prompt_tokens)
        if request.initial_frames is not None and request.frames is not None:
            session.answer_end = request.frames.total + 1
            session.unsent_frames.append(request.initial_frames)
            request.initial_frames = None

    def extend(
        self,
        request: Request,
        token_ids: NDArray[np.int32],
        features: tuple[MediaFeature, ...],
        items: Mapping[bytes, ProcessedItem],
        options: ExtendOptions = EXTEND,
    ) -> None:
        """Raises a `RequestError`, with nothing changed, for what could never be computed."""
        session = request.session
        if session is None:
            raise BadRequestError(f"{request.request_id!r} is no live session", param="request_id")
        if request.frames is not None:
            raise BadRequestError("this session is extended by frames of sound", param="prompt")
        self._check_credits(session)
        if request.adapted is not None:
            features = request.adapted.features(features, live=True)
            items = request.adapted.items(items)
        added = self._validator.build_session_input(token_ids, features, items, options)
        self._check_room(request.sequences[0], session, len(added.token_ids))
        session.add_input(added)
        self.extended[request.request_id] = request

    def extend_frames(self, request: Request, frames: Array) -> None:
        """As `extend`, by frames of sound [n, *frame shape]."""
        session = request.session
        if session is None or request.frames is None:
            raise BadRequestError(
                f"{request.request_id!r} is no live session of sound", param="request_id"
            )
        self._check_credits(session)
        self._validator.check_frames(frames)
        total = request.frames.total + sum(each.shape[0] for each in session.frame_inputs)
        total += frames.shape[0]
        if frames.shape[0] > session.limit:
            raise TooLargeError(
                f"the extension has {frames.shape[0]} frames; a session takes {session.limit} at "
                "once",
                param="frames",
            )
        if not session.has_no_end and total >= session.limit:
            raise TooLargeError(
                f"the session would have {total} frames; the limit is {session.limit - 1}",
                param="frames",
            )
        session.frame_inputs.append(frames)
        self.extended[request.request_id] = request

    def _check_credits(self, session: Session) -> None:
        if session.options.credits and session.num_unfinished_tokens >= session.options.credits:
            raise BadRequestError(
                f"the session was extended although {session.num_unfinished_tokens} of its tokens "
                f"are not computed; {session.options.credits} may be",
                param="request_id",
            )

    def _check_room(self, sequence: Sequence, session: Session, num_tokens: int) -> None:
        if session.has_no_end:
            if num_tokens > session.largest_input:
                raise TooLargeError(
                    f"the extension has {num_tokens} tokens; a session takes "
                    f"{session.largest_input} at once",
                    param="prompt",
                )
            return
        total = len(sequence.tokens) + session.num_pending_tokens + num_tokens
        if total >= session.limit:
            raise TooLargeError(
                f"the session would have {total} tokens; the limit is {session.limit - 1}",
                param="prompt",
            )

    def append_inputs(self) -> None:
        """Append the queued inputs of all admitted sessions; called before a step is planned."""
        for request in list(self.filling.values()):
            if request.sequences[0].state is not SequenceState.FINISHED and request.session:
                self._compact(request, request.session, request.sequences[0])
        self.filling.clear()
        for request in list(self.extended.values()):
            sequence, session = request.sequences[0], request.session
            if sequence.state is SequenceState.FINISHED or session is None:
                del self.extended[request.request_id]
            elif sequence.state not in NOT_ADMITTED:
                if request.frames is not None:
                    self._append_frames(request.frames, session, sequence)
                else:
                    self._append_all(request, session, sequence)
                if not session.inputs or request.finished:
                    del self.extended[request.request_id]

    def _append_all(self, request: Request, session: Session, sequence: Sequence) -> None:
        """Append what need not wait for the end of an answer."""
        num_tokens = 0
        while session.may_append:
            added = session.inputs[0]
            if not self._make_room(request, session, sequence, len(added.token_ids)):
                break
            if sequence.state is SequenceState.DECODING and not num_tokens:
                self._report(request, session.update(ended="interrupted"))
            num_tokens += len(added.token_ids)
            self._append(request, session, sequence, session.take_input())
        if not num_tokens or request.finished:
            return
        sequence.token_limit = session.token_limit
        if sequence.state is not SequenceState.PREFILLING:
            self._state.resume_prefill(sequence)
        self._grow(sequence)

    def _append_frames(self, frames: FrameDigests, session: Session, sequence: Sequence) -> None:
        """The session computes on to the position of its last frame."""
        while session.frame_inputs:
            added = session.frame_inputs.popleft()
            frames.extend(added)
            session.note_frames(frames.total, added.shape[0])
            self._state.counters.session_extensions += 1
            if sequence.announced:
                start = len(sequence.tokens)
                self._state.extensions.append(
                    Extension(sequence.seq_id, start, NO_TOKENS, (), added)
                )
            else:
                session.unsent_frames.append(added)
        sequence.token_limit = session.token_limit
        if sequence.state is SequenceState.IDLE:
            self._state.resume_prefill(sequence)
            self._grow(sequence)

    def _grow(self, sequence: Sequence) -> None:
        """Give the sequence the blocks that its tokens need."""
        num_blocks = self._state.block_pool.blocks_for(len(sequence.tokens))
        if num_blocks > len(sequence.block_ids):
            self._preemption.grow(sequence, num_blocks - len(sequence.block_ids))

    def _make_room(
        self, request: Request, session: Session, sequence: Sequence, num_tokens: int
    ) -> bool:
        """Whether so many tokens may be appended now; ends a session that will never have room."""
        limit = session.limit - (session.spare_tokens if session.has_no_end else 0)
        if len(sequence.tokens) + num_tokens < limit:
            return True
        if session.compacts:
            self._compact(request, session, sequence)
            if request.finished or len(sequence.tokens) + num_tokens < limit:
                return not request.finished
        if session.has_no_end:  # there is room once more of it is computed
            return False
        self._state.end(request, "length")  # tokens generated since took the room
        return False

    def _append(
        self, request: Request, session: Session, sequence: Sequence, added: SessionInput
    ) -> None:
        start, token_ids = len(sequence.tokens), added.token_ids
        left_out = int(_is_joined(sequence, added))
        token_ids = token_ids[left_out:]
        if not sequence.num_generated:
            request.num_prompt_tokens += len(token_ids)
        features = tuple(
            msgspec.structs.replace(feature, offset=start + feature.offset - left_out)
            for feature in added.features.as_tuple()
        )
        request.features.extend(features)
        request.items.update(added.items)
        session.remaining_keys.update(added.features.keys)
        sequence.tokens.extend(token_ids)
        session.note_appended(added, len(sequence.tokens))
        self._state.counters.session_extensions += 1
        if sequence.announced:
            self._state.extensions.append(Extension(sequence.seq_id, start, token_ids, features))

    # --- what leaves a session ------------------------------------------------------------------

    def advance(self, sequence: Sequence) -> None:
        """Positions of the session were computed: drop items and tokens, and give credits back."""
        request, session = sequence.request, sequence.request.session
        if session is None or request.finished:
            return
        session.release_computed(request.features, request.items, sequence.num_computed)
        if request.frames is not None:
            num_computed, block_size = sequence.num_computed, session.block_size
            request.frames.forget_before(num_computed - num_computed % block_size)
        if session.computing:
            credits = session.take_credits(sequence.num_computed)
            if credits:
                self._report(request, session.update(credits=credits))
        if session.window:
            self._slide(request, session, sequence)
        elif session.compacts and len(sequence.tokens) >= session.limit - session.spare_tokens:
            self.filling[request.request_id] = request

    def _slide(self, request: Request, session: Session, sequence: Sequence) -> None:
        """Drop the blocks that no token from the next one on attends to.

        The next token has index `num_computed`: it sees indices from `num_computed - window + 1`.
        """
        num_blocks = (sequence.num_computed - session.window + 1) // session.block_size
        if num_blocks > 0:
            at_end = session.nears_last_position(sequence.num_computed)
            if at_end and not session.relative_positions:
                self._state.end(request, "length")
                return
            self._drop(request, session, sequence, 0, num_blocks, reanchor=at_end)

    def _compact(self, request: Request, session: Session, sequence: Sequence) -> None:
        """Drop the middle: the beginning stays, and of what is computed the newest part, so that
        half of the context is free."""
        first = session.num_kept_blocks
        excess = len(sequence.tokens) - session.limit // 2
        last = sequence.num_computed // session.block_size - 1  # the newest full block stays
        num_blocks = min(-(-excess // session.block_size), last - first)
        if num_blocks <= 0 or not sequence.announced:
            return
        self._drop(request, session, sequence, first, num_blocks, reanchor=True)
        self._state.counters.session_compactions += 1
        if not request.finished:
            num_tokens = num_blocks * session.block_size
            self._report(request, session.update(compacted=num_tokens))

    def _drop(
        self,
        request: Request,
        session: Session,
        sequence: Sequence,
        first: int,
        num_blocks: int,
        *,
        reanchor: bool,
    ) -> None:
        num_tokens, length = num_blocks * session.block_size, len(sequence.tokens)
        session.release_computed(request.features, request.items, sequence.num_computed)
        dropped = sequence.drop_tokens(session.block_size, first, num_blocks)
        self._state.block_pool.release(dropped)
        session.note_dropped(num_tokens, reanchored=reanchor)
        sequence.token_limit = session.token_limit
        moved = self._writable_blocks(session, sequence, first) if reanchor else ()
        if moved is None:
            error = SessionEvictedError("the KV cache has no room for this session any more")
            self._state.end(request, "error", error)
            return
        self._state.extensions.append(
            DropTokens(
                sequence.seq_id,
                first * session.block_size,
                num_tokens,
                length,
                reanchor=reanchor,
                moved=moved,
            )
        )
        self._state.counters.session_tokens_dropped += num_tokens
        self._state.counters.session_reanchors += reanchor

    def _writable_blocks(
        self, session: Session, sequence: Sequence, first: int
    ) -> tuple[tuple[int, int], ...] | None:
        """(from, to) of the computed blocks from `first` on, whose keys will be rotated.

        Other holders of a block, and prefixes that are found by its hash, need it as it is: then
        the keys move to a new block. None, with some moved, where no block is free.
        """
        pool, blocks = self._state.block_pool, sequence.block_ids
        moved = []
        for index in range(first, pool.blocks_for(sequence.num_computed)):
            block = blocks[index]
            if pool.is_shared(block):
                taken = pool.try_allocate(1)
                if taken is None:
                    return None
                blocks[index] = taken[0]
                pool.release([block])
            else:
                pool.unregister(block)
            moved.append((block, blocks[index]))
        return tuple(moved)

    def _report(self, request: Request, update: SessionUpdate) -> None:
        self._state.output.deltas.append(TokenDelta(request.request_id, 0, [], session=update))


def _is_joined(sequence: Sequence, added: SessionInput) -> bool:
    """Whether the first token of an input is left out, since the sequence ends with it."""
    if not added.options.joins or len(added.token_ids) < 2:
        return False
    last = sequence.tokens.raw(len(sequence.tokens) - 1, len(sequence.tokens))
    return last == added.token_ids[:1].tobytes()
