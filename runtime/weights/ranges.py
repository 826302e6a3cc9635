"""Splitting what is to be read into byte ranges, so that a single file occupies every thread."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fp4pipe.safetensors_file import TensorInfo

CHUNK = 16 << 20
"""Bytes of one read: large enough to amortise a call, small enough to spread one file over all threads."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start..end`` of `file` and the tensors that lie, at least in part, in them."""

    file: Path
    start: int
    end: int
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start


def split(infos: Iterable[TensorInfo], chunk: int = CHUNK) -> list[ByteRange]:
    """Cover exactly the bytes of `infos` with ranges of at most `chunk` bytes, each file in order.

    Neighbouring tensors share a range, so that thousands of scalar scales cost a few reads; a large tensor spans many.
    """
    ranges: list[ByteRange] = []
    inside: list[TensorInfo] = []
    start = end = 0
    file: Path | None = None

    def close() -> None:
        nonlocal inside
        if file is not None and end > start:
            ranges.append(ByteRange(file, start, end, tuple(inside)))
        inside = []

    for info in sorted(infos, key=lambda t: (t.file, t.start)):
        if not info.nbytes:
            continue
        if info.file != file or info.start != end:
            close()
            file, start, end = info.file, info.start, info.start
        while end < info.end:
            if end - start == chunk:
                close()
                start = end
            inside.append(info)
            end = min(info.end, start + chunk)
    close()
    return ranges
