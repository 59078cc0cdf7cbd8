"""All configuration: one frozen dataclass per component, resolved once by `resolve`.

Components receive the values they use, never this tree. LookOnce reads the environment in two
places: `LOOKONCE_CPU_KERNELS` in `model/native/compiled.py`, when that is imported, and the options
as `LOOKONCE_PORT` in `cli` (torch, OpenMP and the Hugging Face libraries read their own).
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import os
import re
import secrets
import ssl
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import parse_qsl

from lookonce.errors import ConfigError
from lookonce.types.cpu import cpu_multiplies_bf16
from lookonce.types.kv import (
    DIGITS,
    LMCACHE_MISSING,
    KVLoadFailurePolicy,
    KVLoadPolicy,
    TierSpec,
    parse_tier_spec,
)
from lookonce.types.limits import Limits, parse_limits
from lookonce.types.logs import LogConfig, LogFormat, LogLevel
from lookonce.types.media import MODALITIES
from lookonce.types.pooling import POOLING_KINDS


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be: `least` (or, where `above`, more than it) to `most`."""

    least: float
    most: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        enough = value > self.least if self.above else value >= self.least
        return enough and value <= self.most  # nan is neither

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.least} and at most {self.most}"


_MEMORY_GB = Range(0, 1 << 20, above=True)
_SECONDS = Range(0, 1_000_000, above=True)
_COUNT = Range(1, (1 << 31) - 1)
OPTION_RANGES = {
    "port": Range(0, 65_535),
    "api_processes": Range(1, 1_024),
    "max_model_len": _COUNT,
    "max_num_seqs": Range(1, 65_536),
    "max_num_batched_tokens": Range(1, 1 << 24),
    "tensor_parallel": Range(1, 64),
    "cuda_graph_gb": Range(0, 1 << 20),
    "max_queue": _COUNT,
    "max_sessions": _COUNT,
    "max_tenant_sessions": _COUNT,
    "kv_cache_gb": _MEMORY_GB,
    "block_size": Range(1, 65_536),
    "encoder_cache_gb": _MEMORY_GB,
    "state_cache_gb": Range(0, 1 << 20),
    "encoder_cache_host_gb": Range(0, 1 << 20),
    "mm_processor_cache_gb": Range(0, 1 << 20),
    "media_timeout": _SECONDS,
    "max_media_bytes": Range(1, 1 << 40),
    "max_image_pixels": Range(1, 1 << 40),
    "max_audio_seconds": _SECONDS,
    "max_video_seconds": _SECONDS,
    "max_video_frames": Range(1, 100_000),
    "max_decode_seconds": _SECONDS,
    "max_video_decode_seconds": _SECONDS,
    "max_document_pages": Range(1, 100_000),
    "engine_stall_timeout": _SECONDS,
    "max_connections": _COUNT,
    "max_connections_per_address": _COUNT,
    "max_header_bytes": Range(1024, 1 << 24),
    "header_timeout": _SECONDS,
    "body_timeout": _SECONDS,
    "keep_alive_timeout": _SECONDS,
    "drain_timeout": Range(0, 1_000_000),
    "otlp_sample_ratio": Range(0, 1),
    "max_loras": Range(1, 1_024),
    "max_lora_rank": Range(1, 4_096),
    "response_store_gb": Range(0, 1 << 20),
    "response_store_ttl": Range(0, 1 << 32, above=True),
}
"""Every option that is a number. The most is what no machine has: a slip, or no number at all."""
MAX_SOCKET_FOLDER = 90
"""Bytes; a unix socket's path has at most 103 on some systems, and names in it have up to 12."""
NANO = "nano"
NANO_EAR = "nano-ear"
EMBEDDED_MODELS = {name: Path(__file__).parent / "models" / name for name in (NANO, NANO_EAR)}
"""Models that ship with the package, by the names they are served under."""
NANO_FOLDER = EMBEDDED_MODELS[NANO]
NANO_EAR_FOLDER = EMBEDDED_MODELS[NANO_EAR]
GIB = 1 << 30
Word = TypeVar("Word", bound=str)
REASONING_PARSERS = (
    "auto", "none", "deepseek_r1", "deepseek_v3", "ernie45", "glm45", "kimi_k2", "kimi_vl",
    "minimax_m2", "mistral", "nemotron_v3", "olmo3", "qwen3", "seed_oss", "step3",
)  # fmt: skip
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3", "mistral", "qwen3_coder", "harmony")
ProcessorCacheType = Literal["shm", "lru"]
"""Where processed media lies: in shared memory, or in messages and then in the engine's memory."""
DEFAULT_CACHE_TYPE: ProcessorCacheType = "shm" if sys.platform == "linux" else "lru"
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")
POOLING_OPTIONS = ("none", *POOLING_KINDS)
DTYPES = ("float32", "bfloat16", "float16")
OTEL_MISSING = (
    "--otlp-endpoint needs OpenTelemetry: pip install 'lookonce[otel]' "
    "(opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http)"
)
AUTO = "auto"
"""As a `--dtype`: the fastest of this hardware; of two that are as fast, the more exact one."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    folder: str
    """A local Hugging Face folder or a hub id."""
    served_name: str
    device: str = "cpu"
    dtype: str = "float32"
    max_model_len: int | None = None
    """None: what the model's config says."""
    pooling: str | None = None
    """A kind of `types.pooling`, or "none"; None: what the folder's files say."""
    quantize: str | None = None
    """One of `QUANTIZATIONS`, to which the text model's matrices are quantized; None: none."""
    tensor_parallel_size: int = 1
    """Processes that compute the text model together."""
    cuda_graph_bytes: int = 0
    """Memory for CUDA graphs of decode steps; 0: none are captured."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    """Token budget of one step; a chunk of prefill or one decode token per sequence draws on it."""
    max_encoder_tokens: int = 2048
    """Most encoder rows computed in one step; a larger item runs alone."""
    max_queue: int = 1024
    """Waiting requests of one tenant beyond which a new one is refused with 429."""
    max_sessions: int = 128
    """Live sessions that may be open; a further one is refused with 429."""
    max_tenant_sessions: int | None = None
    """Live sessions that one tenant may have open; None: all."""
    encoder_prefetch: bool = True
    """Encode items of later chunks and of waiting requests in spare encoder budget."""
    async_scheduling: bool = False
    """Plan and begin each step before the result of the last one is there."""


@dataclass(frozen=True, slots=True)
class KVConfig:
    cache_bytes: int = GIB
    block_size: int | None = None
    """Tokens per KV block; None: 16 on CPU, the backend's smallest legal size on CUDA."""
    prefix_caching: bool = True
    tiers: tuple[TierSpec, ...] = ()
    """External tiers, nearest first."""
    load_policy: KVLoadPolicy = "auto"
    """"auto": load only what is estimated to take less time than computing it."""
    load_failure_policy: KVLoadFailurePolicy = "recompute"
    state_cache_bytes: int = GIB // 4
    """For snapshots of states, of a model that keeps states beside keys and values."""

    def num_snapshots(self, state_bytes: int) -> int:
        """Snapshots there is room for, of a model whose states take so many bytes each; 0: it has
        none, or no prefix is cached."""
        if not (state_bytes and self.prefix_caching):
            return 0
        return self.state_cache_bytes // state_bytes


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    cache_bytes: int = GIB // 2
    host_cache_bytes: int = 0
    """Host memory for outputs that leave the device; 0: none."""
    tiers: tuple[TierSpec, ...] = ()
    """External tiers of encoder outputs, nearest first."""


BASE_BODY_BYTES = 16 * 1024 * 1024
LARGEST_MEDIA_PER_BODY = 4


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Limits for what clients send; bytes, pixels and seconds."""

    limit_per_prompt: dict[str, int] = field(
        default_factory=lambda: {"image": 8, "audio": 2, "video": 2}
    )
    allowed_domains: tuple[str, ...] = ()
    """Empty: every public host."""
    allow_private: bool = False
    local_path: str | None = None
    timeout: float = 10.0
    max_bytes: int = 50 * 1024 * 1024
    max_image_pixels: int = 50_000_000
    max_audio_seconds: float = 600.0
    max_video_seconds: float = 3600.0
    """Of a film, by its header."""
    max_video_frames: int = 768
    """Frames of one film that are looked at."""
    max_decode_seconds: float = 10.0
    """CPU seconds of decoding and processing one item, estimated from its headers."""
    max_video_decode_seconds: float = 120.0
    """The same of all frames of one film that one request looks at, estimated from its index."""
    max_document_pages: int = 100
    """Of all PDF files of one request."""
    hash_algorithm: Literal["blake3", "sha256"] = "blake3"
    processor_cache_bytes: int = 4 * GIB
    """0 turns the processor cache off. Divided by the number of API processes."""
    processor_cache_type: ProcessorCacheType = DEFAULT_CACHE_TYPE

    @property
    def max_body_bytes(self) -> int:
        """Of a request: a few of the largest media in base64, and 16 MiB for the rest."""
        return BASE_BODY_BYTES + LARGEST_MEDIA_PER_BODY * (self.max_bytes + 2) // 3 * 4

    @property
    def items_per_prompt(self) -> dict[str, int]:
        """Most items of each modality in a prompt: a film has one for its frames at most."""
        films = self.limit_per_prompt.get("video", 0)
        return {**self.limit_per_prompt, "video": films * self.max_video_frames}

    @property
    def shared_cache_bytes(self) -> int:
        """`processor_cache_bytes` if its items lie in shared memory, else 0."""
        return self.processor_cache_bytes if self.processor_cache_type == "shm" else 0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key that the server accepts; the key itself is not kept."""

    digest: str
    """SHA-256 of the key, 64 hex digits."""
    tenant: str = ""
    inject: bool = False
    admin: bool = False
    expires: float | None = None
    """Unix time from which the key is refused; None: never."""
    from_file: bool = False
    """It stands in `--api-key-file`, which SIGHUP reads again."""


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Limits of one API process for its connections, before any request is authenticated."""

    max_connections: int = 4096
    """Fewer where the process may not open so many descriptors."""
    max_per_address: int = 1024
    max_header_bytes: int = 64 * 1024
    """Request line and header fields of one request; trailers have as much again."""
    max_headers: int = 128
    header_timeout: float = 20.0
    """Seconds from the connection, or a request's first byte, to the end of its header. The TLS
    handshake has as many."""
    body_timeout: float = 30.0
    """Seconds a body may stand still; see `min_body_rate`."""
    min_body_rate: int = 8 * 1024
    """Bytes per second that a body must arrive at on average."""
    keep_alive_timeout: float = 75.0
    """Seconds a connection may wait for its next request."""
    write_timeout: float = 60.0
    """Seconds a client may leave an answer unread."""
    max_unread_bytes: int = GIB // 4
    """Of all answers together, of connections that have more than 64 KiB unread."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Limits of one API process for the sessions of `/v1/realtime`."""

    max_sessions: int = 128
    """That may be open; a further one is refused with 429."""
    max_tenant_sessions: int | None = None
    """That one tenant may have open; None: all."""
    max_bytes: int = 64 * 1024 * 1024
    """Sound, pictures and text that one session may hold."""
    max_total_bytes: int = GIB
    """What all sessions of the process may hold."""
    max_tenant_bytes: int | None = None
    """What those of one tenant may hold; None: all of it."""
    idle_timeout: float = 600.0
    """Seconds without an event from the client and without work for it."""


@dataclass(frozen=True, slots=True)
class ResponseStoreConfig:
    """Where responses and conversations are stored, and how much of them."""

    file: str | None = None
    """None: they end with the server."""
    max_bytes: int = GIB // 4
    """Of all tenants; 0: nothing is stored."""
    max_age: float = 30 * 86_400.0
    """Seconds since the last use."""


@dataclass(frozen=True, slots=True)
class RequestLogConfig:
    """Where requests are logged, without contents."""

    file: str
    secret: str
    """64 hex digits: the key of all digests in it, drawn at each start."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_processes: int = 1
    api_keys: tuple[ApiKey, ...] = ()
    """All keys, those of `api_key_file` included."""
    api_key_file: str | None = None
    limits: Limits | None = None
    """What tenants and keys may use; None: anything."""
    limits_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    """More names that `Host` may have; `*` and `*.example.org` are patterns."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use this server; `*`: every one."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Peers whose `X-Forwarded-For` tells the client: addresses, networks, `unix`, `*`."""
    behind_frontends: bool = False
    """These peers are front-ends of a fleet, which audit themselves what they keep back."""
    ssl_certfile: str | None = None
    """A PEM file's path; None: no TLS."""
    ssl_keyfile: str | None = None
    connections: ConnectionConfig = field(default_factory=ConnectionConfig)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    responses: ResponseStoreConfig = field(default_factory=ResponseStoreConfig)
    allow_injection: bool = False
    chat_template: str | None = None
    """A file's path."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    vllm_metric_names: bool = False
    strict_requests: bool = False
    """Unknown fields of a request are refused."""
    closed_schemas: bool = True
    """Objects of JSON schemas have no keys but those they declare, unless the schema opens them."""
    root_path: str = ""
    """What a proxy puts before every path: `/models/a`; empty: nothing."""
    request_log: RequestLogConfig | None = None
    drain_timeout: float = 30.0
    """Seconds that requests have to end once the server is told to."""


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    address: str
    """The path of a unix socket in a folder that is private to this user."""
    stall_timeout: float = 120.0
    """Seconds a step may take before the engine counts as stuck."""
    max_bytes_in_flight: int = 256 * 1024 * 1024
    """Bytes a sender may have on the channel before a send waits."""


@dataclass(frozen=True, slots=True)
class OtlpConfig:
    """Where traces and metrics are sent by OTLP over HTTP."""

    endpoint: str | None = None
    """`http://host:4318`; None: nowhere."""
    sample_ratio: float = 1.0
    """Of the requests whose sender says nothing of sampling."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    adapters: tuple[tuple[str, str], ...] = ()
    """(name, folder) of those that are loaded at start."""
    folder: str | None = None
    """Adapters in folders beneath this one may be loaded while the server runs; None: none."""
    max_loras: int = 8
    max_rank: int = 64


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Where the engine tells what its caches gain and lose: ZMQ endpoints that it binds."""

    address: str
    replay_address: str
    topic: str = "kv-events"
    """Of KV blocks."""
    form: Literal["array", "map"] = "array"
    """Of each event: vLLM has sent both."""
    blocks_only: bool = False
    """Nothing but KV blocks is told."""


ENCODER_TOPIC, ITEM_TOPIC = "lookonce.encoder-outputs", "lookonce.items"
"""Of events about encoder outputs and processed items."""
ENGINE_TOPIC = "lookonce.engine"
"""Of events about prompts that were computed, and of the engine's load."""
REPLAY_SNAPSHOT, REPLAY_START = b"snapshot", b"start"
"""What the replay socket of `--events` may be asked for, beside a number."""
REPLAY_END = b"\xff" * 8
"""In place of a number: after the last answer."""


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig
    scheduler: SchedulerConfig
    kv: KVConfig
    encoder: EncoderConfig
    media: MediaConfig
    server: ServerConfig
    channel: ChannelConfig
    logs: LogConfig = field(default_factory=LogConfig)
    otlp: OtlpConfig = field(default_factory=OtlpConfig)
    events: EventsConfig | None = None
    lora: LoRAConfig | None = None
    """None: no LoRA adapters are served."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user typed, before it is checked; the names are those of `lookonce serve`."""

    model: str = NANO
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_processes: int = 1
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    limits: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    forwarded_allow_ips: tuple[str, ...] = ()
    behind_frontends: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_connections: int = 4096
    max_connections_per_address: int = 1024
    max_header_bytes: int = 64 * 1024
    header_timeout: float = 20.0
    body_timeout: float = 30.0
    keep_alive_timeout: float = 75.0
    allow_injection: bool = False
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    device: str = "cpu"
    dtype: str | None = None
    max_model_len: int | None = None
    pooling: str | None = None
    quantize: str | None = None
    tensor_parallel: int = 1
    cuda_graph_gb: float = 1.0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_queue: int = 1024
    max_sessions: int = 128
    max_tenant_sessions: int | None = None
    kv_cache_gb: float = 1.0
    block_size: int | None = None
    prefix_caching: bool = True
    kv_tier: tuple[str, ...] = ()
    kv_load: str = "auto"
    kv_load_failure_policy: str = "recompute"
    state_cache_gb: float = 0.25
    encoder_cache_gb: float = 0.5
    encoder_cache_host_gb: float = 0.0
    encoder_tier: tuple[str, ...] = ()
    encoder_prefetch: bool = True
    async_scheduling: str = AUTO
    mm_processor_cache_gb: float = 4.0
    mm_processor_cache_type: str = DEFAULT_CACHE_TYPE
    mm_hash_algorithm: str = "blake3"
    limit_mm_per_prompt: str = "image=8,audio=2,video=2"
    allowed_media_domains: tuple[str, ...] = ()
    allow_private_media: bool = False
    allowed_local_media_path: str | None = None
    media_timeout: float = 10.0
    max_media_bytes: int = 50 * 1024 * 1024
    max_image_pixels: int = 50_000_000
    max_audio_seconds: float = 600.0
    max_video_seconds: float = 3600.0
    max_video_frames: int = 768
    max_decode_seconds: float = 10.0
    max_video_decode_seconds: float = 120.0
    max_document_pages: int = 100
    engine_stall_timeout: float = 120.0
    vllm_metric_names: bool = False
    strict_requests: bool = False
    log_format: str = "text"
    log_level: str = "info"
    otlp_endpoint: str | None = None
    otlp_sample_ratio: float = 1.0
    events: str | None = None
    closed_schemas: bool = True
    root_path: str = ""
    drain_timeout: float = 30.0
    response_store: str | None = None
    response_store_gb: float = 0.25
    response_store_ttl: float = 30 * 86_400.0
    request_log: str | None = None
    lora: tuple[str, ...] = ()
    lora_dir: str | None = None
    max_loras: int = 8
    max_lora_rank: int = 64


def resolve(options: Options) -> Config:
    """Check every option and build the configuration. Raises `ConfigError` naming the option."""
    folder = str(EMBEDDED_MODELS.get(options.model, options.model))
    device = _device(options.device)
    _check_numbers(options)
    keys = _api_keys(options.api_key, options.api_key_file)
    shared = len({key.tenant for key in keys}) > 1
    tenant_sessions = options.max_tenant_sessions
    if tenant_sessions is None and shared:
        tenant_sessions = max(1, options.max_sessions // 2)
    return Config(
        model=ModelConfig(
            folder=folder,
            served_name=options.served_model_name or options.model,
            device=device,
            dtype=_dtype(options.dtype, device),
            max_model_len=options.max_model_len,
            pooling=_pooling(options.pooling),
            quantize=_quantize(options.quantize, device),
            tensor_parallel_size=_tensor_parallel(options),
            cuda_graph_bytes=int(options.cuda_graph_gb * GIB),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_encoder_tokens=options.max_num_batched_tokens,
            max_queue=options.max_queue,
            max_sessions=options.max_sessions,
            max_tenant_sessions=tenant_sessions,
            encoder_prefetch=options.encoder_prefetch,
            async_scheduling=_async_scheduling(options.async_scheduling, device),
        ),
        kv=_kv(options),
        encoder=EncoderConfig(
            cache_bytes=int(options.encoder_cache_gb * GIB),
            host_cache_bytes=int(options.encoder_cache_host_gb * GIB),
            tiers=tuple(_tier("--encoder-tier", text) for text in options.encoder_tier),
        ),
        media=_media(options),
        server=ServerConfig(
            host=options.host,
            port=options.port,
            uds=options.uds,
            api_processes=options.api_processes,
            api_keys=keys,
            api_key_file=options.api_key_file,
            limits=limits_of_file(options.limits),
            limits_file=options.limits,
            allowed_hosts=tuple(map(_host_pattern, options.allowed_hosts)),
            allowed_origins=tuple(map(_origin, options.allowed_origins)),
            forwarded_allow_ips=tuple(map(_forwarding_peer, options.forwarded_allow_ips)),
            behind_frontends=options.behind_frontends,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=_checked_ssl_keyfile(options),
            connections=ConnectionConfig(
                max_connections=int(options.max_connections),
                max_per_address=int(options.max_connections_per_address),
                max_header_bytes=int(options.max_header_bytes),
                header_timeout=options.header_timeout,
                body_timeout=options.body_timeout,
                keep_alive_timeout=options.keep_alive_timeout,
            ),
            sessions=SessionConfig(
                max_sessions=options.max_sessions,
                max_tenant_sessions=tenant_sessions,
                max_tenant_bytes=SessionConfig().max_total_bytes // 2 if shared else None,
            ),
            responses=ResponseStoreConfig(
                file=_response_store(options.response_store),
                max_bytes=int(options.response_store_gb * GIB),
                max_age=options.response_store_ttl,
            ),
            allow_injection=options.allow_injection,
            chat_template=_existing_file("--chat-template", options.chat_template),
            tool_call_parser=_one_of(
                "--tool-call-parser", options.tool_call_parser, TOOL_CALL_PARSERS
            ),
            reasoning_parser=_one_of(
                "--reasoning-parser", options.reasoning_parser, REASONING_PARSERS
            ),
            vllm_metric_names=options.vllm_metric_names,
            strict_requests=options.strict_requests,
            closed_schemas=options.closed_schemas,
            root_path=_root_path(options.root_path),
            request_log=_request_log(options.request_log),
            drain_timeout=options.drain_timeout,
        ),
        channel=ChannelConfig(address=_socket_path(), stall_timeout=options.engine_stall_timeout),
        logs=LogConfig(
            format=_one_of("--log-format", options.log_format, LOG_FORMATS),
            level=_one_of("--log-level", options.log_level, LOG_LEVELS),
        ),
        otlp=OtlpConfig(_otlp_endpoint(options.otlp_endpoint), options.otlp_sample_ratio),
        events=None if options.events is None else parse_events(options.events),
        lora=_lora(options),
    )


LORA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
"""Names under which requests ask for adapters."""


def _lora(options: Options) -> LoRAConfig | None:
    if not options.lora and options.lora_dir is None:
        return None
    if options.lora_dir is not None and not Path(options.lora_dir).is_dir():
        raise ConfigError(f"--lora-dir: {options.lora_dir} is not a folder")
    served = options.served_model_name or options.model
    adapters: dict[str, str] = {}
    for text in options.lora:
        name, _, path = text.partition("=")
        if not LORA_NAME.fullmatch(name) or not path:
            raise ConfigError(
                f"--lora: {text!r} is not NAME=PATH with a name of letters, digits and . _ : / @ -"
            )
        if name in adapters or name == served:
            raise ConfigError(f"--lora: two models have the name {name!r}")
        adapters[name] = str(Path(path).resolve())
    if len(adapters) > options.max_loras:
        raise ConfigError(
            f"--lora: {len(adapters)} adapters are more than --max-loras {options.max_loras}"
        )
    for path in adapters.values():
        if not Path(path).is_dir():
            raise ConfigError(f"--lora: {path} is not a folder")
        if not Path(path, "adapter_config.json").is_file():
            raise ConfigError(f"--lora: {path} has no adapter_config.json")
    folder = None if options.lora_dir is None else str(Path(options.lora_dir).resolve())
    return LoRAConfig(
        tuple(adapters.items()), folder, int(options.max_loras), int(options.max_lora_rank)
    )


def _kv(options: Options) -> KVConfig:
    if options.kv_tier and not options.prefix_caching:
        raise ConfigError("--kv-tier needs --prefix-caching")
    return KVConfig(
        cache_bytes=int(options.kv_cache_gb * GIB),
        block_size=options.block_size,
        prefix_caching=options.prefix_caching,
        tiers=tuple(_tier("--kv-tier", text) for text in options.kv_tier),
        load_policy=_one_of("--kv-load", options.kv_load, ("auto", "always")),
        load_failure_policy=_one_of(
            "--kv-load-failure-policy", options.kv_load_failure_policy, ("recompute", "fail")
        ),
        state_cache_bytes=int(options.state_cache_gb * GIB),
    )


def _tier(option: str, text: str) -> TierSpec:
    spec = parse_tier_spec(text, option)
    if spec.kind == "lmcache" and find_spec("lmcache") is None:
        raise ConfigError(f"{option} {LMCACHE_MISSING}")
    return spec


def _one_of(name: str, value: str, allowed: tuple[Word, ...]) -> Word:
    for word in allowed:
        if value == word:
            return word
    raise ConfigError(f"{name} is {' or '.join(allowed)}, got {value}")


def _media(options: Options) -> MediaConfig:
    if options.mm_hash_algorithm not in ("blake3", "sha256"):
        raise ConfigError("--mm-hash-algorithm is blake3 or sha256")
    local = options.allowed_local_media_path
    if local is not None and not Path(local).is_dir():
        raise ConfigError(f"--allowed-local-media-path: {local} is not a folder")
    return MediaConfig(
        limit_per_prompt=_limits(options.limit_mm_per_prompt),
        allowed_domains=tuple(d.lower() for d in options.allowed_media_domains),
        allow_private=options.allow_private_media,
        local_path=None if local is None else str(Path(local).resolve()),
        timeout=options.media_timeout,
        max_bytes=int(options.max_media_bytes),
        max_image_pixels=int(options.max_image_pixels),
        max_audio_seconds=options.max_audio_seconds,
        max_video_seconds=options.max_video_seconds,
        max_video_frames=int(options.max_video_frames),
        max_decode_seconds=options.max_decode_seconds,
        max_video_decode_seconds=options.max_video_decode_seconds,
        max_document_pages=options.max_document_pages,
        hash_algorithm="sha256" if options.mm_hash_algorithm == "sha256" else "blake3",
        processor_cache_bytes=int(options.mm_processor_cache_gb * GIB),
        processor_cache_type=_processor_cache_type(options),
    )


def _processor_cache_type(options: Options) -> ProcessorCacheType:
    allowed: tuple[ProcessorCacheType, ...] = ("shm", "lru")
    kind = _one_of("--mm-processor-cache-type", options.mm_processor_cache_type, allowed)
    if kind == "shm" and sys.platform != "linux":
        raise ConfigError("--mm-processor-cache-type: shm needs Linux; lru works everywhere")
    return kind


def _check_numbers(options: Options) -> None:
    for name, allowed in OPTION_RANGES.items():
        value = getattr(options, name)
        if value is not None and value not in allowed:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be {allowed}, got {value}")


def _device(device: str) -> str:
    if device != "cpu" and device.split(":")[0] != "cuda":
        raise ConfigError(f"--device is cpu, cuda or cuda:N, got {device}")
    return device


def _pooling(pooling: str | None) -> str | None:
    if pooling is None:
        return None
    return _one_of("--pooling", pooling, POOLING_OPTIONS)


QUANTIZATIONS = ("int8",)


def _quantize(quantize: str | None, device: str) -> str | None:
    if quantize is not None and device != "cpu":
        raise ConfigError(f"--quantize is for --device cpu, got {device}")
    return None if quantize is None else _one_of("--quantize", quantize, QUANTIZATIONS)


def _tensor_parallel(options: Options) -> int:
    """What only one process serves yet is refused."""
    alone = {
        "--kv-tier": options.kv_tier,
        "--encoder-tier": options.encoder_tier,
        "--lora": options.lora,
        "--lora-dir": options.lora_dir,
        "--quantize": options.quantize,
    }
    for name, given in alone.items():
        if given and options.tensor_parallel > 1:
            raise ConfigError(f"--tensor-parallel and {name} do not go together yet")
    if options.tensor_parallel > 1 and options.device not in ("cpu", "cuda"):
        raise ConfigError(
            f"--tensor-parallel takes one device for each rank: --device is cpu or cuda, got "
            f"{options.device}"
        )
    return options.tensor_parallel


def _async_scheduling(choice: str, device: str) -> bool:
    """On a CPU planning and computing share the cores: nothing is gained by overlapping them."""
    chosen = _one_of("--async-scheduling", choice, (AUTO, "on", "off"))
    return device != "cpu" if chosen == AUTO else chosen == "on"


def _dtype(dtype: str | None, device: str) -> str:
    if dtype is None:
        return "float32" if device == "cpu" else "bfloat16"
    if dtype == AUTO:
        return "bfloat16" if device != "cpu" or cpu_multiplies_bf16() else "float32"
    known = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(dtype, dtype)
    if known not in DTYPES:
        raise ConfigError(f"--dtype is one of {', '.join((AUTO, *DTYPES))}, got {dtype}")
    return known


def _limits(text: str) -> dict[str, int]:
    limits = {"image": 8, "audio": 2, "video": 2}
    for part in filter(None, text.split(",")):
        name, _, count = part.partition("=")
        if name not in MODALITIES or not DIGITS.fullmatch(count):
            raise ConfigError(
                f"--limit-mm-per-prompt: {part!r} is not MODALITY=COUNT with a modality of "
                f"{', '.join(MODALITIES)}"
            )
        limits[name] = int(count)
    return limits


# --- API keys -----------------------------------------------------------------------------------

EXPIRES = ":expires="
MAX_KEY_FILE_BYTES = 1 << 20


def key_digest(key: str) -> str:
    """SHA-256 of an API key, in hex: what is kept and compared instead of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def reloaded_api_keys(server: ServerConfig) -> tuple[ApiKey, ...]:
    """The server's keys with those that `--api-key-file` has now. Raises `ConfigError`."""
    fixed = tuple(key for key in server.api_keys if not key.from_file)
    return _without_doubles(fixed + _keys_of_file(server.api_key_file))


@dataclass(frozen=True, slots=True)
class ReloadedSettings:
    """What a supervisor tells a running API process after SIGHUP: one line of JSON."""

    api_keys: tuple[ApiKey, ...]
    limits: Limits | None = None

    def summary(self) -> str:
        """For the log: how many of what there are."""
        told = [f"{len(self.api_keys)} API keys" if self.api_keys else "no API keys"]
        if self.limits is not None:
            tenants, keys = len(self.limits.tenants), len(self.limits.keys)
            told.append(f"limits (sections of tenants: {tenants}, of keys: {keys})")
        return ", ".join(told)


def reloaded_settings(server: ServerConfig) -> ReloadedSettings:
    """What SIGHUP reads again. Raises `ConfigError`."""
    return ReloadedSettings(reloaded_api_keys(server), limits_of_file(server.limits_file))


def limits_of_file(path: str | None) -> Limits | None:
    """Of `--limits`. Raises `ConfigError` naming the entry at fault."""
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            return parse_limits(file.read(MAX_KEY_FILE_BYTES), Path(path).suffix)
    except OSError as error:
        raise ConfigError(f"--limits: {path} cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"--limits: {path}: {error.message}") from None


def _api_keys(specs: tuple[str, ...], file: str | None) -> tuple[ApiKey, ...]:
    given = tuple(
        _api_key(spec, f"--api-key number {number}") for number, spec in enumerate(specs, 1)
    )
    return _without_doubles(given + _keys_of_file(file))


def _keys_of_file(path: str | None) -> tuple[ApiKey, ...]:
    """One key a line; empty lines and those that begin with `#` do not count.

    A file without a key is refused: the server would let everybody in.
    """
    if path is None:
        return ()
    keys = [
        dataclasses.replace(_api_key(text, where), from_file=True)
        for where, text in _key_lines(path)
    ]
    if not keys:
        raise ConfigError(f"--api-key-file: {path} has no key")
    return tuple(keys)


def sent_keys(path: str) -> list[tuple[str, ApiKey]]:
    """The keys of a file as clients send them, by which a front-end asks its engines. Raises
    `ConfigError`."""
    return [
        (_tenant_and_key(text.partition(EXPIRES)[0].split(":"))[1], _api_key(text, where))
        for where, text in _key_lines(path)
    ]


def _key_lines(path: str) -> Iterator[tuple[str, str]]:
    """Where each key of a file stands, and its line."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            lines = file.read(MAX_KEY_FILE_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--api-key-file: {path} cannot be read: {reason}") from None
    for number, line in enumerate(lines, 1):
        if (text := line.strip()) and not text.startswith("#"):
            yield f"--api-key-file: line {number}", text


def _tenant_and_key(parts: Sequence[str]) -> tuple[str, str]:
    return ("", parts[0]) if len(parts) == 1 else (parts[0], parts[1])


def _api_key(spec: str, where: str) -> ApiKey:
    """`KEY` or `TENANT:KEY[:inject][:admin]`, each with or without `:expires=TIME`."""
    spec, dated, time = spec.partition(EXPIRES)
    parts = spec.split(":")
    rights = set(parts[2:])
    if not all(parts) or len(parts) > 4 or not rights <= {"inject", "admin"}:
        raise ConfigError(
            f"{where} is not KEY, TENANT:KEY, TENANT:KEY:inject or TENANT:KEY:admin, with or "
            f"without {EXPIRES}DATE at its end"
        )
    tenant, key = _tenant_and_key(parts)
    return ApiKey(
        digest=key_digest(key),
        tenant=tenant,
        inject="inject" in rights,
        admin="admin" in rights,
        expires=_unix_time(time, where) if dated else None,
    )


def _unix_time(text: str, where: str) -> float:
    """Of an ISO 8601 date or time; UTC where it names no zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{where}: {EXPIRES} is followed by a date or time of ISO 8601 as 2027-01-31 or "
            "2027-01-31T18:00Z"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _without_doubles(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
    if len({key.digest for key in keys}) != len(keys):
        raise ConfigError("--api-key, --api-key-file: the same key was given twice")
    return keys


# --- the HTTP server ----------------------------------------------------------------------------

_HOST_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s*]+")


def _host_pattern(text: str) -> str:
    host = text.lower()
    if not _HOST_PATTERN.fullmatch(host):
        raise ConfigError(
            f"--allowed-hosts: {text!r} is not a host name without port, *.example.org or *"
        )
    return host


def _origin(text: str) -> str:
    origin = text.lower().rstrip("/")
    if not _ORIGIN.fullmatch(origin):
        raise ConfigError(
            f"--allowed-origins: {text!r} is not SCHEME://HOST, with port or not, or *"
        )
    return origin


def _forwarding_peer(text: str) -> str:
    try:
        return text if text in ("unix", "*") else str(ipaddress.ip_network(text))
    except ValueError:
        raise ConfigError(
            f"--forwarded-allow-ips: {text!r} is not an address, a network, unix or *"
        ) from None


def _checked_ssl_keyfile(options: Options) -> str | None:
    """The path of the key, once it is known to belong to the certificate."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    tls_context(options.ssl_certfile, options.ssl_keyfile)
    return options.ssl_keyfile


def tls_context(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """TLS 1.2 or newer with this certificate. Raises `ConfigError`.

    Without `keyfile` the key is in the certificate's file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, certfile, keyfile)
    return context


def load_certificate(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    """Give `context` a certificate, for handshakes from now on. Raises `ConfigError`."""
    for name, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}: {path} is not a file")
    try:
        # A key with a password would be asked for on the terminal: it is refused instead.
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--ssl-certfile, --ssl-keyfile: not a certificate and its key without password: "
            f"{reason}"
        ) from None


def parse_events(text: str) -> EventsConfig:
    """`tcp://HOST:PORT` or `ipc://PATH`, then `?topic=…&form=array|map&replay=ADDRESS&only=kv`.

    Replay is by default at the next port, or at the path with `.replay`. Raises
    `ConfigError`.
    """
    address, _, query = text.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    replay = given.pop("replay", "") or _next_address(address)
    topic, only = given.pop("topic", "kv-events"), given.pop("only", "")
    form = _one_of("--events form", given.pop("form", "array"), _EVENT_FORMS)
    if (
        given
        or only not in ("", "kv")
        or not (_is_events_address(address) and _is_events_address(replay))
    ):
        raise ConfigError(
            f"--events: {text!r} is neither tcp://HOST:PORT nor ipc://PATH, with ?topic=NAME, "
            "&form=array|map, &only=kv or &replay=ADDRESS after it; no port is above 65535, nor "
            "that of replay, which is the next one"
        )
    if topic in (ENCODER_TOPIC, ITEM_TOPIC, ENGINE_TOPIC):
        raise ConfigError(f"--events: the topic {topic!r} is that of other events")
    return EventsConfig(address, replay, topic, form, blocks_only=only == "kv")


_EVENT_FORMS: tuple[Literal["array", "map"], ...] = ("array", "map")
_EVENTS_ADDRESS = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:]+\]|[^\s:/?*]+):[0-9]{1,5}|ipc://[^\s?]+")


def _is_events_address(address: str) -> bool:
    if not _EVENTS_ADDRESS.fullmatch(address):
        return False
    return address.startswith("ipc:") or int(address.rpartition(":")[2]) <= 65_535


def _next_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if address.startswith("ipc:"):
        return f"{address}.replay"
    return f"{host}:{int(port) + 1}" if port.isdecimal() else ""


def _otlp_endpoint(url: str | None) -> str | None:
    """The collector's URL without path. Raises `ConfigError`, also without OpenTelemetry."""
    if url is None:
        return None
    if not re.fullmatch(r"https?://[^\s/?#@]+/?", url):
        raise ConfigError(
            "--otlp-endpoint is the collector's http:// or https:// URL without path, as "
            "http://127.0.0.1:4318; keys for it go into OTEL_EXPORTER_OTLP_HEADERS"
        )
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http") and find_spec(
            "opentelemetry.sdk"
        )
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(OTEL_MISSING)
    return url.rstrip("/")


_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def _root_path(text: str) -> str:
    path = text.rstrip("/")
    if not _ROOT_PATH.fullmatch(path):
        raise ConfigError(f"--root-path: {text!r} is not a path as /models/a")
    return path


def _request_log(path: str | None) -> RequestLogConfig | None:
    """The absolute path of a file that can be appended to, and a new secret."""
    if path is None:
        return None
    file = Path(path).absolute()
    if file.exists() and not file.is_file():
        raise ConfigError(f"--request-log: {path} is not a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--request-log: {path} cannot be written")
    return RequestLogConfig(str(file), secrets.token_hex(32))


def _response_store(path: str | None) -> str | None:
    """The absolute path of a SQLite file, or of one that can be made. Raises `ConfigError`."""
    if path is None:
        return None
    file = Path(path).absolute()
    if not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--response-store: {path} cannot be written")
    if file.exists():
        if not file.is_file():
            raise ConfigError(f"--response-store: {path} is not a file")
        with file.open("rb") as opened:
            if opened.read(len(_SQLITE)) not in (b"", _SQLITE):
                raise ConfigError(f"--response-store: {path} is another file than a store")
    return str(file)


_SQLITE = b"SQLite format 3\0"
"""How every SQLite file begins."""


def _existing_file(name: str, path: str | None) -> str | None:
    if path is not None and not Path(path).is_file():
        raise ConfigError(f"{name}: {path} is not a file")
    return path


def _socket_path() -> str:
    """A fresh name in a folder of its own, which whoever binds it creates for this user only.

    It lies in the system's temporary folder. Raises `ConfigError` where no path is short enough.
    """
    name = f"lookonce-{secrets.token_hex(8)}"
    for parent in (tempfile.gettempdir(), "/tmp"):
        folder = Path(parent, name)
        if len(os.fsencode(folder)) <= MAX_SOCKET_FOLDER and os.access(parent, os.W_OK):
            return str(folder / "engine.sock")
    raise ConfigError("TMPDIR is too long for the path of a unix socket, and /tmp is not writable")
