"""Every kind of random folder, by name."""

from __future__ import annotations

from lookonce.bench.folder_base import FolderKind
from lookonce.bench.folder_media import MEDIA_KINDS
from lookonce.bench.folder_text import TEXT_KINDS

KINDS: dict[str, FolderKind] = {**TEXT_KINDS, **MEDIA_KINDS}
