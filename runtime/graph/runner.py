"""Runs packed steps: pads each to a bucket, feeds static buffers, counts what it did."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fp4pipe.errors import UsageError
from fp4pipe.runtime.attention import Step, attending
from fp4pipe.runtime.batch import Batch
from fp4pipe.runtime.cache import KVCache
from fp4pipe.runtime.graph.bodies import CompiledBody, EagerBody
from fp4pipe.runtime.graph.buckets import bucket_of, token_buckets
from fp4pipe.runtime.graph.compile import available
from fp4pipe.runtime.model import Model

GRAPHS = ("compiled", "segmented", "off")
COMPILERS = ("inductor", "eager")


class Runner:
    """Runs steps of one model over one cache.

    Args:
        model: What to run.
        cache: Where its keys and values go.
        graphs: ``compiled`` traces the model into pieces; ``segmented`` runs its own modules through the same padding
            and static inputs; ``off`` runs them on the batch as it comes.
        compiler: Of ``compiled`` pieces: ``inductor`` or ``eager``.
        max_tokens: Most tokens a step can have.
        buckets: Ascending token counts to pad to; the standard list when absent.

    Raises:
        UsageError: An unknown `graphs` or `compiler`.
        Unavailable: ``compiled``, and the model does not trace.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        *,
        graphs: str = "compiled",
        compiler: str = "inductor",
        max_tokens: int,
        buckets: list[int] | None = None,
    ) -> None:
        for flag, value, known in (("--graphs", graphs, GRAPHS), ("--compiler", compiler, COMPILERS)):
            if value not in known:
                raise UsageError(f"{flag} {value} is unknown", fix=f"{flag} {'|'.join(known)}")
        self.model = model
        self.cache = cache
        self.graphs = graphs
        self.compiler = available(compiler) if graphs == "compiled" else compiler
        self.max_tokens = max_tokens
        self.buckets = buckets or token_buckets(max_tokens)
        self.body: CompiledBody | EagerBody | None = None
        if graphs == "compiled":
            self.body = CompiledBody(model, self.compiler, max_tokens, self.buckets)
        elif graphs == "segmented":
            self.body = EagerBody(model, max_tokens)
        self._replays: Counter[int] = Counter()
        self._eager: Counter[str] = Counter()
        self._recompiles = 0

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Hidden states ``[T, H]`` of the batch's tokens, valid until the next call.

        Raises:
            ValueError: The batch has more tokens than `max_tokens`.
        """
        if batch.num_tokens > self.max_tokens:
            raise ValueError(f"a step of {batch.num_tokens} tokens exceeds the runner's {self.max_tokens}")
        before = _compiled_frames()
        with attending(Step(batch, self.cache)):
            hidden = self._off(batch) if self.body is None else self._through(self.body, batch)
        self._recompiles += _compiled_frames() - before
        return hidden

    def _off(self, batch: Batch) -> Tensor:
        self._eager["off"] += 1
        device = self.model.device
        return self.model.body(batch.input_ids.to(device)[None], batch.position_ids.to(device)[None])[0]

    def _through(self, body: CompiledBody | EagerBody, batch: Batch) -> Tensor:
        tokens = batch.num_tokens
        rows = bucket_of(tokens, self.buckets)
        if rows is None:
            rows = tokens
            self._eager["beyond the largest bucket" if tokens > self.buckets[-1] else "padding above 2x"] += 1
        else:
            self._replays[rows] += 1
        for static, given in zip(body.inputs(rows), (batch.input_ids, batch.position_ids), strict=True):
            static[0, :tokens] = given
            static[0, tokens:] = 0
        return body.run(rows)[0, :tokens]

    def poison(self) -> None:
        """Fill every static buffer with NaN: a result that stays right has read only what its own step wrote."""
        if isinstance(self.body, CompiledBody):
            for storage in self.body.buffers.distinct():
                if storage.is_floating_point():
                    storage.fill_(torch.nan)

    @property
    def stats(self) -> dict[str, Any]:
        """What was built and what has run, for reports and metrics."""
        stats: dict[str, Any] = {
            "graphs": self.graphs,
            "compiler": self.compiler,
            "buckets": list(self.buckets),
            "replays": dict(sorted(self._replays.items())),
            "eager": dict(self._eager),
            "recompiles": self._recompiles,
        }
        if isinstance(self.body, CompiledBody):
            stats |= {
                "pieces": self.body.pieces,
                "distinct_pieces": self.body.distinct_pieces,
                "graph_breaks": 0,  # tracing refuses a model that has any
                "from_disk": self.body.from_disk,
                "rewritten": self.body.rewritten,
                "buffer_bytes": self.body.buffers.bytes,
                "trace_seconds": self.body.trace_seconds,
                "compile_seconds": self.body.compile_seconds,
            }
        return stats


def _compiled_frames() -> int:
    return counters["stats"]["unique_graphs"]
