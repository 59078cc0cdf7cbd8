"""External tiers of KV blocks and encoder outputs: the objects that scheduler, transfer workers and
tiers hand each other."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Literal

import msgspec

from lookonce.errors import ConfigError
from lookonce.types.media import ITEM_SIZE, Array

ExternalStatus = Literal["loaded", "partial", "failed", "shadowed", "aborted", "none"]
KVLoadPolicy = Literal["auto", "always"]
KVLoadFailurePolicy = Literal["recompute", "fail"]
TierKind = Literal["host", "disk", "valkey", "lmcache"]

LMCACHE_MISSING = "lmcache://… needs the optional extra: pip install 'lookonce[lmcache]'"

_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
DIGITS = re.compile("[0-9]{1,9}")
"""A whole number in an option's text: ASCII digits alone, where `int` would take more."""
MAX_CAPACITY = 1 << 50
MAX_PORT = 65_535
MAX_DATABASE = 999_999_999


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One block's K and V of all layers as contiguous bytes `[layer, k or v, row, head, dim]`."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    shared: bool = False
    """Keys are the values as well (latents) and are held once: `[layer, row, head, dim]`."""

    @property
    def num_pages(self) -> int:
        """Pages that a block takes: of keys and of values in each layer."""
        return self.num_layers * (1 if self.shared else 2)

    @property
    def block_bytes(self) -> int:
        rows = self.num_pages * self.block_size
        return rows * self.num_kv_heads * self.head_dim * ITEM_SIZE[self.dtype]

    def describe(self) -> bytes:
        """Unambiguous bytes for digests and object headers, 32 bytes."""
        sizes = (self.num_layers, self.block_size, self.num_kv_heads, self.head_dim)
        kind = f"{self.dtype}/shared" if self.shared else self.dtype
        return struct.pack("<4I16s", *sizes, kind.encode())


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """How tiers hold encoder outputs [rows, width]: their bytes are cut into pieces of one size.

    So every object of a tier has the same size, as KV blocks have. The last piece is filled up with
    zeros.
    """

    row_bytes: int
    dtype: str
    piece_bytes: int

    @classmethod
    def of_rows(cls, row_bytes: int, dtype: str) -> OutputLayout:
        """Pieces of about `PIECE_ROWS` rows: larger ones waste more of the last piece, smaller
        ones take more operations."""
        piece = min(max(PIECE_ROWS * row_bytes, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
        return cls(row_bytes, dtype, piece)

    @property
    def block_bytes(self) -> int:
        """Bytes of one object's payload: what it is called for KV."""
        return self.piece_bytes

    def num_pieces(self, num_rows: int) -> int:
        return -(-num_rows * self.row_bytes // self.piece_bytes)

    def describe(self) -> bytes:
        """Unambiguous bytes for digests and object headers, 32 bytes."""
        return struct.pack("<2Q16s", self.row_bytes, self.piece_bytes, self.dtype.encode())


@dataclass(frozen=True, slots=True)
class StatePieces:
    """How tiers hold states beside keys and values: cut into pieces of the size of a KV block.

    So one tier holds both. The last piece is filled up with zeros.
    """

    state_bytes: int
    piece_bytes: int

    @property
    def num_pieces(self) -> int:
        return -(-self.state_bytes // self.piece_bytes)

    @property
    def padded_bytes(self) -> int:
        """Bytes of all pieces of one state."""
        return self.num_pieces * self.piece_bytes


PIECE_ROWS = 32
MIN_PIECE_BYTES = 16 << 10
MAX_PIECE_BYTES = 1 << 20


class ExternalCacheStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What external tiers did for one prompt, frozen at its first admission; tokens."""

    matched: int = 0
    """Held by the tiers beyond the local prefix, in whole blocks, at most P - 1."""
    loaded: int = 0
    """Verified, loaded beyond the local prefix, and used: 0 <= loaded <= matched."""
    status: ExternalStatus = "none"
    by_tier: tuple[tuple[str, int], ...] = ()
    """`loaded` by the tier it came from."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One `--kv-tier` or `--encoder-tier`, parsed. Which fields are set depends on `kind`."""

    kind: TierKind
    capacity_bytes: int = 0
    path: str | None = None
    """Folder of a disk tier, socket of a Valkey."""
    host: str | None = None
    port: int = 6379
    database: int = 0
    username: str | None = None
    password: str | None = None


def parse_tier_spec(text: str, option: str = "--kv-tier") -> TierSpec:
    """`host:4GB`, `disk:/path:50GB`, `valkey://[user:password@]host:port[/db]`,
    `valkey:///path.sock`, `lmcache://host[:port]`. Raises `ConfigError` saying what is allowed."""
    try:
        return _parse(text)
    except ValueError:
        raise _malformed(text, option) from None


def _parse(text: str) -> TierSpec:
    """Raises `ValueError`."""
    scheme, _, rest = text.partition(":")
    if scheme == "host":
        return TierSpec("host", capacity_bytes=_capacity(text, rest))
    if scheme == "disk":
        path, _, size = rest.rpartition(":")
        if not path.startswith("/"):
            raise ValueError(text)
        return TierSpec("disk", capacity_bytes=_capacity(text, size), path=path)
    if scheme in ("valkey", "redis") and rest.startswith("//"):
        return _valkey(text, rest[2:])
    if scheme == "lmcache" and rest.startswith("//"):
        host, port = _address(text, rest[2:], default_port=5555)
        return TierSpec("lmcache", host=host, port=port)
    raise ValueError(text)


def _valkey(text: str, rest: str) -> TierSpec:
    if rest.startswith("/"):
        return TierSpec("valkey", path=rest)
    credentials, _, address = rest.rpartition("@")
    username, _, password = credentials.partition(":")
    address, _, database = address.partition("/")
    host, port = _address(text, address, default_port=6379)
    return TierSpec(
        "valkey",
        host=host,
        port=port,
        database=_whole(text, database or "0", MAX_DATABASE),
        username=username or None,
        password=password or None,
    )


def _address(text: str, address: str, *, default_port: int) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or port.endswith("]"):  # an IPv6 address alone
        host, port = address, str(default_port)
    bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or "/" in host or bare:
        raise ValueError(text)
    return host.strip("[]"), _whole(text, port, MAX_PORT)


def _whole(text: str, digits: str, most: int) -> int:
    if not DIGITS.fullmatch(digits) or int(digits) > most:
        raise ValueError(text)
    return int(digits)


def _capacity(text: str, size: str) -> int:
    number, unit = size[:-2], size[-2:].lower()
    try:
        capacity = int(float(number) * _UNITS[unit])
    except (KeyError, OverflowError):
        raise ValueError(text) from None
    if not 0 < capacity <= MAX_CAPACITY:
        raise ValueError(text)
    return capacity


def _malformed(text: str, option: str) -> ConfigError:
    shown = text.rpartition("@")[2]  # never a password
    return ConfigError(
        f"{option}: {shown!r} is none of host:4GB, disk:/path:50GB, valkey://host:port, "
        "valkey:///path.sock, lmcache://host:port"
    )


# --- the scheduler's side -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is known of a request's external prefix; `ERROR` and `MISS` both mean: compute it."""

    state: Literal["pending", "hit", "miss", "error"]
    num_blocks: int = 0
    """For a hit: leading blocks of the prompt worth loading up to, local ones included."""
    deadline: float = 0.0
    """Monotonic second after which a pending lookup counts as an error."""
    num_shared: int = 0
    """Leading blocks whose K/V tiers hold, of a model with states: more than `num_blocks` where no
    tier holds a state after them."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A load has come to its end for the request: it can go on."""

    request_id: str
    ticket: int
    num_loaded: int
    """Leading blocks of the load that are verified and in place."""
    failure: str | None = None
    """Why it is fewer than asked: "missing", "corrupt", "timeout", "connection", "io"."""
    state_after: int = 0
    """Leading blocks of the prompt after which the loaded state is; 0: none was loaded."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What became known since the last poll."""

    answered: tuple[str, ...] = ()
    """Requests whose lookup is no longer pending."""
    loads: tuple[LoadReport, ...] = ()
    acknowledged: tuple[int, ...] = ()
    """Tickets whose blocks no worker touches any more."""

    def __bool__(self) -> bool:
        return bool(self.answered or self.loads or self.acknowledged)


@dataclass(frozen=True, slots=True)
class LoadedOutput:
    """What became of one encoder output that was to be loaded."""

    key: bytes
    output: Array | None = None
    """[rows, width], verified; None: no tier holds it, or none gave it whole and in time."""
    tier: str = ""
    """Which one gave it; of several, the farthest."""
