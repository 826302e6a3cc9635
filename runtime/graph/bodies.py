"""Two ways to run a model's body through static buffers: as compiled pieces, or as Hugging Face wrote it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4pipe.runtime.graph.buffers import Buffers
from fp4pipe.runtime.graph.compile import Compiler
from fp4pipe.runtime.graph.fuse_quantize import fuse_quantize
from fp4pipe.runtime.graph.partition import AttentionCall, Piece, partition
from fp4pipe.runtime.graph.rewrite import rewrite
from fp4pipe.runtime.graph.trace import INPUT_IDS, POSITION_IDS, TOKENS, trace
from fp4pipe.runtime.graph.unify import canonical
from fp4pipe.runtime.model import Model
from fp4pipe.runtime.ops import has_native_fp4


class CompiledBody:
    """The model's body as pieces between attention calls, each compiled once for every place it occurs in.

    Args:
        model: What to trace.
        compiler: ``inductor`` or ``eager``.
        max_tokens: Most tokens of a step.
        buckets: Token counts that will recur, for which every call is bound beforehand.
    """

    def __init__(self, model: Model, compiler: str, max_tokens: int, buckets: Sequence[int] = ()) -> None:
        started = time.perf_counter()
        traced = trace(model)
        self.rewritten = rewrite(traced, (fuse_quantize,) if has_native_fp4(model.device) else ())
        program = partition(traced)
        self.trace_seconds = time.perf_counter() - started
        compilation = Compiler(compiler, traced.fake_mode)
        self._weights = traced.weights
        self._steps = [
            (step, compilation.compile(step.graph, canonical(step.graph)) if isinstance(step, Piece) else None)
            for step in program.steps
        ]
        self.compile_seconds = time.perf_counter() - started - self.trace_seconds
        self.pieces = sum(isinstance(step, Piece) for step in program.steps)
        self.distinct_pieces = compilation.distinct
        self.from_disk = compilation.from_disk
        self.buffers = Buffers(program, max_tokens, model.device)
        self._output = program.output
        self._calls = {tokens: self._bind_all(tokens) for tokens in buckets}

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The static int64 ``[1, tokens]`` ids and positions, to be filled before `run`."""
        return self.buffers.view(INPUT_IDS, tokens), self.buffers.view(POSITION_IDS, tokens)

    def run(self, tokens: int) -> Tensor:
        """Hidden states ``[1, tokens, H]``, in a static buffer."""
        for call in self._calls.get(tokens) or self._bind_all(tokens):
            call()
        return self.buffers.view(self._output, tokens)

    def _bind_all(self, tokens: int) -> list[Callable[[], Any]]:
        """Every step of the program with the arguments it has in a step of `tokens`."""
        return [self._bind(step, compiled, tokens) for step, compiled in self._steps]

    def _bind(self, step: Piece | AttentionCall, compiled: Callable[..., Any] | None, tokens: int) -> Callable[[], Any]:
        view = self.buffers.view
        if isinstance(step, AttentionCall):
            q, k, v, out = (view(name, tokens) for name in (step.q, step.k, step.v, step.out))
            attend = torch.ops.fp4pipe.paged_attention.default
            return lambda: attend(q, k, v, out, step.layer, step.scale, step.window)
        assert compiled is not None
        arguments = [
            tokens if name == TOKENS else self._weights[name] if name in self._weights else view(name, tokens)
            for name in step.arguments
        ]
        return lambda: compiled(*arguments)


class EagerBody:
    """The model's body as it is, fed from static inputs: what runs when a model does not trace.

    Args:
        model: What to run.
        max_tokens: Most tokens of a step.
    """

    def __init__(self, model: Model, max_tokens: int) -> None:
        self._model = model
        self._inputs = torch.zeros(2, max_tokens, dtype=torch.int64, device=model.device)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The static int64 ``[1, tokens]`` ids and positions, to be filled before `run`."""
        return self._inputs[:1, :tokens], self._inputs[1:, :tokens]

    def run(self, tokens: int) -> Tensor:
        """Hidden states ``[1, tokens, H]``."""
        return self._model.body(*self.inputs(tokens))
