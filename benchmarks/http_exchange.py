"""One HTTP/1.1 connection for a load generator: send bytes, see the answer's body as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

OnBody = Callable[[bytes], None]


class Connection(asyncio.Protocol):
    """Kept alive between exchanges, which come one after another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._on_body: OnBody | None = None
        self._answered: asyncio.Future[int] | None = None
        self.reusable = True

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """The status. `on_body` gets each piece of the body; what it raises is raised here.

        Raises `ConnectionError` when the connection is lost or speaks no HTTP.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the connection is closed")
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answered
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(ConnectionError("the server closed the connection"))

    # --- httptools ----------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body)

    def on_message_complete(self) -> None:
        parser, answered = self._parser, self._answered
        if parser is None or answered is None or answered.done():
            return
        self.reusable = parser.should_keep_alive()
        answered.set_result(parser.get_status_code())

    def _fail(self, error: BaseException) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)
