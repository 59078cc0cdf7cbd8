"""What clients send, as declared structs that msgspec decodes straight from the body's bytes.

Fields that are not declared are ignored. Those of `ACCEPTED_FIELDS` are harmless; all others are
told to the client (`server.http.unknown_fields`). Fields that would change the answer and are not
supported are declared as raw JSON, with the type `Raw`: `server.http.body.parse` refuses them with
a 400 unless their value asks for nothing.

    RefusesUnsupported
    ├── TokenizeRequest
    ├── PoolingFields: EmbeddingsRequest (PoolingRequest), ScoreRequest, RerankRequest
    └── UnsupportedParameters ── StructuredFields ── SamplingFields ── GenerationFields
                                                                       └── ChatOrCompletionFields
                                                                           ├── ChatRequest
                                                                           └── CompletionRequest
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, Protocol

import msgspec

from lookonce.frontend.tools.calls import Function, Tool, ToolChoice
from lookonce.frontend.tools.function_fields import FunctionChoice

ACCEPTED_FIELDS = frozenset(
    {
        "access_programs", "background_options", "metadata", "prediction", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "store", "user",
    }
)  # fmt: skip
"""OpenAI's fields about accounts, storage and routing: no answer depends on them."""
USUAL_VALUES = {
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "in-memory"),
}
"""Values of such fields that ask for what happens anyway."""
HARMLESS_VALUES = (b"", b"null", b"false", b"[]", b"{}", b'""')
"""JSON of fields that ask for nothing (see `asks_nothing`)."""
Raw = msgspec.Raw | msgspec.UnsetType
NOTHING = msgspec.UNSET
Schema = dict[str, Any] | bool
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def asks_nothing(value: object) -> bool:
    """Whether the value of a field is null, false or empty. A number never is: 0 asks for
    something."""
    return value is None or value is False or value in ("", [], {})


def raw_bytes(raw: Raw) -> bytes:
    """The JSON as it came; empty where the field is absent."""
    return b"" if raw is NOTHING else bytes(raw)


class RefusesUnsupported(msgspec.Struct, kw_only=True):
    """Base of bodies with fields of type `Raw`, which are refused."""

    @classmethod
    @cache
    def unsupported_fields(cls) -> tuple[str, ...]:
        return tuple(f.name for f in msgspec.structs.fields(cls) if f.type == Raw)


class UnsupportedParameters(RefusesUnsupported, kw_only=True):
    """vLLM's and Hugging Face's parameters that no generating route supports."""

    use_beam_search: Raw = NOTHING
    logits_processors: Raw = NOTHING
    bad_words: Raw = NOTHING
    truncate_prompt_tokens: Raw = NOTHING
    return_token_ids: Raw = NOTHING
    vllm_xargs: Raw = NOTHING
    thinking_token_budget: Raw = NOTHING
    guided_whitespace_pattern: Raw = NOTHING
    media_io_kwargs: Raw = NOTHING
    max_new_tokens: Raw = NOTHING


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None
    """Ignored: the answer always conforms."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str = "text"
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's. The first two `disable_*` fields only concern vLLM's grammar libraries."""

    json: str | Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None
    """Whether objects have only the keys that they declare; None: as the server's option says."""


class StructuredFields(UnsupportedParameters, kw_only=True):
    """What the answer must look like: OpenAI's field, vLLM's, and vLLM's older ones.

    Only one of them may be used.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """How the model reasons: OpenAI's for responses; other servers take it in chats too.

    `effort` is honoured where the chat template knows it, and in chats `exclude`."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None
    enabled: Any = None
    exclude: Any = None
    max_tokens: Any = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, every chunk has the usage so far."""
    include_obfuscation: bool | None = None
    """OpenAI's padding of events, which is never added here."""


class SamplingFields(StructuredFields, kw_only=True):
    """Sampling controls; None means the served model's default."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Literal[True] | None = None
    """vLLM's; only its default is supported."""


class GenerationFields(SamplingFields, kw_only=True):
    """Fields beside sampling that all OpenAI routes which generate have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    reuse_receipt: bool = False
    kv_transfer_params: dict[str, Any] | None = None


class ChatOrCompletionFields(GenerationFields, kw_only=True):
    """Fields of chats and plain completions that `/v1/responses` does not have."""

    max_completion_tokens: int | None = None
    best_of: int | None = None
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: tokens of log-probabilities are written as `token_id:N`."""
    prompt_logprobs: int | None = None

    max_output_tokens: Raw = NOTHING
    suffix: Raw = NOTHING


class PoolingFields(RefusesUnsupported, kw_only=True):
    """Fields that all requests for embeddings and scores have."""

    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    reuse_receipt: bool = False
    mm_processor_kwargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    use_activation: bool | None = None
    """vLLM's: scores are probabilities (the default), or logits; of embeddings it is `normalize`,
    which comes first."""

    priority: Raw = NOTHING
    truncate_prompt_tokens: Raw = NOTHING
    chat_template: Raw = NOTHING
    media_io_kwargs: Raw = NOTHING


class EmbeddingsRequest(PoolingFields, kw_only=True):
    """`POST /v1/embeddings`: `input` as OpenAI's, or `messages` as vLLM's."""

    input: str | list[str | int | list[int]] | None = None
    """A text, token ids, or a list of either."""
    messages: list[dict[str, Any]] | None = None
    """One input, in which media may be."""
    encoding_format: Literal["float", "base64"] | None = None
    """None: float."""
    dimensions: int | None = None
    """Leading numbers of each vector to keep."""
    normalize: bool | None = None
    """Whether vectors are made as long as 1; None: as the model says."""
    add_special_tokens: bool | None = None
    """None: yes for texts, no for messages, whose template writes special tokens itself."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False

    embed_dtype: Raw = NOTHING
    endianness: Raw = NOTHING


class PoolingRequest(EmbeddingsRequest, kw_only=True):
    """`POST /pooling`: as for embeddings; every vector of an input is answered."""

    task: str | None = None
    """vLLM's: what is wanted, which must be what the model gives."""


Compared = str | dict[str, Any]
"""A text, or an object with `content`: a text or a list of content parts."""


class ScoreRequest(PoolingFields, kw_only=True):
    """`POST /v1/score`: two texts, one and several, or as many of each."""

    queries: Compared | list[Compared] | None = None
    documents: Compared | list[Compared] | None = None
    text_1: Compared | list[Compared] | None = None
    text_2: Compared | list[Compared] | None = None
    data_1: Compared | list[Compared] | None = None
    data_2: Compared | list[Compared] | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """`POST /v1/rerank`: Jina's and Cohere's."""

    query: Compared
    documents: list[Compared]
    top_n: int | None = None
    """None and, as vLLM's, 0: all."""
    return_documents: bool | None = None
    """None: as true."""

    rank_fields: Raw = NOTHING
    max_chunks_per_doc: Raw = NOTHING
    max_tokens_per_doc: Raw = NOTHING


class TakesControls(Protocol):
    """A body that says how much the model thinks and says."""

    chat_template_kwargs: dict[str, Any] | None

    def asked_controls(self) -> dict[str, Any]:
        """What is asked for, by its name in the request."""


class ChatRequest(ChatOrCompletionFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    """Checked by the renderer, which knows the roles and parts that the model takes."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: Any = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    """vLLM's; false: the answer is without the model's thoughts."""
    verbosity: Any = None

    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    """OpenAI's older name of tools; the answer then has the older form too."""
    function_call: FunctionChoice = None

    add_special_tokens: Raw = NOTHING
    echo: Raw = NOTHING
    moderation: Raw = NOTHING
    audio: Raw = NOTHING
    web_search_options: Raw = NOTHING
    documents: Raw = NOTHING
    chat_template: Raw = NOTHING

    def asked_controls(self) -> dict[str, Any]:
        return _asked_controls(self)


class CompletionRequest(ChatOrCompletionFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    """One prompt as text or as token ids, or a list of either."""
    logprobs: int | None = None
    add_special_tokens: bool = True
    echo: bool | None = None

    top_logprobs: Raw = NOTHING
    tools: Raw = NOTHING
    tool_choice: Raw = NOTHING
    mm_processor_kwargs: Raw = NOTHING
    prompt_embeds: Raw = NOTHING


class TokenizeRequest(RefusesUnsupported, kw_only=True):
    """`POST /tokenize`: `prompt` or `messages`, as vLLM's, with all that a chat's prompt depends
    on."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """None: yes for a prompt, no for messages, whose template writes special tokens itself."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    reasoning: Reasoning | None = None
    verbosity: Any = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    function_call: FunctionChoice = None
    return_token_strs: bool = False

    chat_template: Raw = NOTHING
    documents: Raw = NOTHING
    truncate_prompt_tokens: Raw = NOTHING

    def asked_controls(self) -> dict[str, Any]:
        return _asked_controls(self)


def _asked_controls(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    return {
        "reasoning_effort": body.reasoning_effort,
        "reasoning.effort": body.reasoning and body.reasoning.effort,
        "verbosity": body.verbosity,
    }


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


TEMPLATE_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)
