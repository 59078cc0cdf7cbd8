"""What stands in for an engine where none is needed: nothing is ever generated there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from lookonce.engine.client.sender_cache import DISABLED, InjectionOutcome
from lookonce.errors import NotReadyError
from lookonce.frontend.services import EngineState
from lookonce.types.media import ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import RenderedPrompt, TokenDelta
from lookonce.types.sampling import SamplingParams


class NoEngine:
    """An `Engine` without weights and caches. Asked to generate, it raises `NotReadyError`."""

    state: EngineState = "ready"

    @property
    def model(self) -> ModelInfo:
        raise _none()

    def generate(
        self, rendered: RenderedPrompt, sampling: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        raise _none()

    async def wait_ready(self) -> None:
        return

    async def abort(self, request_id: str, index: int | None = None) -> None:
        return

    async def inject_items(
        self, items: Sequence[tuple[bytes, ProcessedItem]]
    ) -> list[InjectionOutcome]:
        return [DISABLED] * len(items)

    async def stats(self) -> dict[str, float]:
        return {}

    async def reset_cache(self, tier: str) -> None:
        return


def _none() -> NotReadyError:
    return NotReadyError("this server renders and does not generate")
