"""How one step's attention is cut into few dense calls: sequences of like lengths are padded and computed together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4pipe.runtime.batch import Batch

PADDING = 1.5
"""A group's padded work stays within this factor of its real work ..."""
SMALL = 1 << 15
"""... unless it has fewer scores than this, where one call costs more than the padding."""
MAX_GATHERED = 1 << 10
"""Keys that a group of several gathers at most, in tokens: few enough to be read again from the processor's cache."""


@dataclass(frozen=True, slots=True)
class Group:
    """B sequences computed in one call, padded to Q queries and L keys.

    Padding repeats a row or a slot of the sequence itself, so whatever lies elsewhere is never read, not even to be
    multiplied by zero.
    """

    queries: Tensor
    """int64 [B, Q]: rows of q"""
    real: Tensor
    """int64 [R]: entries of `queries`, flattened, that are not padding"""
    targets: Tensor
    """int64 [R]: row of the output that each of them fills"""
    slots: Tensor | None
    """int64 [B, L]: cache slots of the keys; None when the keys are just the new ones, `queries` again"""
    mask: Tensor | None
    """bool [B, 1, Q, L], True where seen"""
    causal: bool
    """Query i sees keys 0 to i; then `mask` is None."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float) -> None:
        """Fill the group's rows of `out`; `keys` and `values` are the layer's cache ``[slots, kv_heads, head_dim]``."""
        if self.slots is None:
            keys, values = _rows(k, self.queries), _rows(v, self.queries)
        else:
            keys, values = _rows(keys, self.slots).to(q.dtype), _rows(values, self.slots).to(q.dtype)
        attended = F.scaled_dot_product_attention(
            _rows(q, self.queries).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            self.mask,
            is_causal=self.causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out.index_copy_(0, self.targets, _rows(attended.transpose(1, 2).flatten(0, 1), self.real))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` for ``x [N, ...]`` and an index of any shape; row by row, which is faster than indexing."""
    return x.flatten(1).index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


class _Span(NamedTuple):
    """One sequence of the step."""

    number: int
    row: int
    queries: int
    first: int
    """Position of the earliest key that any of its queries sees."""
    context: int

    @property
    def keys(self) -> int:
        return self.context - self.first


def plan_groups(batch: Batch, page_size: int, window: int, device: torch.device) -> list[Group]:
    """Cut `batch` into groups that together fill every real row once.

    Args:
        batch: The step.
        page_size: Tokens a page of the cache holds.
        window: Tokens that a query sees, itself included; 0 for all before it.
        device: Where the groups' index tensors go.
    """
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    fresh: list[_Span] = []
    cached: list[_Span] = []
    for number, context in enumerate(contexts):
        queries = starts[number + 1] - starts[number]
        first = max(0, context - queries - window + 1) if window else 0
        span = _Span(number, starts[number], queries, first, context)
        whole = queries == context and (not window or context <= window)
        (fresh if whole and queries > 1 else cached).append(span)
    groups = [_fresh_group(spans, device) for spans in _gather(fresh)]
    groups += [_cached_group(spans, batch, page_size, window, device) for spans in _gather(cached)]
    return groups


def _gather(spans: list[_Span]) -> list[list[_Span]]:
    """Neighbours in length, as many as the padding allows."""
    groups: list[list[_Span]] = []
    work = 0
    for span in sorted(spans, key=lambda s: (s.queries, s.keys), reverse=True):
        if groups:
            group = groups[-1]
            longest = max(group[0].keys, *(s.keys for s in group), span.keys)
            padded = (len(group) + 1) * group[0].queries * longest
            fits = (len(group) + 1) * longest <= MAX_GATHERED
            if fits and (padded <= SMALL or padded <= PADDING * (work + span.queries * span.keys)):
                group.append(span)
                work += span.queries * span.keys
                continue
        groups.append([span])
        work = span.queries * span.keys
    return groups


def _query_rows(spans: list[_Span]) -> tuple[Tensor, Tensor, Tensor]:
    """``queries``, ``real`` and ``targets`` of a group."""
    row, count = _columns(spans, lambda s: s.row), _columns(spans, lambda s: s.queries)
    offset = torch.arange(int(count.max()))
    queries = row + offset.minimum(count - 1)
    is_real = (offset < count).flatten()
    return queries, is_real.nonzero().squeeze(1), queries.flatten()[is_real]


def _fresh_group(spans: list[_Span], device: torch.device) -> Group:
    """Sequences without earlier context: causal over the new tokens, padded on the right, so no mask is needed."""
    queries, real, targets = _query_rows(spans)
    return Group(queries.to(device), real.to(device), targets.to(device), slots=None, mask=None, causal=True)


def _cached_group(spans: list[_Span], batch: Batch, page_size: int, window: int, device: torch.device) -> Group:
    """Sequences whose keys come from the cache."""
    queries, real, targets = _query_rows(spans)
    first, keys = _columns(spans, lambda s: s.first), _columns(spans, lambda s: s.keys)
    offset = torch.arange(int(keys.max()))
    position = first + offset.minimum(keys - 1)
    pages = batch.page_table[[s.number for s in spans]].long().gather(1, position // page_size)
    slots = pages * page_size + position % page_size
    mask = None
    if queries.shape[1] > 1 or int(keys.min()) < len(offset):
        context, count = _columns(spans, lambda s: s.context), _columns(spans, lambda s: s.queries)
        query_position = (context - count + torch.arange(queries.shape[1]).minimum(count - 1)).unsqueeze(2)
        key_position = (first + offset).unsqueeze(1)
        mask = key_position <= query_position
        if window:
            mask &= key_position > query_position - window
        mask = mask.unsqueeze(1).to(device)
    return Group(queries.to(device), real.to(device), targets.to(device), slots.to(device), mask, causal=False)


def _columns(spans: list[_Span], of: Callable[[_Span], int]) -> Tensor:
    return torch.tensor([of(span) for span in spans]).unsqueeze(1)
