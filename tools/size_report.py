"""Report files over 400 lines and functions over 60: where to look for a better cut, no failure."""

from __future__ import annotations

import ast
from pathlib import Path

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def main() -> None:
    found = []
    for path in sorted(Path("lookonce").rglob("*.py")):
        source = path.read_text()
        lines = source.count("\n")
        if lines > MAX_FILE_LINES:
            found.append(f"  {path}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"  {path}:{node.lineno} {node.name}: {length} lines")
    print("\n".join(["Size report:", *(found or ["  nothing over the marks"])]))


if __name__ == "__main__":
    main()
