"""Grammars over nano's real tokenizer: every random walk through the masks conforms."""

from __future__ import annotations

import numpy as np

EOS = 2
VOCAB = 1030
"""More than the tokenizer has: models pad theirs."""


def walk(compiled, tokenizer, rng, *, most=400):
    """A text drawn from the masks alone; None where it found no end."""
    state, tokens = compiled.start(), []
    bits = np.zeros(-(-VOCAB // 32) * 4, np.uint8)
    for _ in range(most):
        state.fill(bits)
        assert state.error is None
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB])
        assert len(allowed)
        assert allowed.max() < 1024
        token = int(rng.choice(allowed))
        if token == EOS:
            return tokenizer.decode(tokens)
        tokens.append(token)
        state.accept(token)
    return None
