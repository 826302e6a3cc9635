"""Whatever a client sends, it gets a 4xx in OpenAI's shape, and the server goes on."""

import json

import httpx
import pytest

from fp4pipe.runtime.engine import Engine
from fp4pipe.runtime.serve import ServeSettings, running_server
from fp4pipe.runtime.serve.token_text import TokenText

COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ""}, None),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 5.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 100000}, "max_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature"),
    ({"prompt": "a", "temperature": float("inf")}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_k": -5}, "top_k"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 100000}, "n"),
    ({"prompt": "a", "best_of": 5}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 100}, "stop"),
    ({"prompt": "a", "stop": "x" * 5000}, "stop"),
    ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [5]}, "logit_bias"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "min_tokens": 50, "max_tokens": 5}, "min_tokens"),
    ({"prompt": "a", "seed": "x"}, "seed"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"prompt": "a", "model": 5}, "model"),
]
USER = {"role": "user", "content": "a"}
CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": 5, "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]},
        "messages",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": [USER], "logprobs": 3}, "logprobs"),
    ({"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
    ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, "tools"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [USER], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format"),
    ({"messages": [USER], "stream": 1}, "stream"),
]


def post(url: str, body: dict | bytes) -> httpx.Response:
    """Send `body` as JSON; httpx's own way refuses NaN and lone surrogates."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(url, content=content, headers={"Content-Type": "application/json"})


def check_error(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


@pytest.mark.parametrize(("body", "param"), COMPLETIONS)
def test_bad_completions(url: str, body: dict, param: str | None) -> None:
    error = check_error(post(f"{url}/v1/completions", body), 400)
    assert error["param"] == param


@pytest.mark.parametrize(("body", "param"), CHATS)
def test_bad_chats(url: str, body: dict, param: str | None) -> None:
    error = check_error(post(f"{url}/v1/chat/completions", body), 400)
    assert error["param"] == param


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b'"text"', b"5", b"\xff\xfe", b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"],
    ids=["nothing", "half", "null", "list", "text", "number", "bytes", "deep", "long"],
)
def test_bodies_that_are_no_object(url: str, route: str, content: bytes) -> None:
    check_error(post(f"{url}{route}", content), 400)


def test_another_content_type(url: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    check_error(httpx.post(f"{url}/v1/completions", content=body, headers={"Content-Type": "text/plain"}), 400)


def test_nulls_and_unknown_fields_are_as_if_absent(url: str) -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "stream", "max_tokens"]
    )
    body = {"prompt": "a", "user": "me", "something_else": [1], **nulls}
    response = httpx.post(f"{url}/v1/completions", json=body)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] <= 16


def test_other_paths_and_methods(url: str) -> None:
    check_error(httpx.get(f"{url}/v1/nothing"), 404)
    check_error(httpx.get(f"{url}/v1/completions"), 405)


def test_large_bodies_are_refused_stated_or_chunked(url: str) -> None:
    large = {"prompt": "a" * (1 << 20)}
    check_error(httpx.post(f"{url}/v1/completions", json=large), 413)

    def chunks():
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"a" * (1 << 16)
        yield b'"}'

    check_error(
        httpx.post(f"{url}/v1/completions", content=chunks(), headers={"Content-Type": "application/json"}), 413
    )


def test_tokenize_and_detokenize(url: str, offline: Engine) -> None:
    text = "Grüße 12 🤗"
    got = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()
    assert got["tokens"] == offline.tokenizer.encode(text)
    assert (got["count"], got["max_model_len"]) == (len(got["tokens"]), 512)
    assert httpx.post(f"{url}/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": text}
    check_error(post(f"{url}/tokenize", {"prompt": "\ud800"}), 400)
    check_error(httpx.post(f"{url}/detokenize", json={"tokens": [-1]}), 400)
    check_error(httpx.post(f"{url}/detokenize", json={"tokens": [512]}), 400)


def test_a_chat_template_may_refuse_or_be_missing(load) -> None:
    engine = load()
    engine.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with running_server(engine, ServeSettings(port=0)) as url:
        error = check_error(httpx.post(f"{url}/v1/chat/completions", json={"messages": [USER]}), 400)
        assert "roles must alternate" in error["message"]
    engine.tokenizer.chat_template = None
    with running_server(engine, ServeSettings(port=0)) as url:
        error = check_error(httpx.post(f"{url}/v1/chat/completions", json={"messages": [USER]}), 400)
        assert error["code"] == "no_chat_template"


def test_token_texts_are_exact_bytes(offline: Engine) -> None:
    text = TokenText(offline.tokenizer)
    ids = offline.tokenizer.encode("Grüße 世界<|im_end|>")
    assert b"".join(map(text.bytes, ids)).decode() == "Grüße 世界<|im_end|>"
    assert text.bytes(99999) == b""
