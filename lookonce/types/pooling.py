"""How a model's hidden states become embeddings or scores, and what of its folder says so.

Sentence Transformers' files are read where a folder has them: `modules.json`, the `config.json` of
its pooling module, and the modules that follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from lookonce.errors import ModelLoadError

PoolingKind = Literal["last", "mean", "cls", "all", "sparse"]
"""Whose hidden states make the result: the last token's, the mean of all, the first token's, or
those of every token, each a vector of its own. "sparse": pairs of a token of the vocabulary and its
weight, for all weights above 0."""
POOLING_KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)
ST_KINDS: dict[str, PoolingKind] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}
"""Sentence Transformers' names: `pooling_mode` of newer files, `pooling_mode_...` of older ones."""
EMBEDDING_TYPES: dict[str, PoolingKind] = {
    "bert": "cls",
    "clip": "last",
    "colqwen2": "all",
    "distilbert": "cls",
    "modernbert": "cls",
    "mpnet": "mean",
    "roberta": "cls",
    "siglip": "last",
    "xlm-roberta": "cls",
}
"""Types of model that do not generate → how they pool where no file says otherwise."""
ENCODER_ONLY = frozenset(EMBEDDING_TYPES) - {"colqwen2"}
"""Of these, types that compute a whole input at once and keep no keys and values."""
CLASSIFIER = "ForSequenceClassification"
"""End of the names of architectures with a classification head."""
Head = Literal["", "classifier", "logit_score", "masked_lm", "sparse_linear"]
SCORING_HEADS: tuple[Head, ...] = ("classifier", "logit_score")
MASKED_LM = "ForMaskedLM"
"""End of the names of architectures with a head that writes masked tokens."""
MASKED_LM_TYPES = ENCODER_ONLY - {"clip", "siglip"}
SPARSE_LINEAR = "sparse_linear.safetensors"
"""The weights of BGE-M3's lexical head in a folder: `weight` [1, H] and `bias` [1]."""
PAIR = 2
"""Numbers of a pair of token id and weight."""


class PoolingInfo(msgspec.Struct, frozen=True, array_like=True):
    """What every process knows about a model that pools instead of generating."""

    kind: PoolingKind
    width: int
    """Numbers of a vector, or labels of a classification."""
    normalize: bool = True
    """Vectors are made as long as 1 unless a request says otherwise."""
    scores: bool = False
    """The numbers are logits of a classification: the model compares two texts, or names labels."""

    reuses_prefixes: bool = False
    """A cached prefix saves computing: the last token's hidden state alone is needed, and it is
    computed from keys and values."""
    most_pairs: int = 0
    """Sparse results: most pairs of one; 0: as many as the prompt has tokens."""

    @property
    def embeds(self) -> bool:
        """Whether an input gets one dense vector."""
        return not self.scores and self.kind not in ("all", "sparse")

    def most_numbers(self, num_tokens: int) -> int:
        """The most numbers that a prompt's result may have."""
        if self.kind == "sparse":
            return self.width * (self.most_pairs or num_tokens)
        return self.width * (num_tokens if self.kind == "all" else 1)


class PoolingFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder says of pooling."""

    kind: PoolingKind
    normalize: bool = True
    dense: tuple[str, ...] = ()
    """Folders of Sentence Transformers' dense layers, in their order."""
    head: Head = ""
    """"classifier": the weights of the architecture; "logit_score": the difference of the logits
    of the two tokens below, as rerankers made of decoders are read. Of sparse results:
    "masked_lm", SPLADE: the largest logit of each token of the vocabulary at any position;
    "sparse_linear", BGE-M3: a weight of each token of the prompt."""
    saturations: int = 1
    """SPLADE: how often log(1 + x) is taken of what is above 0 of a logit."""
    true_token_id: int = 0
    false_token_id: int | None = None


def read_pooling(
    folder: str | Path, config: Mapping[str, object], asked: str | None = None
) -> PoolingFiles | None:
    """How the model of a local folder pools; None for one that generates.

    `asked` is `--pooling`: a kind, "none", or None where the folder's files decide. Raises
    `ModelLoadError` for files that ask for what is not supported.
    """
    if asked == "none":
        return None
    found = _from_files(Path(folder), config)
    if asked is None and found is None:
        return None
    _refuse_other_attention(config)
    if asked is None:
        return found
    if asked == "sparse":
        return found if found and found.kind == "sparse" else _sparse(Path(folder), config)
    kind = next(kind for kind in POOLING_KINDS if kind == asked)
    if found is None or found.kind == "sparse":
        return PoolingFiles(kind=kind)
    return msgspec.structs.replace(found, kind=kind)


def _sparse(folder: Path, config: Mapping[str, object]) -> PoolingFiles:
    """Of a folder whose files do not say that it is sparse. Raises `ModelLoadError`."""
    head: Head = "sparse_linear" if (folder / SPARSE_LINEAR).is_file() else "masked_lm"
    if head == "masked_lm" and not _has_masked_lm(config):
        raise ModelLoadError(
            f"--pooling sparse: the folder has no {SPARSE_LINEAR}, and its architecture is no "
            f"encoder's {MASKED_LM}"
        )
    return PoolingFiles(kind="sparse", head=head, normalize=False)


def _has_masked_lm(config: Mapping[str, object]) -> bool:
    named = config.get("architectures")
    found = isinstance(named, list) and any(str(name).endswith(MASKED_LM) for name in named)
    return found and config.get("model_type") in MASKED_LM_TYPES


def _refuse_other_attention(config: Mapping[str, object]) -> None:
    """Raises `ModelLoadError` for decoders whose own code lets tokens attend to later ones: by
    transformers' code they would give other vectors."""
    model_type = str(config.get("model_type", ""))
    both_ways = config.get("use_bidirectional_attention") is True and model_type != "gemma3_text"
    if both_ways or (config.get("is_causal") is False and model_type not in EMBEDDING_TYPES):
        raise ModelLoadError(
            "the model's tokens attend to later ones (is_causal false), which code of its own does "
            "and transformers' does not; that is not supported"
        )


def _from_files(folder: Path, config: Mapping[str, object]) -> PoolingFiles | None:
    modules = _read(folder / "modules.json")
    found = _from_modules(folder, modules, config) if isinstance(modules, list) else None
    if found is not None:
        return found
    model_type = str(config.get("model_type", ""))
    if has_classifier(config):
        kind: PoolingKind = "cls" if model_type in ENCODER_ONLY else "last"
        if config.get("classifier_pooling") == "mean":
            kind = "mean"
        return PoolingFiles(kind=kind, normalize=False, head="classifier")
    if model_type in EMBEDDING_TYPES:
        return PoolingFiles(kind=EMBEDDING_TYPES[model_type])
    return None


def has_classifier(config: Mapping[str, object]) -> bool:
    """Whether a model's architecture has a classification head."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(
        str(name).endswith(CLASSIFIER) for name in architectures
    )


def _from_modules(
    folder: Path, modules: list[Any], config: Mapping[str, object]
) -> PoolingFiles | None:
    """None for modules of which none pools, as those of a classifier."""
    kind: PoolingKind | None = None
    dense: list[str] = []
    found: dict[str, Any] = {"normalize": False}
    for module in modules:
        if not isinstance(module, dict):
            raise ModelLoadError("modules.json: every module is an object")
        name, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        options = _read(folder / path / "config.json")
        options = options if isinstance(options, dict) else {}
        match name:
            case "Transformer" | "MLMTransformer":
                continue
            case "SpladePooling":
                kind, found["head"] = "sparse", "masked_lm"
                found["saturations"] = _saturations(options)
            case "Pooling":
                kind = _kind(options)
            case "Normalize":
                found["normalize"] = True
            case "Dense":
                dense.append(path)
            case "LogitScore":
                kind, found["head"] = "last", "logit_score"
                found |= _token_ids(options)
            case _:
                raise ModelLoadError(f"modules.json: {name!r:.40} modules are not supported")
    if kind == "sparse" and (dense or found["normalize"] or not _has_masked_lm(config)):
        raise ModelLoadError(
            f"modules.json: SpladePooling is read alone, behind an encoder's {MASKED_LM}"
        )
    return None if kind is None else PoolingFiles(kind=kind, dense=tuple(dense), **found)


def _kind(options: Mapping[str, Any]) -> PoolingKind:
    """Of the configuration of a pooling module."""
    stated = options.get("pooling_mode")
    names = [stated] if isinstance(stated, str) else list(stated or ())
    names += [
        name.removeprefix("pooling_mode_")
        for name, value in options.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    if len(names) == 1 and names[0] in ST_KINDS:
        return ST_KINDS[names[0]]
    raise ModelLoadError(
        f"pooling by {', '.join(map(str, names)) or 'nothing'} is not supported; --pooling takes "
        f"{', '.join(POOLING_KINDS)}"
    )


def _saturations(options: Mapping[str, Any]) -> int:
    """Of the configuration of a SPLADE module. Raises `ModelLoadError`."""
    strategy = options.get("pooling_strategy", "max")
    activation = options.get("activation_function", "relu")
    if strategy != "max" or activation not in ("relu", "log1p_relu"):
        raise ModelLoadError(
            f"SpladePooling by {strategy!r:.20} of {activation!r:.20} is not supported; 'max' of "
            "'relu' or 'log1p_relu' is"
        )
    return 1 if activation == "relu" else 2


def _token_ids(options: Mapping[str, Any]) -> dict[str, Any]:
    true_id, false_id = options.get("true_token_id"), options.get("false_token_id")
    if type(true_id) is not int or not (false_id is None or type(false_id) is int):
        raise ModelLoadError("LogitScore needs true_token_id, and may have false_token_id")
    return {"true_token_id": true_id, "false_token_id": false_id}


def _read(path: Path) -> Any:
    """A JSON file's content; None where there is no such file. Raises `ModelLoadError`."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error}") from None
