"""Random folders of models that give embeddings or scores, made from the random folders of models
that generate: their tokenizers, and the weights of those that have no weights of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.model_folders.make import randomise

Json = dict[str, Any]
SOURCES = {
    "text": "qwen3",
    "picture": "qwen3_vl",
    "colqwen2": "qwen2_vl",
    "bert": "llama",
    "cross": "llama",
    "roberta": "llama",
    "distilbert": "llama",
    "modernbert": "llama",
    "mpnet": "llama",
    "gemma": "gemma3_text",
    "clip": "llava",
    "siglip": "llava",
    "reranker": "qwen3",
    "splade": "llama",
    "splade-distilbert": "llama",
    "splade-modernbert": "llama",
    "splade-mpnet": "llama",
    "lexical": "llama",
}
"""Kind → the generating kind whose folder it is made from."""
PAIRED = ("bert", "cross", "roberta", "distilbert", "modernbert", "mpnet", "splade", "lexical")
"""Kinds whose tokenizer writes texts and pairs as BERT's do."""
PAIR_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}Query: {{ m.content }}\n"
    "{% elif m.role == 'document' %}Document: {{ m.content }}\nAnswer:{% endif %}{% endfor %}"
)


def make_embedder(kind: str, source: Path, target: Path) -> Path:
    """The folder `target` of an embedding model, made from the folder of its `SOURCES`."""
    shutil.copytree(source, target)
    if kind in ("text", "picture"):
        add_pooling(target, normalize=True)
        _end_with_eos(target)
        return target
    _new_model(kind, target)
    return target


def add_pooling(folder: Path, mode: str = "lasttoken", *, normalize: bool, dense: int = 0) -> None:
    """Sentence Transformers' files; with `dense` a dense layer to so many numbers."""
    kinds = ["Transformer", "Pooling"] + ["Dense"] * bool(dense) + ["Normalize"] * normalize
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if kind == "Transformer" else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    _write(folder / "modules.json", modules)
    hidden = _hidden_size(folder)
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens")}
    modes["pooling_mode_lasttoken"] = mode == "lasttoken"
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden, **modes})
    if dense:
        import torch
        from safetensors.torch import save_file

        where = folder / "2_Dense"
        name = "torch.nn.modules.activation.Tanh"
        _write(where / "config.json", {"activation_function": name})
        generator = torch.Generator().manual_seed(3)
        weights = {
            "linear.weight": torch.randn(dense, hidden, generator=generator) / hidden**0.5,
            "linear.bias": torch.randn(dense, generator=generator),
        }
        save_file(weights, where / "model.safetensors")


def _add_splade(folder: Path) -> None:
    """Sentence Transformers' files of a sparse encoder."""
    modules = [
        {"path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},
        {
            "path": "1_SpladePooling",
            "type": "sentence_transformers.sparse_encoder.models.SpladePooling",
        },
    ]
    _write(folder / "modules.json", modules)
    options = {"pooling_strategy": "max", "activation_function": "relu"}
    _write(folder / "1_SpladePooling" / "config.json", options)


def _add_sparse_linear(folder: Path) -> None:
    """BGE-M3's lexical head, beside the files of its dense vectors."""
    import torch
    from safetensors.torch import save_file

    add_pooling(folder, "cls_token", normalize=True)
    generator = torch.Generator().manual_seed(5)
    hidden = _hidden_size(folder)
    weights = {
        "weight": torch.randn(1, hidden, generator=generator) / hidden**0.5,
        "bias": torch.full((1,), 2.9),  # weights of both signs
    }
    save_file(weights, folder / "sparse_linear.safetensors")


def _hidden_size(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("hidden_size") or config["text_config"]["hidden_size"])


def _end_with_eos(folder: Path) -> None:
    """The tokenizer ends every text with the end of sequence, as Qwen3-Embedding's does."""
    from tokenizers import Tokenizer, processors

    config = json.loads((folder / "tokenizer_config.json").read_text())
    eos = config["eos_token"]
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    special = [(eos, tokenizer.token_to_id(eos))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=special
    )
    tokenizer.save(path)


def _new_model(kind: str, folder: Path) -> None:
    """Replace the model of a folder; tokenizer and processor stay."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    ids = {name: _text_config(config)[name] for name in ("pad_token_id", "eos_token_id")}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    for name in ("generation_config.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
    model = BUILDERS[kind](transformers, config, ids)
    randomise(model, 11)
    model.save_pretrained(folder)
    if kind == "gemma":
        add_pooling(folder, "mean_tokens", normalize=True)
    if kind == "splade":
        _add_splade(folder)
    if kind == "lexical":
        _add_sparse_linear(folder)
    if kind in PAIRED:
        _pair_tokenizer(folder, ids["eos_token_id"])
    if kind == "reranker":
        (folder / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    if kind == "siglip":
        _write(
            folder / "preprocessor_config.json",
            {
                "image_processor_type": "SiglipImageProcessor",
                "size": {"height": 64, "width": 64},
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            },
        )
        (folder / "processor_config.json").unlink(missing_ok=True)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.get("text_config") or config
    return found


def _bert_config(transformers: Any, ids: Mapping[str, int], name: str = "BertConfig") -> Any:
    return getattr(transformers, name)(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=200,
        type_vocab_size=2 if name == "BertConfig" else 1,
        num_labels=1,
        **ids,
    )


def _bert(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    return transformers.BertModel(_bert_config(transformers, ids)).eval()


def _distilbert(
    transformers: Any, config: Json, ids: Mapping[str, int], head: str = "SequenceClassification"
) -> Any:
    chosen = transformers.DistilBertConfig(
        vocab_size=320, dim=64, n_layers=2, n_heads=4, hidden_dim=128, num_labels=1, **ids
    )
    return getattr(transformers, f"DistilBertFor{head}")(chosen).eval()


def _modernbert(
    transformers: Any, config: Json, ids: Mapping[str, int], head: str = "SequenceClassification"
) -> Any:
    chosen = transformers.ModernBertConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        local_attention=16,
        num_labels=1,
        classifier_pooling="mean",
        cls_token_id=3,
        sep_token_id=ids["eos_token_id"],
        bos_token_id=3,
        **ids,
    )
    return getattr(transformers, f"ModernBertFor{head}")(chosen).eval()


def _mpnet(transformers: Any, config: Json, ids: Mapping[str, int], head: str = "Model") -> Any:
    chosen = transformers.MPNetConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=200,
        bos_token_id=3,
        **ids,
    )
    return getattr(transformers, f"MPNet{head}")(chosen).eval()


def _gemma(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    """As EmbeddingGemma: every token attends to all others."""
    given = {**config, "architectures": None, "use_bidirectional_attention": True}
    return transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**given)).eval()


def _cross(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    return transformers.BertForSequenceClassification(_bert_config(transformers, ids)).eval()


def _roberta(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    chosen = _bert_config(transformers, ids, "XLMRobertaConfig")
    return transformers.XLMRobertaForSequenceClassification(chosen).eval()


def _splade(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    return transformers.BertForMaskedLM(_bert_config(transformers, ids)).eval()


def _lexical(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    chosen = _bert_config(transformers, ids, "XLMRobertaConfig")
    return transformers.XLMRobertaModel(chosen).eval()


def _reranker(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    chosen = transformers.Qwen3Config(**{**config, "num_labels": 1, "architectures": None})
    return transformers.Qwen3ForSequenceClassification(chosen).eval()


def _colqwen2(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    vlm = transformers.Qwen2VLConfig(**{**config, "architectures": None})
    chosen = transformers.ColQwen2Config(vlm_config=vlm, embedding_dim=24)
    return transformers.ColQwen2ForRetrieval(chosen).eval()


def _clip(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    text = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "max_position_embeddings": 77, **ids}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    chosen = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=40)
    return transformers.CLIPModel(chosen).eval()


def _siglip(transformers: Any, config: Json, ids: Mapping[str, int]) -> Any:
    text = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "max_position_embeddings": 16, "projection_size": 48, **ids}
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 64, "patch_size": 16}
    chosen = transformers.SiglipConfig(text_config=text, vision_config=vision)
    return transformers.SiglipModel(chosen).eval()


BUILDERS = {
    "bert": _bert,
    "cross": _cross,
    "roberta": _roberta,
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "mpnet": _mpnet,
    "gemma": _gemma,
    "reranker": _reranker,
    "colqwen2": _colqwen2,
    "clip": _clip,
    "siglip": _siglip,
    "splade": _splade,
    "splade-distilbert": partial(_distilbert, head="MaskedLM"),
    "splade-modernbert": partial(_modernbert, head="MaskedLM"),
    "splade-mpnet": partial(_mpnet, head="ForMaskedLM"),
    "lexical": _lexical,
}


def _pair_tokenizer(folder: Path, separator: int) -> None:
    """`<first token> A <sep> B <sep>`, as BERT's tokenizers write pairs."""
    from tokenizers import Tokenizer, processors

    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    sep, cls = tokenizer.id_to_token(separator), tokenizer.id_to_token(3)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, 3), (sep, separator)],
    )
    tokenizer.save(path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"sep_token": sep, "cls_token": cls}
    _write(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
