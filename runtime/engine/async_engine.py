"""The engine in a thread of its own, for asyncio servers.

The engine thread alone touches the engine. Event loops put commands in its inbox and get outputs through
`call_soon_threadsafe`, one call a step. Whatever ends the thread ends every open stream with the cause.
"""

import asyncio
import threading
import traceback
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Any

from fp4pipe import console
from fp4pipe.errors import Fp4pipeError, UsageError
from fp4pipe.runtime.engine.engine import Engine
from fp4pipe.runtime.engine.params import SamplingParams
from fp4pipe.runtime.engine.request import Output


class EngineStopped(Fp4pipeError):
    """The engine's thread has ended: it failed, or it was closed."""


class Stream:
    """Outputs of sequences submitted together, as ``(index, output)`` in the order they come.

    It ends when all sequences have ended; `close` ends those that have not.
    """

    def __init__(self, engine: "AsyncEngine", ids: list[str]) -> None:
        self.ids = ids
        self._engine = engine
        self._index = {id: index for index, id in enumerate(ids)}
        self._open = set(ids)
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Output | BaseException] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        try:
            while self._open:
                item = await self._queue.get()
                if isinstance(item, BaseException):
                    self._open.clear()
                    raise item
                if item.finish_reason is not None:
                    self._open.discard(item.request_id)
                yield self._index[item.request_id], item
        finally:
            self.close()

    def close(self) -> None:
        """Abort the sequences that have not ended; nothing more comes from them."""
        for id in self._open:
            self._engine.forget(id)
        self._open.clear()


class AsyncEngine:
    """Serves any number of event loops from one engine.

    Attributes:
        engine: The engine; only its `check`, its options and its model's description may be used from outside.
        failure: What ended the thread, if it did not end by `close`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._lock = threading.Condition()
        self._inbox: deque[Callable[[], object]] = deque()
        self._streams: dict[str, Stream] = {}
        self._calls: deque[Future[int]] = deque(maxlen=64)
        """Calls that someone may wait for."""
        self._ended = False
        self._closing = False
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="fp4pipe-engine", daemon=True)
        self._thread.start()

    # -- from event loops

    @property
    def num_open(self) -> int:
        """Sequences submitted and not ended."""
        return len(self._streams)

    def stats(self) -> dict[str, Any]:
        """`Engine.stats` as of the last step."""
        return self._stats

    def submit(
        self, sequences: Sequence[tuple[Sequence[int], SamplingParams]], request_id: str | None = None
    ) -> Stream:
        """Queue all `sequences` (prompt ids and parameters), or none of them.

        Args:
            sequences: What to complete.
            request_id: Sequence `i` gets the id ``{request_id}-{i}``.

        Raises:
            UsageError: A sequence could never run, or `request_id` is in use.
            EngineStopped: The engine has failed or is closed.
        """
        for prompt_ids, params in sequences:
            self.engine.check(prompt_ids, params)
        request_id = request_id or uuid.uuid4().hex
        stream = Stream(self, [f"{request_id}-{index}" for index in range(len(sequences))])
        with self._lock:
            self._require_running()
            if any(id in self._streams for id in stream.ids):
                raise UsageError(f"request id {request_id!r} is in use", fix="give each request its own id, or none")
            for id, (prompt_ids, params) in zip(stream.ids, sequences, strict=True):
                self._streams[id] = stream
                self._inbox.append(partial(self._add, stream, prompt_ids, params, id))
            self._lock.notify()
        return stream

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[Output]:
        """Outputs of one request; ending the iteration early, or cancelling it, aborts the request."""
        async with aclosing(aiter(self.submit([(prompt_ids, params)], request_id))) as outputs:  # type: ignore[type-var]
            async for _, output in outputs:
                yield output

    def abort(self, request_id: str) -> None:
        """End the sequences of `request_id`; their streams get a last output that says so."""
        self._abort_where(lambda id: id.rpartition("-")[0] == request_id)

    def abort_all(self) -> None:
        """End every sequence, as `abort`."""
        self._abort_where(lambda id: True)

    def forget(self, id: str) -> None:
        """End one sequence that nobody listens to any more."""
        with self._lock:
            if self._streams.pop(id, None) is not None and not self._ended:
                self._inbox.append(partial(self.engine.abort, id))
                self._lock.notify()

    async def flush_cache(self) -> int:
        """`Engine.flush_cache` between two steps."""
        done: Future[int] = Future()

        def flush() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(self.engine.flush_cache())

        with self._lock:
            self._require_running()
            self._calls.append(done)
            self._inbox.append(flush)
            self._lock.notify()
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """End the thread after its current step; open streams get an `EngineStopped`."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()

    def _require_running(self) -> None:
        if self._ended or self._closing:
            raise EngineStopped("the engine has stopped", because=_reason(self.failure))

    def _abort_where(self, chosen: Callable[[str], bool]) -> None:
        with self._lock:
            for id in [id for id in self._streams if chosen(id)]:
                self._inbox.append(partial(self._abort, id))
            self._lock.notify()

    # -- in the engine thread

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    while not (self._inbox or self._closing or self.engine.has_work):
                        self._lock.wait()
                    if self._closing:
                        break
                    commands, self._inbox = self._inbox, deque()
                for command in commands:
                    command()
                outputs = self.engine.step()
                self._stats = self.engine.stats()
                self._deliver(outputs)
        except BaseException as error:  # the thread's end, whatever it is, must reach those who wait
            self.failure = error
            console.warn(f"the engine stopped\n{''.join(traceback.format_exception(error)).rstrip()}")
        with self._lock:
            self._ended = True
            streams, self._streams = set(self._streams.values()), {}
        stopped = EngineStopped("the engine has stopped", because=_reason(self.failure))
        for stream in streams:
            _post(stream, stopped)
        for call in self._calls:
            if not call.done() and call.set_running_or_notify_cancel():
                call.set_exception(stopped)

    def _add(self, stream: Stream, prompt_ids: Sequence[int], params: SamplingParams, id: str) -> None:
        if self._streams.get(id) is stream:  # else its consumer is gone already
            self.engine.add(prompt_ids, params, id)

    def _abort(self, id: str) -> None:
        if output := self.engine.abort(id):
            self._deliver([output])

    def _deliver(self, outputs: Sequence[Output]) -> None:
        batches: dict[Stream, list[Output]] = {}
        with self._lock:
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    batches.setdefault(stream, []).append(output)
                    if output.finish_reason is not None:
                        del self._streams[output.request_id]
        for stream, items in batches.items():
            _post(stream, *items)


def _post(stream: Stream, *items: Output | BaseException) -> None:
    def put() -> None:
        for item in items:
            stream._queue.put_nowait(item)

    try:
        stream._loop.call_soon_threadsafe(put)
    except RuntimeError:  # the loop is closed: nobody listens, and `close` cannot run there any more
        stream.close()


def _reason(failure: BaseException | None) -> str:
    return "it was closed" if failure is None else f"{type(failure).__name__}: {failure}"
