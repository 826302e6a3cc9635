"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

import re
import traceback
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from fp4pipe import console
from fp4pipe.errors import UsageError
from fp4pipe.runtime.engine.async_engine import EngineStopped
from fp4pipe.runtime.engine.request import ContextExceeded

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error that the client is told; an HTTPException, so that FastAPI lets it through while it reads a body.

    Args:
        status: HTTP status.
        message: What is wrong and what to do.
        param: The field of the request that is wrong.
        code: OpenAI's word for it, for programs.
        retry_after: Seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        headers = {"Retry-After": str(retry_after)} if retry_after is not None else None
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON document."""
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        message = self.detail.encode("utf-8", "replace").decode()  # requests may hold lone surrogates
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body, self.status_code, self.headers)


def to_api_error(error: BaseException) -> ApiError:
    """What the client is told about `error`; unexpected ones are printed, and their text is kept from the client."""
    match error:
        case ApiError():
            return error
        case ContextExceeded():
            return ApiError(400, str(error), param="max_tokens", code="context_length_exceeded")
        case UsageError():
            field = re.match(r"[a-z_]+(?= is | has )", error.what)
            return ApiError(400, str(error), param=field.group() if field else None)
        case EngineStopped():
            return ApiError(503, str(error), code="engine_stopped")
        case RequestValidationError():
            return _validation_error(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
    console.warn(f"a request failed unexpectedly\n{''.join(traceback.format_exception(error)).rstrip()}")
    return ApiError(500, "the server failed to answer this request; its log says why")


def _validation_error(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not JSON: {reason}")
    message = first["msg"].removeprefix("Value error, ")
    if not where and first["type"] == "value_error":  # about several fields; it begins with the one to change
        return ApiError(400, message, param=message.split()[0])
    if not where:
        return ApiError(400, "the body is not a JSON object; send one with Content-Type: application/json")
    return ApiError(400, f"{'.'.join(where)}: {message[0].lower()}{message[1:]}", param=where[0])


def add_error_handlers(app: FastAPI) -> None:
    """Answer the errors that routes raise in OpenAI's shape."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return to_api_error(error).response()

    for kind in (ApiError, UsageError, EngineStopped, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)
