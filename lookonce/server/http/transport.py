"""HTTP connections whose answers begin with one write, not two."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD = b"HTTP/1.1 "


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, on a `HeadHolder`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        holder = HeadHolder(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, holder))


class HeadHolder:
    """A transport that keeps the head of an answer back until its body follows.

    uvicorn writes them one after the other; sending is the dearest thing done for a short answer,
    and each write wakes the client. A head that nothing follows at once goes out by itself.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(_HEAD):
            self._held = data
            asyncio.get_running_loop().call_soon(self._let_go)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._let_go()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """All else is the transport's own."""
        return getattr(self._transport, name)

    def _let_go(self) -> None:
        if self._held and not self._transport.is_closing():
            self._transport.write(self._held)
        self._held = b""
