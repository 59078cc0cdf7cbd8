"""When a sequence ends, after each sampled token."""

from __future__ import annotations

from lookonce.core.request import Sequence
from lookonce.types.request import FinishReason


def finish_reason(sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
    """Why the token just appended ends the sequence, and the stop token if one did.

    An end token of the model wins over `stop_token_ids`, and both over length.
    """
    request = sequence.request
    if token_id in request.eos_token_ids:
        return "stop", None
    if token_id in request.stop_token_ids:
        return "stop", token_id
    if sequence.num_computed + 1 >= sequence.token_limit:  # all but the new token are computed
        return "length", None
    return None, None
