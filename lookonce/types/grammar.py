"""What an answer may look like: as a client asks for it, and as the sampler follows it."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.errors import BadRequestError

JSON_SPACES = r" |\r?\n[ \t]{0,64}"
"""Between the tokens of JSON: one space or an indented line, so that it cannot go on forever."""


Kind = Literal["json_schema", "regex", "choice", "grammar", "lark"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What every sample must conform to, as source that the engine compiles."""

    kind: Kind
    source: str
    """The JSON schema or the list of choices as JSON text, the regex, or the grammar.

    A "grammar" is a client's, in Lark or GBNF; "lark" is ours."""
    param: str = "grammar"
    """The request's field it came from, which an error names."""
    parts: tuple[Grammar, ...] = ()
    """What "lark" was made of: where the whole cannot be, the part at fault is named."""

    def __post_init__(self) -> None:
        """Raises `BadRequestError` for what the engine could not read."""
        if self.kind not in get_args(Kind):
            raise BadRequestError(f"there is no grammar of kind {self.kind!r:.40}", param="grammar")
        if type(self.source) is not str or type(self.param) is not str:
            raise BadRequestError("a grammar's source and param must be strings", param="grammar")


class GrammarState(Protocol):
    """Where one sequence stands in its grammar; used by the step thread alone."""

    @property
    def error(self) -> str | None:
        """Why nothing more can be said about what may come next."""

    def fill(self, allowed: NDArray[np.uint8]) -> None:
        """Set bit `t % 8` of byte `t // 8` for every token `t` that may come next, and no other.

        `allowed` is contiguous and has a multiple of 4 bytes.
        """

    def accept(self, token_id: int) -> None:
        """Move on by a token that came."""


class CompiledGrammar(Protocol):
    """Made once per request, off the step thread."""

    def start(self) -> GrammarState: ...
