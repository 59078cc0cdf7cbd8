"""Stored responses and conversations of `/v1/responses` and `/v1/conversations`, in SQLite.

    owners      a response or a conversation of a tenant: its id, its object as JSON
      │ entries   the items of an owner, in order; a response's are its whole input and its output
    items       one item, which several owners may share
      │ item_blobs
    blobs       long texts of items (pictures and sound in base64), once for each tenant

All API processes of a server open the same file: the one of `--response-store`, which outlives the
server, else one in the server's socket folder. A response that continues another shares its items,
so deleting or losing one leaves the other whole.

Size: every tenant's bytes are counted by triggers. While all tenants together have more than
`max_bytes`, the tenant that has most loses its least recently used response or conversation. What
was not used for `max_age` seconds goes too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import msgspec

from lookonce.config import ResponseStoreConfig
from lookonce.errors import (
    BadRequestError,
    ConfigError,
    NotFoundError,
    QueueFullError,
    TooLargeError,
    UnavailableError,
)
from lookonce.types.fair_queue import FairQueue, TenantWeights

logger = logging.getLogger("lookonce.server")

Json = dict[str, Any]
Kind = Literal["response", "conversation"]
P = ParamSpec("P")
T = TypeVar("T")

APPLICATION_ID = 0x4C4F5253  # "LORS"
VERSION = 1
BLOB_BYTES = 1024
"""Texts of so many characters or more are stored apart from their item."""
BLOB_EXT = 1
"""msgpack's extension type of a blob's number."""
ROW_BYTES = 128
ENTRY_BYTES = 48
"""What a row and its place in the indexes count beside its contents."""
LARGEST_SHARE = 4
"""New items of one request may have this part of `max_bytes`."""
LARGEST_CONTEXT = 128 << 20
LARGEST_PAGE = 8 << 20
"""Bytes of items that are read at a time: a text that many items share is stored once, but read as
often as it stands in them."""
OBJECT_BYTES = 8
"""What a byte of an item becomes when it is read: values in memory are larger than in msgpack."""
MOST_EMPTY = 64
LEAST_PER_CONTAINER = 8
"""An item may have `MOST_EMPTY` lists and objects, and one more for so many of its bytes: an empty
one has a byte in msgpack, and 64 in memory."""
MOST_ENTRIES = 65_536
"""Items of one response or conversation: more would fit no model."""
BUSY_SECONDS = 10.0
MAX_CALLS = 256
"""Calls of one tenant that may wait; more are refused with 429."""
QUANTUM_MS = 5
"""Milliseconds that a tenant may use the file before the next one's turn."""
SWEEP_SECONDS = 300.0
UNFINISHED_SECONDS = 86_400.0
"""After so long a response that was never finished belonged to a process that died."""

SCHEMA = f"""
CREATE TABLE tenants (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE owners (
    number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL,
    used REAL NOT NULL, finished INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (tenant, id)
);
CREATE INDEX owners_by_use ON owners (tenant, used);
CREATE INDEX owners_by_age ON owners (used);
CREATE TABLE items (
    number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL
);
CREATE INDEX items_by_id ON items (tenant, id);
CREATE TABLE entries (
    owner INTEGER NOT NULL, position INTEGER NOT NULL, item INTEGER NOT NULL,
    output INTEGER NOT NULL, PRIMARY KEY (owner, position)
) WITHOUT ROWID;
CREATE INDEX entries_by_item ON entries (item);
CREATE TABLE blobs (
    number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, digest BLOB NOT NULL, data TEXT NOT NULL,
    bytes INTEGER NOT NULL, UNIQUE (tenant, digest)
);
CREATE TABLE item_blobs (
    item INTEGER NOT NULL, blob INTEGER NOT NULL, PRIMARY KEY (item, blob)
) WITHOUT ROWID;
CREATE INDEX item_blobs_by_blob ON item_blobs (blob);

CREATE TRIGGER owner_goes BEFORE DELETE ON owners BEGIN
    DELETE FROM entries WHERE owner = old.number;
END;
CREATE TRIGGER entry_gone AFTER DELETE ON entries
WHEN NOT EXISTS (SELECT 1 FROM entries WHERE item = old.item) BEGIN
    DELETE FROM items WHERE number = old.item;
END;
CREATE TRIGGER item_gone AFTER DELETE ON items BEGIN
    DELETE FROM item_blobs WHERE item = old.number;
END;
CREATE TRIGGER item_blob_gone AFTER DELETE ON item_blobs
WHEN NOT EXISTS (SELECT 1 FROM item_blobs WHERE blob = old.blob) BEGIN
    DELETE FROM blobs WHERE number = old.blob;
END;

CREATE TRIGGER owner_added AFTER INSERT ON owners BEGIN
    INSERT OR IGNORE INTO tenants VALUES (new.tenant, 0);
    UPDATE tenants SET bytes = bytes + length(new.body) + {ROW_BYTES} WHERE tenant = new.tenant;
END;
CREATE TRIGGER owner_changed AFTER UPDATE OF body ON owners BEGIN
    UPDATE tenants SET bytes = bytes + length(new.body) - length(old.body)
    WHERE tenant = new.tenant;
END;
CREATE TRIGGER owner_gone AFTER DELETE ON owners BEGIN
    UPDATE tenants SET bytes = bytes - length(old.body) - {ROW_BYTES} WHERE tenant = old.tenant;
    DELETE FROM tenants WHERE tenant = old.tenant AND bytes = 0;
END;
CREATE TRIGGER item_added AFTER INSERT ON items BEGIN
    UPDATE tenants SET bytes = bytes + length(new.body) + {ROW_BYTES} WHERE tenant = new.tenant;
END;
CREATE TRIGGER item_uncounted AFTER DELETE ON items BEGIN
    UPDATE tenants SET bytes = bytes - length(old.body) - {ROW_BYTES} WHERE tenant = old.tenant;
END;
CREATE TRIGGER blob_added AFTER INSERT ON blobs BEGIN
    UPDATE tenants SET bytes = bytes + new.bytes + {ROW_BYTES} WHERE tenant = new.tenant;
END;
CREATE TRIGGER blob_gone AFTER DELETE ON blobs BEGIN
    UPDATE tenants SET bytes = bytes - old.bytes - {ROW_BYTES} WHERE tenant = old.tenant;
END;
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    UPDATE tenants SET bytes = bytes + {ENTRY_BYTES}
    WHERE tenant = (SELECT tenant FROM owners WHERE number = new.owner);
END;
CREATE TRIGGER entry_uncounted AFTER DELETE ON entries BEGIN
    UPDATE tenants SET bytes = bytes - {ENTRY_BYTES}
    WHERE tenant = (SELECT tenant FROM owners WHERE number = old.owner);
END;
"""

READ_BYTES = (
    f"{OBJECT_BYTES} * length(items.body) + (SELECT coalesce(sum(bytes), 0) FROM item_blobs "
    "JOIN blobs ON blobs.number = blob WHERE item_blobs.item = items.number)"
)
"""Of a row of `items`: its bytes in memory, with those of its long texts."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a new response continues: a stored response or a conversation."""

    kind: Kind
    id: str

    @property
    def param(self) -> str:
        return "conversation" if self.kind == "conversation" else "previous_response_id"


class ResponseDatabase:
    """One connection to the file. Used by one thread at a time; several processes may have one.

    Every method is one transaction. Ids of other tenants are not found.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        max_age: float,
        durable: bool,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`durable`: the file outlives a crash of the machine. Raises `ConfigError` for a file that
        is no such database."""
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._now = now
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._sql = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--response-store: {path} cannot be opened: {error}") from None
        try:
            self._prepare(path, durable)
        except BaseException:
            self._sql.close()
            raise

    def _prepare(self, path: Path, durable: bool) -> None:
        try:
            self._use_wal()
            self._sql.execute(f"PRAGMA synchronous={'NORMAL' if durable else 'OFF'}")
            with self._transaction():
                found = self._number("PRAGMA application_id"), self._number("PRAGMA user_version")
                if found == (0, 0) and not self._number("SELECT count(*) FROM sqlite_master"):
                    for statement in _statements(SCHEMA):
                        self._sql.execute(statement)
                    self._sql.execute(f"PRAGMA application_id={APPLICATION_ID}")
                    self._sql.execute(f"PRAGMA user_version={VERSION}")
                elif found != (APPLICATION_ID, VERSION):
                    raise ConfigError(
                        f"--response-store: {path} is no store of responses of this version"
                    )
        except sqlite3.Error as error:
            raise ConfigError(f"--response-store: {path} cannot be used: {error}") from None

    def _use_wal(self) -> None:
        """SQLite does not wait for other processes that change the mode at the same time."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._sql.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def close(self) -> None:
        self._sql.close()

    # --- responses ---

    def begin(
        self, tenant: str, response_id: str, items: Sequence[Json], origin: Origin | None
    ) -> list[Json]:
        """Store the input of a response that nobody sees until `finish`: the items of `origin`,
        which are returned, and `items`. Raises `NotFoundError`, `TooLargeError`."""
        with self._transaction():
            before = 0
            number = self._add_owner(tenant, response_id, "response", b"", finished=False)
            if origin is not None:
                owner = self._find(tenant, origin.kind, origin.id, origin.param)
                self._touch(owner)
                before = self._end(owner)
                self._check_context(owner, origin.param)
                self._sql.execute(
                    "INSERT INTO entries SELECT ?, position, item, 0 FROM entries WHERE owner = ?",
                    (number, owner),
                )
            context = self._items(number)
            self._add_items(tenant, number, items, at=before)
            self._make_room(number)
            return context

    def finish(
        self,
        tenant: str,
        response_id: str,
        body: bytes,
        output: Sequence[Json],
        *,
        keep: bool,
        conversation: str | None = None,
        num_new: int = 0,
    ) -> bool:
        """Add the output and the object as JSON; from now on the response is found. With
        `conversation`, its last `num_new` inputs and the output are added to that. Without `keep`
        the response itself is removed. False: it was dropped meanwhile, for want of room."""
        with self._transaction():
            row = self._sql.execute(
                "SELECT number FROM owners WHERE tenant = ? AND id = ? AND NOT finished",
                (tenant, response_id),
            ).fetchone()
            if row is None:
                return False
            number, end = row[0], self._end(row[0])
            self._sql.execute(
                "UPDATE owners SET body = ?, finished = 1, used = ? WHERE number = ?",
                (body, self._now(), number),
            )
            self._add_items(tenant, number, output, at=end, output=True)
            if conversation is not None:
                with suppress(NotFoundError):  # it was deleted meanwhile
                    owner = self._find(tenant, "conversation", conversation, "conversation")
                    self._touch(owner)
                    shift = self._end(owner) - (end - num_new)
                    self._sql.execute(
                        "INSERT INTO entries SELECT ?, position + ?, item, 0 FROM entries "
                        "WHERE owner = ? AND position >= ?",
                        (owner, shift, number, end - num_new),
                    )
            if not keep:
                self._sql.execute("DELETE FROM owners WHERE number = ?", (number,))
            self._make_room(number)
            return True

    def discard(self, tenant: str, response_id: str) -> None:
        """Remove a response that is not finished."""
        with self._transaction():
            self._sql.execute(
                "DELETE FROM owners WHERE tenant = ? AND id = ? AND NOT finished",
                (tenant, response_id),
            )

    # --- responses and conversations ---

    def body(self, tenant: str, kind: Kind, owner_id: str) -> bytes:
        """The object as JSON. Raises `NotFoundError`."""
        with self._transaction():
            owner = self._find(tenant, kind, owner_id, f"{kind}_id")
            self._touch(owner)
            row = self._sql.execute("SELECT body FROM owners WHERE number = ?", (owner,)).fetchone()
            return bytes(row[0])

    def delete(self, tenant: str, kind: Kind, owner_id: str) -> None:
        """Raises `NotFoundError`."""
        with self._transaction():
            owner = self._find(tenant, kind, owner_id, f"{kind}_id")
            self._sql.execute("DELETE FROM owners WHERE number = ?", (owner,))

    def context(self, tenant: str, origin: Origin) -> list[Json]:
        """All items, in order. Raises `NotFoundError`, `TooLargeError`."""
        with self._transaction():
            owner = self._find(tenant, origin.kind, origin.id, origin.param)
            self._touch(owner)
            self._check_context(owner, origin.param)
            return self._items(owner)

    def page(
        self,
        tenant: str,
        kind: Kind,
        owner_id: str,
        *,
        after: str | None = None,
        limit: int = 20,
        descending: bool = True,
    ) -> tuple[list[Json], bool]:
        """Up to `limit` items behind the one named `after`, fewer where these are large, and
        whether there are more. Of a response only its input. Raises `NotFoundError`,
        `BadRequestError`."""
        with self._transaction():
            owner = self._find(tenant, kind, owner_id, f"{kind}_id")
            self._touch(owner)
            start = None if after is None else self._position(owner, after)
            if after is not None and start is None:
                raise BadRequestError(f"after: no item has the id {after[:80]!r}", param="after")
            sign, order = ("<", "DESC") if descending else (">", "ASC")
            rows = self._sql.execute(
                f"SELECT body, {READ_BYTES} FROM entries JOIN items ON items.number = item "
                f"WHERE owner = ? AND NOT output AND (?2 IS NULL OR position {sign} ?2) "
                f"ORDER BY position {order} LIMIT ?",
                (owner, start, limit + 1),
            ).fetchall()
            sizes = list(accumulate(row[1] for row in rows[:limit]))
            fit = max(1, bisect_right(sizes, LARGEST_PAGE))
            return [self._decoded(row[0]) for row in rows[:limit][:fit]], len(rows) > fit

    def items(self, tenant: str, ids: Sequence[str]) -> list[Json | None]:
        """Items by their ids; None for one that is not stored. Raises `TooLargeError`."""
        with self._transaction():
            found, left = [], LARGEST_CONTEXT
            for item_id in ids:
                row = self._item(tenant, item_id)
                left -= row[1] if row is not None else 0
                if left < 0:
                    raise TooLargeError(
                        f"input: the items referred to take more than {LARGEST_CONTEXT} bytes of "
                        "memory, which is the limit",
                        param="input",
                    )
                found.append(None if row is None else self._decoded(row[0]))
            return found

    # --- conversations ---

    def create_conversation(
        self, tenant: str, conversation_id: str, body: bytes, items: Sequence[Json]
    ) -> None:
        """Raises `TooLargeError`."""
        with self._transaction():
            number = self._add_owner(tenant, conversation_id, "conversation", body, finished=True)
            self._add_items(tenant, number, items, at=0)
            self._make_room(number)

    def update_conversation(self, tenant: str, conversation_id: str, body: bytes) -> None:
        """Raises `NotFoundError`."""
        with self._transaction():
            owner = self._find(tenant, "conversation", conversation_id, "conversation_id")
            self._touch(owner)
            self._sql.execute("UPDATE owners SET body = ? WHERE number = ?", (body, owner))
            self._make_room(owner)

    def add_to_conversation(
        self, tenant: str, conversation_id: str, items: Sequence[Json]
    ) -> list[Json]:
        """The items with the ids that they have now. Raises `NotFoundError`, `TooLargeError`."""
        with self._transaction():
            owner = self._find(tenant, "conversation", conversation_id, "conversation_id")
            self._touch(owner)
            added = self._add_items(tenant, owner, items, at=self._end(owner))
            self._make_room(owner)
            return added

    def conversation_item(self, tenant: str, conversation_id: str, item_id: str) -> Json:
        """Raises `NotFoundError`."""
        with self._transaction():
            owner = self._find(tenant, "conversation", conversation_id, "conversation_id")
            row = self._sql.execute(
                "SELECT body FROM entries JOIN items ON items.number = item "
                "WHERE owner = ? AND position = ?",
                (owner, self._required_position(owner, item_id)),
            ).fetchone()
            return self._decoded(row[0])

    def remove_from_conversation(self, tenant: str, conversation_id: str, item_id: str) -> bytes:
        """Returns the conversation as JSON. Raises `NotFoundError`."""
        with self._transaction():
            owner = self._find(tenant, "conversation", conversation_id, "conversation_id")
            self._touch(owner)
            self._sql.execute(
                "DELETE FROM entries WHERE owner = ? AND position = ?",
                (owner, self._required_position(owner, item_id)),
            )
            row = self._sql.execute("SELECT body FROM owners WHERE number = ?", (owner,)).fetchone()
            return bytes(row[0])

    # --- room ---

    def sweep(self) -> None:
        """Remove what is too old, and what a process left unfinished that died."""
        with self._transaction():
            now = self._now()
            self._sql.execute(
                "DELETE FROM owners WHERE used < ? OR (used < ? AND NOT finished)",
                (now - self._max_age, now - UNFINISHED_SECONDS),
            )

    def bytes_by_tenant(self) -> dict[str, int]:
        return dict(self._sql.execute("SELECT tenant, bytes FROM tenants").fetchall())

    def check_integrity(self) -> None:
        """Every item and blob is used, and the tenants' bytes are the sums of their rows."""
        counted: dict[str, int] = {}
        for query in (
            f"SELECT tenant, length(body) + {ROW_BYTES} FROM owners",
            f"SELECT tenant, length(body) + {ROW_BYTES} FROM items",
            f"SELECT tenant, bytes + {ROW_BYTES} FROM blobs",
            f"SELECT tenant, {ENTRY_BYTES} FROM entries JOIN owners ON owners.number = owner",
        ):
            for tenant, size in self._sql.execute(query):
                counted[tenant] = counted.get(tenant, 0) + size
        assert counted == self.bytes_by_tenant()
        for table, key in (("items", "entries WHERE item"), ("blobs", "item_blobs WHERE blob")):
            lost = f"SELECT count(*) FROM {table} WHERE NOT EXISTS (SELECT 1 FROM {key} = number)"
            assert self._number(lost) == 0, table

    def _make_room(self, number: int) -> None:
        """Called last in a transaction. Raises `TooLargeError` where `number` itself has to go."""
        while self._number("SELECT coalesce(sum(bytes), 0) FROM tenants") > self._max_bytes:
            (oldest,) = self._sql.execute(
                "SELECT number FROM owners WHERE tenant = "
                "(SELECT tenant FROM tenants ORDER BY bytes DESC LIMIT 1) "
                "ORDER BY number = ?, used, number LIMIT 1",
                (number,),
            ).fetchone()
            if oldest == number:
                raise TooLargeError(
                    "this has more items than can be stored: --response-store-gb", param="input"
                )
            self._sql.execute("DELETE FROM owners WHERE number = ?", (oldest,))

    # --- rows ---

    def _add_owner(
        self, tenant: str, owner_id: str, kind: Kind, body: bytes, *, finished: bool
    ) -> int:
        added = self._sql.execute(
            "INSERT INTO owners (tenant, id, kind, used, finished, body) VALUES (?, ?, ?, ?, ?, ?)",
            (tenant, owner_id, kind, self._now(), finished, body),
        )
        assert added.lastrowid is not None
        return added.lastrowid

    def _find(self, tenant: str, kind: Kind, owner_id: str, param: str) -> int:
        row = self._sql.execute(
            "SELECT number FROM owners "
            "WHERE tenant = ? AND id = ? AND kind = ? AND finished AND used >= ?",
            (tenant, owner_id, kind, self._now() - self._max_age),
        ).fetchone()
        if row is None:
            raise NotFoundError(
                f"{param}: no {kind} {owner_id[:80]!r} is stored here",
                param=param,
                code="previous_response_not_found" if param == "previous_response_id" else None,
            )
        return int(row[0])

    def _touch(self, owner: int) -> None:
        self._sql.execute("UPDATE owners SET used = ? WHERE number = ?", (self._now(), owner))

    def _end(self, owner: int) -> int:
        """The position behind the last item."""
        return self._number(
            "SELECT coalesce(max(position) + 1, 0) FROM entries WHERE owner = ?", owner
        )

    def _position(self, owner: int, item_id: str) -> int | None:
        row = self._sql.execute(
            "SELECT position FROM entries JOIN items ON items.number = item "
            "WHERE owner = ? AND id = ? ORDER BY position LIMIT 1",
            (owner, item_id),
        ).fetchone()
        return None if row is None else int(row[0])

    def _required_position(self, owner: int, item_id: str) -> int:
        position = self._position(owner, item_id)
        if position is None:
            raise NotFoundError(
                f"item_id: the conversation has no item {item_id[:80]!r}", param="item_id"
            )
        return position

    def _items(self, owner: int) -> list[Json]:
        rows = self._sql.execute(
            "SELECT body FROM entries JOIN items ON items.number = item "
            "WHERE owner = ? ORDER BY position",
            (owner,),
        ).fetchall()
        return [self._decoded(row[0]) for row in rows]

    def _check_context(self, owner: int, param: str) -> None:
        """Raise `TooLargeError` where an owner's items are more than are read at a time."""
        size = self._number(
            f"SELECT coalesce(sum({READ_BYTES}), 0) FROM entries "
            "JOIN items ON items.number = item WHERE owner = ?",
            owner,
        )
        if size > LARGEST_CONTEXT:
            raise TooLargeError(
                f"{param}: its items take {size} bytes of memory, {LARGEST_CONTEXT} are allowed",
                param=param,
            )

    def _item(self, tenant: str, item_id: str) -> tuple[bytes, int] | None:
        """What is stored of it, and how many bytes it has when it is read."""
        row: tuple[bytes, int] | None = self._sql.execute(
            f"SELECT body, {READ_BYTES} FROM items WHERE tenant = ? AND id = ? "
            "ORDER BY number DESC LIMIT 1",
            (tenant, item_id),
        ).fetchone()
        return row

    def _add_items(
        self, tenant: str, owner: int, items: Sequence[Json], *, at: int, output: bool = False
    ) -> list[Json]:
        """The items as they were added: an input whose id another item of the owner has gets a new
        one."""
        held = self._number("SELECT count(*) FROM entries WHERE owner = ?", owner)
        if held + len(items) > MOST_ENTRIES:
            raise TooLargeError(
                f"there would be {held + len(items)} items, {MOST_ENTRIES} are allowed",
                param="input",
            )
        size = 0
        added_items = list(items) if output else self._with_new_ids(owner, items)
        for position, item in enumerate(added_items, at):
            blobs: set[int] = set()
            try:
                body = msgspec.msgpack.encode(self._without_long_texts(tenant, item, blobs))
            except (RecursionError, OverflowError) as error:
                raise BadRequestError(f"an item cannot be stored: {error}", param="input") from None
            if _num_containers(item) > MOST_EMPTY + len(body) // LEAST_PER_CONTAINER:
                raise BadRequestError(
                    "an item cannot be stored: it has too many lists and objects that are empty "
                    "or nearly so",
                    param="input",
                )
            size += len(body) + sum(
                self._number("SELECT bytes FROM blobs WHERE number = ?", blob) for blob in blobs
            )
            if size > self._max_bytes // LARGEST_SHARE:
                raise TooLargeError(
                    "items of one request may have a quarter of --response-store-gb", param="input"
                )
            added = self._sql.execute(
                "INSERT INTO items (tenant, id, body) VALUES (?, ?, ?)", (tenant, item["id"], body)
            )
            self._sql.executemany(
                "INSERT OR IGNORE INTO item_blobs VALUES (?, ?)",
                [(added.lastrowid, blob) for blob in blobs],
            )
            self._sql.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?)",
                (owner, position, added.lastrowid, output),
            )
        return added_items

    def _with_new_ids(self, owner: int, items: Sequence[Json]) -> list[Json]:
        """A client may send an item again under its id. Pages follow the item that `after` names,
        so an id stands for one item of an owner."""
        rows = self._sql.execute(
            "SELECT items.id FROM entries JOIN items ON items.number = item WHERE owner = ?",
            (owner,),
        )
        taken = {row[0] for row in rows}
        result = []
        for item in items:
            if item["id"] in taken:
                kind = item["id"].partition("_")[0]
                item = {**item, "id": f"{kind[:16]}_{secrets.token_hex(16)}"}
            taken.add(item["id"])
            result.append(item)
        return result

    def _without_long_texts(self, tenant: str, value: Any, blobs: set[int]) -> Any:
        """`value` with a blob's number for each long text; the numbers are added to `blobs`. A text
        that an item repeats stays in it: an item is not much larger than what is counted for it."""
        match value:
            case str() if len(value) >= BLOB_BYTES:
                number = self._blob(tenant, value)
                if number in blobs:
                    return value
                blobs.add(number)
                return msgspec.msgpack.Ext(BLOB_EXT, number.to_bytes(8, "big"))
            case dict():
                return {k: self._without_long_texts(tenant, v, blobs) for k, v in value.items()}
            case list():
                return [self._without_long_texts(tenant, each, blobs) for each in value]
        return value

    def _blob(self, tenant: str, text: str) -> int:
        data = text.encode()
        digest = sha256(data).digest()
        row = self._sql.execute(
            "SELECT number FROM blobs WHERE tenant = ? AND digest = ?", (tenant, digest)
        ).fetchone()
        if row is not None:
            return int(row[0])
        added = self._sql.execute(
            "INSERT INTO blobs (tenant, digest, data, bytes) VALUES (?, ?, ?, ?)",
            (tenant, digest, text, len(data)),
        )
        assert added.lastrowid is not None
        return added.lastrowid

    def _decoded(self, body: bytes) -> Json:
        def read(code: int, data: memoryview) -> str:
            number = int.from_bytes(data, "big")
            row = self._sql.execute("SELECT data FROM blobs WHERE number = ?", (number,)).fetchone()
            return str(row[0])

        item: Json = msgspec.msgpack.decode(body, ext_hook=read)
        return item

    def _number(self, query: str, *values: int) -> int:
        return int(self._sql.execute(query, values).fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._sql.in_transaction:  # SQLite itself rolls back where the disk is full
                self._sql.execute("ROLLBACK")
            raise
        self._sql.execute("COMMIT")


def _num_containers(value: Any) -> int:
    """Lists and objects in `value`, itself included."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + sum(map(_num_containers, value.values() if isinstance(value, dict) else value))


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, which `executescript` would run outside of the transaction."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


@dataclass(eq=False, slots=True)
class _Call:
    work: Callable[[], Any]
    result: Future[Any]


class ResponseStore:
    """A `ResponseDatabase` in a thread of its own, at which tenants take turns by the time that
    their calls took."""

    def __init__(
        self,
        database: ResponseDatabase,
        weights: TenantWeights | None = None,
        max_waiting: int = MAX_CALLS,
    ) -> None:
        """`max_waiting`: of one tenant's calls."""
        self._database = database
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(1, "response-store")
        self._lock = threading.Lock()
        """Guards what the thread and the event loop share: all below."""
        self._queue: FairQueue[_Call] = FairQueue(QUANTUM_MS, weights)
        self._waiting = Counter[str]()

    async def call(
        self,
        method: Callable[Concatenate[ResponseDatabase, str, P], T],
        tenant: str,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Raises what `method` raises; `UnavailableError` where the file cannot be used,
        `QueueFullError` where too many calls of the tenant wait. What ends a response is never
        refused."""
        waiting = self.num_waiting(tenant)
        if waiting >= self._max_waiting and method != ResponseDatabase.finish:
            raise QueueFullError(
                f"{waiting} of your requests wait for stored responses, the most that may"
            )
        work = partial(method, self._database, tenant, *args, **kwargs)
        return await asyncio.wrap_future(self._submit(tenant, work))

    def num_waiting(self, tenant: str) -> int:
        """Its calls that have not begun."""
        with self._lock:
            return self._waiting.get(tenant, 0)

    def discard_later(self, tenant: str, response_id: str) -> None:
        """Without waiting; failures are logged."""
        self._submit(tenant, partial(self._database.discard, tenant, response_id))

    async def sweep(self) -> None:
        await asyncio.wrap_future(self._submit("", self._database.sweep))

    def _submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        call = _Call(work, Future())
        with self._lock:
            self._queue.push(tenant, call, 1)
            self._waiting[tenant] += 1
        self._thread.submit(self._run_next)
        return call.result

    def _run_next(self) -> None:
        """In the thread, once for each call, though perhaps for another one."""
        with self._lock:
            found = self._queue.pop()
            assert found is not None, "there are as many runs as calls"
            tenant, call = found
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        if not call.result.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            result = call.work()
        except sqlite3.Error as error:
            logger.error("stored responses cannot be used: %s", error)
            unavailable = UnavailableError("stored responses cannot be used now")
            unavailable.__cause__ = error
            call.result.set_exception(unavailable)
        except BaseException as error:  # noqa: BLE001  it is its caller's
            call.result.set_exception(error)
        else:
            call.result.set_result(result)
        with self._lock:
            self._queue.settle(tenant, 1000 * (time.monotonic() - began) - 1)

    async def sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            with suppress(UnavailableError):
                await self.sweep()

    def close(self) -> None:
        self._thread.shutdown()
        self._database.close()


@asynccontextmanager
async def open_response_store(
    config: ResponseStoreConfig, folder: Path, weights: TenantWeights | None = None
) -> AsyncIterator[ResponseStore | None]:
    """In `folder` unless the configuration names a file; None where nothing shall be stored.

    Raises `ConfigError`."""
    if not config.max_bytes:
        yield None
        return
    path = folder / "responses.sqlite" if config.file is None else Path(config.file)
    database = ResponseDatabase(
        path,
        max_bytes=config.max_bytes,
        max_age=config.max_age,
        durable=config.file is not None,
    )
    store = ResponseStore(database, weights)
    try:
        await store.sweep()
        sweeper = asyncio.create_task(store.sweep_forever())
        try:
            yield store
        finally:
            sweeper.cancel()
    finally:
        store.close()
