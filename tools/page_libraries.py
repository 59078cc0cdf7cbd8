"""Brings the libraries of the web page from npm into `lookonce/server/static`, and lists them.

    python tools/page_libraries.py          # needs npm; `git diff` then says what changed

A library is one file of its package as published, at most with a line added or removed that is
named here. `libraries.txt` has version, licence and SHA-256 of each; a test compares the files
with it.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "lookonce" / "server" / "static"
LIST = FOLDER / "libraries.txt"


@dataclass(frozen=True)
class Library:
    package: str
    version: str
    source: str
    """The file in the package."""
    licence: str
    """The file with the licence in the package."""
    does: str
    change: str
    """What differs from the published file, in words."""
    without: str = ""
    """A line that begins so is left out."""
    added: str = ""
    file: str = ""
    """Its name in `FOLDER`, where that is not the package's."""

    @property
    def name(self) -> str:
        """Of the file in `FOLDER`."""
        return self.file or f"{self.package}.js"


LIBRARIES = (
    Library(
        "marked", "18.2.1", "lib/marked.esm.js", "LICENSE", "reads Markdown",
        "the line that names a source map is left out", without="//# sourceMappingURL",
    ),
    Library(
        "temml", "0.13.5", "dist/temml.min.js", "LICENSE", "makes MathML of TeX",
        "`export default temml;` is added", added="\nexport default temml;\n",
    ),
    Library(
        "@highlightjs/cdn-assets", "11.12.0", "es/highlight.min.js", "LICENSE",
        "tells the parts of code apart", "nothing differs", file="highlight.js",
    ),
)  # fmt: skip


def bring(library: Library, folder: Path) -> tuple[str, str, str]:
    """The file's text, the licence's text and its SPDX name."""
    wanted = f"{library.package}@{library.version}"
    command = ("npm", "pack", wanted, "--silent", "--pack-destination", str(folder))
    archive = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    with tarfile.open(folder / archive) as package:

        def text(name: str) -> str:
            file = package.extractfile(f"package/{name}")
            assert file is not None, name
            return file.read().decode()

        source, licence = text(library.source), text(library.licence)
        name = json.loads(text("package.json"))["license"]
    if library.without:
        kept = [line for line in source.split("\n") if not line.startswith(library.without)]
        source = "\n".join(kept)
    return source + library.added, licence, name


def main() -> None:
    told = ["Libraries of this page, which are served from here and loaded from nowhere else.\n"]
    with tempfile.TemporaryDirectory() as folder:
        for library in LIBRARIES:
            source, licence, name = bring(library, Path(folder))
            (FOLDER / library.name).write_text(source)
            digest = hashlib.sha256(source.encode()).hexdigest()
            told.append(
                f"{library.name}: {library.package} {library.version}, {name}. It {library.does}. "
                f"Of its file {library.source} {library.change}.\nSHA-256 {digest}\n\n{licence}"
            )
    LIST.write_text(f"\n{'-' * 80}\n\n".join(told))
    print(f"wrote {len(LIBRARIES)} libraries and {LIST.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
