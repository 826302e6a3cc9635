"""`fp4pipe doctor`: what this machine can run, and with which kernels."""

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from fp4pipe import __version__, console
from fp4pipe.cli.outcome import Outcome

PACKAGES = ("torch", "transformers", "nvidia-modelopt", "safetensors", "tokenizers", "triton", "flashinfer-python")
"""Packages whose versions decide what runs."""


def doctor() -> Outcome:
    """Show what this machine can run: devices, numerics modes and their kernels, versions."""
    import torch

    devices = [_device("cpu"), *(_device(f"cuda:{index}") for index in range(torch.cuda.device_count()))]
    document = {
        "fp4pipe": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "devices": devices,
        "hub": _hub_reachable(),
    }
    return Outcome(document, "\n".join(_lines(document)))


def _device(name: str) -> dict[str, Any]:
    """One device: its name, memory, kernels and what each mode means on it."""
    import torch

    from fp4pipe.errors import Unavailable
    from fp4pipe.runtime.ops import MODES, backend_for, resolve_mode

    found: dict[str, Any] = {"device": name, "name": _cpu_name()}
    if name != "cpu":
        properties = torch.cuda.get_device_properties(name)
        found |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "sm": f"{properties.major}.{properties.minor}",
        }
    try:
        backend = backend_for(name)
        return found | {"backend": backend, "modes": {mode: resolve_mode(mode, name)[1] for mode in MODES}}
    except Unavailable as error:
        return found | {"backend": None, "unavailable": str(error)}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _hub_reachable() -> bool:
    """Whether the Hugging Face hub (or the mirror in HF_ENDPOINT) answers within three seconds."""
    import httpx
    from huggingface_hub import constants

    try:
        httpx.head(constants.ENDPOINT, timeout=3.0)
    except httpx.HTTPError:
        return False
    return True


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"fp4pipe {found['fp4pipe']}, Python {found['python']}, {found['platform']}"
    yield f"{found['cores']} cores, {console.format_bytes(found['memory_bytes'])} of memory"
    yield ", ".join(f"{name} {version or 'not installed'}" for name, version in found["packages"].items())
    yield f"Hugging Face hub: {'reachable' if found['hub'] else 'not reachable; give local directories or .gguf files'}"
    for device in found["devices"]:
        memory = f", {console.format_bytes(device['memory_bytes'])}" if "memory_bytes" in device else ""
        sm = f", SM {device['sm']}" if "sm" in device else ""
        yield f"\n{device['device']}: {device['name']}{sm}{memory}"
        if device["backend"] is None:
            yield f"  {device['unavailable']}"
            continue
        yield f"  kernels: {device['backend']}"
        for mode, sentence in device["modes"].items():
            yield f"  --mode {mode}: {sentence}"
