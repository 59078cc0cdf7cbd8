"""Embeddings and scores through scheduler and runner equal those of plain transformers."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lookonce.config import NANO_EAR_FOLDER
from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.families.registry import load_family
from lookonce.types.media import feature_at
from lookonce.types.pooling import read_pooling
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.model.cases import Case, CaseMaker, array, picture
from tests.support.model.pooling import PooledEngine, load_pooled, text_case
from tests.support.model_folders.embedders import add_pooling

TOLERANCE = 2e-4
TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], list(range(30, 90))]


def close(found: np.ndarray, expected: torch.Tensor) -> bool:
    return bool(np.abs(found - expected.float().numpy()).max() < TOLERANCE)


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


@cache
def plain_model(folder: Path) -> Any:
    """Plain transformers'."""
    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def hidden_states(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[T, H] of plain transformers."""
    output: torch.Tensor = plain_model(folder)(torch.tensor([token_ids])).last_hidden_state[0]
    return output


# --- decoders -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(embedder):
    return load_pooled(embedder("text"))


@pytest.mark.parametrize("budget", [7, 64])
def test_the_last_token_s_hidden_state_is_transformers(embedder, text, budget):
    found = PooledEngine(text, budget=budget).pool([text_case(ids) for ids in TEXTS]).vectors
    for ids, vector in zip(TEXTS, found, strict=True):
        hidden = hidden_states(embedder("text"), ids)
        assert close(vector[0], hidden[-1])
        assert not close(vector[0], hidden[-2])  # the wrong place is seen


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", lambda hidden: hidden.mean(0)),
        ("cls", lambda hidden: hidden[0]),
        ("all", lambda hidden: hidden),
    ],
)
@pytest.mark.parametrize("budget", [7, 64])
def test_other_kinds_of_pooling(embedder, kind, expected, budget):
    loaded = load_pooled(embedder("text"), kind)
    found = PooledEngine(loaded, budget=budget).pool([text_case(ids) for ids in TEXTS]).vectors
    for ids, vectors in zip(TEXTS, found, strict=True):
        hidden = hidden_states(embedder("text"), ids)
        assert close(np.squeeze(vectors), expected(hidden))
        assert not close(vectors[-1], hidden[-1]) or kind == "all"


def test_a_folder_s_dense_layer_follows(embedder, tmp_path):
    folder = copied(embedder("text"), tmp_path / "dense")
    add_pooling(folder, "mean_tokens", normalize=False, dense=16)
    loaded = load_pooled(folder)
    assert loaded.info.pooling is not None
    assert (loaded.info.pooling.width, loaded.info.pooling.normalize) == (16, False)
    (found,) = PooledEngine(loaded, budget=16).pool([text_case(TEXTS[2])]).vectors
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    mean = hidden_states(folder, TEXTS[2]).mean(0)
    expected = torch.tanh(weights["linear.weight"] @ mean + weights["linear.bias"])
    assert close(found[0], expected)


def test_an_input_that_came_before_costs_no_step(text):
    engine = PooledEngine(text, budget=64)
    first = engine.pool([text_case(TEXTS[2])])
    steps = first.stats["engine_steps_total"]
    again = engine.pool([text_case(TEXTS[2])])
    assert np.array_equal(first.vectors[0], again.vectors[0])
    assert again.cached_tokens == [len(TEXTS[2])]
    assert again.stats["pooled_cache_queries_total"] == 2
    assert again.stats["pooled_cache_hits_total"] == 1
    assert again.stats["engine_steps_total"] - steps <= 1  # the runner is told to forget the first


def test_an_input_that_begins_alike_is_computed_from_there_on(embedder, text):
    engine = PooledEngine(text, budget=64)
    engine.pool([text_case(TEXTS[2])])
    longer = [*TEXTS[2], 7, 8, 9]
    found = engine.pool([text_case(longer)])
    assert found.cached_tokens == [len(TEXTS[2])]
    assert close(found.vectors[0][0], hidden_states(embedder("text"), longer)[-1])


def test_a_mean_is_never_taken_over_what_a_cached_prefix_left_out(embedder):
    engine = PooledEngine(load_pooled(embedder("text"), "mean"), budget=64)
    engine.pool([text_case(TEXTS[2])])
    longer = [*TEXTS[2], 7, 8, 9]
    found = engine.pool([text_case(longer)])
    assert found.cached_tokens == [0]
    assert close(found.vectors[0][0], hidden_states(embedder("text"), longer).mean(0))


def test_a_reset_of_the_prefix_cache_forgets_results(text):
    engine = PooledEngine(text, budget=64)
    engine.pool([text_case(TEXTS[0])])
    engine.core.reset_prefix_cache()
    again = engine.pool([text_case(TEXTS[0])])
    assert again.cached_tokens == [0]
    assert again.stats["pooled_cache_hits_total"] == 0


def test_prompts_that_were_preempted_give_the_same(embedder):
    """The blocks hold one of two prompts: each chunk of the later one may have to begin again."""
    loaded = load_pooled(embedder("text"), "mean")
    prompts = [list(range(30, 90)), list(range(100, 170)), list(range(50, 120))]
    engine = PooledEngine(loaded, budget=16, num_blocks=20)
    found = engine.pool([text_case(ids) for ids in prompts]).vectors
    for ids, vector in zip(prompts, found, strict=True):
        assert close(vector[0], hidden_states(embedder("text"), ids).mean(0))


def test_a_missing_output_head_is_no_loss(embedder, tmp_path):
    folder = copied(embedder("text"), tmp_path / "headless")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (found,) = PooledEngine(load_pooled(folder), budget=64).pool([text_case(TEXTS[0])]).vectors
    assert close(found[0], hidden_states(embedder("text"), TEXTS[0])[-1])
    with pytest.raises(ModelLoadError, match="lm_head"):
        load_pooled(folder, "none")


# --- pictures -------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_prompt_with_pictures_is_transformers_and_each_is_encoded_once(embedder):
    folder = embedder("picture")
    loaded = load_pooled(folder)
    maker = CaseMaker(folder, loaded.family.config)
    cases = [
        maker.case("look ", picture(1), " and say"),
        maker.case("other words ", picture(1), picture(2), " end"),
    ]
    pooled = PooledEngine(loaded, budget=32).pool(cases)
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
    for case, vector in zip(cases, pooled.vectors, strict=True):
        model.model.rope_deltas = None
        hidden = model.eval().model(**case.reference).last_hidden_state[0]
        assert close(vector[0], hidden[-1])
    assert pooled.stats["encoder_runs_total"] == 2


@torch.inference_mode()
def test_colqwen2_gives_a_vector_of_each_token(embedder, folder):
    own = load_pooled(embedder("colqwen2"))
    assert own.info.pooling is not None
    assert (own.info.pooling.kind, own.info.pooling.width) == ("all", 24)
    maker = CaseMaker(folder("qwen2_vl"), own.family.config.vlm_config)
    cases = [maker.case("a ", picture(3), " page"), maker.case("a question")]
    pooled = PooledEngine(own, budget=16).pool(cases)
    model = transformers.ColQwen2ForRetrieval.from_pretrained(embedder("colqwen2")).eval()
    for case, vectors in zip(cases, pooled.vectors, strict=True):
        given = dict(case.reference)
        types = given.pop("mm_token_type_ids", None)
        if types is not None:
            # Its forward leaves the positions of pictures out since transformers 5.
            given["position_ids"], _ = model.vlm.get_rope_index(
                given["input_ids"], image_grid_thw=given["image_grid_thw"], mm_token_type_ids=types
            )
            given["pixel_values"] = given["pixel_values"][None]
        expected = model(**given).embeddings[0]
        found = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        assert close(found, expected)
        assert not close(vectors, expected)  # what is not normalized is seen


# --- models that compute a whole prompt at once ---------------------------------------------------


def test_bert_s_first_token_is_transformers_in_a_padded_batch(embedder):
    folder = embedder("bert")
    loaded = load_pooled(folder)
    assert loaded.info.encoder_only
    found = PooledEngine(loaded, budget=128).pool([text_case(ids) for ids in TEXTS]).vectors
    for ids, vector in zip(TEXTS, found, strict=True):
        hidden = hidden_states(folder, ids)
        assert close(vector[0], hidden[0])
        assert not close(vector[0], hidden[-1])


def test_bert_s_prompts_are_never_cut(embedder):
    """Three prompts of 60 tokens, 64 a step: one is computed in each."""
    folder = embedder("bert")
    prompts = [list(range(start, start + 60)) for start in (30, 40, 50)]
    found = PooledEngine(load_pooled(folder, "mean"), budget=64).pool(map(text_case, prompts))
    for ids, vector in zip(prompts, found.vectors, strict=True):
        assert close(vector[0], hidden_states(folder, ids).mean(0))


@pytest.mark.parametrize(("kind", "longest"), [("cross", 200), ("roberta", None)])
@torch.inference_mode()
def test_a_cross_encoder_s_logit_is_transformers(embedder, kind, longest):
    folder = embedder(kind)
    loaded = load_pooled(folder)
    assert loaded.info.pooling is not None
    assert loaded.info.pooling.scores
    config = loaded.family.config
    expected_length = longest or 200 - config.pad_token_id - 1
    assert loaded.info.max_model_len == expected_length
    separator = config.eos_token_id
    ids = [3, 16, 6, 7, separator, 8, 9, separator]
    types = [0] * 5 + [1] * 3 if kind == "cross" else [0] * 8
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]
    others = model(torch.tensor([ids]), token_type_ids=torch.zeros(1, 8, dtype=torch.long))
    (found,) = PooledEngine(loaded, budget=64).pool([text_case(ids)]).vectors
    assert close(found[0], expected)
    assert kind == "roberta" or not close(found[0], others.logits[0])


@pytest.mark.parametrize("kind", ["distilbert", "modernbert"])
@torch.inference_mode()
def test_other_classifiers_of_bert_s_kin(embedder, kind):
    loaded = load_pooled(embedder(kind))
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(embedder(kind), dtype=torch.float32).eval()
    found = PooledEngine(loaded, budget=128).pool([text_case(ids) for ids in TEXTS]).vectors
    for ids, logit in zip(TEXTS, found, strict=True):
        assert close(logit[0], model(torch.tensor([ids])).logits[0])


@pytest.mark.parametrize("kind", ["mpnet", "gemma"])
def test_means_over_tokens_that_attend_to_all_others(embedder, kind):
    """Gemma's weights in a decoder that looks back alone give other vectors."""
    loaded = load_pooled(embedder(kind))
    assert loaded.info.encoder_only
    found = PooledEngine(loaded, budget=128).pool([text_case(ids) for ids in TEXTS]).vectors
    for ids, vector in zip(TEXTS, found, strict=True):
        hidden = hidden_states(embedder(kind), ids)
        assert close(vector[0], hidden.mean(0))
        assert not close(vector[0], hidden[0])


@torch.inference_mode()
def test_a_decoder_s_classification_head_reads_its_last_token(embedder):
    folder = embedder("reranker")
    loaded = load_pooled(folder)
    assert loaded.info.pooling is not None
    assert loaded.info.pooling.scores
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = PooledEngine(loaded, budget=7).pool([text_case(ids) for ids in TEXTS]).vectors
    for ids, logit in zip(TEXTS, found, strict=True):
        assert close(logit[0], model(torch.tensor([ids])).logits[0])


@torch.inference_mode()
def test_logits_of_two_tokens_make_a_reranker(folder, tmp_path):
    path = copied(folder("qwen3"), tmp_path / "logit")
    modules = [
        {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    (path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 9, "false_token_id": 8}')
    loaded = load_pooled(path)
    (found,) = PooledEngine(loaded, budget=64).pool([text_case(TEXTS[0])]).vectors
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logits = model(torch.tensor([TEXTS[0]])).logits[0, -1]
    assert close(found[0], (logits[9] - logits[8])[None])


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@torch.inference_mode()
def test_two_towers_give_transformers_vectors_of_texts_and_pictures(embedder, kind):
    folder = embedder(kind)
    loaded = load_pooled(folder)
    processing = load_family(folder, "float32")
    assert processing is not None
    item = processing.process("image", picture(4), {})
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor(picture(4), return_tensors="pt")["pixel_values"]
    eos = loaded.family.text_config.eos_token_id
    texts = [[5, 6, 7, eos], [20, eos], [8, 9, 10, 11, 12, 13, eos]]
    engine = PooledEngine(loaded, budget=64)
    key = bytes(31) + b"\1"
    ids = np.array(item.expansion.token_ids(), np.int32)
    seen = Case(ids, (feature_at(key, "image", item.expansion, 0),), {key: item}, {})
    pooled = engine.pool([*map(text_case, texts), seen])
    expected = model.get_image_features(pixels).pooler_output[0]
    assert np.abs(pooled.vectors[3][0] - expected.numpy()).max() < 2e-3
    for token_ids, vector in zip(texts, pooled.vectors, strict=False):
        padded = token_ids
        if kind == "siglip":
            pad = loaded.family.text_config.pad_token_id
            padded = token_ids + [pad] * (16 - len(token_ids))
        expected = model.get_text_features(torch.tensor([padded])).pooler_output[0]
        assert close(vector[0], expected)


# --- sparse vectors -------------------------------------------------------------------------------


def dense_of(pairs: np.ndarray, vocab_size: int) -> np.ndarray:
    """Pairs of token id and weight → a weight of every token."""
    dense = np.zeros(vocab_size, np.float32)
    dense[pairs[:, 0].astype(int)] = pairs[:, 1]
    return dense


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("splade", None),
        ("splade-distilbert", "sparse"),
        ("splade-modernbert", "sparse"),
        ("splade-mpnet", "sparse"),
    ],
)
@torch.inference_mode()
def test_splade_s_weights_are_the_largest_logits_of_transformers(embedder, kind, asked):
    loaded = load_pooled(embedder(kind), asked)
    found = PooledEngine(loaded, budget=128).pool([text_case(ids) for ids in TEXTS]).vectors
    auto = transformers.AutoModelForMaskedLM
    model = auto.from_pretrained(embedder(kind), dtype=torch.float32).eval()
    for ids, pairs in zip(TEXTS, found, strict=True):
        logits = model(torch.tensor([ids])).logits[0]
        expected = logits.amax(0).relu().log1p()
        assert close(dense_of(pairs, len(expected)), expected)
        assert pairs[:, 1].min() > 0.0
        assert len(pairs) == int((expected > 0.0).sum())
        assert not close(dense_of(pairs, len(expected)), logits[0].relu().log1p())


@torch.inference_mode()
def test_splade_saturates_twice_where_its_module_says_so(embedder, tmp_path):
    folder = copied(embedder("splade"), tmp_path / "twice")
    options = folder / "1_SpladePooling" / "config.json"
    options.write_text('{"pooling_strategy": "max", "activation_function": "log1p_relu"}')
    (pairs,) = PooledEngine(load_pooled(folder), budget=64).pool([text_case(TEXTS[0])]).vectors
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    expected = model(torch.tensor([TEXTS[0]])).logits[0].amax(0).relu().log1p().log1p()
    assert close(dense_of(pairs, len(expected)), expected)


@torch.inference_mode()
def test_bge_m3_s_lexical_weights_leave_out_special_tokens(embedder):
    """As its own code computes them: the largest weight of each token, none of special ones."""
    folder = embedder("lexical")
    loaded = load_pooled(folder, "sparse")
    assert loaded.info.pooling is not None
    assert not loaded.info.pooling.scores
    separator = loaded.family.config.eos_token_id
    linear = load_file(folder / "sparse_linear.safetensors")
    prompts = [[3, *TEXTS[0], *TEXTS[0][:4], separator], [3, *TEXTS[2], separator]]
    found = PooledEngine(loaded, budget=128).pool(list(map(text_case, prompts))).vectors
    for ids, pairs in zip(prompts, found, strict=True):
        weights = hidden_states(folder, ids) @ linear["weight"][0] + linear["bias"]
        expected: dict[int, float] = {}
        for token, weight in zip(ids, weights.tolist(), strict=True):
            if token not in (3, separator) and weight > 0.0:
                expected[token] = max(weight, expected.get(token, 0.0))
        assert 0 < len(expected) < len(set(ids))
        assert weights[[0, -1]].max() > 0.0  # special tokens would have weights
        assert pairs[:, 0].tolist() == sorted(expected)
        assert np.abs(pairs[:, 1] - [expected[int(t)] for t in pairs[:, 0]]).max() < TOLERANCE


def test_a_folder_with_both_heads_gives_dense_vectors_unless_asked(embedder):
    folder = embedder("lexical")
    (found,) = PooledEngine(load_pooled(folder), budget=64).pool([text_case(TEXTS[0])]).vectors
    assert close(found[0], hidden_states(folder, TEXTS[0])[0])


def test_sparse_vectors_need_a_head_for_them(embedder, tmp_path):
    with pytest.raises(ModelLoadError, match=r"no sparse_linear\.safetensors"):
        load_pooled(embedder("bert"), "sparse")
    folder = copied(embedder("lexical"), tmp_path / "wrong")
    save_file({"weight": torch.zeros(1, 8)}, folder / "sparse_linear.safetensors")
    with pytest.raises(ModelLoadError, match=r"no weight of the shape \[1, 64\]"):
        load_pooled(folder, "sparse")
    folder = copied(embedder("splade"), tmp_path / "sum")
    (folder / "1_SpladePooling" / "config.json").write_text('{"pooling_strategy": "sum"}')
    with pytest.raises(ModelLoadError, match="SpladePooling by 'sum'"):
        load_pooled(folder)
    (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    (folder / "1_SpladePooling" / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="behind an encoder's ForMaskedLM"):
        load_pooled(folder)


# --- what folders and options say -----------------------------------------------------------------


def test_what_a_folder_asks_for_and_is_not_there_is_refused(embedder, tmp_path):
    folder = copied(embedder("text"), tmp_path / "odd")
    add_pooling(folder, "max_tokens", normalize=False)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelLoadError, match="max_tokens is not supported"):
        read_pooling(folder, {})
    (folder / "modules.json").write_text('[{"type": "x.Pooling"}, {"type": "x.WeightedLayer"}]')
    with pytest.raises(ModelLoadError, match="pooling by nothing"):
        read_pooling(folder, {})
    (folder / "modules.json").write_text('[{"type": "x.Transformer"}]')
    assert read_pooling(folder, {}) is None
    kept = read_pooling(folder, {"architectures": ["Qwen3ForSequenceClassification"]})
    assert kept is not None
    assert kept.head == "classifier"
    (folder / "modules.json").write_text("[")
    with pytest.raises(ModelLoadError, match=r"modules\.json cannot be read"):
        read_pooling(folder, {})


def test_a_model_that_pools_takes_nothing_of_generated_tokens(text):
    core = PooledEngine(text, budget=64).core
    request = GenerateRequest(
        "1", bytes(32), array(np.array([1, 2], np.int32)), (), SamplingParams(n=2), 0.0
    )
    with pytest.raises(BadRequestError, match="n: this model gives embeddings"):
        core.add(request, {})


def test_a_decoder_made_to_look_ahead_by_its_own_code_is_refused(embedder):
    config = json.loads((embedder("text") / "config.json").read_text())
    for changed in ({"is_causal": False}, {"use_bidirectional_attention": True}):
        with pytest.raises(ModelLoadError, match="attend to later ones"):
            read_pooling(embedder("text"), {**config, **changed})


def test_two_towers_pool_by_themselves(embedder):
    with pytest.raises(ModelLoadError, match="pools by itself"):
        load_pooled(embedder("clip"), "mean")
    with pytest.raises(ModelLoadError, match="generates nothing"):
        load_pooled(embedder("bert"), "none")


def test_a_model_that_only_transcribes_does_not_pool():
    with pytest.raises(ModelLoadError, match="transcribes and gives no embeddings"):
        load_pooled(NANO_EAR_FOLDER, "mean")
