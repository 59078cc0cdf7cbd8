"""States that layers keep beside keys and values: those of short convolutions, Mamba and linear
attention.

A sequence has one state, of a fixed size, however long it is. The pool holds a row for each row of
the input batch, and snapshots: copies of states as they were at the end of a KV block.

    tensors[key]    [num_rows + num_snapshots, *shape]
                     rows of the batch ──┘ └── snapshots, which the scheduler assigns

The layers that have states (mixers) are transformers' own modules. They take a batch of sequences
of one length and read and write their states through transformers' `Cache`. A step has sequences of
several lengths, one after the other, so each mixer is called once for all sequences with one token
and once for each longer one, with a cache that holds the states of those sequences alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from lookonce.model.kv_pages import zeros


class StateSpec(NamedTuple):
    """One tensor of a sequence's state."""

    layer: int
    """The layer's number among all layers of the decoder."""
    kind: str
    """"conv": the last inputs of a short convolution; "recurrent": what all inputs add up to."""
    number: int
    """Of several of one kind in a layer."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StateLayout(tuple[StateSpec, ...]):
    """The tensors of one sequence's state."""

    __slots__ = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of one state."""
        return sum(spec.num_bytes for spec in self)

    def describe(self) -> bytes:
        """What the bytes of a state are, tensor after tensor, unambiguously."""
        tensors = [
            (spec.layer, spec.kind, spec.number, tuple(spec.shape), str(spec.dtype))
            for spec in self
        ]
        return repr(tensors).encode()


class StatePool:
    """The states of all rows of the batch, and snapshots; zeroed, as before the first token.

    On a CPU rows that were never used take no memory.
    """

    def __init__(
        self,
        layout: StateLayout,
        *,
        num_rows: int,
        num_snapshots: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.num_rows = num_rows
        self.device = torch.device(device)
        count = num_rows + num_snapshots
        self.tensors = {
            (spec.layer, spec.kind, spec.number): zeros((count, *spec.shape), spec.dtype, device)
            for spec in layout
        }

    def begin(self, row: int, snapshot: int | None) -> None:
        """A row of the batch has another sequence: a copy of a snapshot is its state; None: its
        state is that before the first token."""
        if snapshot is not None:
            self._copy(self.num_rows + snapshot, row)
            return
        for tensor in self.tensors.values():
            tensor[row].zero_()

    def save(self, row: int, snapshot: int) -> None:
        """Copy the state of a row of the batch to a snapshot."""
        self._copy(row, self.num_rows + snapshot)

    def _copy(self, source: int, target: int) -> None:
        for tensor in self.tensors.values():
            tensor[target].copy_(tensor[source])


class SnapshotCopier:
    """Implements `types.ports.StateCopier`; used by worker threads beside the step thread.

    Host memory holds a state as one piece, tensor after tensor in the order of its layout. On CUDA
    all threads share the default stream, as `kv_pages.PageCopier` says.
    """

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool

    @property
    def state_bytes(self) -> int:
        return self._pool.layout.num_bytes

    def describe(self) -> bytes:
        return self._pool.layout.describe()

    @torch.inference_mode()
    def gather(self, snapshot: int, out: memoryview) -> None:
        for tensor, part in self._parts(snapshot, out):
            part.copy_(tensor)

    @torch.inference_mode()
    def scatter(self, snapshot: int, data: memoryview) -> None:
        for tensor, part in self._parts(snapshot, data):
            tensor.copy_(part)
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()

    def _parts(self, snapshot: int, buffer: memoryview) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of a snapshot, flat and as bytes, and its place in the buffer."""
        row, start = self._pool.num_rows + snapshot, 0
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        for tensor in self._pool.tensors.values():
            whole = tensor[row].reshape(-1).view(torch.uint8)
            yield whole, flat[start : start + whole.numel()]
            start += whole.numel()


Key = tuple[int, str, int]
"""Layer, kind and index of a state's tensor."""


class StateCache(Cache):  # type: ignore[misc]
    """What transformers' modules see of a step's states. Keys and values are in pages, not here."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are: attention writes them to its pages."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class SequenceStates(StateCache):
    """The states of sequences that a mixer computes in one call, as they are during a step.

    They are copies of the pool's rows until `commit`, so that a step that failed can be computed
    again.
    """

    def __init__(self, pool: StatePool, rows: Sequence[int]) -> None:
        """`rows` of the batch."""
        super().__init__()
        self._pool = pool
        self._rows = torch.tensor(rows, device=pool.device)
        self._states: dict[Key, Tensor] = {}

    def _state(self, layer: int, kind: str, index: int) -> Tensor:
        key = layer, kind, index
        found = self._states.get(key)
        if found is None:
            if key not in self._pool.tensors:
                raise ValueError(f"layer {layer} has no {kind} state")
            found = self._states[key] = self._pool.tensors[key].index_select(0, self._rows)
        return found

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Always: before the first token a state is zero, which is as good as none."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """[rows, channels, kernel size]; modules change it in place."""
        return self._state(layer_idx, "conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[rows, ...]; modules change it in place."""
        if (layer_idx, "recurrent", state_idx) not in self._pool.tensors:
            return None
        return self._state(layer_idx, "recurrent", state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """New inputs [rows, channels, T] → those kept from before, then the new ones."""
        state = self._state(layer_idx, "conv", state_idx)
        whole = torch.cat([state, conv_states.to(state.dtype)], dim=-1)
        state.copy_(whole[..., -state.shape[-1] :])
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self._state(layer_idx, "recurrent", state_idx).copy_(recurrent_states)

    def save(self, layer: int, snapshot: int) -> None:
        """Copy one layer's states of the only row, as they are now, to a snapshot."""
        target = self._pool.num_rows + snapshot
        for key, state in self._states.items():
            if key[0] == layer:
                self._pool.tensors[key][target].copy_(state[0])

    def commit(self) -> None:
        """Write the states back to the pool."""
        for key, state in self._states.items():
            self._pool.tensors[key].index_copy_(0, self._rows, state)


class StateChunk(NamedTuple):
    """What a step computes of one sequence, for its state."""

    row: int
    """In the batch."""
    num_tokens: int
    snapshots: tuple[tuple[int, int], ...] = ()
    """(tokens, snapshot): where the state after so many of the tokens is kept, too. Ascending."""
    is_first: bool = False
    """It begins at the sequence's first token."""


class _Part(NamedTuple):
    """Tokens that a mixer computes in one call."""

    at: Tensor | slice
    """Which of the step's tokens: one of each row, or several of one row."""
    states: SequenceStates
    snapshot: int | None = None
    """Where the state after the last of several is kept, too."""


class StepStates(StateCache):
    """The states of all sequences of a step, in the order of its tokens."""

    def __init__(
        self, pool: StatePool, chunks: Sequence[StateChunk], *, by_token: bool = False
    ) -> None:
        """`by_token`: mixers go on after a state with one token alone (Jamba's, in transformers,
        begin longer chunks without one)."""
        super().__init__()
        self._pool = pool
        self._chunks = chunks
        self._parts: list[_Part] = []
        starts = [0, *itertools.accumulate(chunk.num_tokens for chunk in chunks)]
        single = [i for i, chunk in enumerate(chunks) if chunk.num_tokens == 1]
        if single:
            states = SequenceStates(pool, [chunks[i].row for i in single])
            at = torch.tensor([starts[i] for i in single], device=pool.device)
            self._parts.append(_Part(at, states))
        for start, chunk in zip(starts, chunks, strict=False):
            if chunk.num_tokens > 1:
                states = SequenceStates(pool, [chunk.row])
                parts = _parts_of(chunk, start, states)
                self._parts += _by_token(parts, chunk) if by_token else parts
        self._only_single = len(single) == len(chunks)

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """A mixer's outputs [1, T, H] for the tokens `hidden` [1, T, H] of a step."""
        if self._only_single:
            return mixer(hidden.transpose(0, 1), self._parts[0].states).transpose(0, 1)
        mixed: Tensor | None = None
        for part in self._parts:
            tokens = hidden[:, part.at]
            if isinstance(part.at, slice):
                output = mixer(tokens, part.states)
            else:
                output = mixer(tokens.transpose(0, 1), part.states).transpose(0, 1)
            if mixed is None:
                mixed = output.new_empty(1, hidden.shape[1], output.shape[2])
            mixed[:, part.at] = output
            if part.snapshot is not None:
                part.states.save(layer, part.snapshot)
        assert mixed is not None
        return mixed

    def commit(self) -> None:
        """The step has succeeded: write all states back to the pool."""
        for states in {id(part.states): part.states for part in self._parts}.values():
            states.commit()
        for chunk in self._chunks:
            if chunk.num_tokens == 1:
                for _, snapshot in chunk.snapshots:
                    self._pool.save(chunk.row, snapshot)


def _parts_of(chunk: StateChunk, start: int, states: SequenceStates) -> Iterator[_Part]:
    """A chunk's tokens up to each snapshot, and then the others."""
    done = 0
    for num_tokens, snapshot in chunk.snapshots:
        yield _Part(slice(start + done, start + num_tokens), states, snapshot)
        done = num_tokens
    if done < chunk.num_tokens:
        yield _Part(slice(start + done, start + chunk.num_tokens), states)


def _by_token(parts: Iterable[_Part], chunk: StateChunk) -> Iterator[_Part]:
    """Each part cut into single tokens, but the first one of a sequence."""
    for number, part in enumerate(parts):
        assert isinstance(part.at, slice)
        if chunk.is_first and not number:
            yield part
            continue
        for at in range(part.at.start, part.at.stop):
            snapshot = part.snapshot if at + 1 == part.at.stop else None
            yield _Part(slice(at, at + 1), part.states, snapshot)


Mixer = Callable[[Tensor, SequenceStates], Tensor]
"""Hidden states [rows, tokens, H] and the states of those rows → outputs of the same shape."""


class StepForward:
    """The forward of a mixer of transformers, which computes the sequences of a step apart.

    Outside of steps it is the module's own.
    """

    def __init__(self, module: Any) -> None:
        self._forward = module.forward
        self._layer = int(module.layer_idx)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = next((n for n, value in kwargs.items() if isinstance(value, StepStates)), None)
        if name is None:
            return self._forward(*args, **kwargs)
        step = kwargs.pop(name)
        hidden = args[0] if args else kwargs.pop("hidden_states")

        def mixer(tokens: Tensor, states: SequenceStates) -> Tensor:
            output = self._forward(tokens, *args[1:], **{name: states}, **kwargs)
            mixed: Tensor = output[0] if isinstance(output, tuple) else output
            return mixed

        return step.mix(self._layer, mixer, hidden)


def has_states(text_config: Any) -> bool:
    """Whether transformers keeps states beside keys and values for a decoder of this config."""
    try:
        layers = DynamicCache(config=text_config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return False  # no cache that is made of its config
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


class StateObserver(DynamicCache):  # type: ignore[misc]
    """The cache of a model's first run: sees which modules have states, and of what shapes."""

    def __init__(self, text_config: Any) -> None:
        super().__init__(config=text_config)
        self._running: list[nn.Module] = []
        self._mixers: dict[int, nn.Module] = {}

    @contextmanager
    def watching(self, decoder: nn.Module) -> Iterator[None]:
        """In this block the decoder runs."""
        hooks = []
        for module in decoder.modules():
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._mixers[layer_idx] = self._running[-1]
        inputs: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._mixers[layer_idx] = self._running[-1]
        state: Tensor = super().update_recurrent_state(
            recurrent_states, layer_idx, state_idx, **kwargs
        )
        return state

    @property
    def missed(self) -> bool:
        """Whether a layer with a state in transformers' cache has kept it elsewhere."""
        return any(
            isinstance(layer, LinearAttentionCacheLayerMixin) and number not in self._mixers
            for number, layer in enumerate(self.layers)
        )

    def split_steps(self) -> StateLayout:
        """From now on the mixers that were seen compute the sequences of a step apart; returns the
        tensors of their states."""
        specs = []
        for number, module in sorted(self._mixers.items()):
            module.forward = StepForward(module)
            layer = self.layers[number]
            kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
            for kind, states in kinds.items():
                for index, state in states.items():
                    if state is not None:
                        specs.append(StateSpec(number, kind, index, state.shape[1:], state.dtype))
        return StateLayout(specs)
