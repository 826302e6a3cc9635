"""The static tensors that pieces talk through: allocated once, reused along the program, held by the runner."""

import math

import torch
from torch import Tensor

from fp4pipe.runtime.graph.partition import Crossing, Program, shape_for
from fp4pipe.runtime.graph.trace import INPUT_IDS, POSITION_IDS


class Buffers:
    """Storage of every crossing tensor of a program, for steps of up to `max_tokens`.

    Two tensors share storage only when the first is never read once the second is written; what a step of the program
    reads and what it writes never share.
    """

    def __init__(self, program: Program, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self._crossings = program.crossings
        self._storage: dict[str, Tensor] = {}
        last_read = {name: index for index, step in enumerate(program.steps) for name in step.reads}
        last_read[program.output] = len(program.steps)
        free: dict[Crossing, list[Tensor]] = {}

        def allocate(name: str) -> None:
            crossing = program.crossings[name]
            spare = free.get(crossing)
            size = math.prod(shape_for(crossing, max_tokens))
            self._storage[name] = spare.pop() if spare else torch.zeros(size, dtype=crossing.dtype, device=device)

        for name in (INPUT_IDS, POSITION_IDS):
            allocate(name)
        for index, step in enumerate(program.steps):
            for name in step.writes:
                allocate(name)
            for name in {*step.reads, *step.writes}:
                if last_read.get(name, index) == index:
                    free.setdefault(program.crossings[name], []).append(self._storage[name])

    def view(self, name: str, tokens: int) -> Tensor:
        """The crossing tensor `name` in a step of `tokens`: contiguous, at the same address for every count."""
        shape = shape_for(self._crossings[name], tokens)
        return self._storage[name][: math.prod(shape)].view(shape)

    def distinct(self) -> list[Tensor]:
        """Each storage once."""
        return list({storage.data_ptr(): storage for storage in self._storage.values()}.values())

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes for storage in self.distinct())
