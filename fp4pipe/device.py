"""The device a command means."""

import torch

from fp4pipe.errors import Unavailable, UsageError


def pick_device(name: str) -> torch.device:
    """The device called `name`: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UsageError: There is no such kind of device.
        Unavailable: CUDA was asked for and is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is unknown", fix="auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Unavailable(f"device {name} was asked for, but PyTorch sees no such GPU", fix="--device cpu")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported", fix="auto, cpu, cuda or cuda:N")
    return device
