"""What `lookonce models` says of a type, against the model that was loaded."""

from __future__ import annotations

from torch import nn

from lookonce.cli.models import served_types
from lookonce.model.loader import LoadedModel
from lookonce.model.lora_files import adaptable_layers, why_no_adapters


def assert_as_listed(loaded: LoadedModel) -> None:
    family, info = loaded.family, loaded.info
    (row,) = (each for each in served_types() if each.model_type == info.model_type)
    has_linear = any(type(module) is nn.Linear for module in family.decoder.modules())
    takes_adapters = why_no_adapters(family) is None and bool(adaptable_layers(family).decoder)
    keeps = "keys and values"
    if info.state_bytes:
        keeps = "keys, values and states"
    elif family.kv_layout(16, loaded.dtype).shared:
        keeps = "latents"
    assert (row.int8, row.lora, row.keeps) == (has_linear, takes_adapters, keeps)
