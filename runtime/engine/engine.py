"""The engine as it is used: loaded from a checkpoint, and completing lists of prompts."""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fp4pipe import console
from fp4pipe.device import pick_device
from fp4pipe.errors import UsageError
from fp4pipe.runtime.engine.core import EngineCore
from fp4pipe.runtime.engine.generation_config import eos_ids, read_generation_config, sampling_defaults
from fp4pipe.runtime.engine.kv_budget import new_cache
from fp4pipe.runtime.engine.pages import Pages
from fp4pipe.runtime.engine.params import SamplingParams
from fp4pipe.runtime.engine.request import Collector, Completion, Request
from fp4pipe.runtime.engine.text import load_tokenizer
from fp4pipe.runtime.engine.warm import warm
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.model import Model

ONLY_PROMPT = SamplingParams(max_tokens=0)

LOGIT_TOKENS = 2048
"""Prompt tokens that `Engine.prompt_logits` computes together: 2048 rows of 128k float32 are 1 GiB."""


class Engine(EngineCore):
    """Continuous batching over a checkpoint: `load` it, then `generate` for lists of prompts.

    For requests that come and go there are `add`, `step` and `abort`, and `AsyncEngine` over them.
    """

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
        fp4_gemm_backend: str = "auto",
        prefill: str = "bf16",
        lm_head: str = "bf16",
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
            fp4_gemm_backend: Kernels of W4A4 products on Blackwell: see `KernelChoices`.
            prefill: "bf16", or "fp8" for faster and approximate products of many tokens on Hopper.
            lm_head: "bf16" for the checkpoint's own head; "fp8" or "nvfp4" to quantize it, approximately.

        Raises:
            CheckpointError: The checkpoint is damaged or incomplete.
            Unavailable: The model or the mode cannot run here.
            UsageError: An argument is out of range.
        """
        place = pick_device(device)
        if chunk_tokens is None:
            chunk_tokens = 512 if place.type == "cpu" else 8192
        for name, value in (("max_running", max_running), ("chunk_tokens", chunk_tokens), ("page_size", page_size)):
            if value < 1:
                raise UsageError(f"{name} is {value}", fix="give at least 1")
        model = Model.load(
            path,
            mode=mode,
            device=place,
            dtype=dtype,
            load_threads=load_threads,
            progress=progress,
            fp4_gemm_backend=fp4_gemm_backend,
            prefill=prefill,
            lm_head=lm_head,
        )
        generation, tokenizer = read_generation_config(Path(path)), load_tokenizer(Path(path))
        max_running = min(max_running, chunk_tokens)
        cache = new_cache(model, kv_tokens=kv_tokens, page_size=page_size, max_running=max_running)
        runner = Runner(model, cache, graphs=graphs, compiler=compiler, max_tokens=chunk_tokens)
        if model.device.type == "cuda":
            warm(runner, page_size)
        return cls(
            model,
            runner,
            tokenizer,
            Pages(cache.num_pages, page_size, prefix_cache=prefix_cache),
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            eos_ids=eos_ids(generation, model.config, tokenizer),
            sampling_defaults=sampling_defaults(generation),
        )

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
