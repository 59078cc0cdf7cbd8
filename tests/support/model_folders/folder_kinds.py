"""Every kind of random folder, by name."""

from __future__ import annotations

from tests.support.model_folders.folder_base import FolderKind
from tests.support.model_folders.folder_qwen import QWEN_KINDS
from tests.support.model_folders.folder_sound import SOUND_KINDS
from tests.support.model_folders.folder_text import TEXT_KINDS
from tests.support.model_folders.folder_vision import VISION_KINDS

KINDS: dict[str, FolderKind] = {**TEXT_KINDS, **VISION_KINDS, **QWEN_KINDS, **SOUND_KINDS}
