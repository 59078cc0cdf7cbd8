"""Conversations and plain texts → token ids.

    conversation ─▶ ChatTemplate.render ─▶ text ─▶ CachingTokenizer.encode ─▶ token ids

Templates are rendered by transformers (its sandbox, filters and globals). In the template's source
media tokens are escaped (see `placeholders`), so that only the template can write a placeholder.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import jinja2
import jinja2.nodes
import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from lookonce.cache.identity import frame
from lookonce.errors import BadRequestError, ConfigError
from lookonce.render.families.base import NO_ADDITIONS, ProcessorFamily
from lookonce.render.prompt.long_texts import QUANTUM, LongTextThreads, TokenCountBound
from lookonce.render.prompt.messages import PAIR_ROLES, Json
from lookonce.render.prompt.placeholders import (
    PlaceholderEscaping,
    escaped_tokenizer,
    escaping_of,
    refuse_reserved,
)
from lookonce.render.prompt.token_cache import CachingTokenizer, TokenCache
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.fair_queue import LoopTurns, TenantWeights
from lookonce.types.media import Modality
from lookonce.types.request_validation import check_text_length, check_token_count

T = TypeVar("T")
OFF_LOOP_CHARACTERS = 16 * 1024
"""More than this is tokenized in a thread, in turn (tokenizing does 1 to 5 MB/s)."""
LOOK_UP_CHARACTERS = 64 * 1024
"""A text above this is looked up in a thread, too (a few hundred MB/s, less where it is cut into
the shortest chunks)."""
ContentForm = Literal["text", "parts", "either"]
"""What a template takes as a message's content: a text, a list of parts, or either."""
RESERVED_VARIABLES = frozenset(
    {
        "messages", "conversations", "tools", "documents", "chat_template",
        "add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask",
    }
)  # fmt: skip
"""Template variables that `chat_template_kwargs` must not set."""
TEMPLATE_ERRORS = (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions of a template that does not fit the messages."""
RENDERING_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    "generation_config.json",
)
"""Of a model folder, beside chat templates: what prompts and answers become depends on them."""
PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
CHANGING_KEYS = frozenset({"reasoning_content", "thinking", "reasoning"})
"""What transformers changes before the template reads it."""
SAME_REQUEST_SECONDS = 10.0
"""What is large and comes so soon after something large, in one task, belongs to one request."""
_last_large: ContextVar[float] = ContextVar("last_large", default=-math.inf)
"""When this task was last done with something large. Every HTTP request has a task of its own; that
of a live session serves many."""
_PROBE = "lookonce-probe-5b1e"


Follows = Literal["answer", "message"]
"""What the messages of a live session go on after."""
_EARLIER, _ANSWERED = "Before this.", "So it was 7e1c."
"""Stand for what the model has already, which is not rendered again."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to render a chat; the names are those of the request body."""

    tools: list[Json] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt before its placeholders are expanded."""

    ids: NDArray[np.int32]
    """[T], not writeable."""
    text: str
    """The text that was tokenized, not escaped."""

    @property
    def token_ids(self) -> list[int]:
        """`ids` as a list, made anew."""
        ids: list[int] = self.ids.tolist()
        return ids


MERGED_TOKENS = 256
"""Tokens before a film whose text is tokenized again, with the text that its family writes there.
"""


class PromptEncoder:
    """A model's tokenizer and chat templates; `family` is None for a text-only model. Items that
    are prompts by themselves have no placeholder in a template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_sources: Mapping[str, str],
        family: ProcessorFamily | None = None,
        files_digest: str = "",
    ) -> None:
        """`files_digest`: of the files that decide what prompts and answers become, in hex."""
        self.files_digest = files_digest
        if family is not None and family.item_alone:
            family = None
        self.tokenizer = tokenizer
        self.placeholder_ids: dict[Modality, int] = (
            {} if family is None else {m: family.placeholder_token_id(m) for m in family.modalities}
        )
        ids = self.placeholder_ids.values()
        self._escaping = escaping_of(tokenizer, ids)
        self._tokenizer = escaped_tokenizer(tokenizer, self._escaping, ids)
        self._caching_tokenizer = CachingTokenizer(self._tokenizer)
        self._token_count = TokenCountBound(self._tokenizer)
        self._long_texts = LongTextThreads()
        self.loop_turns = LoopTurns()
        """Of tenants that send much at a time."""
        self._placeholder_texts = _placeholder_texts(self._tokenizer, family)
        # Hugging Face's processors add the bos token a template left out; its tokenizers do not.
        additions = NO_ADDITIONS if family is None else family.additions
        self._additions = additions.in_words(tokenizer.special_tokens)
        self._completes_bos = family is not None and not self._additions
        self._bos = tokenizer.special_tokens.get("bos_token")
        placeholders = {
            modality: tokenizer.added_tokens[token_id]
            for modality, token_id in self.placeholder_ids.items()
        }
        named = "tool_use" if "tool_use" in template_sources else "default"
        self.tools_template = template_sources.get(named)
        """Source of the template for requests with tools."""
        self._sources = dict(template_sources)
        self._templates = ChatTemplates(
            {
                name: ChatTemplate(
                    source,
                    variables=tokenizer.special_tokens,
                    escaping=self._escaping,
                    placeholders=placeholders,
                )
                for name, source in template_sources.items()
            }
        )

    def with_weights(self, weights: TenantWeights) -> PromptEncoder:
        """The same encoder, where tenants whose long texts wait have these weights."""
        other = copy(self)
        other._long_texts = LongTextThreads(weights=weights)
        other.loop_turns = LoopTurns(weights)
        return other

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat templates read."""
        return self._templates.variables

    async def encode_chat(
        self,
        conversation: Sequence[Json],
        options: ChatOptions,
        max_tokens: int | None = None,
        *,
        large: bool = False,
        cache: TokenCache | None = None,
        scope: bytes = b"",
        tenant: str = "",
        follows: Follows | None = None,
    ) -> EncodedPrompt:
        """`conversation` is from `messages.read_messages`; a `large` one is rendered in turn.
        With `follows` it goes on after an answer or a message that the model has already.

        `cache` belongs to this encoder; `scope` says for whom its entries are. Raises
        `BadRequestError`, also for a text that certainly has more than `max_tokens`.
        """
        text = await self.in_turn_if(
            large, tenant, lambda: self._text_of(conversation, options, follows)
        )
        adds_bos = self._completes_bos and not (self._bos and text.startswith(self._bos))
        adds_bos = adds_bos and follows is None
        await self._check_length(text, max_tokens, "messages")
        ids = await self._encode(
            text, "messages", cache, scope, tenant, add_special_tokens=adds_bos
        )
        return EncodedPrompt(ids, self._escaping.unescape(text))

    def note_asked(self, tenant: str) -> None:
        """The tenant has asked for something that is not large: what is large of others has a share
        of the time for a while."""
        self._long_texts.note_asked(tenant)

    async def in_turn_if(self, large: bool, tenant: str, work: Callable[[], T]) -> T:
        """The result of `work` on a conversation. That of a `large` one is made in a thread, when
        it is the tenant's turn: nobody waits for all that another one sends. Raises
        `QueueFullError`."""
        if not large:
            self.note_asked(tenant)
            return work()
        begins = time.monotonic() - _last_large.get() > SAME_REQUEST_SECONDS
        try:
            return await self._long_texts.run(work, tenant, QUANTUM, holds_lock=True, begins=begins)
        finally:
            _last_large.set(time.monotonic())

    def _text_of(
        self, conversation: Sequence[Json], options: ChatOptions, follows: Follows | None = None
    ) -> str:
        """The rendered template, media tokens escaped."""
        refuse_reserved(options.tools, "tools")

        def render(messages: Sequence[Json], *, prompts: bool) -> str:
            return self._templates.select(options.tools).render(
                messages,
                tools=options.tools,
                add_generation_prompt=prompts,
                continue_final_message=options.continue_final_message,
                variables=options.chat_template_kwargs,
            )

        if follows is None:
            text = render(conversation, prompts=options.add_generation_prompt)
        else:
            before = [{"role": "user", "content": _EARLIER}]
            if follows == "answer":
                before.append({"role": "assistant", "content": _ANSWERED})
            text = _after(
                render([*before, *conversation], prompts=options.add_generation_prompt),
                _ANSWERED if follows == "answer" else render(before, prompts=False),
            )
        for placeholder, with_text_around in self._placeholder_texts.items():
            text = text.replace(placeholder, with_text_around)
        if self._additions and follows is None:
            added = self._tokenizer.added_tokens
            placeholders = [added[token] for token in self.placeholder_ids.values()]
            text = self._additions.complete(text, placeholders)
        return text

    async def encode_text(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        cache: TokenCache | None = None,
        scope: bytes = b"",
        tenant: str = "",
    ) -> EncodedPrompt:
        """A plain prompt. Special tokens in it are encoded as such, except those of media.

        `cache` and `scope` as in `encode_chat`. Raises `BadRequestError`, also for a text that
        certainly has more than `max_tokens`.
        """
        if len(text) <= OFF_LOOP_CHARACTERS:
            self.note_asked(tenant)
        await self._check_length(text, max_tokens, "prompt")
        refuse_reserved(text, "prompt")
        ids = await self._encode(
            text, "prompt", cache, scope, tenant, add_special_tokens=add_special_tokens
        )
        return EncodedPrompt(ids, text)

    async def encode_pair(
        self, first: str, second: str, *, max_tokens: int | None = None, scope: bytes = b""
    ) -> EncodedPrompt:
        """Two texts as the tokenizer joins them, for a model that compares texts.

        Raises `BadRequestError`.
        """
        for text in (first, second):
            await self._check_length(text, max_tokens, "prompt")
            refuse_reserved(text, "prompt")
        encode = partial(self._tokenizer.encode_pair, first, second)
        if len(first) + len(second) > OFF_LOOP_CHARACTERS:
            ids = await asyncio.to_thread(encode)
        else:
            ids = encode()
        return EncodedPrompt(np.array(ids, np.int32), f"{first}\n{second}")

    @property
    def has_template(self) -> bool:
        """Whether there is a template for conversations."""
        return "default" in self._sources

    @property
    def compares_by_template(self) -> bool:
        """Whether the chat template takes a query and a document."""
        source = self._sources.get("default", "")
        return all(f'"{role}"' in source or f"'{role}'" in source for role in PAIR_ROLES)

    def encode_tokens(self, parts: Sequence[int | str]) -> list[int]:
        """Token ids, and texts as tokens; no text becomes a token of media."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._tokenizer.encode(part, add_special_tokens=False)
        return ids

    def text_before(self, ids: NDArray[np.int32], end: int) -> tuple[int, str]:
        """Where the plain text that ends before position `end` begins, and that text.

        Text that is added there has to be tokenized together with it. At most `MERGED_TOKENS` are
        looked at; where tokens are not what their text becomes, the text is empty.
        """
        start = end
        added = self._tokenizer.added_tokens
        while start > max(0, end - MERGED_TOKENS) and int(ids[start - 1]) not in added:
            start -= 1
        tokens: list[int] = ids[start:end].tolist()
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return (start, text) if self.encode_tokens((text,)) == tokens else (end, "")

    async def _check_length(self, text: str, max_tokens: int | None, param: str) -> None:
        # Counting is worth it where it saves tokenizing more than a context may have.
        if max_tokens is not None and len(text) > max(OFF_LOOP_CHARACTERS, max_tokens):
            check_text_length(len(text), self._tokenizer.longest_token, max_tokens, param)
            least = await asyncio.to_thread(self._token_count.at_least, text, max_tokens)
            check_token_count(least, max_tokens, param)

    async def _encode(
        self,
        text: str,
        param: str,
        cache: TokenCache | None,
        scope: bytes,
        tenant: str,
        *,
        add_special_tokens: bool,
    ) -> NDArray[np.int32]:
        tokenizer = self._caching_tokenizer
        try:
            if len(text) > LOOK_UP_CHARACTERS:
                encode = partial(tokenizer.encode, text, cache, scope)
                cost = len(text)
            else:
                found = tokenizer.look_up(text, cache, scope)
                encode = partial(tokenizer.complete, found)
                cost = found.num_unknown
            work = partial(encode, add_special_tokens=add_special_tokens)
            if cost <= OFF_LOOP_CHARACTERS:
                return work()
            return await self._long_texts.run(work, tenant, cost)
        except BadRequestError as error:
            raise BadRequestError(f"{param}: {error.message}", param=param) from None


def _after(text: str, before: str) -> str:
    """What a rendered conversation has after its earlier part."""
    _, found, rest = text.partition(before)  # what follows may have the same text in it
    if not found:
        raise BadRequestError(
            "the model's chat template cannot go on after earlier messages", param="messages"
        )
    return rest


def chat_options(options: ChatOptions | Mapping[str, Any] | None) -> ChatOptions:
    """Raises `BadRequestError` for values of the wrong type."""
    if isinstance(options, ChatOptions):
        return options
    try:
        return msgspec.convert(dict(options or {}), ChatOptions)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error)) from None


def _placeholder_texts(tokenizer: Tokenizer, family: ProcessorFamily | None) -> dict[str, str]:
    """Escaped placeholder → the same between the texts that its family wants around it."""
    found: dict[str, str] = {}
    if family is None:
        return found
    for modality in family.modalities:
        before, after = family.text_around_placeholder(modality)
        if before or after:
            placeholder = tokenizer.added_tokens[family.placeholder_token_id(modality)]
            found[placeholder] = before + placeholder + after
    return found


class ChatTemplates:
    """A model's templates by name: most models have one, some a second one for tools."""

    def __init__(self, templates: Mapping[str, ChatTemplate]) -> None:
        self._templates = dict(templates)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that any of them reads."""
        return frozenset().union(*(each.variables() for each in self._templates.values()))

    def select(self, tools: Sequence[Json] | None = None) -> ChatTemplate:
        """Raises `BadRequestError` when the model has none."""
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise BadRequestError(
                "the model has no chat template, so it takes plain completions only; "
                "the server's option --chat-template can give it one",
                param="messages",
            )
        return self._templates["default"]


class ChatTemplate:
    """One chat template. Raises `ConfigError` if its source is broken.

    `variables` are the tokenizer's named tokens, which templates print. `placeholders` (modality →
    token text) are written for media parts if the template takes only texts.
    """

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, str] | None = None,
        escaping: PlaceholderEscaping | None = None,
        placeholders: Mapping[Modality, str] | None = None,
    ) -> None:
        self._escaping = escaping or PlaceholderEscaping(())
        self._source = self._escaping.escape(source)
        self._variables = {
            name: self._escaping.escape(text) for name, text in (variables or {}).items()
        }
        self._placeholders = {
            modality: self._escaping.escape(text) for modality, text in (placeholders or {}).items()
        }
        self._knows_developer = "developer" in source
        self._compiled: jinja2.Template | None = None
        self._globals: dict[str, Any] = {}
        self.content_form = self._probe_content_form()

    def variables(self) -> frozenset[str]:
        """Names that the template reads, its own included."""
        tree = _compile_jinja_template(self._source).environment.parse(self._source)
        names = tree.find_all(jinja2.nodes.Name)
        return frozenset(node.name for node in names if node.ctx == "load")

    def render(
        self,
        conversation: Sequence[Json],
        *,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, media tokens escaped.

        Raises `BadRequestError`, with the template's own message if it has one.
        """
        if add_generation_prompt and continue_final_message:
            raise BadRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        try:
            return self._render(
                [self._adapted(message) for message in conversation],
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **_checked_variables(variables or {}),
            )
        except (jinja2.TemplateError, ValueError) as error:
            words = self._escaping.unescape(str(error))
            raise BadRequestError(f"the chat template says: {words}", param="messages") from None
        except TEMPLATE_ERRORS:
            # Their messages are about the template's source and do not help a client.
            raise BadRequestError(
                "the chat template cannot render these messages", param="messages"
            ) from None

    def _render(self, messages: list[Json], **options: Any) -> str:
        if _read_as_given(messages, options):
            return self._render_plainly(messages, **options)
        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=self._source,
            **{**self._variables, **options},
        )
        return str(rendered[0])

    def _render_plainly(
        self,
        messages: list[Json],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The same result as by transformers for what that passes on unchanged, in a third of the
        time, or a tenth: transformers copies all values first."""
        if self._compiled is None:
            self._compiled = _compile_jinja_template(self._source)
            self._globals = {**self._compiled.globals, **self._variables}
        variables = {
            **self._globals,
            "tools": None,
            "documents": None,
            **options,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        context = self._compiled.new_context(variables, shared=True)
        return "".join(self._compiled.root_render_func(context))

    def _adapted(self, message: Json) -> Json:
        """The message with role and content in the form that this template takes."""
        shaped = dict(message)
        if message["role"] == "developer" and not self._knows_developer:
            shaped["role"] = "system"
        content = message.get("content")
        if self.content_form == "text" and isinstance(content, list):
            shaped["content"] = "\n".join(map(self._part_text, content))
        elif self.content_form == "parts" and isinstance(content, str):
            shaped["content"] = [{"type": "text", "text": content}]
        return shaped

    def _part_text(self, part: Json) -> str:
        return part["text"] if part["type"] == "text" else self._placeholders[part["type"]]

    def _probe_content_form(self) -> ContentForm:
        """Find out by rendering one message in both forms."""
        parts = [{"type": "text", "text": _PROBE}]
        printed = self._probe_render(parts)
        # A template that takes only texts may print the list as Python or JSON would.
        takes_parts = _PROBE in printed and not any(
            whole in printed for whole in (str(parts), json.dumps(parts))
        )
        takes_text = _PROBE in self._probe_render(_PROBE)
        if takes_parts and takes_text:
            return "either"
        return "parts" if takes_parts else "text"

    def _probe_render(self, content: object) -> str:
        try:
            return self._render([{"role": "user", "content": content}])
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is broken in line {error.lineno}: {error.message}"
            ) from None
        except (jinja2.TemplateError, ValueError, *TEMPLATE_ERRORS):
            return ""


def _read_as_given(messages: list[Json], options: Mapping[str, Any]) -> bool:
    """Whether transformers would pass all of it on to the template unchanged."""
    return (
        not options.get("continue_final_message")
        and all(map(CHANGING_KEYS.isdisjoint, messages))
        and _is_plain([*messages, *options.values()])
    )


def _is_plain(values: list[Any]) -> bool:
    """Whether lists, objects and what is in them are just that, as JSON gives them."""
    waiting = [values]  # not recursive, because clients choose the depth
    for part in waiting:
        for value in part:
            kind = type(value)
            if kind is list:
                waiting.append(value)
            elif kind is dict:
                waiting += (list(value), list(value.values()))
            elif kind not in PLAIN_TYPES:
                return False
    return True


def template_sources(
    folder: str | Path, tokenizer: Tokenizer, override: str | None = None
) -> dict[str, str]:
    """Name → source: of the file `override`, else the folder's own. Raises `ConfigError`."""
    if override is not None:
        return {"default": _read_override(override)}
    own = tokenizer.chat_template
    legacy = Path(folder) / "chat_template.json"
    # Folders of older processors have the template in a file of its own.
    if legacy.is_file() and not (Path(folder) / "chat_template.jinja").is_file():
        own = json.loads(legacy.read_text(encoding="utf-8")).get("chat_template") or own
    if own is None:
        return {}
    return {"default": own} if isinstance(own, str) else dict(own)


def digest_of_files(folder: str | Path, sources: Mapping[str, str]) -> str:
    """Digest, in hex, of the tokenizer's and the processor's files in a model folder, and of the
    chat templates that are used: where two servers have one digest, they make the same tokens of a
    prompt. About 10 ms."""
    parts = [part.encode() for name in sorted(sources) for part in (name, sources[name])]
    for name in RENDERING_FILES:
        file = Path(folder) / name
        if file.is_file():
            parts += name.encode(), file.read_bytes()
    return blake3(frame(*parts)).hexdigest()


def _read_override(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: {path} cannot be read") from error


def _checked_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """A request's `chat_template_kwargs`. Raises `BadRequestError`."""
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise BadRequestError(
                f"chat_template_kwargs: {name} is not allowed here", param="chat_template_kwargs"
            )
    refuse_reserved(variables, "chat_template_kwargs")
    return dict(variables)


def load_encoder(
    folder: str,
    chat_template: str | None,
    family: ProcessorFamily | None,
) -> PromptEncoder:
    """The encoder of a model folder; `chat_template` is a file's path.

    Raises `ModelLoadError` or `ConfigError`.
    """
    tokenizer = Tokenizer.load(folder)
    sources = template_sources(folder, tokenizer, chat_template)
    if not sources and family is not None and family.default_template is not None:
        sources = {"default": family.default_template}
    return PromptEncoder(tokenizer, sources, family, digest_of_files(folder, sources))
