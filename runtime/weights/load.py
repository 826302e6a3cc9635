"""`load_tensors`: everything a model needs from a checkpoint, checked, on its device."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.errors import CheckpointError
from fp4pipe.runtime.weights.manifest import Expected, Manifest, check_scales
from fp4pipe.runtime.weights.reader import ReadReport, WeightReader


class Loaded(dict[str, Tensor]):
    """Tensors by name, to be claimed once each.

    Attributes:
        report: How the read went.
    """

    def __init__(self, tensors: Mapping[str, Tensor], expected: Mapping[str, Expected], report: ReadReport) -> None:
        super().__init__(tensors)
        self.report = report
        self._expected = expected

    def claim(self, name: str) -> Tensor:
        """Take the tensor `name` out.

        Raises:
            CheckpointError: It was claimed before, or never loaded.
        """
        if name not in self:
            state = "claimed twice" if name in self._expected else "not loaded"
            raise CheckpointError(f"tensor {name} is {state}")
        return self.pop(name)

    def finish(self) -> None:
        """Check that every tensor was claimed.

        Raises:
            CheckpointError: Naming the first that was not.
        """
        if self:
            name = next(iter(self))
            raise CheckpointError(f"tensor {name} was loaded for {self._expected[name].consumer} and never used")


def load_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, Expected],
    *,
    device: str | torch.device = "cpu",
    threads: int = 8,
    progress: bool = True,
    ignore: Iterable[str] = (),
) -> Loaded:
    """Read the `expected` tensors of `checkpoint`: all of them, each as expected, and no tensor left over.

    Args:
        checkpoint: Opened, so its files and index are already consistent.
        expected: What the model needs, by name on disk.
        device: Where to. On the CPU the tensors are copy-on-write views of the files.
        threads: Threads that read.
        progress: Show a bar on stderr.
        ignore: Regular expressions of names that may stay unread.

    Returns:
        The tensors in the shapes expected, with a `report`.

    Raises:
        CheckpointError: A tensor is missing, left over, of another dtype or shape, a scale is not finite and positive,
            or a file has become shorter than its header said. Names tensor, file and offset.
    """
    infos = Manifest(expected).check(checkpoint.tensors, ignore=ignore)
    with WeightReader(infos, device=device, threads=threads, progress=progress) as reads:
        tensors = {info.name: reads[info.name].reshape(expected[info.name].shape) for info in infos}
        assert reads.report is not None  # set on entry
        check_scales([info for info in infos if expected[info.name].scale], tensors)
        return Loaded(tensors, expected, reads.report)
