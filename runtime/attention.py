"""Causal attention over a paged cache: the one operator that sees which tokens belong together.

``fp4pipe::paged_attention(q, k, v, out!, layer, scale, window)`` writes the new tokens' keys and values into the
cache and fills `out`. What it needs to know of the step (which rows are real, where they go, what each sequence may
see) comes from the `Step` that the caller holds in `attending`; a context variable carries it, so two engines in two
threads never see each other's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fp4pipe.runtime.attention_plan import Group, plan_groups
from fp4pipe.runtime.batch import Batch
from fp4pipe.runtime.cache import KVCache

NAME = "fp4pipe_paged"
"""Name of this attention in transformers' attention interface."""


class Step:
    """One batch over one cache, as attention reads it."""

    def __init__(self, batch: Batch, cache: KVCache) -> None:
        self.batch = batch
        self.cache = cache
        self.num_tokens = batch.num_tokens
        self.slots = batch.slots.to(cache.device)
        self._groups: dict[int, list[Group]] = {}

    def groups(self, window: int) -> list[Group]:
        """How to compute this step under a sliding window (0: none); planned once, shared by all layers."""
        if window not in self._groups:
            self._groups[window] = plan_groups(self.batch, self.cache.page_size, window, self.cache.device)
        return self._groups[window]


_step: ContextVar[Step] = ContextVar("fp4pipe_attention_step")


@contextmanager
def attending(step: Step) -> Iterator[None]:
    """Make `step` the one that attention calls in this context work on."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


_library = torch.library.Library("fp4pipe", "FRAGMENT")
_library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer, float scale, int window) -> ()"
)


def paged_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, window: int) -> None:
    """Attend from each new token to its own sequence up to itself.

    Rows past the step's real tokens are padding: their inputs are never read and their outputs are zeroed.

    Args:
        q: ``[T, heads, head_dim]``, rotated.
        k, v: ``[T, kv_heads, head_dim]``; heads is a multiple of kv_heads.
        out: ``[T, heads, head_dim]``, overwritten.
        layer: Index of the cache's tensors.
        scale: Factor of the scores.
        window: Tokens that a query sees, itself included; 0 for all before it.

    Raises:
        LookupError: Called outside `attending`.
    """
    step = _step.get()
    n = step.num_tokens
    q, k, v = q[:n], k[:n], v[:n]
    keys, values = step.cache.k[layer].flatten(0, 1), step.cache.v[layer].flatten(0, 1)
    keys.index_copy_(0, step.slots, k.to(keys.dtype))
    values.index_copy_(0, step.slots, v.to(values.dtype))
    for group in step.groups(window):
        group.run(q, k, v, keys, values, out, scale)
    out[n:] = 0


@torch.library.register_fake("fp4pipe::paged_attention", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, window: int) -> None:
    torch._check(q.shape == out.shape)
    torch._check(k.shape == v.shape)


_library.impl("paged_attention", paged_attention, "CompositeExplicitAutograd")
