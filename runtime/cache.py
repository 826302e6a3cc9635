"""Storage of keys and values in fixed-size pages, one pair of tensors a layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer keeps of each token."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """Tokens that a query sees, itself included; None sees all before it."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of every layer, ``[num_pages, page_size, kv_heads, head_dim]`` each.

    Pages are zeroed once, so that a kernel that reads whole pages finds finite numbers past a sequence's end.
    """

    def __init__(
        self, layers: Sequence[LayerKV], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.layers = tuple(layers)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        shapes = [(num_pages, page_size, layer.num_kv_heads, layer.head_dim) for layer in self.layers]
        self.k: list[Tensor] = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.v: list[Tensor] = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def bytes(self) -> int:
        """Bytes held by all layers."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.page_size
