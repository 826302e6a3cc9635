"""What happens to every HTTP request before a route sees it: the key, the size of the body, and the count."""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp4pipe.runtime.serve.errors import ApiError, to_api_error
from fp4pipe.runtime.serve.state import ServerState

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Paths for probes and scrapers: no key, and not counted as work that a shutdown waits for."""


class Gate:
    """Pure ASGI, so that routes still see clients leave."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        key = state.settings.api_key
        self._key_digest = None if key is None else hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._state.metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, counted)
            return
        headers = Headers(scope=scope)
        if refusal := self._refusal(headers):
            await refusal.response()(scope, receive, counted)
            return
        self._state.in_flight += 1
        try:
            await self._app(scope, self._limited(receive), counted)
        except Exception as error:
            if started:
                raise
            await to_api_error(error).response()(scope, receive, counted)
        finally:
            self._state.in_flight -= 1

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._key_digest is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # Digests are compared, so that the time taken says nothing of the key, its length included.
            digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
            if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._key_digest):
                return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._state.settings.max_body_bytes:
            return self._too_large()
        if self._state.status == "draining":
            return ApiError(503, "the server is shutting down", code="draining", retry_after=1)
        return None

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that counts the body: a chunked one states no length."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._state.settings.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        limit = self._state.settings.max_body_bytes
        return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
