"""One tiny model, served over real HTTP."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from fp4pipe.runtime.engine import Engine
from fp4pipe.runtime.serve import ServeSettings, running_server
from tests.tiny_models import make_tiny

OPTIONS = {"graphs": "off", "progress": False, "kv_tokens": 4096, "chunk_tokens": 64, "max_running": 8}


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("served") / "tiny", seed=3)  # it has much to say


@pytest.fixture(scope="session")
def load(path: Path) -> Callable[[], Engine]:
    return lambda: Engine.load(path, **OPTIONS)


@pytest.fixture(scope="session")
def offline(load) -> Engine:
    """An engine of the same model that is not served."""
    return load()


@pytest.fixture(scope="session")
def url(load) -> Iterator[str]:
    engine = load()
    with running_server(engine, ServeSettings(port=0, served_model_name="tiny", max_body_bytes=1 << 20)) as url:
        yield url
    engine.pages.check()
    assert engine.pages.available == engine.pages.num_pages


@pytest.fixture(scope="session")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def slow(load) -> Engine:
    """An engine that takes 20 ms a step, to catch requests while they run."""
    engine = load()
    forward = engine.runner.forward

    def slowly(batch):
        time.sleep(0.02)
        return forward(batch)

    engine.runner.forward = slowly  # type: ignore[method-assign]
    return engine


def metric(url: str, name: str) -> float:
    """The value of `fp4pipe:name` (labels included in `name`)."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"fp4pipe:{name} ")))


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
