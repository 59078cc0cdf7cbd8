"""Makes the result of a model that pools: hidden states of a prompt → vectors or scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lookonce.errors import ModelLoadError
from lookonce.model.device import StepReads, to_device
from lookonce.types.pooling import (
    PAIR,
    SCORING_HEADS,
    SPARSE_LINEAR,
    PoolingFiles,
    PoolingInfo,
    PoolingKind,
)
from lookonce.types.step import NewSequence, ScheduledSequence

Head = Callable[[Tensor], Tensor]
"""[n, H] → [n, W] of pooled hidden states; of every token's where all are kept."""
ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.SiLU": nn.SiLU,
}
"""What Sentence Transformers' dense layers name."""
LOGIT_ROWS = 64
"""Rows of logits that SPLADE makes at a time: each has a number for every token there is."""


class SparseHead:
    """The weights that a vocabulary's tokens have in a part of a prompt."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def weights(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Hidden states [t, H] and the ids [t] of their tokens → weights [vocab_size], float32."""
        raise NotImplementedError


class SpladeHead(SparseHead):
    """A token's weight is log(1 + its largest logit at any position), of logits above 0.

    Formal et al., "SPLADE v2" (2021). Version 3 of OpenSearch's encoders takes the logarithm twice.
    """

    def __init__(self, logits: Head, vocab_size: int, saturations: int) -> None:
        super().__init__(vocab_size)
        self._logits = logits
        self._saturations = saturations

    def weights(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        highest = [self._logits(rows).amax(0) for rows in torch.split(hidden, LOGIT_ROWS)]
        found = torch.stack(highest).amax(0).float().relu()
        for _ in range(self._saturations):
            found = found.log1p()
        return found


class LexicalHead(SparseHead):
    """BGE-M3's: a linear layer weighs each token of the prompt; one that comes again has its
    largest weight. Special tokens have none."""

    def __init__(self, linear: Head, vocab_size: int, special_ids: Sequence[int]) -> None:
        super().__init__(vocab_size)
        self._linear = linear
        self._special = torch.tensor(sorted(special_ids), dtype=torch.long)

    def weights(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        of_each = self._linear(hidden).float().flatten().relu()
        ids = to_device(token_ids, hidden.device)
        found = of_each.new_zeros(self.vocab_size).scatter_reduce(0, ids, of_each, "amax")
        found[to_device(self._special, found.device)] = 0.0
        return found


class Pooler:
    """Collects what each sequence's result is made of, chunk by chunk.

    A chunk that is computed twice replaces what it gave before.
    """

    def __init__(self, kind: PoolingKind, head: Head | SparseHead | None = None) -> None:
        """`head` None: hidden states are the result."""
        self._kind = kind
        self._sparse = head if isinstance(head, SparseHead) else None
        self._head = None if isinstance(head, SparseHead) else head
        self._prompts: dict[int, Tensor] = {}
        """Sequence → the ids of its prompt's tokens."""
        self._parts: dict[int, dict[int, Tensor]] = {}
        """Sequence → start of a chunk → what it adds."""

    def add(self, new: NewSequence) -> None:
        self._prompts[new.seq_id] = torch.from_numpy(np.array(new.token_ids, np.int64))
        self._parts[new.seq_id] = {}

    def remove(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._prompts.pop(seq_id, None)
            self._parts.pop(seq_id, None)

    def pool(
        self, hidden: Tensor, chunks: Sequence[ScheduledSequence], reads: StepReads
    ) -> Callable[[], dict[int, Tensor]]:
        """Hidden states [T, H] of a step → once `reads` were waited for, the results of sequences
        whose prompt ends in it, each [W], [tokens, W] where all are kept, or pairs [n, 2]; float32
        on the CPU."""
        ended, row = [], 0
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            rows = hidden[row : row + chunk.num_tokens]
            row += chunk.num_tokens
            prompt = self._prompts[chunk.seq_id]
            is_end = end == len(prompt)
            part = (
                self._part(rows, is_start=chunk.start == 0, is_end=is_end)
                if self._sparse is None
                else self._sparse.weights(rows, prompt[chunk.start : end])
            )
            if part is not None:
                self._parts[chunk.seq_id][chunk.start] = part
            if is_end:
                ended.append(chunk.seq_id)
        if not ended:
            return dict
        if self._kind == "all":
            found = [reads.later(self._joined(seq_id)) for seq_id in ended]
            return lambda: dict(zip(ended, found, strict=True))
        if self._sparse is not None:
            found = [reads.later(self._weights(seq_id)) for seq_id in ended]
            return lambda: dict(zip(ended, map(_pairs, found), strict=True))
        pooled = torch.stack([self._vector(seq_id) for seq_id in ended])
        if self._head is not None:
            pooled = self._head(pooled.to(hidden.dtype))
        pooled = reads.later(pooled.float())
        return lambda: dict(zip(ended, pooled.unbind(), strict=True))

    def _part(self, rows: Tensor, *, is_start: bool, is_end: bool) -> Tensor | None:
        """What a chunk's hidden states [t, H] add to the result."""
        if self._kind == "mean":
            return rows.float().sum(0)
        if self._kind == "all":
            return (rows if self._head is None else self._head(rows)).float()
        if self._kind == "cls":
            return rows[0].clone() if is_start else None
        return rows[-1].clone() if is_end else None

    def _vector(self, seq_id: int) -> Tensor:
        parts = self._parts[seq_id]
        if self._kind == "mean":
            total = torch.stack([parts[start] for start in sorted(parts)]).sum(0)
            return total / len(self._prompts[seq_id])
        (part,) = parts.values()
        return part

    def _joined(self, seq_id: int) -> Tensor:
        parts = self._parts[seq_id]
        return torch.cat([parts[start] for start in sorted(parts)])

    def _weights(self, seq_id: int) -> Tensor:
        """[V] of all tokens of a vocabulary."""
        return torch.stack(list(self._parts[seq_id].values())).amax(0)


def _pairs(weights: Tensor) -> Tensor:
    """[V] → [n, 2]: token ids, rising, and their weights; float32 has every id of a vocabulary."""
    ids = weights.nonzero().flatten()
    return torch.stack([ids.float(), weights[ids]], 1)


class DenseHead(nn.Module):
    """A linear layer and its activation."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: nn.Module) -> None:
        """`weight` [out, in]."""
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        self.linear.weight = nn.Parameter(weight)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias)
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.activation(self.linear(hidden))
        return result


def make_head(
    folder: Path, files: PoolingFiles, family_head: Head | None, lm_head: Any, like: Tensor
) -> Head | None:
    """The layers between pooled hidden states and the result, with weights as `like`'s.

    `family_head` is the family's own. Raises `ModelLoadError` for weights that are not there.
    """
    if files.head == "logit_score":
        return _logit_score(files, lm_head)
    if files.head == "classifier" and family_head is None:
        return _classifier(folder, like)
    layers = [_dense(folder / path, like) for path in files.dense]
    if not layers:
        return family_head
    if family_head is not None:
        raise ModelLoadError("dense layers behind a model's own head are not supported")
    return nn.Sequential(*layers)


def make_sparse_head(
    folder: Path,
    files: PoolingFiles,
    family_head: Head | None,
    like: Tensor,
    vocab_size: int,
    special_ids: Sequence[int],
) -> SparseHead:
    """What makes the weights of the vocabulary's tokens, with its own weights as `like`'s.

    `family_head` is the family's masked language model's. Raises `ModelLoadError`.
    """
    if files.head == "masked_lm":
        if family_head is None:
            raise ModelLoadError("the model has no head that writes masked tokens")
        return SpladeHead(family_head, family_head(like).shape[-1], files.saturations)
    found = read_tensors(folder, ("weight", "bias"), SPARSE_LINEAR)
    if "weight" not in found or found["weight"].shape != (1, like.shape[-1]):
        raise ModelLoadError(f"{SPARSE_LINEAR} has no weight of the shape [1, {like.shape[-1]}]")
    linear = DenseHead(
        found["weight"].to(like),
        found["bias"].to(like) if "bias" in found else None,
        nn.Identity(),
    )
    return LexicalHead(linear, vocab_size, special_ids)


def pooling_info(
    files: PoolingFiles, head: Head | SparseHead | None, like: Tensor, *, encoder_only: bool
) -> PoolingInfo:
    """What other processes know. `like` [1, H] has the model's dtype."""
    if isinstance(head, SparseHead):
        most_pairs = head.vocab_size if files.head == "masked_lm" else 0
        return PoolingInfo("sparse", PAIR, files.normalize, most_pairs=most_pairs)
    width = like.shape[-1] if head is None else head(like).shape[-1]
    return PoolingInfo(
        files.kind,
        int(width),
        files.normalize,
        scores=files.head in SCORING_HEADS,
        reuses_prefixes=files.kind == "last" and not encoder_only,
    )


def _logit_score(files: PoolingFiles, lm_head: Any) -> Head:
    """The logit of one token, minus that of the other."""
    vocab_size = lm_head.weight.shape[0]
    for token in (files.true_token_id, files.false_token_id or 0):
        if not 0 <= token < vocab_size:
            raise ModelLoadError(f"the module LogitScore names token {token} of {vocab_size}")
    weight = lm_head.weight[files.true_token_id]
    if files.false_token_id is not None:
        weight = weight - lm_head.weight[files.false_token_id]
    return DenseHead(weight[None].clone(), None, nn.Identity())


def _classifier(folder: Path, like: Tensor) -> Head:
    """The linear layer `score` of transformers' decoders for classification."""
    found = read_tensors(folder, ("score.weight", "score.bias"))
    if "score.weight" not in found:
        raise ModelLoadError("the model has no weights of a classification head (score.weight)")
    found = {name: tensor.to(like) for name, tensor in found.items()}
    return DenseHead(found["score.weight"], found.get("score.bias"), nn.Identity())


def _dense(folder: Path, like: Tensor) -> DenseHead:
    """A dense layer of Sentence Transformers."""
    found = read_tensors(folder, ("linear.weight", "linear.bias"))
    if "linear.weight" not in found:
        raise ModelLoadError(f"{folder.name} has no weights of a dense layer (linear.weight)")
    options = _options(folder / "config.json")
    name = options.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in ACTIVATIONS:
        raise ModelLoadError(f"{folder.name}: the activation {name!r:.60} is not supported")
    found = {name: tensor.to(like) for name, tensor in found.items()}
    return DenseHead(found["linear.weight"], found.get("linear.bias"), ACTIVATIONS[name]())


def _options(path: Path) -> dict[str, Any]:
    try:
        options = msgspec.json.decode(path.read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error}") from None
    return options


def read_tensors(
    folder: Path, names: Sequence[str], pattern: str = "*.safetensors"
) -> dict[str, Tensor]:
    """Those of `names` that the folder's safetensors have. Raises `ModelLoadError`."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob(pattern)):
        try:
            with safe_open(path, framework="pt") as file:
                held = set(file.keys())
                found |= {name: file.get_tensor(name) for name in names if name in held}
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path.name} cannot be read: {error}") from None
    return found
