"""Results of pooled requests, kept for later ones with equal tokens and items in their scope."""

from __future__ import annotations

from collections import OrderedDict

from lookonce.core.request import Request, TokenBuffer, extend_chain

CACHE_BYTES = 64 << 20
ENTRY_BYTES = 256
"""What an entry takes beside its result."""


class PooledOutputs:
    """Digest of an input → its result; the least recently used leaves first.

    A digest is that of one KV block as long as the input: scope, tokens and items are in it.
    """

    def __init__(self, capacity_bytes: int = CACHE_BYTES) -> None:
        """0 keeps nothing."""
        self._capacity = capacity_bytes
        self._outputs: OrderedDict[bytes, bytes] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def get(self, request: Request) -> bytes | None:
        """The result of an equal input, if it is held."""
        key = _key(request)
        found = self._outputs.get(key)
        if found is not None:
            self._outputs.move_to_end(key)
        return found

    def put(self, request: Request, output: bytes) -> None:
        """Keep a result; one that is larger than the cache is not kept."""
        key, nbytes = _key(request), len(output) + ENTRY_BYTES
        if nbytes > self._capacity or key in self._outputs:
            return
        while self.used_bytes + nbytes > self._capacity:
            _, dropped = self._outputs.popitem(last=False)
            self.used_bytes -= len(dropped) + ENTRY_BYTES
        self._outputs[key] = output
        self.used_bytes += nbytes

    def clear(self) -> None:
        self._outputs.clear()
        self.used_bytes = 0


def _key(request: Request) -> bytes:
    if request.output_key is None:
        length, chain = request.num_prompt_tokens, list[bytes]()
        tokens = TokenBuffer(request.prompt)
        extend_chain(chain, request.root_hash, tokens, request.features, length, 1)
        request.output_key = chain[0]
    return request.output_key
