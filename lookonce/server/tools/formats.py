"""The call formats, and which of them a model speaks."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from lookonce.server.tools import hermes, llama3, mistral
from lookonce.server.tools.deltas import ToolParser

ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    `markers`: tokens that must stay readable where they are special ones. `id_length`: Mistral's
    templates take ids of nine letters only.
    """

    name: str
    markers: tuple[str, ...]
    parser: Callable[[Collection[str]], ToolParser]
    """From the names of the declared functions."""
    arguments_key: str
    id_prefix: str = "call_"
    id_length: int = 24

    def call_id(self) -> str:
        return self.id_prefix + "".join(secrets.choice(ALPHABET) for _ in range(self.id_length))


FORMATS = {
    "hermes": ToolFormat(
        name="hermes",
        markers=(hermes.OPEN, hermes.CLOSE),
        parser=lambda names: hermes.HermesParser(),
        arguments_key="arguments",
    ),
    "llama3": ToolFormat(
        name="llama3",
        markers=(llama3.TAG,),
        parser=lambda names: llama3.Llama3Parser(names.__contains__),
        arguments_key="parameters",
    ),
    "mistral": ToolFormat(
        name="mistral",
        markers=(mistral.MARKER, mistral.CALL_ID, mistral.ARGS),
        parser=lambda names: mistral.MistralParser(),
        arguments_key="arguments",
        id_prefix="",
        id_length=9,
    ),
}


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """A format as one model speaks it. `special`: markers that are special tokens → their ids."""

    format: ToolFormat
    special: Mapping[str, int]
    writes_args: bool = False
    """Mistral's newer way: name and arguments apart."""


def choose_dialect(
    option: str, template: str | None, special_tokens: Mapping[str, int]
) -> ToolDialect | None:
    """For `--tool-call-parser`; None where the chat template has no place for tools.

    `special_tokens` is text → id of all of the tokenizer's special tokens.
    """
    if template is None or "tools" not in template:
        return None
    chosen = FORMATS[_written_in(template) if option == "auto" else option]
    special = {text: special_tokens[text] for text in chosen.markers if text in special_tokens}
    return ToolDialect(chosen, special, writes_args=mistral.ARGS in template)


def _written_in(template: str) -> str:
    """The template writes earlier calls as the model writes its own."""
    if mistral.MARKER in template:
        return "mistral"
    if hermes.OPEN in template:
        return "hermes"
    llama = llama3.TAG in template or "ipython" in template or '"parameters"' in template
    return "llama3" if llama else "hermes"
