"""Fuzz one parser with atheris, guided by the coverage of lookonce's own code.

    python tools/fuzz.py                      the names of the parsers
    python tools/fuzz.py http --seconds 60    one of them; findings stay in build/fuzz/

A finding is a file that breaks a rule of `tests/support/fuzz_targets.py`. Once it is mended, put
the file, made small, into tests/fuzz/corpus/NAME, where the tests try it again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "build" / "fuzz"
MAX_BYTES = 16_384
MAX_SECONDS = 5
MAX_MEBIBYTES = 4096
"""What one input may take."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("--seconds", type=int, default=60)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import atheris

    with atheris.instrument_imports(include=["lookonce"]):
        from tests.support.fuzz_targets import TARGETS
    if given.target is None:
        print(*sorted(TARGETS), sep="\n")
        return 0
    chosen = TARGETS[given.target]
    corpus = FOUND / given.target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(chosen.corpus()):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={given.seconds}",
        f"-max_len={MAX_BYTES}",
        f"-timeout={MAX_SECONDS}",
        f"-rss_limit_mb={MAX_MEBIBYTES}",
        f"-artifact_prefix={FOUND}/{given.target}-",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup(options, chosen.check)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
