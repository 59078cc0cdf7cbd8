"""How to sample: what a client may ask for, checked once at the door."""

from __future__ import annotations

import math

import msgspec

from lookonce.errors import BadRequestError
from lookonce.types.grammar import Grammar


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling controls of one request, in OpenAI's and vLLM's terms.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps all. `logprobs` is the number of alternatives
    to report beside the sampled token (None: no logprobs at all); `prompt_logprobs` asks the same
    of the prompt's tokens, all of which are then computed. `max_tokens` None means up to the
    model's length. `seed` makes a request's draws independent of what else is in the batch; sample
    `i` of `n` uses `seed + i`. Raises `BadRequestError` naming the field.
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
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _between("n", self.n, 1, 128)
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("top_k", self.top_k, -1, 2**31 - 1)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _between("seed", self.seed, -(2**63), 2**63 - 1)
        _between("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _between("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _between("logprobs", self.logprobs, 0, 20)
        _between("prompt_logprobs", self.prompt_logprobs, 0, 20)
        for token, bias in (self.logit_bias or {}).items():
            _between(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if len(self.stop) > 16:
            raise BadRequestError("stop takes at most 16 strings", param="stop")
        if any(not text for text in self.stop):
            raise BadRequestError("stop strings must not be empty", param="stop")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequestError("min_tokens is larger than max_tokens", param="min_tokens")
        if self.grammar is not None:
            self._check_grammar(self.grammar)

    def _check_grammar(self, grammar: Grammar) -> None:
        """A grammar decides when a sample ends, and nothing else may."""
        for name, asked in {"ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens}.items():
            if asked:
                raise BadRequestError(f"{name} cannot be used with {grammar.param}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


def _between(
    name: str, value: float | None, low: float, high: float, *, open_low: bool = False
) -> None:
    if value is None:
        return
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise BadRequestError(
            f"{name} must be in {bracket}{low}, {high}], got {value}", param=name.split("[")[0]
        )
