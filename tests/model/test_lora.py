"""Answers with adapters equal PEFT's, token for token, whatever else is in the batch and caches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lookonce.core import request
from lookonce.model.lora import (
    AdaptableLayers,
    LoadedAdapters,
    LoRAAdapter,
    LoRALayer,
    StepLoRA,
)
from lookonce.types.lora import LoRAIdentity
from tests.support.model.adapters import PROJECTIONS, answers_with, make_adapter, read
from tests.support.model.cases import ALL_MODELS
from tests.support.model.serving import assert_parity, blocks_for_preemption, compare, serve

LANGUAGE_MODEL = rf".*language_model.*\.({'|'.join(PROJECTIONS)})"
BLOCK = 4


@pytest.fixture(scope="module")
def adapted(subjects, folder, tmp_path_factory):
    """`adapted(kind, seed, **settings)`: a model, an adapter of it, and PEFT's answers with it to
    the model's cases; each is made once."""
    made = {}

    def get(kind, seed=0, **settings):
        name = f"{kind}-{seed}-{sorted(settings.items())}"
        if name not in made:
            subject, path = subjects(kind), tmp_path_factory.mktemp("adapter")
            make_adapter(folder(kind), subject.loaded, path, seed=seed, **settings)
            expected = answers_with(path, folder(kind), subject.loaded, subject.cases)
            made[name] = read(path, subject.loaded), expected
        return (subjects(kind), *made[name])

    return get


ALL = range(4)


def every(adapter):
    return dict.fromkeys(ALL, adapter)


ALWAYS = [
    (
        "text:lfm2",
        {
            "target_modules": ["w1", "w2"],
            "exclude_modules": ["model.layers.1.feed_forward.w1"],
        },
    ),
    ("qwen2_5_vl", {"target_modules": "all-linear"}),
]
MORE = [
    ("qwen3", {"lora_alpha": 16}),
    ("gemma2", {"target_modules": r".*\.(q_proj|down_proj)"}),
    ("qwen2", {"target_modules": "all-linear", "use_rslora": True}),
    ("text:deepseek_v2", {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"]}),
    ("qwen2_5_vl", {"target_modules": LANGUAGE_MODEL}),
    ("gemma3", {"target_modules": "all-linear", "r": 2}),
    ("qwen2_audio", {"target_modules": "all-linear"}),
]
"""In `make test-models`."""


@pytest.mark.parametrize(("kind", "settings"), ALWAYS + (MORE if ALL_MODELS else []))
def test_answers_equal_pefts(adapted, kind, settings):
    subject, adapter, expected = adapted(kind, **settings)
    assert len(subject.cases) == 4
    served = serve(subject.loaded, subject.cases, budget=64, adapted=every(adapter))
    assert served.stats["prefix_cache_hits_total"] > 0
    assert compare(served.answers, subject.expected).max_logit_error > 0.1
    assert_parity(served, expected)


def test_ranks_and_scales_of_single_layers_equal_pefts(adapted):
    patterns = {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
        "alpha_pattern": {"v_proj": 32},
    }
    subject, adapter, expected = adapted("llama", **patterns)
    assert adapter.rank == 8
    served = serve(subject.loaded, subject.cases, budget=23, adapted=every(adapter))
    assert_parity(served, expected)


SHARING = [("gemma2", 23), ("qwen2_5_vl", 64), *([("qwen3", 23)] if ALL_MODELS else [])]


@pytest.mark.parametrize(("kind", "budget"), SHARING)
def test_two_adapters_and_none_share_a_batch_and_nothing_else(adapted, kind, budget):
    """The same prompts with each of them, one arriving at each step: no hit crosses over."""
    targets = "all-linear" if kind == "qwen2_5_vl" else list(PROJECTIONS)
    subject, first, with_first = adapted(kind, 1, target_modules=targets)
    _, second, with_second = adapted(kind, 2, target_modules=targets, r=2, lora_alpha=8)
    order = [0, 1, 3, 2]
    cases, expected, chosen = [], [], {}
    for case in order:
        for adapter, answers in (
            (None, subject.expected),
            (first, with_first),
            (second, with_second),
        ):
            if adapter is not None:
                chosen[len(cases)] = adapter
            cases.append(subject.cases[case])
            expected.append(answers[case])
    served = serve(subject.loaded, cases, budget=budget, adapted=chosen)
    assert served.stats["prefix_cache_hits_total"] > 0
    assert_parity(served, expected)


def test_without_the_adapter_in_block_hashes_answers_are_wrong(adapted, monkeypatch):
    """The control of the test above: it sees a hit across adapters."""
    subject, adapter, expected = adapted("qwen3", 1)
    plain = request.root_hash
    monkeypatch.setattr(request, "root_hash", lambda scope, adapter=b"": plain(scope))
    cases = [subject.cases[0], subject.cases[0]]
    served = serve(subject.loaded, cases, budget=64, adapted={1: adapter})
    assert compare(served.answers, [subject.expected[0], expected[0]]).wrong


def test_without_the_adapter_in_item_keys_answers_are_wrong(adapted, monkeypatch):
    subject, adapter, expected = adapted("qwen2_5_vl", target_modules="all-linear")
    monkeypatch.setattr(request.AdaptedKeys, "key", lambda self, sent: sent)
    cases = [subject.cases[0], subject.cases[0]]
    served = serve(subject.loaded, cases, budget=64, adapted={1: adapter})
    assert compare(served.answers, [subject.expected[0], expected[0]]).wrong


def test_encoder_outputs_are_shared_unless_the_adapter_changes_them(adapted):
    subject, text_only, _ = adapted("qwen2_5_vl", target_modules=LANGUAGE_MODEL)
    _, whole, _ = adapted("qwen2_5_vl", target_modules="all-linear")
    assert not text_only.identity.encoder_digest
    assert whole.identity.encoder_digest
    picture = [subject.cases[0]] * 3
    served = serve(subject.loaded, picture, budget=64, adapted={1: text_only, 2: whole})
    assert served.stats["encoder_runs_total"] == 2
    assert served.stats["encoder_cache_hits_total"] == 1


def test_forced_preemption_changes_no_token(adapted):
    subject, adapter, expected = adapted("qwen2_5_vl", target_modules="all-linear")
    cases, answers = ([all_[i] for i in (1, 0)] for all_ in (subject.cases, expected))
    served = serve(
        subject.loaded,
        cases,
        budget=32,
        num_blocks=blocks_for_preemption(cases, BLOCK),
        block_size=BLOCK,
        adapted={0: adapter, 1: adapter},
    )
    assert served.stats["num_preemptions_total"] > 0
    assert_parity(served, answers)


def test_scores_of_a_prompt_are_the_adapters(adapted):
    subject, adapter, _ = adapted("qwen3")
    cases = [subject.cases[0]] * 2
    served = serve(
        subject.loaded, cases, budget=64, prompt_logprobs={0: 0, 1: 0}, adapted={1: adapter}
    )
    plain, scored = ([entry.logprob for entry in served.scored[i]] for i in (0, 1))
    assert max(abs(a - b) for a, b in zip(plain, scored, strict=True)) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_its_own_adapter_whatever_is_loaded_beside(dtype):
    """Short chunks share a product, long ones have their own; layers are columns of one product."""
    generator = torch.Generator().manual_seed(0)
    q, k = nn.Linear(12, 8, bias=False), nn.Linear(12, 4, bias=False)
    layers = AdaptableLayers(decoder={"q": q, "k": k})

    def adapter(digest, rank, *names):
        made = {}
        for name in names:
            outputs = layers.decoder[name].out_features
            a, b = (torch.randn(rank, n, generator=generator).to(dtype) for n in (12, outputs))
            made[name] = LoRALayer(a, b, 0.5 * rank)
        return LoRAAdapter(LoRAIdentity(digest), rank, made)

    loaded = LoadedAdapters(layers)
    adapters = {b"1": adapter(b"1", 2, "q", "k"), b"2": adapter(b"2", 3, "k"), b"": None}
    for each in (adapters[b"1"], adapter(b"gone", 4, "q", "k"), adapters[b"2"]):
        loaded = loaded.with_adapter(each)
    loaded = loaded.without(b"gone")
    lengths = [1, 1, 3, 20, 2, 17, 1]
    owners = [b"1", b"2", b"", b"2", b"1", b"1", b""]
    inputs = torch.randn(sum(lengths), 12, generator=generator).to(dtype)
    expected = torch.zeros(len(inputs), 12)
    rows = [owner for owner, length in zip(owners, lengths, strict=True) for _ in range(length)]
    for row, owner in enumerate(rows):
        for name, columns in (("q", slice(0, 8)), ("k", slice(8, 12))):
            if adapters[owner] is not None and name in adapters[owner].layers:
                a, b, scale = adapters[owner].layers[name]
                expected[row, columns] = scale * (inputs[row].float() @ a.float().t()) @ b.float()
    outputs = torch.zeros(len(inputs), 12, dtype=dtype)
    StepLoRA(loaded, lengths, owners).add((q, k), inputs, outputs)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2 * float(expected.abs().max())
    assert torch.allclose(outputs.float(), expected, atol=tolerance)
    with pytest.raises(ValueError, match="rows in a step"):
        StepLoRA(loaded, lengths, owners).add((q,), inputs[1:], outputs[1:])
    with pytest.raises(KeyError):
        StepLoRA(loaded, [1], [b"gone"])
