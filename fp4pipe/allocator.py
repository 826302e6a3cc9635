"""Keeping freed memory in the process, which is what makes PyTorch quick on a CPU.

glibc returns every block above its mmap threshold (128 KiB at first) to the kernel when it is freed, and the next
temporary of the same size faults its pages in again, zeroed, at under 1 GB/s: more than the arithmetic on it costs.
"""

import ctypes
import gc
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_MMAP_THRESHOLD = 32 << 20  # bytes; the largest glibc accepts
_TRIM_THRESHOLD = 1 << 30  # bytes kept at the heap's end before any is given back


def keep_freed_memory() -> bool:
    """Let this process reuse freed blocks of up to 32 MiB; call before they are allocated.

    Returns:
        Whether the C library took the settings; other ones than glibc have no such call, and lose nothing.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD))


def return_freed_memory() -> None:
    """Give what is free at the moment back to the kernel: between steps that each need much, and not the same."""
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
