"""The formats that models write tool calls in, and which of them a model uses."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.frontend.tools import harmony
from lookonce.frontend.tools.json_calls import (
    ARGS,
    CALL_ID,
    END_TOOL_CALL,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALLS,
    HermesParser,
    Llama3Parser,
    MistralParser,
)
from lookonce.frontend.tools.parser import ToolParser
from lookonce.frontend.tools.qwen3_coder import FUNCTION, PARAMETER, Qwen3CoderParser

ALPHABET = string.ascii_letters + string.digits
Schemas = Mapping[str, Mapping[str, Any]]
"""Function name → JSON schema of its parameters."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls."""

    name: str
    markers: tuple[str, ...]
    """Tokens that stay in the text even where they are special tokens."""
    parser: Callable[[Schemas], ToolParser]
    """Makes a parser of one sample, given the functions that may be called."""
    arguments_key: str
    always: bool = False
    """Answers are written in the format with or without tools."""
    ends: tuple[str, ...] = ()
    """Markers that end an answer."""
    describes: bool = False
    """The models' templates expect that every function has a description."""
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
        parser=lambda schemas: HermesParser(),  # never called: requests with tools are refused
        arguments_key="",
    ),
    "hermes": ToolFormat(
        name="hermes",
        markers=(TOOL_CALL, END_TOOL_CALL),
        parser=lambda schemas: HermesParser(),
        arguments_key="arguments",
    ),
    "llama3": ToolFormat(
        name="llama3",
        markers=(PYTHON_TAG,),
        parser=lambda schemas: Llama3Parser(schemas.__contains__),
        arguments_key="parameters",
    ),
    "qwen3_coder": ToolFormat(
        name="qwen3_coder",
        markers=(TOOL_CALL, END_TOOL_CALL),
        parser=Qwen3CoderParser,
        arguments_key="arguments",
    ),
    "mistral": ToolFormat(
        name="mistral",
        markers=(TOOL_CALLS, CALL_ID, ARGS),
        parser=lambda schemas: MistralParser(),
        arguments_key="arguments",
        id_prefix="",
        id_length=9,  # Mistral's templates accept no other
    ),
    "harmony": ToolFormat(
        name="harmony",
        markers=harmony.MARKERS,
        parser=lambda schemas: harmony.HarmonyParser(calls=bool(schemas)),
        arguments_key="",
        always=True,
        ends=(harmony.RETURN, harmony.CALL),
        describes=True,
    ),
}


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """A format as one model uses it."""

    format: ToolFormat
    special: Mapping[str, int]
    """Markers that are special tokens → their ids."""
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
    """The dialect for an option `--tool-call-parser` and a chat template; None where answers are
    plain text and the template has no place for tools.

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
    return ToolDialect(chosen, special, ARGS in template, refusal)


def _written_in(template: str) -> str:
    """The template writes earlier calls as the model writes its own."""
    if harmony.CHANNEL in template:
        return "harmony"
    if TOOL_CALLS in template:
        return "mistral"
    if FUNCTION in template:
        tags = (TOOL_CALL, PARAMETER)  # Functionary's and Seed's calls look alike
        return "qwen3_coder" if all(tag in template for tag in tags) else "unknown"
    if TOOL_CALL in template:
        return "unknown" if any(other in template for other in NOT_HERMES) else "hermes"
    llama = PYTHON_TAG in template or "ipython" in template or '"parameters"' in template
    return "llama3" if llama else "unknown"
