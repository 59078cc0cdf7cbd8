"""Request fields that would change the answer and are not built: declared, so as to be refused."""

from __future__ import annotations

from functools import cache

import msgspec

Raw = msgspec.Raw | msgspec.UnsetType
NOTHING = msgspec.UNSET


def raw_bytes(raw: Raw) -> bytes:
    """The JSON as it came; empty where it did not."""
    return b"" if raw is NOTHING else bytes(raw)


class Refusing(msgspec.Struct, kw_only=True):
    """Base of bodies with fields that are refused. Those fields are the ones of type `Raw`."""

    @classmethod
    @cache
    def unbuilt_fields(cls) -> tuple[str, ...]:
        return tuple(f.name for f in msgspec.structs.fields(cls) if f.type == Raw)


class Unbuilt(Refusing, kw_only=True):
    """What no route that generates serves, by the names of vLLM and of Hugging Face."""

    use_beam_search: Raw = NOTHING
    logits_processors: Raw = NOTHING
    allowed_token_ids: Raw = NOTHING
    bad_words: Raw = NOTHING
    truncate_prompt_tokens: Raw = NOTHING
    return_token_ids: Raw = NOTHING
    return_tokens_as_token_ids: Raw = NOTHING
    vllm_xargs: Raw = NOTHING
    thinking_token_budget: Raw = NOTHING
    guided_whitespace_pattern: Raw = NOTHING
    media_io_kwargs: Raw = NOTHING
    max_new_tokens: Raw = NOTHING
