"""Runs one packed step through the model."""

import torch
from torch import Tensor

from fp4pipe.runtime.attention import Step, attending
from fp4pipe.runtime.batch import Batch
from fp4pipe.runtime.cache import KVCache
from fp4pipe.runtime.graph.buckets import token_buckets
from fp4pipe.runtime.model import Model


class Runner:
    """Runs steps of one model over one cache.

    Args:
        model: What to run.
        cache: Where its keys and values go.
        graphs: ``compiled``, ``segmented`` or ``off``.
        compiler: ``inductor`` or ``eager``, for ``compiled``.
        max_tokens: Most tokens a step can have.
        buckets: Token counts to pad to; the standard list when absent.
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
        self.model = model
        self.cache = cache
        self.graphs = graphs
        self.compiler = compiler
        self.max_tokens = max_tokens
        self.buckets = buckets or token_buckets(min(max_tokens, model.max_context))
        self.stats: dict[str, object] = {}

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Hidden states ``[T, H]`` of the batch's tokens, valid until the next call."""
        device = self.model.device
        with attending(Step(batch, self.cache)):
            hidden = self.model.body(batch.input_ids.to(device)[None], batch.position_ids.to(device)[None])
        return hidden[0]
