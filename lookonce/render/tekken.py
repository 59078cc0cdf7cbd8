"""Folders that have Mistral's tekken.json alone: no tokenizer.json, and no chat template.

How a chat is written depends on the version. Tests compare the template with mistral-common's
`InstructTokenizerV7`, `V11` and `V13`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from lookonce.errors import ModelLoadError

TEMPLATE = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- else -%}[IMG]{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro asked(content) -%}
    {#- One picture after nothing but texts goes before them. -#}
    {%- if content is not string and content | length > 1 and content[-1]['type'] != 'text'
           and content | rejectattr('type', 'equalto', 'text') | list | length == 1 -%}
        [IMG]{{- text_of(content[:-1]) -}}
    {%- else -%}
        {{- text_of(content) -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro json_of(arguments) -%}
    {{- arguments if arguments is string else arguments | tojson -}}
{%- endmacro -%}
{%- set users = namespace(first=-1, last=-1) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {%- if users.first < 0 -%}{%- set users.first = loop.index0 -%}{%- endif -%}
        {%- set users.last = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- set with_tools = users.first if VERSION >= 13 else users.last -%}
{{- '<s>' -}}
{%- for message in messages -%}
    {%- if message['role'] in ('system', 'developer') -%}
        [SYSTEM_PROMPT]{{- text_of(message['content']) -}}[/SYSTEM_PROMPT]
    {%- elif message['role'] == 'user' -%}
        {%- if tools and loop.index0 == with_tools -%}
            {%- set written = namespace(tools=[]) -%}
            {%- for tool in tools -%}
                {%- set function = tool['function'] -%}
                {%- set written.tools = written.tools + [{'type': 'function', 'function': {
                    'name': function['name'], 'description': function['description'] or '',
                    'parameters': function['parameters'] or {}}}] -%}
            {%- endfor -%}
            [AVAILABLE_TOOLS]{{- written.tools | tojson -}}[/AVAILABLE_TOOLS]
        {%- endif -%}
        [INST]{{- asked(message['content']) -}}[/INST]
    {%- elif message['role'] == 'assistant' -%}
        {%- if message['content'] -%}
            {{- text_of(message['content']).rstrip(' ') -}}
        {%- endif -%}
        {%- if message['tool_calls'] -%}
            {%- if VERSION < 11 -%}
                {%- set written = namespace(calls=[]) -%}
                {%- for call in message['tool_calls'] -%}
                    {%- set function = call['function'] -%}
                    {%- set written.calls = written.calls + [{'name': function['name'],
                        'arguments': function['arguments'], 'id': call['id']}] -%}
                {%- endfor -%}
                [TOOL_CALLS]{{- written.calls | tojson -}}
            {%- else -%}
                {%- for call in message['tool_calls'] -%}
                    [TOOL_CALLS]{{- call['function']['name'] -}}
                    {%- if VERSION < 13 -%}[CALL_ID]{{- call['id'] -}}{%- endif -%}
                    [ARGS]{{- json_of(call['function']['arguments']) -}}
                {%- endfor -%}
            {%- endif -%}
        {%- endif -%}
        {{- '</s>' -}}
    {%- elif message['role'] == 'tool' -%}
        [TOOL_RESULTS]
        {%- if VERSION < 13 -%}{{- message['tool_call_id'] -}}[TOOL_CONTENT]{%- endif -%}
        {{- text_of(message['content']) -}}[/TOOL_RESULTS]
    {%- else -%}
        {{- raise_exception('a chat has no messages with the role ' + message['role']) -}}
    {%- endif -%}
{%- endfor -%}
"""
VERSIONS = {"v7": 7, "v11": 11, "v13": 13}
"""Of files, and what `VERSION` stands for in the template."""


class _Config(msgspec.Struct):
    version: str = ""


class _Token(msgspec.Struct):
    rank: int
    token_str: str


class TekkenImages(msgspec.Struct):
    """How pictures are cut into tokens."""

    image_patch_size: int
    max_image_size: int
    spatial_merge_size: int = 1


class TekkenFile(msgspec.Struct):
    """The parts of tekken.json that are no vocabulary."""

    config: _Config = msgspec.field(default_factory=_Config)
    special_tokens: list[_Token] = []
    image: TekkenImages | None = None
    multimodal: TekkenImages | None = None
    """The older name of `image`."""

    @property
    def images(self) -> TekkenImages | None:
        return self.image or self.multimodal

    @property
    def special_ids(self) -> dict[str, int]:
        """Text → id of the special tokens."""
        return {token.token_str: token.rank for token in self.special_tokens}

    @property
    def chat_template(self) -> str | None:
        """The template's source; None for a version of which nothing is known."""
        version = VERSIONS.get(self.config.version)
        return None if version is None else TEMPLATE.replace("VERSION", str(version))


def read_tekken(path: Path) -> TekkenFile:
    """Raises `ModelLoadError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TekkenFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"tekken.json cannot be read: {error}") from None
