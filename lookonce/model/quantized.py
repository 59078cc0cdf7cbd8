"""Weights that were published in fewer bits: unpacked on loading, or refused by name.

What is unpacked has the model's own modules and dtype, so everything else holds for it. Weights of
a method that transformers does not know it would take for plain ones, without their scales.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lookonce.errors import ModelLoadError

Json = dict[str, Any]

UNPACKED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""`quant_method` of a config → the class in transformers that can be told to unpack."""
NEED_ACCELERATE = ("fp8",)
"""Methods for which transformers asks for it before anything else, though it unpacks without."""


def unpacking(raw_config: Json) -> Json:
    """Keyword arguments of `from_pretrained` that unpack such weights; none for plain ones.

    Raises `ModelLoadError` for a method that is not unpacked here, naming those that are.
    """
    declared = _declared(raw_config)
    if declared is None:
        return {}
    method = declared.get("quant_method")
    if method not in UNPACKED:
        raise ModelLoadError(
            f"weights quantized by {method!r} are not supported; supported are "
            f"{', '.join(sorted(UNPACKED))}, and weights that are not quantized"
        )
    if method in NEED_ACCELERATE and find_spec("accelerate") is None:
        raise ModelLoadError(
            f"weights quantized by {method!r} need the optional extra: "
            "pip install 'lookonce[quantized]'"
        )
    config_class = getattr(import_module("transformers"), UNPACKED[method])
    return {"quantization_config": config_class(dequantize=True)}


def _declared(raw_config: Json) -> Json | None:
    """Where transformers looks: in the config, of Omni the thinker's, and in its text part."""
    config = raw_config.get("thinker_config") or raw_config
    text_config = config.get("text_config") or {}
    declared: Json | None = config.get("quantization_config") or text_config.get(
        "quantization_config"
    )
    return declared
