"""The engine process: `python -m lookonce.engine.process`, started by a supervisor."""

from __future__ import annotations

from lookonce.engine.build import build_engine
from lookonce.engine.hosting import host_engine

if __name__ == "__main__":
    host_engine(build_engine)
