"""The FastAPI application: routes only."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

import fp4pipe
from fp4pipe.runtime.engine import AsyncEngine
from fp4pipe.runtime.serve.chat import create_chat_completion
from fp4pipe.runtime.serve.completions import create_completion
from fp4pipe.runtime.serve.errors import ApiError, add_error_handlers
from fp4pipe.runtime.serve.generation import check_progress
from fp4pipe.runtime.serve.middleware import Gate
from fp4pipe.runtime.serve.protocol import ChatRequest, CompletionRequest
from fp4pipe.runtime.serve.settings import ServeSettings
from fp4pipe.runtime.serve.state import ServerState


def create_app(engine: AsyncEngine, settings: ServeSettings, *, path: str = "model") -> FastAPI:
    """A ready application over `engine`, which it closes when it shuts down.

    Args:
        engine: Running engine.
        settings: The server's; those of the engine are not read.
        path: The checkpoint's path; its last part names the model unless the settings do.
    """
    state = ServerState.for_path(settings, path)
    state.attach(engine)
    return app_of(state)


def app_of(state: ServerState) -> FastAPI:
    """The application over `state`, which may still be loading."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    app = FastAPI(title="fp4pipe", version=fp4pipe.__version__, lifespan=lifespan)
    app.state.server = state
    add_error_handlers(app)
    app.add_middleware(Gate, state=state)
    _add_openai_routes(app, state)
    _add_server_routes(app, state)
    _add_tokenizer_routes(app, state)
    return app


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await create_completion(state, body, request, f"cmpl-{uuid.uuid4().hex}")

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await create_chat_completion(state, body, request, f"chatcmpl-{uuid.uuid4().hex}")

    def model_card() -> dict[str, Any]:
        return {
            "id": state.model_name,
            "object": "model",
            "created": state.created,
            "owned_by": "fp4pipe",
            "root": state.path,
            "max_model_len": state.engine.engine.max_context,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        state.require_model(name)
        return model_card()


def _add_server_routes(app: FastAPI, state: ServerState) -> None:
    @app.head("/health", include_in_schema=False)  # what some load balancers probe with
    @app.get("/health")
    async def health() -> Response:
        if state.status == "ready":
            return PlainTextResponse("ok")
        reason = f": {state.failure}" if state.failure else ""
        return PlainTextResponse(f"{state.status}{reason}", 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        await check_progress(state)
        return PlainTextResponse("ok")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/flush_cache", include_in_schema=False)
    @app.post("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        pages = await state.engine.flush_cache()
        return {"success": True, "freed_tokens": pages * state.engine.engine.pages.page_size}

    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        engine = state.engine.engine
        return {
            "model_path": state.path,
            "served_model_name": state.model_name,
            "is_generation": True,
            "model_type": getattr(engine.model.config, "model_type", None),
            "mode": engine.model.mode,
            "max_model_len": engine.max_context,
            "sampling_defaults": engine.sampling_defaults,
        }

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "version": fp4pipe.__version__,
            "status": state.status,
            "model_path": state.path,
            "engine_options": dict(state.settings.engine),
            "load": state.engine.engine.model.load_report,
            "stats": state.engine_stats(),
        }


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize``."""

    model_config = ConfigDict(strict=True)

    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = ConfigDict(strict=True)

    tokens: list[Annotated[int, Field(ge=0)]]


def _add_tokenizer_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        context = state.engine.engine.max_context
        try:
            ids = await state.in_encoder(
                lambda: state.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
            )
        except (TypeError, ValueError) as error:  # lone surrogates are no text
            raise ApiError(400, f"the prompt cannot be encoded: {error}", param="prompt") from error
        return {"tokens": ids, "count": len(ids), "max_model_len": context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        vocab = state.engine.engine.model.vocab_size
        if bad := next((i for i in body.tokens if i >= vocab), None):
            raise ApiError(400, f"token id {bad} is outside the vocabulary of {vocab}", param="tokens")
        text = await state.in_encoder(lambda: state.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))
        return JSONResponse({"prompt": text})
