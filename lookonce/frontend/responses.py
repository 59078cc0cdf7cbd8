"""What the server answers: OpenAI's shapes as structs, encoded straight to bytes by msgspec.

Fields of type `... | UnsetType` are left out unless set; None is written as null.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

StopReason = str | int | None
"""The stop string or stop token id that ended a sample."""


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    image_tokens: int = 0
    audio_tokens: int = 0
    video_tokens: int | UnsetType = UNSET
    """Only where a prompt has a film."""


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0
    """Tokens of thoughts, with their markers; of gpt-oss those on `analysis`, without."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only where the model's thoughts are told apart."""


class ReceiptItem(msgspec.Struct, kw_only=True):
    """Where the result of one media item came from."""

    modality: str
    hash: str
    """First 16 hex digits of the MediaHash."""
    offset: int
    length: int
    processor: str
    encoder: str
    decode_ms: float
    process_ms: float
    encode_ms: float
    frames: int | UnsetType = UNSET
    """Of an item of a film: how many of its frames it has."""
    encoder_tier: str | UnsetType = UNSET
    """The external tier that gave the encoder output, if one did."""


class FilmFrames(msgspec.Struct, kw_only=True):
    """How many frames of films a prompt has, and for how many of them there was work."""

    total: int = 0
    processed: int = 0
    """Decoded and processed for this request."""
    encoded: int = 0
    """Of the listed items."""


class ReuseReceipt(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    prefix_cached_tokens: int
    external_cached_tokens: int
    items: list[ReceiptItem]
    film_frames: FilmFrames | UnsetType = UNSET
    """Only where a prompt has a film."""


class Embedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class PooledAnswer(msgspec.Struct, kw_only=True):
    """What the lists of embeddings, pooled outputs and scores have in common."""

    id: str
    object: str = "list"
    created: int
    model: str
    usage: Usage
    reuse_receipt: ReuseReceipt | UnsetType = UNSET


class EmbeddingList(PooledAnswer, kw_only=True):
    """`/v1/embeddings`."""

    data: list[Embedding]


class TokenWeight(msgspec.Struct):
    """One number of a sparse vector."""

    token_id: int
    weight: float


class PooledOutput(msgspec.Struct, kw_only=True):
    object: str = "pooling"
    index: int
    data: list[float | list[float] | TokenWeight] | str


class PoolingList(PooledAnswer, kw_only=True):
    """`/pooling`."""

    data: list[PooledOutput]


class Score(msgspec.Struct, kw_only=True):
    object: str = "score"
    index: int
    score: float


class ScoreList(PooledAnswer, kw_only=True):
    """`/v1/score`."""

    data: list[Score]


class RankedDocument(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: dict[str, Any] | UnsetType = UNSET


class RerankResult(msgspec.Struct, kw_only=True):
    """`/v1/rerank`."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: Usage
    reuse_receipt: ReuseReceipt | UnsetType = UNSET


class ExternalCache(msgspec.Struct, kw_only=True):
    status: str
    by_tier: dict[str, int]
    """Tokens loaded and used, by the tier they came from."""


class KVTransferParams(msgspec.Struct, kw_only=True):
    """What external KV tiers did for the prompts of one response, in tokens."""

    num_lmcache_extra_cached_tokens: int
    """Held by the tiers beyond what the device held."""
    num_external_cached_tokens: int
    """Of those, loaded and used."""
    external_cache: ExternalCache


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorBody


# --- log-probabilities ------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenEntry]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The first token of an echoed prompt, and media in it, have no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptEntry(msgspec.Struct):
    """vLLM's entry of one token that is possible at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptEntries = list[dict[str, PromptEntry] | None]
"""One per token of the prompt: token id → entry of the token itself and of the likeliest ones."""


# --- chat ---------------------------------------------------------------------------------------


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    """What the model wrote before the answer, where its format separates the two."""
    reasoning_content: str | UnsetType = UNSET
    """The same: vLLM's and DeepSeek's older name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    """The call of a request with `functions`."""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: StopReason


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    request_id: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_logprobs: PromptEntries | UnsetType | None = UNSET
    reuse_receipt: ReuseReceipt | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The first of a call has its id, type and name; later ones have more of the arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    request_id: str
    choices: list[ChatChunkChoice]
    system_fingerprint: None = None
    usage: Usage | UnsetType | None = UNSET
    reuse_receipt: ReuseReceipt | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


# --- plain completions ----------------------------------------------------------------------------


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    prompt_logprobs: PromptEntries | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, and each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    request_id: str
    choices: list[CompletionChoice]
    system_fingerprint: None = None
    usage: Usage | UnsetType | None = UNSET
    reuse_receipt: ReuseReceipt | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


# --- the rest -------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lookonce"
    root: str
    parent: str | None = None
    """Of a LoRA adapter: the model."""
    max_model_len: int | None
    modalities: tuple[str, ...]
    """What the model takes beside text."""


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Prompt(msgspec.Struct):
    prompt: str
