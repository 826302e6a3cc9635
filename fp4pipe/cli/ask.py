"""One chat question to a checkpoint, through the HTTP server that `fp4pipe serve` runs."""

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fp4pipe.errors import Fp4pipeError

if TYPE_CHECKING:
    from fp4pipe.runtime.engine import Engine

MAX_TOKENS = 128


def ask(engine: "Engine", name: str, question: str) -> dict[str, Any]:
    """Ask `question` over HTTP; the answer appears on stderr as it is generated.

    Args:
        engine: A loaded engine without work.
        name: Model name of the request.
        question: One user message.

    Returns:
        The answer, its tokens, and how quickly they came.

    Raises:
        Fp4pipeError: The server did not answer as it should.
    """
    import httpx

    from fp4pipe.runtime.serve import ServeSettings, running_server

    body = {
        "model": name,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    first: float | None = None
    print(f"question: {question}\nanswer:   ", end="", file=sys.stderr, flush=True)
    with running_server(engine, ServeSettings(port=0, served_model_name=name)) as url:
        start = time.monotonic()
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600.0) as response:
            if response.status_code != 200:
                raise Fp4pipeError(f"the server answered {response.status_code}", because=response.read().decode())
            for event in _events(response.iter_lines()):
                usage = event.get("usage") or usage
                text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if text and first is None:
                    first = time.monotonic()
                pieces.append(text)
                print(text, end="", file=sys.stderr, flush=True)
        end = time.monotonic()
    print(file=sys.stderr)
    tokens = usage.get("completion_tokens", 0)
    return {
        "question": question,
        "answer": "".join(pieces),
        "usage": usage,
        "first_token_s": None if first is None else first - start,
        "tokens_per_s": (tokens - 1) / (end - first) if first is not None and tokens > 1 else None,
    }


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON documents of a server-sent event stream, up to its `[DONE]`."""
    for line in lines:
        data = line.removeprefix("data: ")
        if line == data:
            continue
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise Fp4pipeError("the server broke off its answer", because=event["error"]["message"])
        yield event
    raise Fp4pipeError("the server broke off its answer", because="the stream ended without [DONE]")
