"""`WeightReader`: the tensors of a checkpoint on a device, read by several threads, with a report of how fast."""

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fp4pipe import console
from fp4pipe.runtime.weights import device as pinned
from fp4pipe.runtime.weights.host import HostPages
from fp4pipe.runtime.weights.ranges import CHUNK, split
from fp4pipe.safetensors_file import TensorInfo, view


@dataclass(frozen=True)
class ReadReport:
    """How a read went.

    Attributes:
        seconds: From the first request to the last byte in place.
        bytes: Tensor bytes read.
        threads: Threads that read.
        ranges: Byte ranges the work was split into.
        files: Files read from.
        copied: Tensors copied because their offset is no multiple of their item size.
        method: ``"populate"`` or ``"touch"`` (CPU, views of mapped files), ``"pinned"`` (accelerators).
    """

    seconds: float
    bytes: int
    threads: int
    ranges: int
    files: int
    copied: int
    method: str

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9 bytes) a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and `gb_per_s`, for JSON."""
        return asdict(self) | {"gb_per_s": self.gb_per_s}


class WeightReader:
    """Read `infos` onto `device` with `threads` threads.

        with WeightReader(checkpoint.tensors.values(), device="cpu", threads=8) as reads:
            weight = reads["model.norm.weight"]

    On the CPU the tensors are copy-on-write views of the files. All reading happens on entry.

    Raises:
        CheckpointError: On entry, when a file cannot be read or has become shorter than its header said.
    """

    def __init__(
        self,
        infos: Iterable[TensorInfo],
        *,
        device: str | torch.device = "cpu",
        threads: int = 8,
        progress: bool = True,
        chunk: int = CHUNK,
    ) -> None:
        self._infos = {info.name: info for info in infos}
        self._device = torch.device(device)
        self._ranges = split(self._infos.values(), chunk)
        self._threads = max(1, min(threads, len(self._ranges)))
        self._progress = progress
        self._tensors: dict[str, Tensor] = {}
        self.report: ReadReport | None = None

    def __enter__(self) -> "WeightReader":
        started = time.perf_counter()
        copied, method = 0, "pinned"
        if self._device.type == "cpu":
            pages = HostPages({info.file for info in self._infos.values()})
            self._count(pages.make_resident(self._ranges, self._threads))
            method = pages.method
            for name, info in self._infos.items():
                self._tensors[name] = view(pages.files[info.file], info)
                copied += info.start % info.torch_dtype.itemsize != 0
        else:
            self._tensors = pinned.allocate(self._infos.values(), self._device)
            if self._ranges:
                self._count(pinned.fill(self._tensors, self._ranges, self._threads, self._device))
        self.report = ReadReport(
            seconds=time.perf_counter() - started,
            bytes=sum(part.nbytes for part in self._ranges),
            threads=self._threads,
            ranges=len(self._ranges),
            files=len({info.file for info in self._infos.values()}),
            copied=copied,
            method=method,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _count(self, done: Iterator[int]) -> None:
        total = sum(part.nbytes for part in self._ranges)
        with console.progress(total, "reading weights", bytes=True) if self._progress else nullcontext() as bar:
            for count in done:
                if bar is not None:
                    bar.update(count)
