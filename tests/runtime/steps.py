"""Steps over random sequences in a shuffled cache, and what a model makes of them."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4pipe.runtime.batch import Batch, Segment

PAGE = 4


class Sequences:
    """Token sequences with cache pages scattered over `num_pages`, and how far each has been computed."""

    def __init__(self, lengths: Sequence[int], num_pages: int, *, vocab: int = 500, seed: int = 0) -> None:
        chance = random.Random(seed)
        self.ids = [[chance.randrange(5, vocab) for _ in range(length)] for length in lengths]
        pages = chance.sample(range(num_pages), num_pages)
        self.pages = [[pages.pop() for _ in range(-(-length // PAGE))] for length in lengths]
        self.done = [0] * len(lengths)

    def step(self, counts: Sequence[int]) -> Batch:
        """The next ``counts[i]`` tokens of each sequence i; 0 leaves one out."""
        segments = []
        for number, count in enumerate(counts):
            start = self.done[number]
            if count:
                segments.append(Segment(self.ids[number][start : start + count], start, self.pages[number]))
            self.done[number] += count
        return Batch.pack(segments, PAGE)

    def whole(self) -> Batch:
        """All tokens of all sequences."""
        return self.step([len(ids) for ids in self.ids])


def each_alone(sequences: Sequences, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """`forward` (int64 ``[1, T]`` to ``[1, T, ...]``) of each sequence by itself, end to end."""
    with torch.no_grad():
        return torch.cat([forward(torch.tensor([ids]))[0] for ids in sequences.ids])


def relative(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`."""
    return float((got - expected).norm() / expected.norm())
