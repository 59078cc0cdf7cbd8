"""The call formats, and which of them a model speaks."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lookonce.frontend.tools import harmony, hermes, llama3, mistral, qwen3_coder
from lookonce.frontend.tools.asked import AskedTools
from lookonce.frontend.tools.deltas import ToolParser

ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    `markers`: tokens that must stay readable where they are special ones. `id_length`: Mistral's
    templates take ids of nine letters only.
    """

    name: str
    markers: tuple[str, ...]
    parser: Callable[[AskedTools], ToolParser]
    arguments_key: str
    always: bool = False
    """Answers are written in it with or without tools."""
    ends: tuple[str, ...] = ()
    """Markers that end an answer."""
    describes: bool = False
    """The models' templates take it that every function has a description."""
    id_prefix: str = "call_"
    id_length: int = 24

    def call_id(self) -> str:
        return self.id_prefix + "".join(secrets.choice(ALPHABET) for _ in range(self.id_length))


NO_PLACE = (
    "the model's chat template has no place for tools; the server's option --chat-template can "
    "give it one"
)
UNKNOWN_FORMAT = (
    "how the model writes tool calls cannot be read off its chat template; the server's option "
    "--tool-call-parser can tell"
)
NOT_HERMES = ("<arg_key>", "<tool_sep>")
"""Other formats with the same marker around calls: GLM's, Hunyuan's."""

FORMATS = {
    "unknown": ToolFormat(
        name="unknown",
        markers=(),
        parser=lambda asked: hermes.HermesParser(),  # no request gets as far as that
        arguments_key="",
    ),
    "hermes": ToolFormat(
        name="hermes",
        markers=(hermes.OPEN, hermes.CLOSE),
        parser=lambda asked: hermes.HermesParser(),
        arguments_key="arguments",
    ),
    "llama3": ToolFormat(
        name="llama3",
        markers=(llama3.TAG,),
        parser=lambda asked: llama3.Llama3Parser(asked.names.__contains__),
        arguments_key="parameters",
    ),
    "qwen3_coder": ToolFormat(
        name="qwen3_coder",
        markers=(hermes.OPEN, hermes.CLOSE),
        parser=qwen3_coder.Qwen3CoderParser,
        arguments_key="arguments",
    ),
    "mistral": ToolFormat(
        name="mistral",
        markers=(mistral.MARKER, mistral.CALL_ID, mistral.ARGS),
        parser=lambda asked: mistral.MistralParser(),
        arguments_key="arguments",
        id_prefix="",
        id_length=9,
    ),
    "harmony": ToolFormat(
        name="harmony",
        markers=harmony.MARKERS,
        parser=lambda asked: harmony.HarmonyParser(calls=bool(asked.functions)),
        arguments_key="",
        always=True,
        ends=(harmony.RETURN, harmony.CALL),
        describes=True,
    ),
}


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """A format as one model speaks it. `special`: markers that are special tokens → their ids."""

    format: ToolFormat
    special: Mapping[str, int]
    writes_args: bool = False
    """Mistral's newer way: name and arguments apart."""
    refusal: str = ""
    """Why no tools can be used."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer, whether or not the model's configuration says so."""
        return tuple(self.special[text] for text in self.format.ends if text in self.special)


def choose_dialect(
    option: str, template: str | None, special_tokens: Mapping[str, int]
) -> ToolDialect | None:
    """For `--tool-call-parser`; None where answers are text and the chat template has no place for
    tools.

    `special_tokens` is text → id of all of the tokenizer's special tokens.
    """
    template = template or ""
    chosen = FORMATS[_written_in(template) if option == "auto" else option]
    refusal = UNKNOWN_FORMAT if chosen.name == "unknown" else ""
    if "tools" not in template:
        if not chosen.always:
            return None
        refusal = NO_PLACE
    special = {text: special_tokens[text] for text in chosen.markers if text in special_tokens}
    return ToolDialect(chosen, special, mistral.ARGS in template, refusal)


def _written_in(template: str) -> str:
    """The template writes earlier calls as the model writes its own."""
    if harmony.CHANNEL in template:
        return "harmony"
    if mistral.MARKER in template:
        return "mistral"
    if qwen3_coder.FUNCTION in template:
        tags = (hermes.OPEN, qwen3_coder.PARAMETER)  # Functionary's and Seed's calls look alike
        return "qwen3_coder" if all(tag in template for tag in tags) else "unknown"
    if hermes.OPEN in template:
        return "unknown" if any(other in template for other in NOT_HERMES) else "hermes"
    llama = llama3.TAG in template or "ipython" in template or '"parameters"' in template
    return "llama3" if llama else "unknown"
