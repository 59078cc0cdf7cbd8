"""The one object that goes from scheduler to runner each step, and the one that comes back.

What is made anew in every step is a struct: a frozen dataclass takes several times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.errors import LookOnceError
from lookonce.types.media import Array, MediaFeature, ProcessedItem
from lookonce.types.request import PromptLogprob, TokenLogprob
from lookonce.types.sampling import CompiledGrammar, SamplingParams


class NewSequence(msgspec.Struct, frozen=True, eq=False):
    """A sequence the runner has not seen, or sees again after preemption."""

    seq_id: int
    """Unique for the engine's life; never reused."""
    token_ids: NDArray[np.int32]
    """[num_prompt + already generated]; the runner copies it."""
    num_prompt_tokens: int
    features: tuple[MediaFeature, ...]
    sampling: SamplingParams
    sample_index: int = 0
    """Which of the request's n samples: with a seed, draws use seed + sample_index."""
    grammar: CompiledGrammar | None = None
    """What its tokens must conform to."""
    frames: tuple[Array, ...] = ()
    """Of a live session whose model adds a frame of sound to each token: those of the first
    positions, each array [n, *frame shape]."""
    snapshot: int | None = None
    """Where the state after its cached prefix is kept, of a model with states; None: the sequence
    is computed from its first token."""
    adapter: bytes = b""
    """Digest of the LoRA adapter that it is computed with; empty: none."""


@dataclass(frozen=True, slots=True)
class Extension:
    """What a live session appended to a sequence the runner knows."""

    seq_id: int
    start: int
    """Index of the first appended token."""
    token_ids: NDArray[np.int32]
    """[num_appended]; the runner copies it."""
    features: tuple[MediaFeature, ...]
    """The items among them, in order, at offsets of the whole sequence."""
    frames: Array | None = None
    """[n, *frame shape]: the frames of sound of the next n positions that have none."""


@dataclass(frozen=True, slots=True)
class DropTokens:
    """Computed tokens that a live session's sequence loses: whole KV blocks of them.

    The indices of all later tokens become smaller by `num_tokens`, and their entries in the block
    table move up. Their positions stay what they were, except with `reanchor`: then the keys in
    `moved` are rotated so that a token's position is its index again.
    """

    seq_id: int
    start: int
    """Index of the first token that is dropped; a multiple of the block size."""
    num_tokens: int
    """A multiple of the block size."""
    length: int
    """Tokens of the sequence before."""
    reanchor: bool = False
    moved: tuple[tuple[int, int], ...] = ()
    """(block, block) from which and to which K/V are moved, often the same: of the tokens from
    `start` on that stay, as far as they are computed. The second is the one in the table then."""


class EmbedSlice(msgspec.Struct, frozen=True, gc=False):
    """Rows `[start, end)` of the encoder output `key` go to the chunk's rows from `row` on."""

    key: bytes
    start: int
    end: int
    row: int


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """Positions `[start, start + num_tokens)` of one sequence, computed in this step."""

    seq_id: int
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...] = ()
    """KV blocks appended to the sequence's block table before this step (prefix hits included)."""
    embeds: tuple[EmbedSlice, ...] = ()
    bidirectional: tuple[tuple[int, int], ...] = ()
    """Absolute `(start, end)` of unsplittable items this chunk touches."""
    sample: bool = False
    """The chunk ends at the last known token: sample the next one from its last row."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """(tokens, snapshot), ascending: where the state after so many of these positions is kept."""


class EncodeItem(msgspec.Struct, frozen=True, gc=False):
    """Run the encoder on one item and keep the output under its key."""

    key: bytes
    item: ProcessedItem
    adapter: bytes = b""
    """Digest of the LoRA adapter that changes the encoder for it; empty: none."""


class ReceivedOutput(msgspec.Struct, frozen=True, gc=False):
    """Keep an encoder output that an external tier gave, under its key."""

    key: bytes
    output: Array
    """[num_embeds, row width] of the model's dtype."""


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One step. The runner first forgets, then learns, then moves outputs, encodes and computes.

    Outputs move in the order of the fields: `dropped_host`, `offload`, `dropped_outputs`,
    `restore`, `received`. So host memory has room before anything comes to it, and the device too.
    """

    step_id: int
    finished: tuple[int, ...] = ()
    """Sequences to forget (finished, aborted, preempted)."""
    dropped_host: tuple[bytes, ...] = ()
    """Host copies of encoder outputs to free."""
    offload: tuple[bytes, ...] = ()
    """Encoder outputs to copy to host memory; they are dropped from the device next."""
    dropped_outputs: tuple[bytes, ...] = ()
    """Encoder outputs to free on the device."""
    restore: tuple[bytes, ...] = ()
    """Encoder outputs to copy back to the device; the host copy stays."""
    received: tuple[ReceivedOutput, ...] = ()
    """Encoder outputs to copy to the device, from external tiers."""
    new: tuple[NewSequence, ...] = ()
    extended: tuple[Extension | DropTokens, ...] = ()
    """What has become of live sessions' sequences, in this order."""
    encode: tuple[EncodeItem, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    """Decodes (num_tokens 1 and sample) first, then prefill chunks."""

    @property
    def num_tokens(self) -> int:
        return sum([s.num_tokens for s in self.scheduled])


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """What one step produced."""

    token_ids: tuple[int, ...] = ()
    """The sampled token of each `scheduled` entry with `sample`, in plan order; -1 where failed."""
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Aligned with token_ids; None when no sequence asked."""
    prompt_logprobs: dict[int, list[PromptLogprob]] = {}
    """By sequence that asked: of the prompt's tokens that follow the positions computed."""
    alignments: dict[int, list[int]] = {}
    """By sequence that asked, once its prompt is computed: an input position per token."""
    pooled: dict[int, bytes] = {}
    """By sequence whose prompt is computed, of a model that pools (`TokenDelta.pooled`)."""
    failed_items: dict[bytes, LookOnceError] = {}
    """Encoder outputs that could not be computed; their sequences were not computed this step."""
    failed_sequences: dict[int, LookOnceError] = {}
    """Sequences whose computation failed; their sampled token is -1."""
    lost_copies: tuple[bytes, ...] = ()
    """Offloaded outputs of which no host copy could be made."""
    encode_seconds: dict[bytes, float] = {}
    """Per item encoded in this step (a batch's time is shared equally)."""
    device_seconds: tuple[tuple[int, float], ...] | None = None
    """(step, seconds) of the steps that the device was found to have ended since the last result;
    one that sampled nothing is not waited for, and is told later. None: on a CPU, where a step has
    ended when its result is there."""
