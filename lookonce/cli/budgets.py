"""Everything that a request can make a server do, and how much of it: one table.

The limits are read from where they are enforced. `python -m lookonce.cli.budgets` prints the table
of docs/operations.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lookonce.cache.identity import MAX_BINDINGS
from lookonce.cache.slabs import MAX_SLABS
from lookonce.config import ConnectionConfig, Options, SessionConfig
from lookonce.core.scheduler import MAX_SHARES
from lookonce.engine.process import grammar
from lookonce.engine.process.grammar_worker import GrammarLimits
from lookonce.fleet import engine_http, identity, rendering, router
from lookonce.fleet import frontend as fleet_frontend
from lookonce.frontend.sampling_params import MAX_CHOICES
from lookonce.frontend.tools.calls import MAX_SCHEMA_VALUES, MAX_TOOLS
from lookonce.render.media import address_guard, cost, fetch, pdf, pool
from lookonce.render.media.processing import MAX_CHANNELS
from lookonce.render.prompt import long_texts
from lookonce.render.prompt.messages import MAX_ARGUMENT_VALUES
from lookonce.server.http.body import MAX_VALUES
from lookonce.server.http.connections import (
    DISCARD_SECONDS,
    DROPPED_BYTES_PER_SECOND,
    MAX_PIPELINED,
)
from lookonce.server.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS
from lookonce.server.http.websocket import MAX_FRAGMENTS, MAX_MESSAGE_BYTES
from lookonce.server.response_store import LARGEST_CONTEXT, LARGEST_PAGE, MAX_CALLS, MOST_ENTRIES
from lookonce.server.routes.completions import MAX_PROMPTS
from lookonce.server.routes.conversations import MAX_ITEMS
from lookonce.server.routes.pooling import MAX_INPUTS, MAX_NUMBERS
from lookonce.server.routes.realtime.session import MAX_RESPONSES
from lookonce.server.routes.realtime.session import MAX_VALUES as MAX_EVENT_VALUES
from lookonce.server.routes.serving_base import MAX_SCORED
from lookonce.server.services import LARGEST_BODIES_HELD
from lookonce.types.logs import MAX_LINES
from lookonce.types.sampling import MAX_BIASES, MAX_GRAMMAR_BYTES

Payer = Literal["address", "connection", "request", "tenant", "key, tenant", "process", "item"]
"""Whose use is counted."""


@dataclass(frozen=True, slots=True)
class Budget:
    what: str
    limit: float | str
    """A number, or the option that sets it."""
    unit: str
    payer: Payer
    above: str
    """What happens to what is beyond the limit."""

    def row(self) -> str:
        limit = self.limit if isinstance(self.limit, str) else f"{self.limit:,.10g}"
        return f"| {self.what} | {limit} | {self.unit} | {self.payer} | {self.above} |"


_OPTIONS = Options()
_CONNECTIONS = ConnectionConfig()
_GRAMMARS = GrammarLimits()
_SESSIONS = SessionConfig()


def _option(name: str) -> str:
    """An option and its default."""
    value = getattr(_OPTIONS, name)
    shown = f"{value:,}" if isinstance(value, int | float) else value
    return f"`--{name.replace('_', '-')}` [{shown}]"


BUDGETS = (
    # before authentication
    Budget("open connections", _option("max_connections"), "connections", "process",
           "one that waits is closed, else new ones wait"),
    Budget("open connections of one", _option("max_connections_per_address"), "connections",
           "address", "429"),
    Budget("header", _option("max_header_bytes"), "bytes", "request", "431"),
    Budget("header fields", _CONNECTIONS.max_headers, "fields", "request", "431"),
    Budget("time for a header", _option("header_timeout"), "s", "connection", "408"),
    Budget("time without a byte of a body", _option("body_timeout"), "s", "connection", "408"),
    Budget("pace of a body, at least", _CONNECTIONS.min_body_rate, "bytes/s", "connection", "408"),
    Budget("rest of a body that was answered", DISCARD_SECONDS, "s", "connection", "closed"),
    Budget("reading what is dropped, of all addresses", DROPPED_BYTES_PER_SECOND, "bytes/s",
           "address", "waits for the others' turns"),
    Budget("time between requests", _option("keep_alive_timeout"), "s", "connection", "closed"),
    Budget("time an answer is not read", _CONNECTIONS.write_timeout, "s", "connection", "closed"),
    Budget("answers that are not read",
           _CONNECTIONS.max_unread_bytes, "bytes", "process",
           "the connections that have most unread are closed"),
    Budget("pipelined requests", MAX_PIPELINED, "requests", "connection", "closed"),
    Budget("log lines of one line of code", MAX_LINES, "lines/min", "process",
           "left out, and counted"),
    # of a tenant
    Budget("requests", "`--limits` requests_per_second", "requests/s", "key, tenant", "429"),
    Budget("tokens", "`--limits` tokens_per_minute", "tokens/min", "key, tenant", "429"),
    Budget("media parts", "`--limits` media_per_minute", "parts/min", "key, tenant", "429"),
    Budget("requests being served", "`--limits` concurrent_requests", "requests", "key, tenant",
           "429"),
    Budget("answer", "`--limits` max_tokens", "tokens", "key, tenant", "400"),
    Budget("requests waiting in the engine", _option("max_queue"), "requests", "tenant",
           f"429; of all tenants {MAX_SHARES} times as many"),
    Budget("computing prompts", "turns", "tokens", "tenant", "waits for the others' turns"),
    Budget("answers that generate side by side", "turns where a step would take others too long",
           "sequences", "tenant", "waits for the others' turns"),
    Budget("KV blocks", "as many for its weight as others, where these wait", "blocks", "tenant",
           "its latest answers are preempted, never its earliest"),
    Budget("stored responses and conversations", _option("response_store_gb"), "GiB", "process",
           "the tenant that has most loses what it used least recently"),
    Budget("items of a conversation, or of a response with what it continues", MOST_ENTRIES,
           "items", "request", "413"),
    Budget("stored items that are continued or referred to", LARGEST_CONTEXT, "bytes", "request",
           "413"),
    Budget("stored items of a page", LARGEST_PAGE, "bytes", "request",
           "the page ends earlier, after one item at least"),
    Budget("large bodies and files on the event loop", "turns", "bytes", "tenant",
           "waits for the others' turns"),
    Budget("bodies and fetched media of requests that are being served",
           f"{LARGEST_BODIES_HELD} largest bodies; half where there are several tenants", "bytes",
           "tenant", "429"),
    Budget("calls waiting for stored responses and conversations", MAX_CALLS, "calls", "tenant",
           "429; the others wait for their turns"),
    # of a request
    Budget("body", f"16 MiB and four of {_option('max_media_bytes')} in base64", "bytes", "request",
           "413"),
    Budget("commas and brackets of a body", MAX_VALUES, "characters", "request", "413"),
    Budget("fields of a form", MAX_FIELDS, "fields", "request", "413"),
    Budget("fields of a form together, but the file", MAX_FIELD_BYTES, "bytes", "request", "413"),
    Budget("messages, input items and their parts", "the model's context", "parts", "request",
           "400 before they are read"),
    Budget("tools", MAX_TOOLS, "tools", "request", "400"),
    Budget("parameters of all tools", MAX_SCHEMA_VALUES, "JSON values", "request", "400"),
    Budget("arguments of all earlier tool calls",
           f"{MAX_ARGUMENT_VALUES:,}, or what the context can hold", "commas and brackets",
           "request", "400"),
    Budget("token ids of one field", "the vocabulary", "ids", "request", "400"),
    Budget("token ids of logit_bias", MAX_BIASES, "ids", "request", "400"),
    Budget("items stored at a time", MAX_ITEMS, "items", "request", "400"),
    Budget("prompts of a completion", MAX_PROMPTS, "prompts", "request", "400"),
    Budget("inputs to embed or compare", MAX_INPUTS, "inputs", "request", "400"),
    Budget("numbers of their vectors", MAX_NUMBERS, "numbers", "request", "400"),
    Budget("log-probabilities of prompts", MAX_SCORED, "numbers", "request", "400"),
    Budget("media of a prompt", _option("limit_mm_per_prompt"), "parts", "request", "400"),
    # sessions
    Budget("live sessions, and realtime sessions", _option("max_sessions"), "sessions", "process",
           "429"),
    Budget("those of one", "`--max-tenant-sessions` [half; all where there is one tenant]",
           "sessions", "tenant", "429"),
    Budget("what a realtime session holds", _SESSIONS.max_bytes, "bytes", "connection",
           "an error event"),
    Budget("what all of them hold", _SESSIONS.max_total_bytes, "bytes", "process",
           "an error event; one tenant has half where there are others"),
    Budget("time without an event or work", _SESSIONS.idle_timeout, "s", "connection", "closed"),
    Budget("responses of a session at a time", MAX_RESPONSES, "responses", "connection",
           "an error event"),
    Budget("message of a WebSocket", MAX_MESSAGE_BYTES, "bytes", "connection", "closed"),
    Budget("frames of a message", MAX_FRAGMENTS, "frames", "connection", "closed"),
    Budget("JSON values of an event", MAX_EVENT_VALUES, "values", "connection", "an error event"),
    # texts
    Budget("text", "what the context can hold", "places where a token must end", "request",
           "400 before it is tokenized"),
    Budget("threads for long texts, large chats and bodies", max(1, long_texts.THREADS - 1),
           "threads", "tenant", "waits"),
    Budget("converting large chats and bodies while another tenant asks",
           long_texts.LOCK_SHARE, "of a thread's time", "tenant", "waits"),
    Budget("long texts, large chats and bodies waiting", long_texts.MAX_WAITING, "texts", "tenant",
           "429"),
    # media
    Budget("file", _option("max_media_bytes"), "bytes", "item", "413"),
    Budget("time of a fetch", _option("media_timeout"), "s", "item", "422"),
    Budget("fetches at a time", fetch.MAX_FETCHES, "fetches", "tenant", "waits"),
    Budget("names looked up at a time", address_guard.MAX_LOOKUPS, "names", "tenant", "waits"),
    Budget("picture", _option("max_image_pixels"), "pixels", "item", "413 by its header"),
    Budget("sound", _option("max_audio_seconds"), "s", "item", "413"),
    Budget("film", _option("max_video_seconds"), "s", "item", "413 by its header"),
    Budget("frames of a film", _option("max_video_frames"), "frames", "item", "413 by its header"),
    Budget("channels of a sound", MAX_CHANNELS, "channels", "item", "422"),
    Budget("scans of a JPEG", cost.MAX_SCANS, "scans", "item", "413 before it is decoded"),
    Budget("segments of a JPEG", cost.MAX_SEGMENTS, "segments", "item", "413"),
    Budget("chunks of a PNG or GIF", cost.MAX_CHUNKS, "chunks", "item", "413"),
    Budget("decoding, by its header", _option("max_decode_seconds"), "CPU s", "item",
           "413 before it is decoded"),
    Budget("decoding a film, by its index", _option("max_video_decode_seconds"), "CPU s", "item",
           "413 before a frame is decoded"),
    Budget("decoding, really", "6 times the estimate, 4 to 60", "CPU s", "item",
           "422, its worker is replaced; the tenant pays for it"),
    Budget("memory that a job leaves in use in its worker", pool.MOST_KEPT_BYTES, "bytes", "item",
           "its worker is replaced; the tenant pays for it"),
    Budget("pages of PDF files", _option("max_document_pages"), "pages", "request",
           "413 before any is drawn"),
    Budget("page of a PDF file", f"{_option('max_image_pixels')} at {pdf.PAGE_DPI} dots per inch",
           "pixels", "item", "413 before it is drawn"),
    Budget("media waiting", pool.MAX_QUEUE_PER_TENANT, "items", "tenant", "429"),
    Budget("media waiting of all", pool.MAX_QUEUE, "items", "process", "429"),
    Budget("uuids that are remembered", MAX_BINDINGS, "uuids", "tenant",
           "the tenant that has most forgets the one it used longest ago: its media is sent again"),
    Budget("shared memory that is leased for media", MAX_SLABS, "slabs", "process",
           "items travel in messages"),
    Budget("media workers", "turns", "CPU s", "tenant", "waits for the others' turns"),
    # grammars
    Budget("grammar", MAX_GRAMMAR_BYTES, "bytes", "request", "400"),
    Budget("choices", MAX_CHOICES, "choices", "request", "400"),
    Budget("compiling a grammar", _GRAMMARS.cpu_seconds, "CPU s", "request",
           "400, the worker is replaced"),
    Budget("memory of compiling", _GRAMMARS.memory_bytes, "bytes", "request",
           "400, the worker is replaced"),
    Budget("compiled grammar", _GRAMMARS.compiled_bytes, "bytes", "request", "400"),
    Budget("masks of one sample", _GRAMMARS.mask_seconds, "CPU s, and 5 ms a token", "request",
           "this request fails"),
    Budget("grammars waiting", grammar.MAX_WAITING, "grammars", "tenant", "429"),
    Budget("workers for grammars", max(1, grammar.WORKERS - 1), "workers", "tenant", "waits"),
    Budget("compiled grammars kept", grammar.CACHE_BYTES, "bytes", "tenant",
           "dropped from the tenant that holds most"),
    # of a fleet's front-end
    Budget("fleet: body", fleet_frontend.MAX_BODY_BYTES, "bytes", "request", "413"),
    Budget("fleet: body without a known key", fleet_frontend.MAX_KEYLESS_BYTES, "bytes", "request",
           "401"),
    Budget("fleet: bodies that wait for an engine", fleet_frontend.MAX_HELD_BYTES, "bytes",
           "tenant", "429; one tenant has half where there are others"),
    Budget("fleet: commas and brackets of a body", identity.MAX_VALUES, "characters", "request",
           "routed by its first level alone, rendered by its engine; not looked into above what "
           "engines take"),
    Budget("fleet: quotes of a body that is rendered there", rendering.MAX_QUOTES, "characters",
           "request", "rendered by its engine"),
    Budget("fleet: base64 of a body", identity.MAX_MARKS, "data URLs", "request",
           "those that follow are not taken out before JSON is read"),
    Budget("fleet: parts of a prompt", identity.MAX_PARTS, "parts", "request",
           "those that follow do not count for the route"),
    Budget("fleet: media of a prompt", identity.MAX_MEDIA, "items", "request",
           "those that follow do not count for the route"),
    Budget("fleet: answer that its client does not read", engine_http.MAX_UNREAD, "bytes",
           "request", "the engine's connection is not read"),
    Budget("fleet: idle connections to engines", engine_http.MAX_IDLE, "connections", "process",
           "closed"),
    Budget("fleet: sessions that stay with an engine", router.MAX_SESSIONS, "sessions", "tenant",
           "the tenant that has most loses the one it used longest ago"),
    Budget("fleet: responses and conversations whose engine is known", router.MAX_STORED,
           "entries", "tenant", "the same; engines are asked in turn"),
    Budget("fleet: URLs and uuids whose media are known", router.MAX_ALIASES, "entries", "tenant",
           "the same; routed without them"),
)  # fmt: skip


def markdown() -> str:
    head = ["| what | limit | unit | who pays | above it |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(budget.row() for budget in BUDGETS)])


if __name__ == "__main__":
    print(markdown())
