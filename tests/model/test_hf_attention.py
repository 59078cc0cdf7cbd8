"""transformers' attention modules use our pages inside a forward context, and SDPA outside."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from lookonce.model.attention.backend import ForwardContext
from lookonce.model.attention.hf_attention import (
    ATTENTION_NAME,
    CAUSAL_LAYER,
    paged_attention,
    paged_forward_context,
)
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.kv_pages import KVPages
from lookonce.types.kv import KVLayout
from tests.support.model.attention_world import Problem, Scene, build, dense_answer

PROBLEM = Problem([(1, 12), (6, 5)], sliding_window=4, softcap=2.0, sinks=True)


def pages_of(scene: Scene, num_layers: int, layer: int) -> KVPages:
    """Pages of several layers, of which only `layer` is the scene's."""
    blocks, block_size, heads, head_dim = scene.layer.keys.shape
    pages = KVPages(KVLayout(num_layers, block_size, heads, head_dim, "float32"), blocks)
    layers = list(pages.layers)
    layers[layer] = scene.layer
    pages.layers = tuple(layers)
    return pages


def forward_context(scene: Scene, num_layers: int, layer: int) -> AbstractContextManager[None]:
    pages = pages_of(scene, num_layers, layer)
    return paged_forward_context(ForwardContext(scene.metadata, ReferenceBackend(), pages))


def as_transformers(scene: Scene) -> tuple[torch.Tensor, ...]:
    """[T, H, D] → [1, H, T, D]."""
    return tuple(x.transpose(0, 1)[None] for x in (scene.query, scene.key, scene.value))


def test_it_is_registered_without_a_mask_function() -> None:
    assert AttentionInterface()[ATTENTION_NAME] is paged_attention
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS


def test_inside_a_forward_it_attends_over_its_layers_pages_with_every_argument() -> None:
    scene = build(PROBLEM)
    module = SimpleNamespace(layer_idx=2, is_causal=True)
    with forward_context(scene, 4, 2):
        output, weights = paged_attention(
            module,
            *as_transformers(scene),
            None,
            scaling=PROBLEM.head_dim**-0.5,
            sliding_window=PROBLEM.sliding_window,
            softcap=PROBLEM.softcap,
            s_aux=scene.sinks,
            dropout=0.0,
        )
    assert weights is None
    torch.testing.assert_close(output, dense_answer(scene)[None], atol=4e-6, rtol=1e-5)


def test_without_scaling_it_divides_by_the_root_of_the_head_size() -> None:
    scene = build(Problem([(5, 0)]))
    with forward_context(scene, 1, 0):
        output, _ = paged_attention(SimpleNamespace(layer_idx=0), *as_transformers(scene), None)
    torch.testing.assert_close(output[0], dense_answer(scene), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_outside_a_forward_it_is_sdpa(is_causal: bool) -> None:
    """A vision encoder that shares the text model's config runs outside and sees everything."""
    scene = build(Problem([(7, 0)], group=1))
    module = SimpleNamespace(layer_idx=0, is_causal=is_causal, num_key_value_groups=1)
    query, key, value = as_transformers(scene)
    output, _ = paged_attention(module, query, key, value, None, scaling=0.3)
    wanted, _ = sdpa_attention_forward(module, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(output, wanted, rtol=0, atol=0)


def test_after_a_forward_that_raised_it_is_sdpa_again() -> None:
    scene = build(Problem([(7, 0)], group=1))
    with (
        pytest.raises(KeyError),
        forward_context(scene, 1, 0),
    ):
        raise KeyError
    module = SimpleNamespace(layer_idx=99, is_causal=True, num_key_value_groups=1)
    output, _ = paged_attention(module, *as_transformers(scene), None)
    assert output.shape == (1, 7, 2, 32)


@pytest.mark.parametrize(
    ("is_causal", "mask"), [(False, None), (True, torch.zeros(1, 1, 7, 7))], ids=["cross", "mask"]
)
def test_what_it_would_get_wrong_it_refuses(is_causal: bool, mask: torch.Tensor | None) -> None:
    scene = build(Problem([(7, 0)]))
    module = SimpleNamespace(layer_idx=0, is_causal=is_causal)
    with (
        forward_context(scene, 1, 0),
        pytest.raises(ValueError, match="causal self-attention"),
    ):
        paged_attention(module, *as_transformers(scene), mask)


def test_a_layer_with_fewer_and_narrower_heads_than_the_pages_is_padded() -> None:
    scene = build(Problem([(1, 12), (6, 5)]))
    blocks, block_size, heads, width = scene.layer.keys.shape
    pages = KVPages(KVLayout(1, block_size, 2 * heads, width + 8, "float32"), blocks)
    pages.layers[0].keys[..., :width] = scene.layer.keys.repeat_interleave(2, 2)
    pages.layers[0].values[..., :width] = scene.layer.values.repeat_interleave(2, 2)
    with paged_forward_context(ForwardContext(scene.metadata, ReferenceBackend(), pages)):
        output, _ = paged_attention(SimpleNamespace(layer_idx=0), *as_transformers(scene), None)
    torch.testing.assert_close(output[0], dense_answer(scene), atol=4e-6, rtol=1e-5)


def test_an_item_is_causal_in_layers_that_say_so() -> None:
    scene = build(Problem([(6, 5)], spans=[[(6, 10)]]))
    causal = build(Problem([(6, 5)]))
    module = SimpleNamespace(layer_idx=0, **{CAUSAL_LAYER: True})
    with forward_context(scene, 1, 0):
        output, _ = paged_attention(module, *as_transformers(scene), None)
    torch.testing.assert_close(output[0], dense_answer(causal), atol=4e-6, rtol=1e-5)
