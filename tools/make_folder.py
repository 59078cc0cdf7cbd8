"""Writes a complete Hugging Face folder with random weights, as tests and benchmarks serve them.

    .venv/bin/python tools/make_folder.py qwen2_5_vl ./qwen-8m --scale 8m --dtype bfloat16
    .venv/bin/lookonce serve ./qwen-8m --dtype bfloat16

The same kind, scale, type and seed give the same folder. Kinds and scales: --help. Types without a
family of their own are `text:TYPE` and `media:TYPE`, as text:olmo2 and media:llava_next.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs from any folder

from lookonce.types.model import GENERAL_TEXT as GENERAL_TEXT_TYPES
from tests.support.model_folders.base import SCALES
from tests.support.model_folders.make import (
    GENERAL_MEDIA,
    GENERAL_MEDIA_KINDS,
    GENERAL_TEXT,
    KINDS,
    make_folder,
)

DTYPES = ("float32", "bfloat16")
ALL_KINDS = (
    *sorted(KINDS),
    *sorted(GENERAL_TEXT + name for name in GENERAL_TEXT_TYPES),
    *sorted(GENERAL_MEDIA + name for name in GENERAL_MEDIA_KINDS),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="kinds: " + " ".join(ALL_KINDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", metavar="KIND", choices=ALL_KINDS, help="listed below")
    parser.add_argument("folder", type=Path, help="must not exist, or be empty")
    parser.add_argument("--scale", choices=sorted(SCALES), default="tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.folder.exists() and any(options.folder.iterdir()):
        print(f"{options.folder} is not empty", file=sys.stderr)
        return 2
    folder = make_folder(
        options.kind, options.folder, seed=options.seed, scale=options.scale, dtype=options.dtype
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
