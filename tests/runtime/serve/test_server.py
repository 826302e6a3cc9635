"""The server as a process among others: limits, keys, clients that leave, failures and the end."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, AuthenticationError, InternalServerError, OpenAI, RateLimitError

from fp4pipe.errors import UsageError
from fp4pipe.runtime.engine import Engine, SamplingParams
from fp4pipe.runtime.serve import ServeSettings, generation, running_server, serve
from fp4pipe.runtime.serve.server import _listen
from tests.runtime.serve.conftest import metric, wait_for

LONG = {"prompt": [5, 6, 7], "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def idle(engine: Engine) -> None:
    assert not engine.has_work
    engine.pages.check()
    assert engine.pages.available == engine.pages.num_pages


def test_clients_that_leave_free_their_pages(slow: Engine) -> None:
    with running_server(slow, ServeSettings(port=0)) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()  # httpx closes the response when this is dropped
            next(lines)
            assert metric(url, "num_running_reqs") == 1
        wait_for(lambda: metric(url, "num_running_reqs") == 0)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={**LONG, "n": 3}, timeout=0.3)
        wait_for(lambda: metric(url, "num_running_reqs") == 0)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}, timeout=0.3)
        wait_for(lambda: metric(url, "num_running_reqs") == 0 and metric(url, "num_used_tokens") == 0)
        assert metric(url, 'num_requests_total{finish_reason="abort"}') == 5
    idle(slow)


def test_a_client_that_does_not_read_is_dropped(load, monkeypatch) -> None:
    engine = load()
    with running_server(engine, ServeSettings(port=0, send_timeout_s=0.2)) as url:
        host, port = url.removeprefix("http://").split(":")
        body = b'{"prompt": [5], "max_tokens": 450, "ignore_eos": true, "stream": true, "n": 64, "logprobs": 20}'
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
            wait_for(lambda: metric(url, "num_running_reqs") > 0)
            wait_for(lambda: metric(url, "num_running_reqs") == 0 and metric(url, "num_queue_reqs") == 0, 30)
            assert metric(url, 'num_requests_total{finish_reason="abort"}') > 0
    idle(engine)


def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(load) -> None:
    engine = load()
    chance = random.Random(0)
    jobs = [
        (
            {"prompt": [chance.randrange(5, 500) for _ in range(chance.randrange(1, 80))], "ignore_eos": True}
            | {"max_tokens": chance.randrange(1, 60), "stream": chance.random() < 0.7, "n": chance.choice([1, 1, 3])},
            chance.choice(["stay"] * 6 + ["leave"] * 3 + ["malformed"]),
        )
        for _ in range(80)
    ]

    async def run(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

            async def one(body: dict, kind: str) -> str:
                if kind == "malformed":
                    response = await client.post("/v1/completions", json={**body, "top_p": 7})
                    return "right" if response.status_code == 400 else response.text
                if kind == "leave":
                    with contextlib.suppress(TimeoutError):
                        async with (
                            asyncio.timeout(chance.random() / 2),
                            client.stream("POST", "/v1/completions", json=body) as response,
                        ):
                            await anext(aiter(response.aiter_lines()))
                    return "right"
                response = await client.post("/v1/completions", json=body)
                if not body["stream"]:
                    return (
                        "right"
                        if response.json()["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]
                        else "?"
                    )
                ends = response.text.count('"finish_reason":"length"')
                return "right" if ends == body["n"] and response.text.endswith("data: [DONE]\n\n") else response.text

            return await asyncio.gather(*(one(*job) for job in jobs))

    with running_server(engine, ServeSettings(port=0)) as url:
        assert asyncio.run(run(url)) == ["right"] * len(jobs)
        wait_for(lambda: metric(url, "num_running_reqs") == 0 and metric(url, "num_queue_reqs") == 0)
    idle(engine)


def test_a_full_queue_is_said(slow: Engine) -> None:
    slow.scheduler.max_running = 2
    with running_server(slow, ServeSettings(port=0, max_queued=1)) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True, "n": 3}) as response:
            lines = response.iter_lines()  # httpx closes the response when this is dropped
            next(lines)
            client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            with pytest.raises(RateLimitError, match="the queue is full: 3 of 3") as error:
                client.completions.create(model=Path(slow.model.config.name_or_path).name or "model", prompt="a")
            assert error.value.response.headers["retry-after"] == "1"
            assert httpx.get(f"{url}/health").status_code == 200
        wait_for(lambda: metric(url, "num_running_reqs") == 0)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_the_key_is_asked_for(load) -> None:
    with running_server(load(), ServeSettings(port=0, api_key="sesame", served_model_name="m")) as url:
        for key in ("wrong", "sesam", "sesame2", "ü"):
            response = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}".encode("latin-1")})
            assert response.status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "sesame"}).status_code == 401
        assert httpx.post(f"{url}/flush_cache").status_code == 401
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        assert OpenAI(base_url=f"{url}/v1", api_key="sesame").models.list().data[0].id == "m"
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200
    assert "sesame" not in repr(ServeSettings(api_key="sesame"))


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_no_key(key: str):
    with pytest.raises(UsageError, match="the API key is empty"):
        ServeSettings(api_key=key)


def test_metrics_and_flush(load) -> None:
    engine = load()
    with running_server(engine, ServeSettings(port=0)) as url:
        body = {"prompt": list(range(5, 45)), "max_tokens": 4, "ignore_eos": True}
        for _ in range(2):
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        assert metric(url, "prompt_tokens_total") == 80
        assert metric(url, "generation_tokens_total") == 8
        assert metric(url, "cached_tokens_total") == 32
        assert metric(url, "time_to_first_token_seconds_count") == 2
        assert metric(url, "inter_token_latency_seconds_count") == 6
        assert metric(url, "e2e_request_latency_seconds_count") == 2
        assert metric(url, 'num_requests_total{finish_reason="length"}') == 2
        assert metric(url, 'http_responses_total{status="200"}') >= 2
        for method in ("GET", "POST"):
            assert httpx.request(method, f"{url}/flush_cache").json()["success"]
        assert engine.pages.num_free == engine.pages.num_pages
        assert httpx.head(f"{url}/health").status_code == 200
        with warnings.catch_warnings(action="error"):
            assert "/v1/chat/completions" in httpx.get(f"{url}/openapi.json").json()["paths"]
        info = httpx.get(f"{url}/get_model_info").json()
        assert (info["model_type"], info["max_model_len"]) == ("llama", 512)
        assert httpx.get(f"{url}/server_info").json()["stats"]["steps"] > 0


def test_an_engine_that_fails_fails_everyone_at_once(slow: Engine, capsys) -> None:
    broken = threading.Event()
    forward = slow.runner.forward

    def fail_when_broken(batch):
        if broken.is_set():
            raise RuntimeError("the device is lost")
        return forward(batch)

    slow.runner.forward = fail_when_broken  # type: ignore[method-assign]
    with running_server(slow, ServeSettings(port=0, served_model_name="m", failure_grace_s=1)) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)

        def stream() -> str:
            pieces = client.completions.create(model="m", stream=True, prompt=[5], max_tokens=300)
            try:
                for _ in pieces:
                    pass
            except Exception as error:
                return str(error)
            return "no error"

        def whole() -> str:
            with pytest.raises(InternalServerError) as error:
                client.completions.create(model="m", prompt=[5], max_tokens=300, extra_body={"ignore_eos": True})
            return f"{error.value.status_code} {error.value.body['message']}"

        with ThreadPoolExecutor() as pool:
            open_ones = [pool.submit(stream), pool.submit(whole), pool.submit(whole)]
            wait_for(lambda: metric(url, "num_running_reqs") == 3)
            broken.set()
            messages = [f.result() for f in open_ones]
        assert all("the device is lost" in m for m in messages), messages
        assert all(m.startswith("503") for m in messages[1:])
        health = httpx.get(f"{url}/health")
        assert (health.status_code, "the device is lost" in health.text) == (503, True)
        with pytest.raises(APIStatusError, match="the engine has failed"):
            client.completions.create(model="m", prompt=[5])
        assert httpx.get(f"{url}/metrics").status_code == 200

        def gone() -> bool:
            try:
                httpx.get(f"{url}/health")
            except httpx.TransportError:
                return True
            return False

        wait_for(gone)
    assert "the device is lost" in capsys.readouterr().err


def test_the_engine_is_free_again_after_its_server(load) -> None:
    engine = load()
    for _ in range(2):
        with running_server(engine, ServeSettings(port=0)) as url:
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert len(engine.generate(["a"], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
        idle(engine)


def test_health_generate_asks_for_progress(slow: Engine, monkeypatch) -> None:
    monkeypatch.setattr(generation, "PROGRESS_TIMEOUT_S", 0.2)
    with running_server(slow, ServeSettings(port=0)) as url:
        assert httpx.get(f"{url}/health_generate").status_code == 200
        slow.scheduler.max_running = 1
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            assert httpx.get(f"{url}/health_generate").status_code == 200  # busy, and moving
            stuck, forward = threading.Event(), slow.runner.forward
            slow.runner.forward = lambda batch: (stuck.wait(10), forward(batch))[1]  # type: ignore[method-assign]
            time.sleep(0.1)
            assert httpx.get(f"{url}/health_generate").json()["error"]["code"] == "unhealthy"
            stuck.set()
    idle(slow)


def test_tokens_leave_without_nagles_delay() -> None:
    with _listen(ServeSettings(port=0)) as sock:
        assert sock.proto == socket.IPPROTO_TCP  # asyncio sets TCP_NODELAY on connections of such sockets only


def test_a_port_that_is_taken_is_said(path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(path, ServeSettings(port=port))


SERVE = """
import sys, time
from fp4pipe.runtime.serve import ServeSettings, serve, server
load = server.Engine.load
def slow_load(*args, **options):
    time.sleep(1)
    engine = load(*args, **options)
    forward = engine.runner.forward
    engine.runner.forward = lambda batch: (time.sleep(0.02), forward(batch))[1]
    return engine
server.Engine.load = slow_load
serve(sys.argv[1], ServeSettings(port=int(sys.argv[2]), engine={"graphs": "off", "progress": False, "kv_tokens": 2048}))
print("returned")
"""


@pytest.fixture
def process(path: Path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(path), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    child.url = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]
    yield child
    child.kill()
    child.communicate()


def statuses_until_ready(url: str) -> list[int]:
    seen: list[int] = []
    end = time.monotonic() + 90
    while 200 not in seen:
        assert time.monotonic() < end
        with contextlib.suppress(httpx.ConnectError):
            seen.append(httpx.get(f"{url}/health").status_code)
        time.sleep(0.05)
    return seen


def stream_in_background(url: str, pool: ThreadPoolExecutor, count: int):
    started = threading.Event()

    def run() -> list[str]:
        body = {"prompt": [5], "max_tokens": count, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = []
            for line in response.iter_lines():
                lines.append(line)
                started.set()
        return [line for line in lines if line]

    future = pool.submit(run)
    assert started.wait(30)
    return future


def test_sigterm_lets_requests_finish(process) -> None:
    assert statuses_until_ready(process.url)[0] == 503
    with ThreadPoolExecutor() as pool:
        running = stream_in_background(process.url, pool, 100)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{process.url}/health").status_code == 503)
        refused = httpx.post(f"{process.url}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        lines = running.result(60)
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out.strip()) == (0, "returned")
    assert f"Ready: {process.url}/v1" in err
    assert "Stopping: 1 requests still run" in err
    assert "Traceback" not in err


def test_a_second_sigterm_aborts(process) -> None:
    statuses_until_ready(process.url)
    with ThreadPoolExecutor() as pool:
        running = stream_in_background(process.url, pool, 480)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{process.url}/health").status_code == 503)
        process.send_signal(signal.SIGTERM)
        lines = running.result(8)
    assert lines[-1] == "data: [DONE]"
    assert "aborted" in lines[-2]
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_checkpoint_that_does_not_load_ends_the_server(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="config"):
        serve(tmp_path, ServeSettings(port=0, engine={"progress": False}))
