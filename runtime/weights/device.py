"""Weights for an accelerator: threads read byte ranges into a ring of pinned buffers and copy them from there.

Mapped pages are never handed to the driver: a page fault inside its copy holds the driver's lock, which deadlocks on
cold network storage. The ring bounds the bytes in flight; a buffer is read into again only after its copies are done.
"""

import contextlib
import os
import queue
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fp4pipe.runtime.weights.host import read_exactly
from fp4pipe.runtime.weights.ranges import ByteRange
from fp4pipe.safetensors_file import TensorInfo

BUFFERS_PER_THREAD = 2
"""One being read into while the other is being copied from."""


def allocate(infos: Iterable[TensorInfo], device: torch.device) -> dict[str, Tensor]:
    """Uninitialised destination tensors, by name."""
    return {info.name: torch.empty(info.shape, dtype=info.torch_dtype, device=device) for info in infos}


def fill(targets: Mapping[str, Tensor], ranges: list[ByteRange], threads: int, device: torch.device) -> Iterator[int]:
    """Read `ranges` into `targets` with `threads` threads, yielding each range's length once its copies are under way.

    When the iterator ends, the current stream sees every byte.

    Raises:
        CheckpointError: A file has become shorter than its header said, or cannot be read.
    """
    ring = _Ring(min(threads * BUFFERS_PER_THREAD, len(ranges)), max(part.nbytes for part in ranges), device)
    flat = {name: target.reshape(-1).view(torch.uint8) for name, target in targets.items()}
    with _open_files({part.file for part in ranges}) as fds:

        def read(part: ByteRange) -> int:
            with ring.buffer() as buffer:
                read_exactly(fds[part.file], buffer.numpy().data[: part.nbytes], part)
                for info in part.tensors:
                    start, end = max(info.start, part.start), min(info.end, part.end)
                    target = flat[info.name][start - info.start : end - info.start]
                    target.copy_(buffer[start - part.start : end - part.start], non_blocking=True)
            return part.nbytes

        with ThreadPoolExecutor(threads, thread_name_prefix="fp4pipe-read") as pool:
            yield from pool.map(read, ranges)
    ring.finish()


class _Ring:
    """Reusable host buffers; on CUDA pinned, with copies on a stream of their own."""

    def __init__(self, buffers: int, nbytes: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if cuda else None
        if self._stream is not None:
            # The targets' memory may still be in use by kernels queued before it was handed out again.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._free: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event | None]] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put((torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda), None))

    @contextlib.contextmanager
    def buffer(self) -> Iterator[Tensor]:
        """Lend a buffer whose earlier copies are done; copies issued inside the block go to the ring's stream."""
        buffer, copied = self._free.get()
        if copied is not None:
            copied.synchronize()
        try:
            if self._stream is None:
                yield buffer
            else:
                with torch.cuda.stream(self._stream):
                    yield buffer
                    copied = torch.cuda.Event()
                    copied.record(self._stream)
        finally:
            self._free.put((buffer, copied))

    def finish(self) -> None:
        """Wait for all copies, so that the ring may be freed and the current stream may read."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream.synchronize()


@contextlib.contextmanager
def _open_files(paths: set[Path]) -> Iterator[dict[Path, int]]:
    with contextlib.ExitStack() as stack:
        fds: dict[Path, int] = {}
        for path in paths:
            fds[path] = os.open(path, os.O_RDONLY)
            stack.callback(os.close, fds[path])
        yield fds
