"""What clients send, as declared structs that msgspec decodes straight from the body's bytes.

Fields that are not declared are ignored: they are harmless (`user`, `store`, `metadata`, ...).
Fields that would change the answer and are not built yet are declared in an `Unbuilt` base as raw
JSON: `parsing.parse` refuses them with a clear 400 unless their value asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from lookonce.frontend.structured_outputs import Structured
from lookonce.frontend.tools.asked import Tool, ToolChoice
from lookonce.frontend.unsupported_parameters import NOTHING, Raw, Refusing

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Sampling(Structured, kw_only=True):
    """Sampling controls both generation routes share; None means the served model's default."""

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
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Literal[True] | None = None
    """vLLM's; only its default is served."""


class Generate(Sampling, kw_only=True):
    """What is not about sampling and is the same for chat and plain completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    reuse_receipt: bool = False
    kv_transfer_params: dict[str, Any] | None = None


class ChatOrCompletion(Generate, kw_only=True):
    """What chats and plain completions have beside all that generate."""

    max_completion_tokens: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None

    max_output_tokens: Raw = NOTHING
    suffix: Raw = NOTHING


class ChatRequest(ChatOrCompletion, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    """The renderer judges roles and parts: it knows what the model takes."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None

    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    add_special_tokens: Raw = NOTHING
    functions: Raw = NOTHING
    function_call: Raw = NOTHING
    echo: Raw = NOTHING
    reasoning_effort: Raw = NOTHING
    verbosity: Raw = NOTHING
    moderation: Raw = NOTHING
    audio: Raw = NOTHING
    web_search_options: Raw = NOTHING
    documents: Raw = NOTHING
    chat_template: Raw = NOTHING


class CompletionRequest(ChatOrCompletion, kw_only=True):
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


class TokenizeRequest(Refusing, kw_only=True):
    """`POST /tokenize`: `prompt` or `messages`, as vLLM's."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """None: yes for a prompt, no for messages, whose template writes its own."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool = False

    chat_template: Raw = NOTHING
    documents: Raw = NOTHING
    truncate_prompt_tokens: Raw = NOTHING


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


TEMPLATE_FIELDS = (
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "mm_processor_kwargs",
)  # fmt: skip


def template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """How messages become a prompt; the renderer's options bear the same names."""
    return {name: getattr(body, name) for name in TEMPLATE_FIELDS}
