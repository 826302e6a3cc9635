"""The engine's core: requests go in, each step computes one batch, tokens and text come out."""

import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fp4pipe.errors import UsageError
from fp4pipe.runtime.batch import Batch, Segment
from fp4pipe.runtime.engine.advance import advance, finish, read_prompt
from fp4pipe.runtime.engine.pages import Pages
from fp4pipe.runtime.engine.params import SamplingParams
from fp4pipe.runtime.engine.request import ContextExceeded, Output, Request
from fp4pipe.runtime.engine.sampling import Sampled, sample
from fp4pipe.runtime.engine.scheduler import Scheduler, Work
from fp4pipe.runtime.engine.text import Vocabulary
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.model import Model

TOTALS = ("steps", "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens")
"""What `EngineCore.stats` counts from the start."""


class EngineCore:
    """Runs requests over one model with continuous batching.

    One thread at a time may call it; only `check` may be called from any.

    Args:
        model: Loaded model.
        runner: Runs its body over a cache of ``pages`` pages.
        tokenizer: The checkpoint's Hugging Face tokenizer.
        pages: Allocator over the runner's cache.
        max_running: Requests computed at the same time at most.
        chunk_tokens: Tokens computed in one step at most, at least `max_running`.
        eos_ids: Tokens that end a request unless it ignores them.
        sampling_defaults: Sampling parameters the model's makers advise; for servers, not applied here.
    """

    def __init__(
        self,
        model: Model,
        runner: Runner,
        tokenizer: Any,
        pages: Pages,
        *,
        max_running: int,
        chunk_tokens: int,
        eos_ids: Sequence[int],
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.runner = runner
        self.tokenizer = tokenizer
        self.pages = pages
        self.scheduler = Scheduler(pages, max_running=max_running, chunk_tokens=chunk_tokens)
        self.eos_ids = tuple(eos_ids)
        self.sampling_defaults = dict(sampling_defaults or {})
        self.max_context = min(model.max_context, pages.num_tokens)
        """Prompt and output tokens of one request at most."""
        self._vocabulary = Vocabulary(tokenizer)
        self._requests: dict[str, Request] = {}
        self._seeds = random.Random()
        self._totals = dict.fromkeys(TOTALS, 0)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse a request that could never run; safe to call from any thread.

        Raises:
            UsageError: The prompt is empty or has ids outside the vocabulary.
            ContextExceeded: Prompt and output do not fit the context or the KV cache.
        """
        vocab = self.model.vocab_size
        if not prompt_ids:
            raise UsageError("the prompt is empty", fix="give at least one token")
        for name, ids in (
            ("prompt", prompt_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            low, high = min(ids, default=0), max(ids, default=0)
            if low < 0 or high >= vocab:
                raise UsageError(f"{name} has token id {low if low < 0 else high}, outside the vocabulary of {vocab}")
        length = len(prompt_ids) + (1 if params.max_tokens is None else params.max_tokens)
        if length > self.max_context:
            asked = "at least 1" if params.max_tokens is None else str(params.max_tokens)
            limit = "the context" if self.max_context == self.model.max_context else "the KV cache"
            raise ContextExceeded(
                f"{len(prompt_ids)} prompt tokens and {asked} to generate exceed {limit} of {self.max_context} tokens",
                fix="shorten the prompt, or lower max_tokens",
            )

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None) -> Request:
        """Queue a request; `step` computes it.

        Raises:
            UsageError: As `check`, or `request_id` is in use.
        """
        self.check(prompt_ids, params)
        return self._add(prompt_ids, params, request_id)

    def _add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        keep_logits: bool = False,
    ) -> Request:
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._requests:
            raise UsageError(f"request id {request_id!r} is in use", fix="give each request its own id, or none")
        max_tokens = self.max_context if params.max_tokens is None else params.max_tokens
        request = Request(
            id=request_id,
            tokens=list(prompt_ids),
            num_prompt=len(prompt_ids),
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_len=min(len(prompt_ids) + max_tokens, self.max_context),
            stop_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.eos_ids),
            text=self._vocabulary.stream(prompt_ids, skip_special_tokens=params.skip_special_tokens, stop=params.stop),
            keep_logits=keep_logits,
        )
        self._requests[request.id] = request
        self._totals["prompt_tokens"] += request.num_prompt
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str) -> Output | None:
        """End a request now and free its pages; None when it is unknown or already finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._remove(request)
        return finish(request, "abort")

    def step(self) -> list[Output]:
        """Compute one batch; returns what is new, at most one output a request."""
        work = self.scheduler.schedule()
        if not work:
            return []
        batch = Batch.pack([_segment(w) for w in work], self.pages.page_size)
        now = time.monotonic()
        with torch.inference_mode():
            hidden = self.runner.forward(batch)
            self.scheduler.commit(work)
            for w, first in zip(work, batch.query_start.tolist(), strict=False):
                w.request.started = w.request.started or now
                if w.request.needs_whole_prompt:
                    read_prompt(w.request, w.start, hidden[first : first + w.count], self.model.logits)
            ready = [index for index, w in enumerate(work) if w.is_last]
            requests = [work[index].request for index in ready]
            rows = batch.last_rows[ready].to(hidden.device)
            sampled = sample(self.model.logits(hidden[rows]), requests) if ready else []
        self._totals["steps"] += 1
        self._totals["computed_tokens"] += batch.num_tokens
        return [self._advance(request, token) for request, token in zip(requests, sampled, strict=True)]

    def _advance(self, request: Request, sampled: Sampled) -> Output:
        if request.num_output == 0:
            self._totals["cached_tokens"] += request.cached_tokens
        output = advance(request, sampled)
        self._totals["generated_tokens"] += len(output.token_ids)
        if output.finish_reason is not None:
            self._remove(request)
        return output

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        del self._requests[request.id]

    def flush_cache(self) -> int:
        """Forget all prefixes that no running request uses; returns how many pages became free."""
        return self.pages.flush()

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is running now."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "max_running": self.scheduler.max_running,
            "kv_tokens": self.pages.num_tokens,
            "kv_used_tokens": self.pages.used * self.pages.page_size,
            "kv_idle_tokens": self.pages.num_idle * self.pages.page_size,
            "preemptions": self.scheduler.num_preemptions,
            **self._totals,
            "runner": dict(self.runner.stats),
        }


def _segment(work: Work) -> Segment:
    assert work.request.lease is not None
    return Segment(work.request.tokens[work.start : work.end], work.start, work.request.lease.pages)
