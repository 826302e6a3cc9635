"""What a server is doing: loading, ready, draining or failed."""

import asyncio
import copy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fp4pipe.runtime.engine import AsyncEngine
from fp4pipe.runtime.serve.errors import ApiError
from fp4pipe.runtime.serve.metrics import Metrics
from fp4pipe.runtime.serve.settings import ServeSettings
from fp4pipe.runtime.serve.token_text import TokenText

RETRY_LOADING_S = 5
RETRY_BUSY_S = 1


class ServerState:
    """Shared by all routes of one server.

    Args:
        settings: The server's.
        path: The checkpoint, as it was given.
        model_name: What requests call the model.
    """

    def __init__(self, settings: ServeSettings, path: str, model_name: str) -> None:
        self.settings = settings
        self.path = path
        self.model_name = model_name
        self.created = int(time.time())
        self._engine: AsyncEngine | None = None
        self.metrics = Metrics(self.engine_stats)
        self.in_flight = 0
        """HTTP requests for work that are not fully answered."""
        self.draining = False
        self.load_failure: BaseException | None = None
        # One thread: encoding is quick, and Hugging Face's tokenizers must not be called from two threads at a time.
        self._encoder = ThreadPoolExecutor(1, "fp4pipe-encode")

    @classmethod
    def for_path(cls, settings: ServeSettings, path: str | Path) -> "ServerState":
        """The state of a server of the checkpoint at `path`."""
        return cls(settings, str(path), settings.served_model_name or Path(path).resolve().name)

    def attach(self, engine: AsyncEngine) -> None:
        """The engine is there: from now on the server is ready."""
        self.tokenizer = copy.deepcopy(engine.engine.tokenizer)  # the engine thread decodes with its own
        self.token_text = TokenText(self.tokenizer)
        self._engine = engine

    @property
    def failure(self) -> BaseException | None:
        """Why the server cannot work any more."""
        return self.load_failure or (self._engine.failure if self._engine else None)

    @property
    def status(self) -> str:
        """ "loading", "ready", "draining" or "failed"."""
        if self.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        return "loading" if self._engine is None else "ready"

    @property
    def engine(self) -> AsyncEngine:
        """The engine.

        Raises:
            ApiError: 503, when it is not there or will take nothing more.
        """
        if self._engine is not None and self.status == "ready":
            return self._engine
        reasons = {
            "loading": "the model is loading",
            "draining": "the server is shutting down",
            "failed": f"the engine has failed: {self.failure}",
        }
        retry = None if self.status == "failed" else RETRY_LOADING_S
        raise ApiError(503, reasons[self.status], code=self.status, retry_after=retry)

    def engine_stats(self) -> dict[str, Any]:
        """`Engine.stats`; empty while loading."""
        return self._engine.stats() if self._engine else {}

    def require_room(self, sequences: int) -> None:
        """Refuse `sequences` more when they are too many.

        Raises:
            ApiError: 400 when one request may never ask for so many, 429 when the queue is full.
        """
        if sequences > self.settings.max_sequences:
            raise ApiError(
                400,
                f"the request asks for {sequences} sequences (prompts times n); at most {self.settings.max_sequences}",
                param="n",
            )
        limit = self.engine.engine.scheduler.max_running + self.settings.max_queued
        if self.engine.num_open + sequences > limit:
            raise ApiError(
                429,
                f"the queue is full: {self.engine.num_open} of {limit} sequences are open",
                code="queue_full",
                retry_after=RETRY_BUSY_S,
            )

    def require_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in (self.model_name, self.path):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def in_encoder(self, function: Any, *args: Any) -> Any:
        """Run `function`, which uses the tokenizer, outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, function, *args)

    def abort_all(self) -> None:
        """End every running sequence."""
        if self._engine is not None:
            self._engine.abort_all()

    def close(self) -> None:
        """Stop the engine's thread and the encoder's."""
        self._encoder.shutdown(wait=False, cancel_futures=True)
        if self._engine is not None:
            self._engine.close()
