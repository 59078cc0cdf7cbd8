"""One line of a request log (`--request-log`): what was asked, without any content.

Blocks are digests of 16 tokens and all before them, keyed by a secret of the log, so that equal
beginnings of prompts of one scope are seen to be equal, and nothing else is.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from lookonce.types.media import Modality

LOG_BLOCK_TOKENS = 16
BLOCK_BYTES = 8
"""Of each block's digest."""


class LoggedMedium(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One media item of a prompt."""

    key: str
    """A digest of its scoped key, 16 hex digits."""
    modality: Modality
    offset: int
    length: int
    """Tokens."""
    num_bytes: int = 0
    """Of the file; 0: not known."""
    pixels: int = 0


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One prompt and its answer."""

    arrival: float
    """Unix time."""
    prompt_tokens: int
    output_tokens: int
    blocks: str
    """Base64 of the digests, 8 bytes each, of prompt and answer; the last one may not be full."""
    media: tuple[LoggedMedium, ...] = ()
    tenant: str = ""
    """A digest, 8 hex digits; empty: the one tenant of a server without keys."""
    first_token: float = 0.0
    """Seconds from arrival, as the server saw it; 0: there was none."""
    seconds: float = 0.0
    """From arrival to the end."""
    cached_tokens: int = 0
    encoder_runs: int = 0
    processed: int = 0
    """Media that were processed."""


def encode_blocks(digests: bytes) -> str:
    return base64.b64encode(digests).decode()


def decode_blocks(text: str) -> bytes:
    """Raises `ValueError`."""
    try:
        digests = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"blocks: {error}") from None
    if len(digests) % BLOCK_BYTES:
        raise ValueError("blocks are of 8 bytes each")
    return digests
