"""What a renderer has counted."""

from __future__ import annotations

from lookonce.render.media.resolver import RenderStats
from lookonce.render.renderer import Renderer


def counts_of(renderer: Renderer) -> dict[str, float]:
    """Counts of `RenderStats`, as `name:modality` → value."""
    stats = RenderStats() if renderer._resolver is None else renderer._resolver.stats
    return {
        f"{name}:{modality}": float(by_modality[modality])
        for name, by_modality in stats.by_name().items()
        for modality in renderer._encoder.placeholder_ids
    }
