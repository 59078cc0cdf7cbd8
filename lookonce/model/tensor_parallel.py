"""One model on several ranks: each has its part of the heads, of the MLPs and of the vocabulary.

    q, k, v, gate, up    by outputs: each rank computes its heads and its columns of the MLP
    o, down              by inputs: each rank has a part of the sum, and all parts are added
    output head          by outputs: each rank has logits of its tokens, and gathers the others'
    everything else      whole on each rank: embeddings, norms, encoders

A rank has K/V of its heads alone. With more ranks than K/V heads several ranks have the same one.
Every rank executes every plan; only rank 0 samples, and tells the others the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor, nn

from lookonce.errors import ModelLoadError
from lookonce.model.device import StepReads
from lookonce.model.sampled_tokens import Draw, on_device
from lookonce.model.sampler import Sampler, SamplerOutput
from lookonce.types.sampling import CompiledGrammar, SamplingParams

JOIN_SECONDS = 600.0
"""How long a rank waits for the others to join, and in one operation for them to take part."""
OPTION = "--tensor-parallel"


class TensorParallelGroup:
    """The ranks that compute one model together, seen from one of them.

    Every method is called by all ranks in the same order with tensors of the same shape, and raises
    `RuntimeError` when another rank has ended.
    """

    def __init__(self, rank: int, size: int, rendezvous: Path, device: torch.device) -> None:
        """Returns when all ranks have come. `rendezvous` is a file that none of them has made."""
        self.rank = rank
        self.size = size
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in place."""
        torch.distributed.all_reduce(part)
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        """Parts [n, m] of all ranks → [n, size * m], in the order of ranks."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        torch.distributed.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        torch.distributed.broadcast(values, src=0)
        return values

    def is_same(self, digest: bytes) -> bool:
        """Whether all ranks give the same bytes, of which each gives as many. The hosts wait for
        each other; the devices do not."""
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        return bool((self.all_gather(own[None]).view(self.size, -1) == own).all())


def divide(model: Any, decoder: nn.Module, head: nn.Linear, group: TensorParallelGroup) -> None:
    """Keep this rank's part of a plain decoder's layers and of the output head alone.

    `decoder` is one of `text_model.PLAIN_DECODERS`. Raises `ModelLoadError` where heads or MLPs
    cannot be divided by the number of ranks.
    """
    config = model.config.get_text_config(decoder=True)
    size, rank = group.size, group.rank
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    _require(num_heads % size == 0, f"{num_heads} attention heads", size)
    whole = num_kv_heads % size == 0
    _require(whole or size % num_kv_heads == 0, f"{num_kv_heads} heads of keys and values", size)
    _require(config.intermediate_size % size == 0, f"{config.intermediate_size} MLP columns", size)
    heads = _part(rank, num_heads // size * head_dim)
    kv_heads = _part(rank, num_kv_heads // size * head_dim)
    if not whole:
        kv_heads = _part(rank * num_kv_heads // size, head_dim)
    columns = _part(rank, config.intermediate_size // size)
    for layer in decoder.layers:  # type: ignore[union-attr]
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        _keep_outputs(attention.q_proj, heads)
        _keep_outputs(attention.k_proj, kv_heads)
        _keep_outputs(attention.v_proj, kv_heads)
        _keep_inputs(attention.o_proj, heads, group)
        _keep_outputs(mlp.gate_proj, columns)
        _keep_outputs(mlp.up_proj, columns)
        _keep_inputs(mlp.down_proj, columns, group)
    _divide_head(head, group)


def _require(condition: bool, what: str, size: int) -> None:
    if not condition:
        raise ModelLoadError(f"{OPTION} {size}: the model has {what}")


def _part(number: int, size: int) -> slice:
    return slice(number * size, (number + 1) * size)


def _keep_outputs(module: nn.Linear, kept: slice) -> None:
    module.weight = _parameter(module.weight[kept])
    if module.bias is not None:
        module.bias = _parameter(module.bias[kept])
    module.out_features = len(module.weight)


def _keep_inputs(module: Any, kept: slice, group: TensorParallelGroup) -> None:
    """The module gives the whole sum; `module.reduce` makes it of what its weight alone gives."""
    module.weight = _parameter(module.weight[:, kept])
    module.in_features = module.weight.shape[1]
    multiply = module.forward
    # Added once, to the sum. A parameter of the module, so that it goes to the device with it.
    module.sum_bias, module.bias = module.bias, None

    def reduce(part: Tensor) -> Tensor:
        total = group.all_reduce(part)
        return total if module.sum_bias is None else total + module.sum_bias

    module.reduce = reduce
    module.forward = lambda inputs: reduce(multiply(inputs))


def _divide_head(head: Any, group: TensorParallelGroup) -> None:
    """Each rank has as many rows; the last ones' may be zeros beyond the vocabulary."""
    vocab_size = len(head.weight)
    rows = -(-vocab_size // group.size)
    kept = slice(group.rank * rows, (group.rank + 1) * rows)

    def part(values: Tensor) -> nn.Parameter:
        own = values[kept]
        padded = own.new_zeros((rows, *own.shape[1:]))
        padded[: len(own)] = own
        return nn.Parameter(padded, requires_grad=False)

    head.weight = part(head.weight)
    if head.bias is not None:
        head.bias = part(head.bias)
    head.vocab_size = vocab_size
    multiply = head.forward
    head.forward = lambda hidden: group.all_gather(multiply(hidden))[..., :vocab_size]


def _parameter(values: Tensor) -> nn.Parameter:
    """In memory of its own: the whole matrix is freed."""
    return nn.Parameter(
        values.detach().clone(memory_format=torch.contiguous_format), requires_grad=False
    )


class SharedSampler:
    """As `Sampler`, on every rank: rank 0 draws, and the others get its tokens on the device."""

    def __init__(self, sampler: Sampler, group: TensorParallelGroup) -> None:
        self._sampler = sampler if group.rank == 0 else None
        self._group = group

    def add(
        self,
        seq_id: int,
        params: SamplingParams,
        sample_index: int,
        prompt_ids: Sequence[int] | np.ndarray,
        output_ids: Sequence[int] | np.ndarray,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        if self._sampler is not None:
            self._sampler.add(seq_id, params, sample_index, prompt_ids, output_ids, grammar)

    def extend(self, seq_id: int, start: int, token_ids: NDArray[np.int32]) -> None:
        if self._sampler is not None:
            self._sampler.extend(seq_id, start, token_ids)

    def remove(self, seq_id: int) -> None:
        if self._sampler is not None:
            self._sampler.remove(seq_id)

    def begin(
        self, logits: Tensor, seq_ids: Sequence[int], positions: Sequence[int], reads: StepReads
    ) -> Draw[SamplerOutput]:
        if self._sampler is None:
            tokens = torch.empty(len(seq_ids), dtype=torch.int64, device=logits.device)
            told = reads.later(self._group.broadcast(tokens))
            return Draw(tokens, lambda: SamplerOutput(told.tolist(), None))
        draw = self._sampler.begin(logits, seq_ids, positions, reads)
        drawn = on_device(draw.tokens, logits.device)
        return Draw(self._group.broadcast(drawn), draw.output)
