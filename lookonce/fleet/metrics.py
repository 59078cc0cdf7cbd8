"""What `/metrics` of a front-end says: its own figures, and those of all engines by engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from lookonce.fleet.router import EngineState, Router

Sample = tuple[str, float]
"""Labels, as they are written, and the value."""


def fleet_families(
    router: Router,
    retried: int,
    decision_seconds: float,
    responses: Mapping[int, int],
    rendered: int | None = None,
) -> Iterator[str]:
    """Lines of the front-end's own figures; `rendered`: None where it renders nothing."""
    routed = [
        (f'engine="{engine}",reason="{reason}"', count)
        for (engine, reason), count in sorted(router.routed.items())
    ]
    yield from _family("routed_total", "Requests by engine and reason of the choice", routed)
    gauges: dict[str, tuple[str, Callable[[EngineState], float]]] = {
        "engine_ready": ("Whether it takes requests", lambda e: int(e.accepts)),
        "engine_requests": ("Requests that it serves", lambda e: e.num_requests),
        "engine_backlog_seconds": ("Work that waits there", lambda e: e.backlog),
    }
    for name, (text, value) in gauges.items():
        engines = sorted(router.engines.items())
        yield from _family(
            name, text, [(f'engine="{n}",model="{e.model}"', value(e)) for n, e in engines]
        )
    entries = [(f'of="{of}"', len(getattr(router, of))) for of in ("blocks", "outputs", "items")]
    yield from _family("index_entries", "Digests whose engines are known", entries)
    text = "Requests that were sent to a second engine"
    yield from _family("retried_total", text, [("", retried)])
    if rendered is not None:
        text = "Requests that the front-end rendered"
        yield from _family("rendered_total", text, [("", rendered)])
    text = "Time that choosing engines took"
    yield from _family("decision_seconds_total", text, [("", decision_seconds)])
    counts = [(f'status="{status}"', count) for status, count in sorted(responses.items())]
    yield from _family("responses_total", "Answers by status", counts)


def _family(name: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    name = f"lookonce_fleet_{name}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
    for labels, value in samples:
        yield f"{name}{{{labels}}} {value:.12g}" if labels else f"{name} {value:.12g}"


def engines_families(texts: Mapping[str, str]) -> Iterator[str]:
    """`texts`: engine → what its `/metrics` answered. Every sample gets the engine as a label;
    a family's lines stand together, as Prometheus wants them."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for engine, text in texts.items():
        family: tuple[list[str], list[str]] = ([], [])
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, ([], []))
                if line not in family[0]:
                    family[0].append(line)
            elif line and not line.startswith("#"):
                family[1].append(_with_engine(line, engine))
    for head, samples in families.values():
        yield from head
        yield from samples


def _with_engine(line: str, engine: str) -> str:
    label = f'engine="{engine}"'
    name, space, value = line.partition(" ")
    if "{" not in name:
        return f"{name}{{{label}}}{space}{value}"
    name, _, rest = line.partition("{")
    return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
