"""A checkpoint in W4A4 with every sum and scale in float64, to be compared with another implementation code by code."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.runtime.batch import Batch, Segment
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.model import Model
from fp4pipe.runtime.validate.numerics import loaded_layers

_PAGE_SIZE = 16


class ExactScorer:
    """Logits by the model, the runner and the paged cache that serve, on a CPU, in float64.

    Activations are still quantized as Blackwell does it, codes decided in float32; only the rounding of sums is gone,
    and that of the product of the two scales, which the runtime keeps in float32.

    Args:
        checkpoint: An NVFP4 checkpoint with input scales.
        graphs: As of `Runner`; ``compiled`` pieces are run by PyTorch as they were traced and rewritten.
        max_tokens: Tokens of the longest prompt.
        load_threads: Threads that read the weights.
    """

    def __init__(self, checkpoint: Checkpoint, graphs: str, *, max_tokens: int, load_threads: int = 8) -> None:
        self.model = Model.load(
            checkpoint.path, mode="w4a4", device="cpu", dtype=torch.float64, load_threads=load_threads, progress=False
        )
        for name, layer in loaded_layers(self.model, checkpoint):
            scale = checkpoint.input_scale(name)
            assert scale is not None  # a layer without one does not load in w4a4
            layer.alpha = (checkpoint.global_scale(name).double() * scale.double()).reshape(1)
        self._pages = list(range(-(-max_tokens // _PAGE_SIZE)))
        cache = self.model.new_cache(len(self._pages), _PAGE_SIZE)
        self.runner = Runner(self.model, cache, graphs=graphs, compiler="eager", max_tokens=max_tokens)

    def prompt_logits(self, prompts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """float32 ``[T, V]`` for each prompt, in order."""
        for ids in prompts:
            hidden = self.runner.forward(Batch.pack([Segment(ids, 0, self._pages)], _PAGE_SIZE))
            yield self.model.logits(hidden)
