"""Which numerics and which kernels a device gets: decided once at load, said in one sentence."""

import torch

from fp4pipe.errors import Unavailable, UsageError

MODES = ("auto", "w4a4", "w4a16")
_NATIVE_FP4 = ((10, 0), (10, 3), (12, 0), (12, 1))
"""Compute capabilities whose tensor cores multiply NVFP4."""


def capability(device: torch.device | str) -> tuple[int, int] | None:
    """Compute capability of a CUDA `device`, None for any other."""
    device = torch.device(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def has_native_fp4(device: torch.device | str) -> bool:
    """Whether `device` multiplies NVFP4 by NVFP4 in hardware."""
    return capability(device) in _NATIVE_FP4


def backend_for(device: torch.device | str) -> str:
    """Name of the kernels `device` runs: ``reference``, ``cuda`` (own kernels, SM80 to SM90) or ``flashinfer``.

    Raises:
        Unavailable: A CUDA device older than SM80.
    """
    sm = capability(device)
    if sm is None:
        return "reference"
    if sm in _NATIVE_FP4:
        return "flashinfer"
    if sm < (8, 0):
        raise Unavailable(
            f"{torch.cuda.get_device_name(device)} cannot run NVFP4 kernels",
            because=f"it is SM{sm[0]}{sm[1]} and they need SM80 or newer",
            fix="--device cpu",
        )
    return "cuda"


def resolve_mode(mode: str, device: torch.device | str) -> tuple[str, str]:
    """The numerics to run on `device` and a sentence that says why.

    Args:
        mode: ``auto``, ``w4a4`` or ``w4a16``.
        device: Where the model will run.

    Returns:
        ``w4a4`` or ``w4a16``, and the sentence.

    Raises:
        UsageError: `mode` is none of the three.
    """
    if mode not in MODES:
        raise UsageError(f"--mode {mode} is not a numerics mode", fix="--mode " + "|".join(MODES))
    native = has_native_fp4(device)
    where = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "the CPU"
    if mode == "auto":
        if native:
            return "w4a4", f"w4a4: {where} multiplies NVFP4 in hardware"
        return "w4a16", f"w4a16: {where} has no NVFP4 matrix units, so activations stay unquantized"
    if mode == "w4a4" and not native:
        return "w4a4", f"w4a4, emulated bit-faithfully on {where}: Blackwell's accuracy, not its speed"
    return mode, f"{mode}, as asked, on {where}"
