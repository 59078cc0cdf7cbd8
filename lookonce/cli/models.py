"""`lookonce models`: the types of model that are served, and what was shown about each."""

from __future__ import annotations

import json
from typing import NamedTuple

from lookonce.types.model import (
    EMBEDDERS,
    GENERAL_MEDIA,
    GENERAL_TEXT,
    KEEPS_LATENTS,
    KEEPS_STATES,
    READ_FROM_GGUF,
    SUPPORTED,
    TRANSCRIBES_ONLY,
    UNSERVABLE,
    UNSERVABLE_MEDIA,
    WITHOUT_LINEAR_LAYERS,
)

QUANTIZED = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq")
"""Methods whose checkpoints are unpacked for every type."""
MXFP4 = ("gpt_oss",)
VECTORS_OF_KEYS = ("colqwen2",)
"""Of those that give embeddings alone: what computes them attends over kept keys and values."""

OWN = "greedy answers, chunks, preemption, negative controls"
OWN_MEDIA = "greedy answers, media, chunks, preemption, negative controls"
VECTORS = "vectors, batches, caches, negative controls"
GENERAL = "greedy answers, chunks, preemption; compared again on loading"
MEDIA = "greedy answers, media, chunks, preemption; compared again on loading"


class ServedType(NamedTuple):
    """One row of the table."""

    model_type: str
    media: tuple[str, ...]
    served_by: str
    """"own": a family written for the type; "general": one family for all others."""
    proven: str
    """What is compared with transformers, token for token, on random weights."""
    gives: str = "answers, or embeddings (--pooling)"
    weights: tuple[str, ...] = ()
    """What is read: safetensors, the methods of quantized ones, GGUF."""
    int8: bool = False
    """`--quantize int8`."""
    lora: bool = False
    """`--lora`."""
    keeps: str = "keys and values"
    """What is kept of prompts, on the device and in KV tiers."""

    def told(self) -> ServedType:
        """With what the tables say of its weights, adapters and states."""
        name, gives_answers = self.model_type, self.gives != EMBEDDINGS
        linear = name not in WITHOUT_LINEAR_LAYERS
        keeps = self.keeps
        if name in KEEPS_STATES:
            keeps = "keys, values and states"
        elif name in KEEPS_LATENTS:
            keeps = "latents"
        elif not gives_answers and name not in VECTORS_OF_KEYS:
            keeps = "nothing"
        return self._replace(
            gives=TRANSCRIPTS if name in TRANSCRIBES_ONLY else self.gives,
            weights=(
                "safetensors",
                *QUANTIZED,
                *(("mxfp4",) if name in MXFP4 else ()),
                *(("gguf",) if name in READ_FROM_GGUF else ()),
            ),
            int8=linear and keeps != "nothing",
            lora=linear and gives_answers and name not in TRANSCRIBES_ONLY,
            keeps=keeps,
        )

    def beside(self) -> str:
        """In which ways it is served beside the usual one, for people."""
        ways = {"LoRA": self.lora, "int8": self.int8, "GGUF": "gguf" in self.weights}
        ways |= {"states": self.keeps.endswith("states"), "latents": self.keeps == "latents"}
        return ", ".join(way for way, has in ways.items() if has)


EMBEDDINGS, TRANSCRIPTS = "embeddings", "transcripts"


def served_types() -> list[ServedType]:
    own = [
        ServedType(name, media, "own", OWN_MEDIA if media else OWN)
        for name, media in SUPPORTED.items()
    ]
    own += [
        ServedType(name, media, "own", VECTORS, EMBEDDINGS) for name, media in EMBEDDERS.items()
    ]
    general = [ServedType(name, (), "general", GENERAL) for name in GENERAL_TEXT]
    general += [ServedType(name, media, "general", MEDIA) for name, media in GENERAL_MEDIA.items()]
    return sorted(each.told() for each in own + general)


def _refused_types() -> list[dict[str, object]]:
    """Rows with the fields of `ServedType`, which are null but for the name."""
    reasons = (*UNSERVABLE.items(), *UNSERVABLE_MEDIA.items())
    empty = dict.fromkeys(ServedType._fields)
    return [
        {**empty, "model_type": name, "refused_because": reason}
        for reason, types in reasons
        for name in types
    ]


def print_models(named: str = "", *, as_json: bool) -> None:
    """Those whose `model_type` contains `named`."""
    rows = [row for row in served_types() if named in row.model_type]
    if as_json:
        served = [{**row._asdict(), "refused_because": None} for row in rows]
        refused = [row for row in _refused_types() if named in str(row["model_type"])]
        print(json.dumps([*served, *refused], indent=1))
        return
    _print_served(rows)
    if named:
        if not _print_refused(named) and not rows:
            print(
                f"no type that is listed as served has {named!r} in its name; others of "
                "transformers are tried when they are loaded"
            )
        return
    print(
        "\nWeights are read from safetensors, plain or quantized by "
        f"{', '.join(QUANTIZED)}; gpt-oss as MXFP4. GGUF: that, too (pip install 'lookonce[gguf]')."
        "\nLoRA: adapters by name (--lora). int8: --quantize int8, on the CPU."
        "\nPrefixes are found again on the device and in KV tiers (--kv-tier), which hold keys and "
        "values,\nand of types that keep them states or latents.\n"
    )
    _print_refused()
    print(
        f"\n{len(rows)} types are served. Other types of transformers are tried: loading compares "
        "them with transformers and refuses what differs."
    )


def _print_served(rows: list[ServedType]) -> None:
    columns = [(row.model_type, _media(row), row.served_by, row.beside()) for row in rows]
    widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
    for row, cells in zip(rows, columns, strict=True):
        only = f"{row.gives} only: " if row.gives in (EMBEDDINGS, TRANSCRIPTS) else ""
        padded = (f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
        print("  ".join((*padded, f"{only}{row.proven}")))


def _media(row: ServedType) -> str:
    return ", ".join(("text", *row.media))


def _print_refused(named: str = "") -> bool:
    """Whether there are any."""
    any_found = False
    for reason, types in (*UNSERVABLE.items(), *UNSERVABLE_MEDIA.items()):
        found = [name for name in types if named in name]
        if found:
            any_found = True
            print(f"not served, {reason}: {', '.join(found)}")
    return any_found
