"""Answers to clients that may go away: whole ones and streams of server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fp4pipe.runtime.serve.errors import to_api_error

CLIENT_GONE = 499
"""nginx's status for a client that closed the connection; nobody receives it, the metrics count it."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Await `answer`, or cancel it as soon as the client is gone."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=CLIENT_GONE)
    finally:
        await _cancel(work, gone)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events of JSON documents, then ``[DONE]``; an error becomes a last document.

    Args:
        events: The documents.
        on_close: Called when the last one is sent, when the client is gone, or when it takes longer than
            `send_timeout_s` to accept a piece; nothing is taken from `events` after that.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[dict[str, Any]], *, on_close: Callable[[], None], send_timeout_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._on_close = on_close
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(sending, gone)
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await self._send(send, event)
        except (TimeoutError, OSError):  # the client does not read, or its connection is broken
            return
        except Exception as error:
            await self._send(send, to_api_error(error).body)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send(self, send: Send, event: dict[str, Any]) -> None:
        body = f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})
