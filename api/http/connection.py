"""A client's connection, with limits on what comes before a request: uvicorn has none."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_S = 30.0
"""Seconds in which the head of a request has to come: its first line and its headers."""
_HEAD_BYTES = 65_536


class Connection(HttpToolsProtocol):
    """uvicorn's connection, closed where the head of a request comes too slowly or is too large."""

    _in_head = True
    """Whether a request's head is awaited: from the start, and again from the first byte of each request."""
    _head_late: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_late = self.loop.call_later(_HEAD_S, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._got_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head:
            self._got_head()
        elif self._head_late is None:
            self._head_late = self.loop.call_later(_HEAD_S, self._close)
        elif self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self.logger.warning("The head of a request is too large.")
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _got_head(self) -> None:
        self._head_bytes = 0
        if self._head_late is not None:
            self._head_late.cancel()
            self._head_late = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
