"""A limit on the size of request bodies, with or without a Content-Length."""

from __future__ import annotations

import json

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.requests.errors import MEDIA_TYPE

_MOST_DIGITS = 18


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than ``max_bytes``; no more than that is held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and (len(announced) > _MOST_DIGITS or int(announced) > self._max_bytes):
            await self._refuse(send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, self._detail)
            return message

        await self._app(scope, counted, send)

    @property
    def _detail(self) -> str:
        return f"A request has at most {self._max_bytes} bytes."

    async def _refuse(self, send: Send) -> None:
        problem = {"type": "about:blank", "title": "Too large", "status": 413, "detail": self._detail}
        headers = [(b"content-type", MEDIA_TYPE.encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(problem).encode()})
