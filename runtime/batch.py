"""One packed step: the tokens of several sequences laid end to end, and where their keys and values live."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """The part of one sequence that a step computes."""

    token_ids: Sequence[int]
    """The new tokens, at least one."""
    start: int
    """Position of the first new token, which is how many tokens of the sequence the cache already holds."""
    pages: Sequence[int]
    """Cache pages of the sequence, in order; they must hold ``start + len(token_ids)`` tokens."""


@dataclass(slots=True)
class Batch:
    """One step over S sequences with T new tokens in all; host tensors, which the runner copies where they go."""

    input_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], from 0 in each sequence"""
    slots: Tensor
    """int64 [T]: ``page * page_size + offset`` of the place where the token's key and value go"""
    query_start: Tensor
    """int32 [S + 1]: sequence s owns tokens ``query_start[s]`` to ``query_start[s + 1]``"""
    context_len: Tensor
    """int32 [S]: tokens of the sequence in the cache once this step is done"""
    page_table: Tensor
    """int32 [S, P]: pages of each sequence, in order; entries past its last page are never read"""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.context_len.shape[0]

    @property
    def last_rows(self) -> Tensor:
        """int64 [S]: row of each sequence's last token, the one that a sampler reads."""
        return self.query_start[1:].long() - 1

    @classmethod
    def pack(cls, segments: Iterable[Segment], page_size: int) -> "Batch":
        """Lay `segments` end to end.

        Raises:
            ValueError: A segment is empty, or has fewer pages than its tokens need.
        """
        segments = list(segments)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        contexts: list[int] = []
        for number, (token_ids, start, pages) in enumerate(segments):
            end = start + len(token_ids)
            if not token_ids or end > len(pages) * page_size:
                raise ValueError(
                    f"segment {number} puts {len(token_ids)} tokens at {start} in {len(pages)} pages of {page_size}"
                )
            ids.extend(token_ids)
            positions.extend(range(start, end))
            slots.extend(pages[p // page_size] * page_size + p % page_size for p in range(start, end))
            starts.append(len(ids))
            contexts.append(end)
        page_table = torch.zeros(len(segments), max((len(s.pages) for s in segments), default=0), dtype=torch.int32)
        for row, segment in zip(page_table, segments, strict=True):
            row[: len(segment.pages)] = torch.tensor(segment.pages, dtype=torch.int32)
        return cls(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            position_ids=torch.tensor(positions, dtype=torch.int64),
            slots=torch.tensor(slots, dtype=torch.int64),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_len=torch.tensor(contexts, dtype=torch.int32),
            page_table=page_table,
        )
