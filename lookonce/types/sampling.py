"""Sampling parameters and grammars, as a client asks for them and as the sampler uses them."""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

import msgspec
import numpy as np
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from lookonce.errors import BadRequestError

JSON_SPACES = r" |\r?\n[ \t]{0,64}"
"""Between the tokens of JSON: one space or an indented line, so that it cannot go on forever."""
MAX_GRAMMAR_BYTES = 256 << 10
"""Most bytes of any grammar: a schema as JSON, choices as a JSON list, a regex, Lark or GBNF, and
what tools make (their schemas together)."""
MAX_PARAM = 200
"""Characters of the name of a grammar's field."""
MOST_REPETITION = 100.0
"""Largest repetition penalty, and one over the smallest: logits are divided by it in float32."""
MAX_BIASES = 65_536
"""Most token ids of `logit_bias`: each is read in Python."""
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
    """The grammars that a "lark" one was made of: an error names the one that does not compile."""
    before: str = ""
    """Lark: a sample's text up to where the grammar begins, which is written `@answer`; empty: it
    begins at once."""

    def __post_init__(self) -> None:
        """Raises `BadRequestError` for what the engine could not read."""
        if self.kind not in get_args(Kind):
            raise BadRequestError(f"there is no grammar of kind {self.kind!r:.40}", param="grammar")
        if any(type(text) is not str for text in (self.source, self.param, self.before)):
            raise BadRequestError(
                "a grammar's source, param and before must be strings", param="grammar"
            )
        if max(len(self.param), len(self.before)) > MAX_PARAM:
            raise BadRequestError("a grammar's param or before is too long", param="grammar")
        if any(part.parts for part in self.parts):
            raise BadRequestError("the parts of a grammar have no parts", param="grammar")
        for nbytes in (self.nbytes, sum(part.nbytes for part in self.parts)):
            if nbytes > MAX_GRAMMAR_BYTES:
                raise too_large_grammar(nbytes, self.param)

    @property
    def nbytes(self) -> int:
        """Bytes of the source."""
        count = len(self.source)
        if count > MAX_GRAMMAR_BYTES or self.source.isascii():
            return count
        return len(self.source.encode("utf-8", "surrogatepass"))


def too_large_grammar(nbytes: int, param: str) -> BadRequestError:
    return BadRequestError(
        f"{param}: {nbytes} bytes; a grammar, with all its schemas, choices or rules, has at most "
        f"{MAX_GRAMMAR_BYTES}",
        param=param,
        code="grammar_too_large",
    )


class GrammarState(Protocol):
    """The state of one sequence in its grammar; used by the step thread alone."""

    @property
    def error(self) -> str | None:
        """Why the grammar cannot tell any more which tokens may come next; None: it can."""

    def fill(self, allowed: NDArray[np.uint8]) -> None:
        """Set bit `t % 8` of byte `t // 8` for every token `t` that may come next, and no other.

        `allowed` is contiguous and has a multiple of 4 bytes.
        """

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token."""


class CompiledGrammar(Protocol):
    """Made once for all requests of a tenant that ask for it, off the step thread."""

    nbytes: int
    """Memory it holds."""

    def start(self) -> GrammarState: ...


MAX_ALIGNMENT_HEADS = 4096


class TokenRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens a speech model may write, and where: Whisper's rules, as transformers' logits
    processors have them. Ids outside the vocabulary are ignored."""

    only: tuple[int, ...] = ()
    """If not empty, no other token may come. Log-probabilities are still those of all tokens."""
    suppressed: tuple[int, ...] = ()
    """Never written."""
    suppressed_first: tuple[int, ...] = ()
    """Not written as the first generated token."""
    timestamp_begin: int | None = None
    """The first timestamp: ids from here on are times, in pairs around text, which never decrease;
    they come first, and wherever all together are likelier than any other token. None: no rule."""
    max_initial_timestamp: int | None = None
    """How many timestamps after the first one the text may begin at most; None: any."""
    text_end: int = 0
    """Ids below are text."""

    def __post_init__(self) -> None:
        """Raises `BadRequestError` for what is no token id."""
        for name in ("only", "suppressed", "suppressed_first"):
            if not all(type(token) is int for token in getattr(self, name)):
                raise BadRequestError(f"token_rules.{name} takes token ids", param="token_rules")


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """Asks when each token of a prompt was spoken (`model.alignment`)."""

    heads: tuple[tuple[int, int], ...]
    """(layer, head) of the decoder's cross-attention."""
    start: int
    """Index of the first token to align."""
    positions: int
    """Leading positions of the input that have sound."""
    filter_width: int = 7

    def __post_init__(self) -> None:
        """Raises `BadRequestError`."""
        odd = self.filter_width > 0 and self.filter_width % 2 == 1
        if not self.heads or self.start < 0 or self.positions < 1 or not odd:
            raise BadRequestError("alignment is not valid", param="alignment")
        if len(self.heads) > MAX_ALIGNMENT_HEADS or len(set(self.heads)) < len(self.heads):
            raise BadRequestError(
                f"alignment.heads takes at most {MAX_ALIGNMENT_HEADS} heads, each once",
                param="alignment",
            )
        if any(number < 0 for head in self.heads for number in head):
            raise BadRequestError("alignment.heads takes (layer, head)", param="alignment")


_WHOLE = {int: "a whole number"}
_NUMBER = {int: "a number", float: "a number"}
_TEXT = {str: "a string"}
_FLAG = {bool: "true or false"}
_NOTHING = {type(None): "none"}
_TYPES: dict[str, dict[Any, str]] = {
    "n": _WHOLE,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE,
    "min_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "logit_bias": {dict: "a mapping"} | _NOTHING,
    "seed": _WHOLE | _NOTHING,
    "stop": _TEXT | {tuple: "a list of strings", list: "a list of strings"},
    "allowed_token_ids": {tuple: "a list of whole numbers", list: "a list of whole numbers"},
    "stop_token_ids": {tuple: "a list of whole numbers", list: "a list of whole numbers"},
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "max_tokens": _WHOLE | _NOTHING,
    "min_tokens": _WHOLE,
    "logprobs": _WHOLE | _NOTHING,
    "prompt_logprobs": _WHOLE | _NOTHING,
    "skip_special_tokens": _FLAG,
    "grammar": {Grammar: "a Grammar"} | _NOTHING,
    "alignment": {Alignment: "Alignment"} | _NOTHING,
    "token_rules": {TokenRules: "TokenRules"} | _NOTHING,
}
"""What each field takes: exact type → its name for people."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling controls of one request, in OpenAI's and vLLM's terms.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps all. `logprobs` is the number of alternatives
    to report beside the sampled token (None: no logprobs at all); `prompt_logprobs` asks the same
    of the prompt's tokens, all of which are then computed. `max_tokens` None means up to the
    model's length. `seed` makes a request's draws independent of what else is in the batch; sample
    `i` of `n` uses `seed + i`. `stop` and `stop_token_ids` take a list too, and `stop` one string.
    Raises `BadRequestError` naming the field, also for a value of another type than the field's:
    the engine could not read it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be generated; empty: all."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    token_rules: TokenRules | None = None
    alignment: Alignment | None = None
    """Only with `prompt_logprobs`, for which the whole prompt is computed."""

    def __post_init__(self) -> None:
        self._check_types()
        _between("n", self.n, 1, 128)
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("top_k", self.top_k, -1, 2**31 - 1)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between(
            "repetition_penalty", self.repetition_penalty, 1 / MOST_REPETITION, MOST_REPETITION
        )
        _between("seed", self.seed, -(2**63), 2**63 - 1)
        _between("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _between("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _between("logprobs", self.logprobs, 0, 20)
        _between("prompt_logprobs", self.prompt_logprobs, 0, 20)
        check_num_biases(len(self.logit_bias or ()))
        for token, bias in (self.logit_bias or {}).items():
            if type(token) not in _WHOLE or type(bias) not in _NUMBER:
                raise _wrong("logit_bias", "whole numbers (token ids) to numbers", {token: bias})
            if not -100.0 <= bias <= 100.0:
                _between(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if len(self.stop) > 16:
            raise BadRequestError("stop takes at most 16 strings", param="stop")
        if any(not text for text in self.stop):
            raise BadRequestError("stop strings must not be empty", param="stop")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequestError("min_tokens is larger than max_tokens", param="min_tokens")
        if self.alignment is not None and self.prompt_logprobs is None:
            raise BadRequestError("alignment needs prompt_logprobs", param="alignment")
        if self.grammar is not None:
            self._check_grammar(self.grammar)

    def _check_types(self) -> None:
        """Exact types, for a bool is no number here and a float no count."""
        for name, types in _TYPES.items():
            if type(getattr(self, name)) not in types:
                raise _wrong(name, " or ".join(dict.fromkeys(types.values())), getattr(self, name))
        stop: object = self.stop
        if not isinstance(stop, tuple):
            force_setattr(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        for name in ("stop_token_ids", "allowed_token_ids"):
            token_ids = getattr(self, name)
            if type(token_ids) is not tuple:
                force_setattr(self, name, token_ids := tuple(token_ids))
            if not all(type(token) is int for token in token_ids):
                raise _wrong(name, "whole numbers alone", token_ids)
        if not all(type(text) is str for text in self.stop):
            raise _wrong("stop", "strings alone", self.stop)

    def _check_grammar(self, grammar: Grammar) -> None:
        """A grammar decides when a sample ends, and nothing else may."""
        alone = ("ignore_eos", "min_tokens", "allowed_token_ids")
        for name, asked in {name: getattr(self, name) for name in alone}.items():
            if asked:
                raise BadRequestError(f"{name} cannot be used with {grammar.param}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


def check_num_biases(count: int) -> None:
    """Raises `BadRequestError` for more than `MAX_BIASES`."""
    if count > MAX_BIASES:
        raise BadRequestError(
            f"logit_bias: {count} token ids, {MAX_BIASES} are allowed", param="logit_bias"
        )


def _wrong(name: str, wanted: str, value: object) -> BadRequestError:
    return BadRequestError(f"{name} must be {wanted}, got {value!r:.40}", param=name)


def _between(
    name: str, value: float | None, low: float, high: float, *, open_low: bool = False
) -> None:
    if value is None:
        return
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise BadRequestError(
            f"{name} must be in {bracket}{low}, {high}], got {value!r:.40}",
            param=name.split("[")[0],
        )
