"""Running the application: the listening socket, loading, signals and the end."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvicorn

from fp4pipe import console
from fp4pipe.errors import Fp4pipeError, UsageError
from fp4pipe.runtime.engine import AsyncEngine, Engine, SamplingParams
from fp4pipe.runtime.serve.app import app_of
from fp4pipe.runtime.serve.settings import ServeSettings
from fp4pipe.runtime.serve.state import ServerState

KEEP_ALIVE_S = 75
"""Time an idle connection stays open; clients that reuse one just as it closes see an error."""
CLOSE_TIMEOUT_S = 5
"""Time for connections to close once no work is left on them."""


def serve(path: str | Path, settings: ServeSettings) -> None:
    """Serve the checkpoint at `path` until a signal says to stop.

    The socket listens at once; /health answers 503 while the model loads. The first SIGTERM or SIGINT stops taking
    requests and waits for those that run, the second aborts them.

    Raises:
        UsageError: The address cannot be had.
        KeyboardInterrupt: Stopped by SIGINT.
        Fp4pipeError: Loading or the engine failed.
    """
    state = ServerState.for_path(settings, path)
    server = _Server(state, _listen(settings))
    threading.Thread(target=_load, args=(state, path, server.url), name="fp4pipe-load", daemon=True).start()
    server.run_to_end()
    if state.load_failure is not None:
        raise state.load_failure
    if state.failure is not None:
        because = f"{type(state.failure).__name__}: {state.failure}"
        raise Fp4pipeError("the engine failed", because=because) from state.failure
    if server.interrupted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def running_server(engine_or_path: Engine | str | Path, settings: ServeSettings | None = None) -> Iterator[str]:
    """A server in a thread of this process, on a free port unless the settings name one.

    Args:
        engine_or_path: A loaded engine, which can be used again afterwards, or a checkpoint to load.
        settings: The server's.

    Yields:
        The base URL, ``http://127.0.0.1:PORT``; the server is ready.

    Raises:
        Fp4pipeError: Loading failed.
    """
    settings = settings or ServeSettings(port=0)
    if isinstance(engine_or_path, Engine):
        path, engine = str(engine_or_path.model.config.name_or_path or "model"), engine_or_path
    else:
        path, engine = str(engine_or_path), Engine.load(engine_or_path, **settings.engine)
    state = ServerState.for_path(settings, path)
    state.attach(AsyncEngine(engine))
    server = _Server(state, _listen(settings))
    thread = threading.Thread(target=server.run_to_end, name="fp4pipe-serve", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield server.url
    finally:
        state.draining = True
        state.abort_all()
        server.should_exit = True
        thread.join()


def _listen(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's delay off on the connections: tokens leave when they come.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
    except OSError as error:
        sock.close()
        raise UsageError(
            f"cannot listen on {settings.host}:{settings.port}",
            because=str(error),
            fix="choose another --port or --host",
        ) from error
    sock.listen(2048)
    return sock


def _load(state: ServerState, path: str | Path, url: str) -> None:
    try:
        engine = Engine.load(path, **state.settings.engine)
        # The first steps allocate and warm up; a model that cannot compute fails here and not at a user's request.
        (done,) = engine.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))
        if done.error:
            raise Fp4pipeError("the model does not work", because=done.error)
        engine.flush_cache()
        state.attach(AsyncEngine(engine))
    except BaseException as error:  # reported by `serve`, in the main thread
        state.load_failure = error
        return
    stats = engine.stats()
    route, asked = "completions", '"prompt": "Hello"'
    if engine.tokenizer.chat_template:
        route, asked = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    console.say(
        f"Ready: {url}/v1  (model {state.model_name})\n"
        f"  {engine.model.mode} on {engine.model.device}, graphs {engine.runner.graphs}, context {engine.max_context}, "
        f"KV cache {stats['kv_tokens']} tokens, {stats['max_running']} at a time\n"
        f"  curl -N {url}/v1/{route} -H 'Content-Type: application/json' "
        f'-d \'{{{asked}, "max_tokens": 64, "stream": true}}\''
    )


class _Server(uvicorn.Server):
    """uvicorn with an end of our own: a signal drains, a second one aborts, a failure leaves after a while."""

    def __init__(self, state: ServerState, sock: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app_of(state),
                access_log=False,
                log_config=None,
                log_level="critical",  # errors in routes are reported by `to_api_error`
                lifespan="on",
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._state = state
        self._sock = sock
        self._signals = 0
        self._failed_at: float | None = None
        self.interrupted = False
        host, port = sock.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run_to_end(self) -> None:
        """Serve until `should_stop`."""
        self.run(sockets=[self._sock])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count the signal; `on_tick` acts on it (uvicorn calls this from the signal handler)."""
        self._signals += 1
        self.interrupted = self.interrupted or sig == signal.SIGINT

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s: whether to stop."""
        return await super().on_tick(counter) or self._should_stop()

    def _should_stop(self) -> bool:
        state = self._state
        if self._signals and not state.draining:
            state.draining = True
            console.say(f"Stopping: {state.in_flight} requests still run; a second signal aborts them")
        if self._signals > 1:
            state.abort_all()
            return True
        if state.load_failure is not None:
            return True
        if state.failure is not None:
            self._failed_at = self._failed_at or time.monotonic()
            return time.monotonic() - self._failed_at > state.settings.failure_grace_s
        return state.draining and state.in_flight == 0
