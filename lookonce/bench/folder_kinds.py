"""Every kind of random folder, by name."""

from __future__ import annotations

from lookonce.bench.folder_base import FolderKind
from lookonce.bench.folder_qwen import QWEN_KINDS
from lookonce.bench.folder_sound import SOUND_KINDS
from lookonce.bench.folder_text import TEXT_KINDS
from lookonce.bench.folder_vision import VISION_KINDS

KINDS: dict[str, FolderKind] = {**TEXT_KINDS, **VISION_KINDS, **QWEN_KINDS, **SOUND_KINDS}
