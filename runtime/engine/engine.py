"""The engine: requests go in, each step computes one batch, tokens and text come out."""

import contextlib
import random
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from fp4pipe import console
from fp4pipe.errors import UsageError
from fp4pipe.runtime.batch import Batch, Segment
from fp4pipe.runtime.engine.advance import advance, finish, read_prompt
from fp4pipe.runtime.engine.generation_config import eos_ids, read_generation_config, sampling_defaults
from fp4pipe.runtime.engine.kv_budget import kv_pages
from fp4pipe.runtime.engine.pages import Pages
from fp4pipe.runtime.engine.params import SamplingParams
from fp4pipe.runtime.engine.request import Collector, Completion, ContextExceeded, Output, Request
from fp4pipe.runtime.engine.sampling import Sampled, sample
from fp4pipe.runtime.engine.scheduler import Scheduler, Work
from fp4pipe.runtime.engine.text import Vocabulary
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.model import Model

TOTALS = ("steps", "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens")
"""What `Engine.stats` counts from the start."""

ONLY_PROMPT = SamplingParams(max_tokens=0)

LOGIT_TOKENS = 2048
"""Prompt tokens that `Engine.prompt_logits` computes together: 2048 rows of 128k float32 are 1 GiB."""


class Engine:
    """Runs requests over one model with continuous batching.

    Use `load`, then `generate` for a list of prompts, or `add` and `step` for requests that come and go. One thread at
    a time may call it; `AsyncEngine` gives it a thread of its own.

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
        self.max_context = min(model.max_context, pages.num_pages * pages.page_size)
        """Prompt and output tokens of one request at most."""
        self._vocabulary = Vocabulary(tokenizer)
        self._requests: dict[str, Request] = {}
        self._seeds = random.Random()
        self._totals = dict.fromkeys(TOTALS, 0)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        mode: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        graphs: str = "compiled",
        compiler: str = "inductor",
        load_threads: int = 8,
        max_running: int = 64,
        chunk_tokens: int | None = None,
        kv_tokens: int | None = None,
        page_size: int = 16,
        prefix_cache: bool = True,
        progress: bool = True,
    ) -> "Engine":
        """Load a checkpoint and everything around it.

        Args:
            path: NVFP4 checkpoint, or an unquantized Hugging Face directory.
            mode: "w4a4", "w4a16" or "auto".
            device: "cpu", "cuda", "cuda:1" … or "auto".
            dtype: Compute dtype; "auto" is the checkpoint's on a GPU and float32 on a CPU.
            graphs: "compiled", "segmented" or "off".
            compiler: "inductor" or "eager".
            load_threads: Threads that read the weights.
            max_running: Requests computed at the same time at most.
            chunk_tokens: Tokens computed in one step at most; None: 512 on CPU, 8192 on a GPU.
            kv_tokens: Tokens the KV cache holds; None: from the memory that is free.
            page_size: Tokens in a page of the KV cache.
            prefix_cache: Reuse the keys and values of prompts that begin alike.
            progress: Show progress on stderr.

        Raises:
            CheckpointError: The checkpoint is damaged or incomplete.
            Unavailable: The model or the mode cannot run here.
            UsageError: An argument is out of range.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        chunk_tokens = chunk_tokens or (512 if device == "cpu" else 8192)
        for name, value in (("max_running", max_running), ("chunk_tokens", chunk_tokens), ("page_size", page_size)):
            if value < 1:
                raise UsageError(f"{name} is {value}", fix="give at least 1")
        model = Model.load(path, mode=mode, device=device, dtype=dtype, load_threads=load_threads, progress=progress)
        max_running = min(max_running, chunk_tokens)
        num_pages = kv_pages(model, kv_tokens=kv_tokens, page_size=page_size, max_running=max_running)
        pages = Pages(num_pages, page_size, prefix_cache=prefix_cache)
        runner = Runner(
            model,
            model.new_cache(num_pages, page_size),
            graphs=graphs,
            compiler=compiler,
            max_tokens=chunk_tokens,
        )
        generation = read_generation_config(Path(path))
        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls(
            model,
            runner,
            tokenizer,
            pages,
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            eos_ids=eos_ids(generation, model.config, tokenizer),
            sampling_defaults=sampling_defaults(generation),
        )

    # -- requests

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
        if bad := next((i for i in prompt_ids if not 0 <= i < vocab), None):
            raise UsageError(f"prompt token id {bad} is outside the vocabulary of {vocab}")
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if bad := next((i for i in ids if not 0 <= i < vocab), None):
                raise UsageError(f"{name} has token id {bad}, outside the vocabulary of {vocab}")
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

    # -- steps

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

    # -- offline

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete all prompts, as many at a time as the engine runs; results are in the prompts' order.

        Args:
            prompts: Texts, encoded with the tokenizer's special tokens, or lists of token ids.
            params: For all prompts, or one for each.
            progress: Show a bar on stderr.

        Raises:
            UsageError: A prompt could never run; nothing was computed then.
        """
        assert not self.has_work, "other requests' outputs would be lost"
        many = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        for prompt, one in zip(ids, many, strict=True):
            self.check(prompt, one)
        requests = [self._add(prompt, one) for prompt, one in zip(ids, many, strict=True)]
        results = {request.id: Collector() for request in requests}
        with contextlib.ExitStack() as stack:
            stack.callback(self._abort_all, requests)
            bar = stack.enter_context(console.progress(len(prompts), "generating", "prompt")) if progress else None
            while self.has_work:
                for output in self.step():
                    if results[output.request_id].add(output) and bar:
                        bar.update(1)
        return [results[request.id].completion() for request in requests]

    def prompt_logits(self, prompts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Logits after each token of each prompt, through the same runner and paged cache as generation.

        Yields:
            float32 [T, V] on the model's device, one for each prompt, in order.
        """
        assert not self.has_work, "other requests' outputs would be lost"
        ahead = deque(prompts)
        while ahead:
            group = [ahead.popleft()]
            while ahead and sum(map(len, group)) + len(ahead[0]) <= LOGIT_TOKENS:
                group.append(ahead.popleft())
            for prompt in group:
                self.check(prompt, ONLY_PROMPT)
            requests = [self._add(prompt, ONLY_PROMPT, keep_logits=True) for prompt in group]
            try:
                while self.has_work:
                    self.step()
            finally:
                self._abort_all(requests)
            for request in requests:
                yield torch.cat(request.prompt_logits)

    def _abort_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.abort(request.id)

    # -- state

    def flush_cache(self) -> int:
        """Forget all prefixes that no running request uses; returns how many pages became free."""
        return self.pages.flush()

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is running now."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "max_running": self.scheduler.max_running,
            "kv_tokens": self.pages.num_pages * self.pages.page_size,
            "kv_used_tokens": self.pages.used * self.pages.page_size,
            "kv_idle_tokens": self.pages.num_idle * self.pages.page_size,
            "preemptions": self.scheduler.num_preemptions,
            **self._totals,
            "runner": dict(self.runner.stats),
        }


def _segment(work: Work) -> Segment:
    assert work.request.lease is not None
    return Segment(work.request.tokens[work.start : work.end], work.start, work.request.lease.pages)
