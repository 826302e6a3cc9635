"""Weights for the CPU: views of mapped files whose pages threads make resident.

Copying into fresh memory costs more than reading from the page cache, because every destination page must first be
faulted in; views of the mapping skip the copy altogether. What is left to do is to bring the pages in, in parallel and
before anybody waits for one: `madvise(MADV_POPULATE_READ)` where the kernel has it (Linux 5.14), else a `pread` into
scratch memory followed by a touch of each page.
"""

import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fp4pipe.errors import CheckpointError
from fp4pipe.runtime.weights.ranges import ByteRange
from fp4pipe.safetensors_file import map_file

MADV_POPULATE_READ = 22
"""Linux's number (uapi/asm-generic/mman-common.h); Python's mmap module does not name it yet."""
_PAGE = mmap.PAGESIZE


class HostPages:
    """Mapped files, and the two ways of making their pages resident.

    Attributes:
        files: Each file as uint8 ``[size]``, copy-on-write.
        method: ``"populate"``, or ``"touch"`` once the kernel has refused to populate.
    """

    def __init__(self, paths: set[Path]) -> None:
        self.files: dict[Path, Tensor] = {path: map_file(path) for path in paths}
        self.method = "populate" if sys.platform == "linux" else "touch"

    def make_resident(self, ranges: list[ByteRange], threads: int) -> Iterator[int]:
        """Bring `ranges` into memory with `threads` threads, yielding each range's length when it is there.

        Raises:
            CheckpointError: A file has become shorter than its header said.
        """
        with ThreadPoolExecutor(threads, thread_name_prefix="fp4pipe-read") as pool:
            yield from pool.map(self._bring_in, ranges)

    def _bring_in(self, part: ByteRange) -> int:
        if self.method == "populate" and not self._populate(part):
            self.method = "touch"
        if self.method == "touch":
            self._touch(part)
        return part.nbytes

    def _populate(self, part: ByteRange) -> bool:
        """Whether the kernel knew how."""
        start = part.start - part.start % _PAGE
        code = populate(self.files[part.file].data_ptr() + start, part.end - start)
        if code == errno.EFAULT:  # the fault handler ran past the end of the file
            raise _short(part, part.file.stat().st_size)
        return code == 0

    def _touch(self, part: ByteRange) -> None:
        # pread first: it reports a file that has shrunk, where touching a page beyond its end would kill the process.
        buffer = bytearray(part.nbytes)
        fd = os.open(part.file, os.O_RDONLY)
        try:
            read_exactly(fd, memoryview(buffer), part)
        finally:
            os.close(fd)
        torch.count_nonzero(self.files[part.file][part.start : part.end : _PAGE])


def populate(address: int, length: int) -> int:
    """Call ``madvise(address, length, MADV_POPULATE_READ)`` without holding the interpreter lock; 0 or an errno."""
    madvise = _libc().madvise
    while madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), MADV_POPULATE_READ):
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            return code
    return 0


def read_exactly(fd: int, buffer: memoryview, part: ByteRange) -> None:
    """Fill `buffer` with the bytes of `part` from `fd`.

    Raises:
        CheckpointError: The file ends first, or the read fails.
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], part.start + done)
        except OSError as error:
            what = f"{part.file}: read failed at offset {part.start + done}"
            raise CheckpointError(what, because=error.strerror or str(error)) from error
        if count == 0:
            raise _short(part, part.start + done)
        done += count


def _short(part: ByteRange, size: int) -> CheckpointError:
    first = next((info for info in part.tensors if info.end > size), part.tensors[0])
    return CheckpointError(
        f"{part.file}: short read at offset {size}: tensor {first.name} ends at {first.end}",
        fix="the file changed while it was read; copy or download it again",
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
