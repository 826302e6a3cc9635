import asyncio
import threading
import time

import pytest

from fp4pipe.errors import UsageError
from fp4pipe.runtime.engine.async_engine import AsyncEngine, EngineStopped
from fp4pipe.runtime.engine.params import SamplingParams

PROMPTS = [[5] * 3, [7, 8, 9] * 9, [11], list(range(20, 60))]


@pytest.fixture
def served(make_engine):
    engine = AsyncEngine(make_engine(likelier_eos=-100.0))
    yield engine
    engine.close()
    engine.engine.pages.check()
    assert engine.engine.pages.available == engine.engine.pages.num_pages
    assert not engine._thread.is_alive()


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_requests_at_once_give_what_they_give_alone(served, greedy) -> None:
    async def run(prompt: list[int]) -> list[int]:
        return [t async for output in served.generate(prompt, SamplingParams(max_tokens=20)) for t in output.token_ids]

    got = await asyncio.gather(*map(run, PROMPTS))
    assert list(got) == [greedy.continue_(p, 20, -100.0) for p in PROMPTS]
    assert served.num_open == 0


async def test_submitted_together_outputs_carry_their_index(served, greedy) -> None:
    got: dict[int, list[int]] = {}
    async for index, output in served.submit([(p, SamplingParams(max_tokens=9)) for p in PROMPTS], "r"):
        got.setdefault(index, []).extend(output.token_ids)
    assert [got[i] for i in range(4)] == [greedy.continue_(p, 9, -100.0) for p in PROMPTS]


async def test_all_or_none_are_queued(served) -> None:
    with pytest.raises(UsageError):
        served.submit([([1], SamplingParams()), ([], SamplingParams())])
    assert served.num_open == 0
    stream = served.submit([([1], SamplingParams(max_tokens=50))], "same")
    with pytest.raises(UsageError, match="'same' is in use"):
        served.submit([([1], SamplingParams())], "same")
    stream.close()


async def test_leaving_early_frees_the_pages(served) -> None:
    forward = served.engine.runner.forward
    served.engine.runner.forward = lambda batch: (time.sleep(0.01), forward(batch))[1]

    async def read_one() -> None:
        async for _ in served.generate([1, 2, 3], SamplingParams(max_tokens=150)):
            pass

    task = asyncio.create_task(read_one())
    await until(lambda: served.stats()["running"] == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not served.engine.has_work)
    assert served.engine.stats()["generated_tokens"] < 100
    stream = served.submit([([1, 2, 3], SamplingParams(max_tokens=150))], "id")
    stream.close()
    again = [o async for _, o in served.submit([([1, 2, 3], SamplingParams(max_tokens=2))], "id")]
    assert again[-1].finish_reason == "length"


async def test_abort_ends_the_stream(served) -> None:
    stream = served.submit([([1], SamplingParams(max_tokens=150)), ([2], SamplingParams(max_tokens=150))], "gone")
    outputs = []
    async for index, output in stream:
        outputs.append((index, output.finish_reason))
        if len(outputs) == 1:
            served.abort("gone")
    assert sorted(o for o in outputs if o[1]) == [(0, "abort"), (1, "abort")]


async def test_flush_runs_between_steps(served) -> None:
    [o async for o in served.generate(PROMPTS[1], SamplingParams(max_tokens=1))]
    assert await served.flush_cache() == 6
    assert await served.flush_cache() == 0


async def test_a_failure_reaches_every_stream_and_every_later_call(make_engine) -> None:
    engine = AsyncEngine(make_engine())
    hold = threading.Event()

    def forward(batch) -> None:
        hold.wait(5)
        raise RuntimeError("the device is lost")

    engine.engine.runner.forward = forward
    streams = [engine.submit([([1], SamplingParams())]) for _ in range(3)]

    async def read(stream) -> None:
        async for _ in stream:
            pass

    flush = asyncio.create_task(engine.flush_cache())
    await asyncio.sleep(0)
    hold.set()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*map(read, streams), return_exceptions=True)
        await asyncio.gather(flush, return_exceptions=True)
    assert all(isinstance(r, EngineStopped) and "the device is lost" in str(r) for r in results)
    assert isinstance(engine.failure, RuntimeError)
    with pytest.raises(EngineStopped, match="the device is lost"):
        engine.submit([([1], SamplingParams())])
    with pytest.raises(EngineStopped):
        await engine.flush_cache()
    engine.close()


async def test_close_ends_open_streams(make_engine) -> None:
    engine = AsyncEngine(make_engine(likelier_eos=-100.0))
    stream = engine.submit([([1], SamplingParams(max_tokens=190))])
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineStopped, match="closed"):
        async for _ in stream:
            pass
    assert engine.failure is None


def test_a_closed_event_loop_does_not_stop_the_engine(served, greedy) -> None:
    async def leave() -> None:
        served.submit([([1], SamplingParams(max_tokens=100))])

    asyncio.run(leave())

    async def run() -> list[int]:
        return [t async for o in served.generate([5] * 3, SamplingParams(max_tokens=5)) for t in o.token_ids]

    assert asyncio.run(run()) == greedy.continue_([5] * 3, 5, -100.0)
    asyncio.run(until(lambda: not served.engine.has_work))
