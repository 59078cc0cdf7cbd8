"""`lookonce models`: the types of model that are served, and what was shown about each."""

from __future__ import annotations

import json
from typing import NamedTuple

from lookonce.types.model import (
    EMBEDDERS,
    GENERAL_MEDIA,
    GENERAL_TEXT,
    SUPPORTED,
    UNSERVABLE,
    UNSERVABLE_MEDIA,
)

OWN = "greedy answers, chunks, preemption, negative controls"
OWN_MEDIA = "greedy answers, media, chunks, preemption, negative controls"
VECTORS = "vectors, batches, caches, negative controls"
GENERAL = "greedy answers, chunks, preemption; compared again on loading"
MEDIA = "greedy answers, media, chunks, preemption; compared again on loading"


class ServedType(NamedTuple):
    """One row of the table."""

    model_type: str
    media: tuple[str, ...]
    served_by: str
    """"own": a family written for the type; "general": one family for all others."""
    proven: str
    """What is compared with transformers, token for token, on random weights."""
    gives: str = "answers, or embeddings (--pooling)"


def served_types() -> list[ServedType]:
    own = [
        ServedType(name, media, "own", OWN_MEDIA if media else OWN)
        for name, media in SUPPORTED.items()
    ]
    own += [
        ServedType(name, media, "own", VECTORS, "embeddings") for name, media in EMBEDDERS.items()
    ]
    general = [ServedType(name, (), "general", GENERAL) for name in GENERAL_TEXT]
    general += [ServedType(name, media, "general", MEDIA) for name, media in GENERAL_MEDIA.items()]
    return sorted(own + general)


def _refused_types() -> list[dict[str, object]]:
    """Rows with the fields of `ServedType`, which are null but for the name."""
    reasons = (*UNSERVABLE.items(), *UNSERVABLE_MEDIA.items())
    empty = dict.fromkeys(ServedType._fields)
    return [
        {**empty, "model_type": name, "refused_because": reason}
        for reason, types in reasons
        for name in types
    ]


def print_models(*, as_json: bool) -> None:
    rows = served_types()
    if as_json:
        served = [{**row._asdict(), "refused_because": None} for row in rows]
        print(json.dumps([*served, *_refused_types()], indent=1))
        return
    width = max(len(row.model_type) for row in rows)
    for row in rows:
        media = ", ".join(("text", *row.media))
        only = "embeddings only: " if row.gives == "embeddings" else ""
        print(f"{row.model_type:{width}}  {media:18}  {row.served_by:7}  {only}{row.proven}")
    print()
    for reason, types in (*UNSERVABLE.items(), *UNSERVABLE_MEDIA.items()):
        print(f"not served, {reason}: {', '.join(types)}")
    print(
        f"\n{len(rows)} types are served. Other types of transformers are tried: loading compares "
        "them with transformers and refuses what differs."
    )
