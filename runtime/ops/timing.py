"""How long operators take on a GPU, without the time to launch them: medians over replays of a CUDA graph."""

import statistics
from collections.abc import Callable, Sequence

import torch

_WARM_MS = 10.0


def replay_us(calls: Sequence[Callable[[], object]], replays: int = 12, warm_ms: float = _WARM_MS) -> float:
    """Microseconds one of `calls` takes when all are replayed in order from one CUDA graph: median over replays.

    Args:
        calls: Work on the current device, run twice before it is captured.
        replays: How many replays to time.
        warm_ms: Replays before those, because an idle GPU clocks down and takes milliseconds of work to come back.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph.capture_begin()  # `torch.cuda.graph` would collect garbage each time, a second with a model around
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    times, warm = [], 0.0
    while warm < warm_ms or len(times) < replays:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end)
        if warm < warm_ms:
            warm += elapsed
        else:
            times.append(elapsed * 1000 / len(calls))
    return statistics.median(times)
