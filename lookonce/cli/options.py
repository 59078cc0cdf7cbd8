"""Command-line options, made from the fields of `config.Options`.

The engine is not imported here, so `lookonce --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from lookonce.cli.config_file import read_config_file, variable_of
from lookonce.config import Options

HELP: dict[str, str] = {
    "model": "A local Hugging Face folder, a hub id, or an embedded model: nano, nano-ear.",
    "served_model_name": "The name clients use for the model; MODEL itself by default.",
    "host": "Address to listen on.",
    "port": "Port to listen on; 0 takes a free one.",
    "uds": "Listen on this unix socket instead of host and port.",
    "api_processes": "API processes that share one engine.",
    "api_key": "KEY, TENANT:KEY, TENANT:KEY:inject or TENANT:KEY:admin; repeatable. Other users of "
    "the machine see it here: better use --api-key-file or the variable.",
    "api_key_file": "A file with such a key on each line; SIGHUP reads it again.",
    "limits": "A file, .yaml or .toml, of what tenants and keys may use: rates, tokens, concurrent "
    "requests, weights; SIGHUP reads it again.",
    "allowed_hosts": "More names by which clients may call this server; comma-separated or "
    "repeated. Without keys: loopback, IP addresses and private names only.",
    "allowed_origins": "Web pages of these origins may use this server: https://example.org or *; "
    "comma-separated or repeated.",
    "forwarded_allow_ips": "Proxies whose X-Forwarded-For tells the client, for the audit: "
    "addresses, networks, unix (whoever reaches --uds) or *; comma-separated or repeated.",
    "behind_frontends": "The proxies of --forwarded-allow-ips are front-ends of a fleet, which "
    "audit refusals that they keep back from clients; lookonce fleet sets it.",
    "ssl_certfile": "Serve HTTPS with this certificate, a PEM file.",
    "ssl_keyfile": "The certificate's key, where it is not in --ssl-certfile.",
    "max_connections": "Connections that one API process holds open.",
    "max_connections_per_address": "Connections that one address may hold open of them.",
    "max_header_bytes": "Largest header of a request, bytes.",
    "header_timeout": "Seconds in which a request's header must have come.",
    "body_timeout": "Seconds a request's body may stand still.",
    "keep_alive_timeout": "Seconds a connection may wait for its next request.",
    "allow_injection": "Let clients of a server without keys inject processed media.",
    "tool_call_parser": "How the model writes tool calls: hermes (Qwen too), llama3, mistral, "
    "qwen3_coder or harmony (gpt-oss); auto reads it off the chat template.",
    "reasoning_parser": "How the model writes its thoughts, by vLLM's names: qwen3 and others "
    "(<think>), mistral ([THINK]), seed_oss, kimi_vl; none: thoughts stay in the answer; auto "
    "finds it among the tokens and in the chat template.",
    "chat_template": "A Jinja file to use instead of the model's own chat template.",
    "device": "cpu, cuda or cuda:N.",
    "dtype": "float32, bfloat16, float16, or auto: bfloat16 where the hardware multiplies it, else "
    "float32. By default float32 on CPU and bfloat16 on CUDA.",
    "quantize": "int8: the text model's matrices in 8 bits with a scale for each output, on the "
    "CPU; a quarter of float32's memory, and answers of rounded weights.",
    "tensor_parallel": "Processes that compute the text model together, each a part of it: on one "
    "GPU each, or on the CPU.",
    "cuda_graph_gb": "Memory for CUDA graphs of decode steps, GiB; 0 turns them off.",
    "max_model_len": "Prompt plus generated tokens of one sequence; the model's own by default.",
    "lora": "NAME=FOLDER: a LoRA adapter as PEFT writes it, which requests ask for by its name as "
    "the model; repeatable.",
    "lora_dir": "Adapters in folders beneath this one may be loaded and unloaded while the server "
    "runs, with an admin key where there are keys.",
    "max_loras": "Adapters that are loaded at a time.",
    "max_lora_rank": "Largest rank of an adapter.",
    "pooling": "Give embeddings instead of answers: last, mean, cls or all of a prompt's hidden "
    "states, or sparse: weights of tokens; none: answers, whatever the model's files say. By "
    "default the files decide.",
    "max_num_seqs": "Sequences computed side by side.",
    "max_num_batched_tokens": "Tokens computed in one step, prompts and answers together.",
    "max_queue": "Waiting requests of one tenant beyond which new ones are refused with 429.",
    "max_sessions": "Live sessions, and realtime ones of each API process, that may be open.",
    "max_tenant_sessions": "Sessions that one tenant may have open; by default half of them, all "
    "where there is one tenant.",
    "kv_cache_gb": "Memory for keys and values, GiB.",
    "block_size": "Tokens per block of keys and values; 16 on CPU by default.",
    "prefix_caching": "Reuse keys and values of prompts that begin alike.",
    "kv_tier": "Keep KV beyond the device: host:4GB, disk:/path:50GB, valkey://host:port, "
    "valkey:///path.sock or lmcache://host:port; repeatable, nearest first.",
    "kv_load": "auto loads from a tier what that makes faster; always loads all there is.",
    "kv_load_failure_policy": "recompute or fail: what becomes of a prompt whose load failed.",
    "state_cache_gb": "Memory for snapshots of the states that hybrid models keep beside keys and "
    "values, GiB; with 0 their prefixes are not reused.",
    "encoder_cache_gb": "Memory for encoder outputs of media, GiB.",
    "encoder_cache_host_gb": "Host memory for encoder outputs that leave the device, GiB.",
    "encoder_tier": "Keep encoder outputs beyond the device, in tiers named as for --kv-tier: what "
    "one server encoded, others that share a tier do not; repeatable, nearest first.",
    "async_scheduling": "on, off or auto: plan each step while the last one is computed; auto does "
    "where the device is no CPU.",
    "encoder_prefetch": "Encode media of later chunks and waiting requests where that pays.",
    "mm_processor_cache_gb": "Memory for processed media, GiB; 0 turns this cache off.",
    "mm_processor_cache_type": "shm: processed media lies in shared memory, written once and read "
    "in place (Linux); lru: it travels in messages. Either way the least recently used goes first.",
    "mm_hash_algorithm": "blake3 or sha256: what media are recognised by.",
    "limit_mm_per_prompt": "Media one prompt may have, by modality.",
    "allowed_media_domains": "Fetch media from these domains only; comma-separated or repeated.",
    "allow_private_media": "Also fetch media from private, loopback and link-local addresses.",
    "allowed_local_media_path": "Allow file:// URLs beneath this folder.",
    "media_timeout": "Seconds a media file may take to fetch.",
    "max_media_bytes": "Largest encoded media file, bytes.",
    "max_image_pixels": "Largest picture, pixels, checked before it is decoded.",
    "max_audio_seconds": "Longest sound, seconds.",
    "max_video_seconds": "Longest film, seconds, judged before it is decoded.",
    "max_video_frames": "Most frames of one film that are looked at.",
    "max_decode_seconds": "CPU seconds that decoding one file, or a part of a film, may take, by "
    "its headers.",
    "max_video_decode_seconds": "CPU seconds that decoding one whole film may take, by its index.",
    "max_document_pages": "Pages that the PDF files of one request may have.",
    "engine_stall_timeout": "Seconds a step may take before the engine counts as stuck.",
    "vllm_metric_names": "Export metrics under vLLM's names too.",
    "strict_requests": "Refuse requests with unknown fields, which are ignored otherwise.",
    "log_format": "text, or json: one JSON object a line.",
    "otlp_endpoint": "Send traces and metrics to this OTLP/HTTP collector: http://host:4318.",
    "events": "Publish what the caches gain and lose on ZMQ, KV blocks as vLLM does: "
    "tcp://HOST:PORT or ipc://PATH, and replay at the next port.",
    "otlp_sample_ratio": "Share of requests that are traced, where their sender does not say.",
    "log_level": "debug (a line per request), info, warning or error.",
    "closed_schemas": "Objects of JSON schemas have no keys but their properties, unless "
    "additionalProperties says otherwise.",
    "response_store": "A SQLite file for stored responses and conversations; without one they end "
    "with the server.",
    "response_store_gb": "Stored responses and conversations of all tenants, GiB; 0 stores none.",
    "response_store_ttl": "Seconds after its last use for which a response is stored.",
    "request_log": "Append a line of JSON for each request to this file, without contents, for "
    "lookonce simulate.",
    "root_path": "What a proxy puts before every path: /models/a.",
    "drain_timeout": "Seconds that requests have to end after SIGTERM or Ctrl-C.",
}
"""One line per field of `Options`."""

GROUPS: dict[str, tuple[str, ...]] = {
    "server": (
        "host",
        "port",
        "uds",
        "api_processes",
        "served_model_name",
        "allowed_hosts",
        "allowed_origins",
        "forwarded_allow_ips",
        "behind_frontends",
        "root_path",
        "drain_timeout",
        "ssl_certfile",
        "ssl_keyfile",
        "strict_requests",
        "closed_schemas",
        "vllm_metric_names",
    ),
    "keys": ("api_key", "api_key_file", "limits", "allow_injection"),
    "responses": ("response_store", "response_store_gb", "response_store_ttl"),
    "connections": (
        "max_connections",
        "max_connections_per_address",
        "max_header_bytes",
        "header_timeout",
        "body_timeout",
        "keep_alive_timeout",
    ),
    "model": (
        "device",
        "dtype",
        "quantize",
        "tensor_parallel",
        "cuda_graph_gb",
        "max_model_len",
        "pooling",
        "lora",
        "lora_dir",
        "max_loras",
        "max_lora_rank",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
    ),
    "steps": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_queue",
        "max_sessions",
        "max_tenant_sessions",
        "encoder_prefetch",
        "async_scheduling",
        "engine_stall_timeout",
    ),
    "caches": (
        "kv_cache_gb",
        "block_size",
        "prefix_caching",
        "kv_tier",
        "kv_load",
        "kv_load_failure_policy",
        "state_cache_gb",
        "encoder_cache_gb",
        "encoder_cache_host_gb",
        "encoder_tier",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_hash_algorithm",
    ),
    "media": (
        "limit_mm_per_prompt",
        "allowed_media_domains",
        "allow_private_media",
        "allowed_local_media_path",
        "media_timeout",
        "max_media_bytes",
        "max_image_pixels",
        "max_audio_seconds",
        "max_video_seconds",
        "max_video_frames",
        "max_decode_seconds",
        "max_video_decode_seconds",
        "max_document_pages",
    ),
    "logs": (
        "log_format",
        "log_level",
        "otlp_endpoint",
        "otlp_sample_ratio",
        "events",
        "request_log",
    ),
}
"""Heading of the help → its options; what is in none is under "other"."""
OTHER = "other"

ENGINE_OPTIONS = (
    "device",
    "dtype",
    "quantize",
    "max_model_len",
    "max_num_batched_tokens",
    "kv_cache_gb",
    "chat_template",
)
"""The options of `lookonce chat`."""

RENDER_OPTIONS = (
    *(name for name in GROUPS["server"] if name not in ("api_processes", "behind_frontends")),
    "api_key",
    "api_key_file",
    *GROUPS["connections"],
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "dtype",
    "lora",
    "max_model_len",
    "mm_hash_algorithm",
    *GROUPS["media"],
    "log_format",
    "log_level",
)
"""The options of `lookonce render`: those of the API, and all that a rendered prompt depends on."""

SECRET = "api_key"
"""The option whose environment variable no other process shall inherit."""
COMMA_SEPARATED = (
    *("allowed_media_domains", "allowed_hosts", "allowed_origins", "forwarded_allow_ips"),
)


def takes_options(
    names: typing.Iterable[str],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the fields `names` of `Options` to a command's signature, which typer reads."""
    kinds = typing.get_type_hints(Options)
    fields = {field.name: field for field in dataclasses.fields(Options)}
    added = [_parameter(fields[name], kinds[name]) for name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]

        def run(**given: Any) -> None:
            given.pop(CONFIG, None)  # its callback has read it
            command(**given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        signature = inspect.Signature([*kept, *added, _config_parameter()])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return run

    return decorate


def options_from(model: str, given: dict[str, Any]) -> Options:
    """`Options` of a command line; typer's lists become tuples.

    The variable of `SECRET` is removed from the environment: typer has read it.
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    for name in COMMA_SEPARATED:
        if listed := values.get(name):
            values[name] = tuple(filter(None, ",".join(listed).replace(" ", "").split(",")))
    os.environ.pop(variable_of(SECRET), None)  # processes started from here do not inherit it
    return Options(model=model, **values)


CONFIG = "config"


def _config_parameter() -> inspect.Parameter:
    option = typer.Option(
        "--config",
        metavar="FILE",
        help="Options in a YAML file, as `port: 8000`. The command line comes first, then the "
        f"environment ({variable_of('port')} and so on), then the file.",
        envvar=variable_of(CONFIG),
        show_envvar=False,
        callback=_read_config,
        is_eager=True,
    )
    return inspect.Parameter(
        CONFIG,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _read_config(context: typer.Context, path: str | None) -> str | None:
    """The file's options become the command's defaults."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **read_config_file(path)}
    return path


def _parameter(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    flag = "--" + field.name.replace("_", "-")
    repeatable = typing.get_origin(kind) is tuple
    names = [f"{flag}/--no-{flag[2:]}"] if field.default is True else [flag]
    option = typer.Option(
        *names,
        help=HELP[field.name],
        show_default=not repeatable,
        envvar=variable_of(field.name),
        show_envvar=field.name == SECRET,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=[] if repeatable else field.default,
        annotation=Annotated[list[str] if repeatable else kind, option],
    )
