"""Prints the licences of LookOnce and of every package that it is installed with, as Markdown.

    python tools/licences.py [EXTRA...] > LICENCES.md

Follows the requirements of the installed `lookonce`, with the extras that are named, through the
metadata of this environment. A package without a stated licence ends the list with status 1.
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

UNKNOWN = "not stated"


def installed_with(name: str, extras: frozenset[str]) -> list[Distribution]:
    """The distributions of `name` and of all that it requires here, by name."""
    found: dict[str, Distribution] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    waiting = [(name, extras)]
    while waiting:
        wanted, its_extras = waiting.pop()
        key = (normalized(wanted), its_extras)
        if key in visited:
            continue
        visited.add(key)
        try:
            package = distribution(wanted)
        except PackageNotFoundError:  # of another system, or of an extra that is not installed
            continue
        found[key[0]] = package
        waiting += requirements(package, its_extras)
    return [found[key] for key in sorted(found)]


def requirements(package: Distribution, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """Name and extras of what a package requires, its own `extras` included."""
    needed = []
    for line in package.requires or ():
        requirement, _, marker = line.partition(";")
        of_extras = set(re.findall(r"""extra\s*==\s*['"]([^'"]+)['"]""", marker))
        if of_extras and not of_extras & extras:
            continue
        match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", requirement)
        if match:
            listed = (match[2] or "").split(",")
            needed.append((match[1], frozenset(filter(None, map(str.strip, listed)))))
    return needed


def licence(package: Distribution) -> str:
    """As the metadata states it: an SPDX expression, a classifier, or the first line of a text."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or ()
        if line.startswith("License ::") and not line.endswith("OSI Approved")
    ]
    if classifiers:
        return ", ".join(sorted(set(classifiers)))
    text = str(metadata.get("License") or "").strip()
    return text.splitlines()[0][:80] if text else UNKNOWN


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(extras: list[str]) -> int:
    packages = installed_with("lookonce", frozenset(extras))
    print("| package | version | licence |\n|---|---|---|")
    rows = [(normalized(p.metadata["Name"]), p.version, licence(p)) for p in packages]
    for name, version, its_licence in rows:
        print(f"| {name} | {version} | {its_licence} |")
    return int(any(row[2] == UNKNOWN for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
