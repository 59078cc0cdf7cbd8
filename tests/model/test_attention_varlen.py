"""The CUDA backend, with torch's flash attention replaced by a double that follows its docs.

No GPU runs these tests; what they hold fast is how we speak to the kernel: its signature in the
installed torch, page size, both running sums, the window's two sides.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from lookonce.model.attention import cuda
from lookonce.model.attention.cuda import VarlenBackend
from tests.support.model.attention_world import Problem, build, dense_answer

PAGED = Problem([(1, 300), (40, 20), (1, 0)], block_size=256, dtype=torch.bfloat16)


def flash_attention_double(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """FlashAttention-2 with a block table, as torch documents it."""
    assert cu_seq_k is not None
    assert seqused_k is not None
    assert block_table is not None
    assert scale is not None
    assert key.shape[1] % 256 == 0
    assert {t.dtype for t in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
    assert query.is_contiguous()
    assert enable_gqa
    assert num_splits == 1
    assert cu_seq_k.tolist() == [0, *seqused_k.cumsum(0).tolist()]
    left, right = window_size
    for index, length in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seq_q[index]), int(cu_seq_q[index + 1]))
        new = rows.stop - rows.start
        assert new <= max_q
        assert length <= max_k
        pages = block_table[index, : -(-length // key.shape[1])]
        keys, values = (x[pages].flatten(0, 1)[:length].float() for x in (key, value))
        group = query.shape[1] // key.shape[2]
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys.repeat_interleave(group, 1))
        distance = torch.arange(length - new, length)[:, None] - torch.arange(length)[None]
        seen = (distance >= -right) & ((distance <= left) | torch.tensor(left < 0))
        weights = (scores * scale).masked_fill(~seen, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)).to(
            out.dtype
        )
    return out


def test_the_double_has_the_installed_signature() -> None:
    real = inspect.signature(varlen.varlen_attn_out).parameters
    double = inspect.signature(flash_attention_double).parameters
    assert [(p.name, p.kind) for p in real.values()] == [(p.name, p.kind) for p in double.values()]


@pytest.mark.parametrize("sliding_window", [None, 1, 30])
@pytest.mark.parametrize("heads_first", [False, True])
def test_equals_dense_attention(
    monkeypatch: pytest.MonkeyPatch, sliding_window: int | None, heads_first: bool
) -> None:
    monkeypatch.setattr(cuda, "varlen_attn_out", flash_attention_double)
    scene = build(
        Problem(
            PAGED.sequences,
            block_size=256,
            dtype=torch.bfloat16,
            sliding_window=sliding_window,
            heads_first=heads_first,
        )
    )
    output = scene.run(VarlenBackend()).float()
    torch.testing.assert_close(output, dense_answer(scene), atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("feature", ["softcap", "sinks", "spans"])
def test_what_it_lacks_it_refuses(feature: str) -> None:
    changes = {"softcap": {"softcap": 1.0}, "sinks": {"sinks": True}, "spans": {}}[feature]
    spans = [[], [(30, 40)], []] if feature == "spans" else []
    scene = build(
        Problem(PAGED.sequences, block_size=256, dtype=torch.bfloat16, spans=spans, **changes)
    )
    with pytest.raises(ValueError, match="reference backend"):
        scene.run(VarlenBackend())
