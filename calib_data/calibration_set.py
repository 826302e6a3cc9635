"""The token ids a model is calibrated on, and nothing else: no mask, because there is no padding."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class CalibrationSet:
    """Samples of token ids, in the order they are to be run.

    Attributes:
        name: Where the text came from: `bundled`, a file name or a dataset name.
        samples: 1-D int64 tensors, each from 1 to `seq_len` ids long. No sample holds a padding position.
    """

    name: str
    samples: tuple[Tensor, ...]

    @classmethod
    def from_ids(cls, name: str, samples: Sequence[Sequence[int]]) -> "CalibrationSet":
        """Build a set from plain lists of token ids."""
        return cls(name, tuple(torch.tensor(ids, dtype=torch.int64) for ids in samples))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over every sample's length and ids as little-endian int64: equal ids, equal digest."""
        sha = hashlib.sha256()
        for sample in self.samples:
            ids = sample.numpy().astype("<i8", copy=False)
            sha.update(len(ids).to_bytes(8, "little"))
            sha.update(ids.tobytes())
        return sha.hexdigest()

    @property
    def num_tokens(self) -> int:
        """Ids over all samples."""
        return sum(len(sample) for sample in self.samples)

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """Yield `[B, L]` int64 batches, `B <= batch_size`.

        Only samples of equal length share a batch, so no id is ever a padding id and no attention mask is needed.
        Lengths come in the order in which they first appear.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        by_length: dict[int, list[Tensor]] = {}
        for sample in self.samples:
            by_length.setdefault(len(sample), []).append(sample)
        for group in by_length.values():
            for start in range(0, len(group), batch_size):
                yield torch.stack(group[start : start + batch_size])
