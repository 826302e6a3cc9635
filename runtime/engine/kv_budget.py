"""How large the KV cache is."""

import os
from pathlib import Path

import torch

from fp4pipe import console
from fp4pipe.errors import UsageError
from fp4pipe.runtime.cache import KVCache
from fp4pipe.runtime.model import Model

CPU_SHARE = 0.25
"""Share of the available memory that the cache takes on a CPU, where the machine has other users."""
CPU_MOST_BYTES = 4 << 30
GPU_SHARE = 0.9
"""Share of the memory left after the weights on a GPU; the rest is for activations."""


def new_cache(model: Model, *, kv_tokens: int | None, page_size: int, max_running: int) -> KVCache:
    """A cache of `kv_tokens`, or of as many tokens as the free memory allows and `max_running` requests can use.

    Raises:
        UsageError: `kv_tokens` is less than a page, or there is no memory for it.
    """
    num_pages = (_affordable(model, page_size, max_running) if kv_tokens is None else kv_tokens) // page_size
    if num_pages < 1:
        raise UsageError(f"kv_tokens is {kv_tokens}", fix=f"give at least one page of {page_size} tokens")
    tokens = num_pages * page_size
    if tokens < model.max_context:
        console.warn(
            f"the KV cache holds {tokens} tokens, fewer than the model's context of {model.max_context}; "
            "longer requests are refused"
        )
    try:
        return model.new_cache(num_pages, page_size)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError on a CPU
        because = str(error).partition("\n")[0]
        raise UsageError(
            f"no memory for a KV cache of {tokens} tokens", because=because, fix="lower kv_tokens"
        ) from error


def _affordable(model: Model, page_size: int, max_running: int) -> int:
    """Tokens."""
    per_token = sum(layer.bytes_per_token(model.dtype) for layer in model.kv_layers)
    free = _budget_bytes(model.device)
    tokens = min(free // per_token, max_running * (model.max_context + page_size))
    if tokens < page_size:
        raise UsageError(
            f"no memory for the KV cache: {console.format_bytes(free)} can be given to it",
            fix="free some memory, or set kv_tokens",
        )
    return tokens


def _budget_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    return min(int(available_bytes() * CPU_SHARE), CPU_MOST_BYTES)


def available_bytes() -> int:
    """Memory this process can still take: the machine's, or what its control group leaves of it."""
    meminfo = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    kib = next((int(line.split()[1]) for line in meminfo.splitlines() if line.startswith("MemAvailable:")), None)
    machine = kib * 1024 if kib is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        limit, current = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(machine, max(0, int(limit) - int(current)))
    except (OSError, ValueError):  # no control group, or "max"
        return machine
