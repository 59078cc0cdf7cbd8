"""Conversations and plain texts → token ids, with placeholders that only the template can write."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lookonce.errors import BadRequestError
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.prompt.messages import Json, in_thread_if
from lookonce.render.prompt.placeholder_escaping import (
    media_spelling,
    refuse_reserved,
    secret_tokenizer,
)
from lookonce.render.prompt.template import ChatTemplate, ChatTemplates
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.media import Modality
from lookonce.types.request_validation import check_text_length

OFF_LOOP_CHARACTERS = 64 * 1024
"""A text above this is tokenized in a thread (tokenizing does 1 to 5 MB/s)."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to render a chat, by the names the request body has."""

    tools: list[Json] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt before its placeholders are expanded."""

    token_ids: list[int]
    text: str
    """What was tokenized, as a person should read it."""


class PromptEncoder:
    """A model's tokenizer and chat templates; `family` is None for a text-only model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_sources: Mapping[str, str],
        family: ProcessorFamily | None = None,
    ) -> None:
        self.placeholder_ids: dict[Modality, int] = (
            {} if family is None else {m: family.placeholder_token_id(m) for m in family.modalities}
        )
        ids = self.placeholder_ids.values()
        self._spelling = media_spelling(tokenizer, ids)
        self._tokenizer = secret_tokenizer(tokenizer, self._spelling, ids)
        self._surrounded = _surrounded(self._tokenizer, family)
        # Hugging Face's processors add the bos token a template left out; its tokenizers do not.
        self._completes_bos = family is not None
        self._bos = tokenizer.special_tokens.get("bos_token")
        placeholders = {
            modality: tokenizer.added_tokens[token_id]
            for modality, token_id in self.placeholder_ids.items()
        }
        named = "tool_use" if "tool_use" in template_sources else "default"
        self.tools_template = template_sources.get(named)
        """Source of the template that requests with tools use."""
        self._templates = ChatTemplates(
            {
                name: ChatTemplate(
                    source,
                    variables=tokenizer.special_tokens,
                    spelling=self._spelling,
                    placeholders=placeholders,
                )
                for name, source in template_sources.items()
            }
        )

    async def encode_chat(
        self,
        conversation: Sequence[Json],
        options: ChatOptions,
        max_tokens: int | None = None,
        *,
        large: bool = False,
    ) -> EncodedPrompt:
        """`conversation` is that of `messages.read_messages`; a `large` one is rendered in a
        thread.

        Raises `BadRequestError`, also for a text that has more than `max_tokens` for certain.
        """
        text = await in_thread_if(large, self._text_of, conversation, options)
        adds_bos = self._completes_bos and not (self._bos and text.startswith(self._bos))
        self._check_length(text, max_tokens, "messages")
        token_ids = await self._encode(text, add_special_tokens=adds_bos, param="messages")
        return EncodedPrompt(token_ids, self._spelling.reveal(text))

    def _text_of(self, conversation: Sequence[Json], options: ChatOptions) -> str:
        """What the template makes of it, media tokens in their secret spelling."""
        refuse_reserved(options.tools, "tools")
        text = self._templates.select(options.tools).render(
            conversation,
            tools=options.tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables=options.chat_template_kwargs,
        )
        for placeholder, surrounded in self._surrounded.items():
            text = text.replace(placeholder, surrounded)
        return text

    async def encode_text(
        self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> EncodedPrompt:
        """A plain prompt. Special tokens in it count, but for those of media.

        Raises `BadRequestError`, also for a text that has more than `max_tokens` for certain.
        """
        self._check_length(text, max_tokens, "prompt")
        refuse_reserved(text, "prompt")
        token_ids = await self._encode(text, add_special_tokens=add_special_tokens, param="prompt")
        return EncodedPrompt(token_ids, text)

    def _check_length(self, text: str, max_tokens: int | None, param: str) -> None:
        if max_tokens is not None and len(text) > OFF_LOOP_CHARACTERS:
            check_text_length(len(text), self._tokenizer.longest_token, max_tokens, param)

    async def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        try:
            if len(text) <= OFF_LOOP_CHARACTERS:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(
                self._tokenizer.encode, text, add_special_tokens=add_special_tokens
            )
        except BadRequestError as error:
            raise BadRequestError(f"{param}: {error.message}", param=param) from None


def chat_options(options: ChatOptions | Mapping[str, Any] | None) -> ChatOptions:
    """Raises `BadRequestError` for values of the wrong type."""
    if isinstance(options, ChatOptions):
        return options
    try:
        return msgspec.convert(dict(options or {}), ChatOptions)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error)) from None


def _surrounded(tokenizer: Tokenizer, family: ProcessorFamily | None) -> dict[str, str]:
    """A placeholder's spelling → the same between the texts its family wants around it."""
    found: dict[str, str] = {}
    if family is None:
        return found
    for modality in family.modalities:
        before, after = family.surroundings(modality)
        if before or after:
            placeholder = tokenizer.added_tokens[family.placeholder_token_id(modality)]
            found[placeholder] = before + placeholder + after
    return found
