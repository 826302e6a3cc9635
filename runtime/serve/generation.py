"""The sequences of one API request: queued together, measured, and ended when nobody waits for them any more."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from fp4pipe.runtime.engine import Output, SamplingParams
from fp4pipe.runtime.serve.errors import ApiError
from fp4pipe.runtime.serve.state import ServerState


class Generation:
    """Outputs of `sequences`, as ``(index, output)`` in the order they come.

    Raises:
        ApiError: 429 when the queue is full, 503 when the server takes no work.
        UsageError: A sequence could never run.
    """

    def __init__(
        self, state: ServerState, sequences: Sequence[tuple[Sequence[int], SamplingParams]], request_id: str
    ) -> None:
        state.require_room(len(sequences))
        self._metrics = state.metrics
        self._started = time.monotonic()
        self._last: dict[int, float] = {}
        self._unfinished = len(sequences)
        self._stream = state.engine.submit(sequences, request_id)

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Each output as it comes; leaving early ends what is unfinished.

        Raises:
            ApiError: A sequence was aborted (503) or failed (500).
            EngineStopped: The engine has failed.
        """
        try:
            async for index, output in self._stream:
                self._measure(index, output)
                if output.finish_reason == "abort":
                    raise ApiError(503, "the request was aborted by the server", code="aborted")
                if output.finish_reason == "error":
                    raise ApiError(500, f"generation failed: {output.error}")
                yield index, output
        finally:
            self.close()

    def close(self) -> None:
        """End what is unfinished."""
        self._stream.close()
        if self._unfinished:
            self._metrics.requests.labels("abort").inc(self._unfinished)
            self._unfinished = 0

    def _measure(self, index: int, output: Output) -> None:
        now = time.monotonic()
        if output.token_ids:
            if index in self._last:
                self._metrics.between_tokens.observe(now - self._last[index])
            else:
                self._metrics.ttft.observe(now - self._started)
                self._metrics.queue_time.observe(output.queue_seconds)
            self._last[index] = now
        if output.finish_reason is not None:
            self._unfinished -= 1
            self._metrics.requests.labels(output.finish_reason).inc()
            self._metrics.latency.observe(now - self._started)


PROGRESS_TIMEOUT_S = 20.0


async def check_progress(state: ServerState) -> None:
    """Have one token generated; a busy engine passes as long as it computes something meanwhile.

    Raises:
        ApiError: 503, when nothing is computed.
    """
    before = state.engine.stats()["steps"]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    stream = state.engine.submit([([0], params)])
    try:
        async with asyncio.timeout(PROGRESS_TIMEOUT_S):
            async for _, output in stream:
                if output.error:
                    raise ApiError(503, f"generation fails: {output.error}", code="unhealthy")
    except TimeoutError:
        if state.engine.stats()["steps"] == before:
            raise ApiError(503, f"no step ended in {PROGRESS_TIMEOUT_S:.0f} s", code="unhealthy") from None
    finally:
        stream.close()
