"""From a request's sampling fields, and the model's own defaults, to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.frontend.closed_schemas import closed_schema
from lookonce.frontend.requests import (
    ChatOrCompletionFields,
    ChatRequest,
    CompletionRequest,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    Schema,
    StructuredFields,
    StructuredOutputs,
)
from lookonce.types.sampling import Grammar, SamplingParams, check_num_biases

MAX_CHOICES = 10_000
ANY_OBJECT = '{"type":"object"}'
COMPLETION_MAX_TOKENS = 16
"""What `/v1/completions` generates when the client names no limit (OpenAI's default)."""
LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")
"""The fields that limit the tokens to generate; of several the first counts."""


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What the model's `generation_config.json` recommends, and the server's own options.

    They are used where a request is silent."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    closed_schemas: bool = True
    """Objects of JSON schemas have no keys but those they declare."""

    def value(self, name: str) -> float | None:
        if name == "temperature" and self.do_sample is False:
            return 0.0
        found = getattr(self, name, None)
        return None if found is None else float(found)


def read_defaults(folder: str, *, closed_schemas: bool = True) -> SamplingDefaults:
    """The defaults in the model's `generation_config.json`, if it has such a file.

    Raises `ModelLoadError` for a file that is broken.
    """
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return SamplingDefaults(closed_schemas=closed_schemas)
    try:
        read = msgspec.json.decode(file.read_bytes(), type=SamplingDefaults, strict=False)
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"generation_config.json: {error}") from None
    return msgspec.structs.replace(read, closed_schemas=closed_schemas)


def names_limit(body: object) -> bool:
    """Whether the client set a limit of tokens to generate.

    A client's limit is refused where the context is too short for it; a limit that the server chose
    is shortened to what the context leaves.
    """
    # The body of `/generate` has no defaults.
    return not isinstance(body, SamplingFields) or asked_limit(body) is not None


def default_sampling(defaults: SamplingDefaults) -> SamplingParams:
    """The parameters of a chat request that sets none."""
    return _sampling(SamplingFields(), defaults, defaults.max_new_tokens, None, "logprobs")


def chat_sampling(request: ChatRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Raises `BadRequestError` naming the field."""
    if request.top_logprobs and not request.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    _check_best_of(request)
    limit = asked_limit(request)
    if limit is None:
        limit = defaults.max_new_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = _sampling(request, defaults, limit, logprobs, "top_logprobs")
    return _with_prompt_logprobs(sampling, request, request.prompt_logprobs)


def completion_sampling(request: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Raises `BadRequestError` naming the field."""
    _check_best_of(request)
    limit = asked_limit(request)
    if limit is None:
        limit = COMPLETION_MAX_TOKENS
    if request.echo and limit == 0:
        limit = 1  # the prompt's last token needs a step to be computed
    sampling = _sampling(request, defaults, limit, request.logprobs, "logprobs")
    asked = (request.prompt_logprobs, request.logprobs if request.echo else None)
    wanted = max((count for count in asked if count is not None), default=None)
    return _with_prompt_logprobs(sampling, request, wanted)


def response_sampling(
    request: SamplingFields, logprobs: int | None, defaults: SamplingDefaults
) -> SamplingParams:
    """Raises `BadRequestError` naming the field."""
    limit = asked_limit(request)
    if limit is None:
        limit = defaults.max_new_tokens
    try:
        return _sampling(request, defaults, limit, logprobs, "top_logprobs")
    except BadRequestError as error:
        if error.param != "max_tokens":
            raise
        message = error.message.replace("max_tokens", "max_output_tokens")
        raise BadRequestError(message, param="max_output_tokens") from None


def asked_limit(request: SamplingFields) -> int | None:
    """The client's limit of tokens to generate, if it set one."""
    return next((limit for _, limit in _asked_limits(request)), None)


def limit_name(body: object) -> str:
    """The field in which the client set it; `max_tokens` if it did not."""
    return next((name for name, _ in _asked_limits(body)), "max_tokens")


def _asked_limits(body: object) -> Iterator[tuple[str, int]]:
    for name in LIMITS:
        limit = getattr(body, name, None)
        if isinstance(limit, int):
            yield name, limit


def _check_best_of(request: ChatOrCompletionFields) -> None:
    if request.best_of not in (None, request.n or 1):
        raise BadRequestError("best_of is not supported beyond n", param="best_of")


def _with_prompt_logprobs(
    sampling: SamplingParams, request: ChatOrCompletionFields, wanted: int | None
) -> SamplingParams:
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequestError("prompt_logprobs needs stream to be false", param="prompt_logprobs")
    if wanted is None:
        return sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=wanted)


def _sampling(
    request: SamplingFields,
    defaults: SamplingDefaults,
    max_tokens: int | None,
    logprobs: int | None,
    logprobs_name: str,
) -> SamplingParams:
    given = {
        "n": request.n,
        "temperature": _first(request.temperature, defaults.value("temperature")),
        "top_p": _first(request.top_p, defaults.value("top_p")),
        "top_k": _first(request.top_k, defaults.top_k),
        "min_p": _first(request.min_p, defaults.value("min_p")),
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": _first(
            request.repetition_penalty, defaults.value("repetition_penalty")
        ),
        "logit_bias": _logit_bias(request.logit_bias),
        "seed": request.seed,
        "stop": request.stop,
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": request.allowed_token_ids,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "grammar": grammar_of(request, close=defaults.closed_schemas),
    }
    try:
        return SamplingParams(
            include_stop_str_in_output=request.include_stop_str_in_output,
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
            skip_special_tokens=request.skip_special_tokens,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
    except BadRequestError as error:
        param = error.param or ""
        own = {"logprobs": logprobs_name, "max_tokens": limit_name(request)}.get(param, param)
        if own == param:
            raise
        raise BadRequestError(error.message.replace(param, own, 1), param=own) from None


def _first(asked: float | None, default: float | None) -> float | None:
    return default if asked is None else asked


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """The same by token id: JSON's keys are text."""
    if not bias:
        return None
    check_num_biases(len(bias))
    tokens = {}
    for key, value in bias.items():
        if not key.isdecimal() or len(key) > 10:
            raise BadRequestError(f"logit_bias: {key[:20]!r} is not a token id", param="logit_bias")
        tokens[int(key)] = value
    return tokens


# --- structured outputs ---------------------------------------------------------------------------


def grammar_of(body: StructuredFields, *, close: bool = True) -> Grammar | None:
    """The grammar that the answer must follow; None where it may be anything.

    `close`: objects of JSON schemas are closed (see `closed_schemas`). Raises
    `BadRequestError` naming the field at fault.
    """
    found: list[Grammar] = []
    if body.response_format is not None:
        found += _of_format(body.response_format, "response_format", close)
    if body.structured_outputs is not None:
        found += _of_outputs(body.structured_outputs, "structured_outputs.", close)
    guided = StructuredOutputs(
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    found += _of_outputs(guided, "guided_", close)
    if len(found) > 1:
        names = " and ".join(grammar.param for grammar in found)
        raise BadRequestError(f"{names} cannot be used together", param=found[1].param)
    return found[0] if found else None


def _of_format(asked: ResponseFormat, param: str, close: bool) -> list[Grammar]:
    match asked:
        case ResponseFormat(type="text"):
            return []
        case ResponseFormat(type="json_object"):
            return [Grammar(kind="json_schema", source=ANY_OBJECT, param=param)]
        case ResponseFormat(type="json_schema"):
            return [schema_grammar(asked.json_schema, f"{param}.json_schema", close=close)]
    raise BadRequestError(
        f"{param}.type: {asked.type[:50]!r} is none of text, json_object, json_schema",
        param=f"{param}.type",
        code="unsupported_parameter",
    )


def schema_grammar(asked: JsonSchemaFormat | None, param: str, *, close: bool) -> Grammar:
    """Raises `BadRequestError` where the schema itself is missing."""
    if asked is None:
        raise BadRequestError(f"{param} is missing", param=param)
    if asked.schema is None:
        raise BadRequestError(f"{param}.schema is missing", param=f"{param}.schema")
    return _json_grammar(asked.schema, f"{param}.schema", close)


def _of_outputs(asked: StructuredOutputs, prefix: str, close: bool) -> list[Grammar]:
    found = []
    if asked.disable_additional_properties is not None:
        close = asked.disable_additional_properties
    if asked.json is not None:
        found.append(_json_grammar(asked.json, f"{prefix}json", close))
    if asked.regex is not None:
        found.append(Grammar(kind="regex", source=asked.regex, param=f"{prefix}regex"))
    if asked.choice is not None:
        found.append(_choice(asked.choice, f"{prefix}choice"))
    if asked.grammar is not None:
        found.append(Grammar(kind="grammar", source=asked.grammar, param=f"{prefix}grammar"))
    if asked.json_object:
        param = f"{prefix}json_object"
        found.append(Grammar(kind="json_schema", source=ANY_OBJECT, param=param))
    return found


def _json_grammar(schema: str | Schema, param: str, close: bool) -> Grammar:
    """A schema may come as JSON text, as vLLM takes it. Its size is judged before it is read or
    closed, which would take the event loop seconds of a schema of some megabytes."""
    if isinstance(schema, str):
        Grammar(kind="json_schema", source=schema, param=param)
        try:
            decoded: Schema = msgspec.json.decode(schema, type=Schema)
        except (ValueError, RecursionError):
            raise BadRequestError(f"{param}: not a JSON schema", param=param) from None
        schema = decoded
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    asked = Grammar(kind="json_schema", source=_json_text(schema, param), param=param)
    if not close:
        return asked
    source = _json_text(closed_schema(schema, param), param)
    return Grammar(kind="json_schema", source=source, param=param)


def _json_text(value: object, param: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (ValueError, RecursionError):
        raise BadRequestError(f"{param}: nested too deeply", param=param) from None


def _choice(choices: list[str], param: str) -> Grammar:
    if not choices or not all(choices):
        raise BadRequestError(f"{param}: at least one text, none of them empty", param=param)
    if len(choices) > MAX_CHOICES:
        raise BadRequestError(
            f"{param}: {len(choices)} choices, {MAX_CHOICES} are allowed", param=param
        )
    return Grammar(kind="choice", source=_json_text(choices, param), param=param)
