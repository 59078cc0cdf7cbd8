"""`lookonce`: the command line. Commands import what they need when they run."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import lookonce
from lookonce.cli.config_file import drop_service_links, variable_of
from lookonce.cli.help import GroupedCommand, GroupedCommands
from lookonce.cli.options import (
    ENGINE_OPTIONS,
    RENDER_OPTIONS,
    SECRET,
    options_from,
    takes_options,
)
from lookonce.config import NANO, Options
from lookonce.errors import ConfigError, LookOnceError, ModelLoadError

app = typer.Typer(
    help="LookOnce serves multimodal language models and never does the same work twice.",
    cls=GroupedCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SERVE_OPTIONS = [field.name for field in dataclasses.fields(Options) if field.name != "model"]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A local Hugging Face folder, a hub id, nano or nano-ear.",
        envvar=variable_of("model"),
        show_envvar=False,
    ),
]

BENCHMARKS: dict[str, tuple[str, str]] = {
    "attention": ("benchmarks.attention", "our attention kernel beside what torch offers"),
    "cpu": ("benchmarks.cpu", "a text model on the CPU beside a plain read of its weights"),
    "documents": ("benchmarks.documents", "a PDF file that is new, sent again, changed by a page"),
    "ear": ("benchmarks.ear", "the word error rate of nano-ear on voices it never heard"),
    "embeddings": ("benchmarks.embeddings", "inputs with pictures, new and embedded before"),
    "engine": ("benchmarks.engine", "a decode step beside the bare model and transformers"),
    "events": ("benchmarks.events", "what --events costs a step"),
    "fairness": ("benchmarks.fairness", "what one tenant's attacks cost another one"),
    "fleet": ("benchmarks.fleet", "routing rules beside each other on one fleet; what they cost"),
    "film": ("benchmarks.film", "a window that slides over a film, beside resending all frames"),
    "items": ("benchmarks.items", "what 128,000 media items in one request cost per step"),
    "known": ("benchmarks.known", "the first token of known prompts and pictures, by its parts"),
    "kv": ("benchmarks.kv", "a long prompt's KV: computed, on the device, from each tier"),
    "link": ("benchmarks.link", "the link between API process and engine: lateness, CPU"),
    "live": ("benchmarks.live", "sessions of a day in flat memory, side by side, and resent"),
    "lora": ("benchmarks.lora", "a step whose sequences have adapters, beside one without"),
    "look": ("benchmarks.look", "what a picture costs when known, when new, uncached"),
    "prefetch": ("benchmarks.prefetch", "first tokens when pictures come late in the prompt"),
    "prices": ("benchmarks.prices", "what a step, a picture, a request take: for simulate"),
    "processes": ("benchmarks.processes", "several API processes: rates, CPU, memory together"),
    "nano": ("benchmarks.nano", "how often nano answers right about what it never saw"),
    "render": ("benchmarks.render", "what /render and /tokenize cost beside the picture's work"),
    "restart": ("benchmarks.restart", "how long a killed engine or API process is missed"),
    "serve": ("benchmarks.serve", "a server under load: rates, percentiles, caches; a peer"),
    "start": ("benchmarks.start", "from the command to /ready, and the first requests"),
    "tracing": ("benchmarks.tracing", "what traces cost: tokens/s and CPU beside a server without"),
    "twin": ("benchmarks.twin", "a real server beside its simulation, on the same requests"),
    "warmup": ("benchmarks.warmup", "the first request after /ready beside later ones"),
}
"""Name → module, whose `main(arguments)` returns the exit status, and what it measures."""
CHECKOUT = Path(lookonce.__file__).parents[1]


def show_version(asked: bool) -> None:
    if asked:
        print(f"lookonce {lookonce.__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """LookOnce serves multimodal language models and never does the same work twice."""


@app.command(cls=GroupedCommand)
@takes_options(SERVE_OPTIONS)
def serve(model: Model = NANO, **given: Any) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    from lookonce.cli.serve import run_server

    raise typer.Exit(run_server(options_from(model, given)))


@app.command(cls=GroupedCommand)
@takes_options(RENDER_OPTIONS)
def render(model: Model = NANO, **given: Any) -> None:
    """Serve what MODEL makes of prompts, without an engine or weights."""
    from lookonce.cli.serve import run_render_server

    raise typer.Exit(run_render_server(options_from(model, given)))


@app.command(cls=GroupedCommand)
def fleet(
    file: Annotated[str | None, typer.Argument(metavar="[FILE.yaml]")] = None,
    model: Annotated[
        str | None, typer.Option(help="What to serve, where there is no file; nano by default.")
    ] = None,
    engines: Annotated[int | None, typer.Option(min=1, help="Engines of each model.")] = None,
    frontends: Annotated[
        int | None, typer.Option(min=1, help="Processes that share the port.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, help="Port; 0 takes a free one.")] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="Keys as for `lookonce serve`, on every machine.")
    ] = None,
    lora: Annotated[
        list[str],
        typer.Option(help="NAME=FOLDER: an adapter that every engine serves; repeatable."),
    ] = [],  # noqa: B006
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster; by default one starts here.")
    ] = None,
) -> None:
    """Serve many engines behind one address; needs lookonce[fleet].

    Ray Serve places, watches and replaces them. Requests go to where their pictures and prompts are
    known. SIGHUP reads the file again.
    """
    from lookonce.cli.fleet import run_fleet

    given = {
        "model": model,
        "engines": engines,
        "frontends": frontends,
        "host": host,
        "port": port,
        "api_key_file": api_key_file,
        "lora": tuple(lora),
        "address": address,
    }
    raise typer.Exit(run_fleet(file, given))


@app.command(cls=GroupedCommand)
@takes_options(ENGINE_OPTIONS)
def chat(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[MODEL] [TEXT]")] = None,
    image: Annotated[list[Path], typer.Option(help="A picture to ask about; repeatable.")] = [],  # noqa: B006
    audio: Annotated[list[Path], typer.Option(help="A sound to ask about; repeatable.")] = [],  # noqa: B006
    film: Annotated[
        list[Path],
        typer.Option(help="A film to ask about, of a model or server that takes it; repeatable."),
    ] = [],  # noqa: B006
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    receipt: Annotated[bool, typer.Option("--receipt", help="Say what was reused.")] = False,
    url: Annotated[
        str | None, typer.Option(help="Ask this server: http://HOST:PORT or unix:PATH.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=variable_of(SECRET), help="Of the server.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always says the likeliest.")] = None,
    **given: Any,
) -> None:
    """Talk to MODEL (nano by default), here or, with --url, on a server.

    TEXT, or what is piped in, is answered once. Without either, a terminal gets a conversation.
    """
    from lookonce.cli.chat import (
        Question,
        model_and_text,
        piped_text,
        run_chat,
        run_chat_with_server,
    )

    model, text = model_and_text(words or [])
    question = Question(
        piped_text() if text is None else text,
        tuple(image),
        tuple(audio),
        tuple(film),
        system,
        max_tokens,
        temperature,
        receipt,
    )
    if url is None:
        run_chat(question, options_from(model or NANO, given))
        return
    typed = [name for name in given if _is_typed(context, name)]
    if typed:
        flag = typed[0].replace("_", "-")
        raise ConfigError(f"--{flag} is an option of the server: it cannot go with --url")
    options_from(NANO, {})  # removes the key from the environment
    run_chat_with_server(question, url, model, api_key)


def _is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line, and not only in the environment or a file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command(cls=GroupedCommand)
def ls(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """List the models on this machine: embedded, and in the hub's cache."""
    from lookonce.cli.model_list import print_models_held

    print_models_held(as_json=as_json)


@app.command(cls=GroupedCommand)
def pull(model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id.")]) -> None:
    """Download MODEL from the hub, and print its folder."""
    from lookonce.cli.model_list import pull as download

    download(model)


@app.command(cls=GroupedCommand)
def ps(
    api_key: Annotated[
        str | None, typer.Option(envvar=variable_of(SECRET), help="Of the servers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """List your servers on this machine."""
    from lookonce.cli.ps import print_servers

    print_servers(api_key, as_json=as_json)


@app.command(cls=GroupedCommand)
def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Compute on the first CUDA device.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """Say what this machine has, what will be slow, and why."""
    from lookonce.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(gpu=gpu, as_json=as_json))


@app.command(cls=GroupedCommand)
def models(
    name: Annotated[str, typer.Argument(help="Types with this in their names alone.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """List the types of model that are served, and how."""
    from lookonce.cli.models import print_models

    print_models(re.sub(r"[-.]", "_", name.lower()), as_json=as_json)


@app.command(cls=GroupedCommand)
def top(
    url: Annotated[
        str, typer.Option(help="Of the server: http://HOST:PORT or unix:PATH.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(envvar=variable_of(SECRET), help="An admin key, to see tenants."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, also on a terminal.")] = False,
) -> None:
    """Watch a server: requests, tenants, reuse, memory, KV tiers."""
    from lookonce.cli.top import run_top

    run_top(url, api_key, interval=interval, once=once)


@app.command(cls=GroupedCommand)
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A file (a request log, Mooncake's or ServeGen's columns), or a generator: zipf, "
            "conversations, agents, fresh.",
        ),
    ],
    engines: Annotated[str, typer.Option(help="How many; 1,2,4 tries each.")] = "1",
    router: Annotated[
        str,
        typer.Option(
            help="price (the fleet's own), round_robin, power_of_two, least_loaded, "
            "consistent_hash; several with commas."
        ),
    ] = "price",
    kv_cache_gb: Annotated[str, typer.Option(help="Of each engine, GiB; 1,4 tries each.")] = "1",
    kv_tier: Annotated[
        list[str],
        typer.Option(help="A tier as for serve, or none; each that is given is tried."),
    ] = [],  # noqa: B006
    encoder_tier: Annotated[list[str], typer.Option(help="As for serve; nearest first.")] = [],  # noqa: B006
    prices: Annotated[
        Path | None,
        typer.Option(help="A file of `lookonce bench prices --json`; by default nano's."),
    ] = None,
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="NAME=NUMBER", help="Of a generator: requests, rate, …"),
    ] = [],  # noqa: B006
    per_engine: Annotated[
        bool,
        typer.Option("--per-engine", help="A generator's requests and rate are of each engine."),
    ] = False,
    max_requests: Annotated[int | None, typer.Option(min=1, help="The first ones only.")] = None,
    speed: Annotated[float, typer.Option(help="How many times as fast requests come.")] = 1.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="As for serve.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="As for serve.")] = 2048,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="As for serve; the price list's by default. Larger: less to do."),
    ] = None,
    encoder_cache_gb: Annotated[float, typer.Option(help="As for serve.")] = 0.5,
    target_p99: Annotated[
        float | None,
        typer.Option(help="Seconds to the first token that 99 of 100 may take: recommends."),
    ] = None,
    engine_cost: Annotated[float, typer.Option(help="Of one engine, in any unit.")] = 1.0,
    host_gb_cost: Annotated[float, typer.Option(help="Of a GiB of a tier's memory.")] = 0.005,
    processes: Annotated[
        int, typer.Option(min=1, help="That simulate one fleet; of many engines only.")
    ] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write curves to this SVG file.")] = None,
) -> None:
    """Replay a trace on simulated engines."""
    from lookonce.cli.simulate import Asked, run_simulate

    asked = Asked(
        trace=trace,
        engines=engines,
        router=router,
        kv_cache_gb=kv_cache_gb,
        kv_tier=tuple(kv_tier),
        encoder_tier=tuple(encoder_tier),
        prices=prices,
        shape=tuple(settings),
        per_engine=per_engine,
        max_requests=max_requests,
        speed=speed,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        encoder_cache_gb=encoder_cache_gb,
        target_p99=target_p99,
        engine_cost=engine_cost,
        host_gb_cost=host_gb_cost,
        processes=processes,
        json_file=json_file,
        plot=plot,
    )
    raise typer.Exit(run_simulate(asked))


@app.command(
    add_help_option=False,  # the benchmark shows its own
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=lambda: sorted(BENCHMARKS))
    ] = "list",
) -> None:
    """Run the benchmark NAME, or list them.

    Each takes --json FILE and --help.
    """
    raise typer.Exit(run_benchmark(name, context.args))


def run_benchmark(name: str, arguments: Sequence[str]) -> int:
    """Run benchmark `name` and return its exit status; `list` prints all names."""
    if name in ("list", "--help", "-h"):
        for known, (_, measures) in sorted(BENCHMARKS.items()):
            print(f"{known:12} {measures}")
        return 0
    if name not in BENCHMARKS:
        known = ", ".join(sorted(BENCHMARKS))
        raise ConfigError(f"there is no benchmark {name!r}; there are: {known}")
    if not (CHECKOUT / "benchmarks" / "running_server.py").is_file():
        raise ConfigError(
            "the benchmarks are not installed with the package: they are in benchmarks/ of "
            "LookOnce's source; install a checkout with `pip install -e .`, then run them again"
        )
    sys.path.insert(0, str(CHECKOUT))
    path = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)  # for the processes that benchmarks start
    module, _ = BENCHMARKS[name]
    return int(import_module(module).main(list(arguments)) or 0)


# The base class of click's errors in a command line; typer has no public name for it.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main() -> None:
    """The entry point: a mistake, in an option or in the model's folder, is one line on stderr and
    status 2."""
    drop_service_links(os.environ)
    sys.exit(_run(sys.argv[1:] or ["--help"]))


def _run(arguments: list[str]) -> int:
    """The exit status."""
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except UsageError as error:
        return _complain(_usage_message(error), 2)
    except (ConfigError, ModelLoadError) as error:  # a restart would end the same way
        return _complain(error.message, 2)
    except LookOnceError as error:
        return _complain(error.message, 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130


WANTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}
"""How pydantic's names of errors begin, which reads values for typer → what the value should be."""


def _usage_message(error: Any) -> str:
    """What click says; of a value of the wrong kind also the value, and where it stands."""
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    wanted = WANTED.get(found[0]["type"].partition("_")[0]) if found else None
    if wanted is None or not getattr(error, "param", None):
        return str(error.format_message())
    name = error.param.name
    place = {"ENVIRONMENT": f" ({variable_of(name)})", "DEFAULT_MAP": " (in the file of --config)"}
    where = place.get(error.ctx.get_parameter_source(name).name, "")
    value = str(found[0]["input"])
    return f"--{name.replace('_', '-')} must be {wanted}, got {value!r:.60}{where}"


def _complain(message: str, status: int) -> int:
    print(f"lookonce: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
