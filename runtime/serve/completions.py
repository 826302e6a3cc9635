"""``POST /v1/completions``."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from fp4pipe.runtime.engine import Output, TokenLogprob
from fp4pipe.runtime.engine.request import Collector, Completion
from fp4pipe.runtime.serve.errors import ApiError
from fp4pipe.runtime.serve.generation import Generation
from fp4pipe.runtime.serve.openai_objects import Usage, completion_logprobs, finish_fields
from fp4pipe.runtime.serve.protocol import CompletionRequest
from fp4pipe.runtime.serve.state import ServerState
from fp4pipe.runtime.serve.transport import EventStream, answer_unless_gone

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for text completions."""


async def create_completion(state: ServerState, body: CompletionRequest, request: Request, id: str) -> Response:
    """Complete each prompt `n` times.

    Raises:
        ApiError, UsageError: The request cannot be taken.
    """
    state.require_model(body.model)
    per_prompt = body.n or 1
    state.require_room(len(body.prompt) * per_prompt)
    prompts = await state.in_encoder(_encode, state, body.prompt)
    params = body.sampling(
        state.engine.engine.sampling_defaults,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    sequences = [
        (prompt, params if params.seed is None else replace(params, seed=params.seed + number))
        for prompt in prompts
        for number in range(per_prompt)
    ]
    answer = _Answer(state, body, prompts, id, per_prompt)
    if body.echo:
        await state.in_encoder(answer.decode_prompts)
    generation = Generation(state, sequences, id)
    if body.stream:
        events = answer.events(generation)
        return EventStream(events, on_close=generation.close, send_timeout_s=state.settings.send_timeout_s)
    try:
        return await answer_unless_gone(request, answer.whole(generation))
    finally:
        generation.close()


def _encode(state: ServerState, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    try:
        return [state.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    except (TypeError, ValueError) as error:  # lone surrogates are no text
        raise ApiError(400, f"the prompt cannot be encoded: {error}", param="prompt") from error


class _Answer:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(
        self, state: ServerState, body: CompletionRequest, prompts: list[list[int]], id: str, per_prompt: int
    ) -> None:
        self._state, self._body, self._prompts, self._per_prompt = state, body, prompts, per_prompt
        self._head = {"id": id, "object": "text_completion", "created": int(time.time()), "model": state.model_name}
        self._usage = Usage(per_prompt)
        self._echo: list[str] = [""] * len(prompts)

    def decode_prompts(self) -> None:
        """Prepare the texts that an echo starts with."""
        self._echo = [
            prompt
            if isinstance(prompt, str)
            else self._state.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
            for prompt in self._body.prompt
        ]

    async def whole(self, generation: Generation) -> Response:
        """The answer in one document."""
        collectors = [Collector() for _ in range(len(self._prompts) * self._per_prompt)]
        async for index, output in generation.outputs():
            self._usage.add(index, output)
            collectors[index].add(output)
        choices = []
        for index, collector in enumerate(collectors):
            done = collector.completion()
            text = self._prompt_text(index) + done.text
            choices.append(self._choice(index, text, self._reports(done), 0, self._finish(done)))
        return JSONResponse({**self._head, "choices": choices, "usage": self._usage.to_dict()})

    async def events(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks."""
        usage = {"usage": None} if self._body.include_usage else {}
        lengths: dict[int, int] = {}
        async for index, output in generation.outputs():
            self._usage.add(index, output)
            text = output.text if index in lengths else self._prompt_text(index) + output.text
            reports = self._reports(output)
            if text or reports or output.finish_reason or self._body.return_token_ids:
                choice = self._choice(index, text, reports, lengths.get(index, 0), self._finish(output))
                yield {**self._head, "choices": [choice], **usage}
            lengths[index] = lengths.get(index, 0) + len(text)
        if self._body.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage.to_dict()}

    def _finish(self, done: Completion | Output) -> dict[str, Any]:
        return finish_fields(done, token_ids=self._body.return_token_ids)

    def _prompt_text(self, index: int) -> str:
        return self._echo[index // self._per_prompt]

    @staticmethod
    def _reports(done: Completion | Output) -> list[TokenLogprob | None] | None:
        if done.logprobs is None and done.prompt_logprobs is None:
            return None
        return [*(done.prompt_logprobs or []), *(done.logprobs or [])]

    def _choice(
        self, index: int, text: str, reports: list[TokenLogprob | None] | None, offset: int, finish: dict[str, Any]
    ) -> dict[str, Any]:
        first_token = self._prompts[index // self._per_prompt][0]
        logprobs = (
            None if reports is None else completion_logprobs(reports, first_token, self._state.token_text, offset)
        )
        return {"index": index, "text": text, "logprobs": logprobs, **finish}
