"""``POST /v1/chat/completions``."""

import inspect
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from fp4pipe.runtime.engine import Output
from fp4pipe.runtime.engine.request import Collector, Completion
from fp4pipe.runtime.serve.errors import ApiError
from fp4pipe.runtime.serve.generation import Generation
from fp4pipe.runtime.serve.openai_objects import Usage, chat_logprobs, finish_fields
from fp4pipe.runtime.serve.protocol import ChatRequest
from fp4pipe.runtime.serve.state import ServerState
from fp4pipe.runtime.serve.transport import EventStream, answer_unless_gone


async def create_chat_completion(state: ServerState, body: ChatRequest, request: Request, id: str) -> Response:
    """Answer a chat `n` times.

    Raises:
        ApiError, UsageError: The request cannot be taken.
    """
    state.require_model(body.model)
    count = body.n or 1
    state.require_room(count)
    prompt = await state.in_encoder(encode_chat, state, body)
    params = body.sampling(
        state.engine.engine.sampling_defaults,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    sequences = [
        (prompt, params if params.seed is None else replace(params, seed=params.seed + number))
        for number in range(count)
    ]
    answer = _Answer(state, body, id, count)
    generation = Generation(state, sequences, id)
    if body.stream:
        events = answer.events(generation)
        return EventStream(events, on_close=generation.close, send_timeout_s=state.settings.send_timeout_s)
    try:
        return await answer_unless_gone(request, answer.whole(generation))
    finally:
        generation.close()


def encode_chat(state: ServerState, body: ChatRequest) -> list[int]:
    """The tokens of the chat as the model's template writes it, up to where the answer begins.

    Raises:
        ApiError: 400, when there is no template or it refuses the messages.
    """
    tokenizer = state.tokenizer
    if not tokenizer.chat_template:
        raise ApiError(
            400, "the model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    more = body.chat_template_kwargs or {}
    if taken := sorted(more.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys()):
        raise ApiError(400, f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs")
    messages = [message.to_template() for message in body.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # templates are programs of the model's makers: they may fail in any way
        raise ApiError(400, f"the model's chat template refuses the messages: {error}", param="messages") from error


class _Answer:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(self, state: ServerState, body: ChatRequest, id: str, count: int) -> None:
        self._state, self._body, self._count = state, body, count
        self._usage = Usage(count)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = {"id": id, "object": kind, "created": int(time.time()), "model": state.model_name}

    async def whole(self, generation: Generation) -> Response:
        """The answer in one document."""
        collectors = [Collector() for _ in range(self._count)]
        async for index, output in generation.outputs():
            self._usage.add(index, output)
            collectors[index].add(output)
        choices = []
        for index, collector in enumerate(collectors):
            done = collector.completion()
            message = {"role": "assistant", "content": done.text, "refusal": None}
            choices.append(
                {"index": index, "message": message, "logprobs": self._logprobs(done.logprobs), **self._finish(done)}
            )
        return JSONResponse({**self._head, "choices": choices, "usage": self._usage.to_dict()})

    async def events(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks: the role, the text, and why it ended."""
        for index in range(self._count):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for index, output in generation.outputs():
            self._usage.add(index, output)
            finish = self._finish(output)
            if output.text or output.logprobs or (output.token_ids and self._body.return_token_ids):
                still = {**finish, "finish_reason": None, "stop_reason": None}
                yield self._chunk(index, {"content": output.text}, self._logprobs(output.logprobs), still)
                finish.pop("token_ids", None)
            if output.finish_reason is not None:
                yield self._chunk(index, {}, None, finish)
        if self._body.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage.to_dict()}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **(finish or {})}
        return {**self._head, "choices": [choice], **({"usage": None} if self._body.include_usage else {})}

    def _finish(self, done: Completion | Output) -> dict[str, Any]:
        return finish_fields(done, token_ids=self._body.return_token_ids)

    def _logprobs(self, reports: Any) -> dict[str, Any] | None:
        return None if reports is None else chat_logprobs(reports, self._state.token_text)
