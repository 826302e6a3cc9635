"""One pass over the values that rules look at: block scales as histograms, scalars as numbers, the rest as extremes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.errors import CheckpointError
from fp4pipe.quantized_linear import FLOATING

E4M3_FLOOR, E4M3_TOP, E4M3_NAN = 0x01, 0x7E, 0x7F
"""Bit patterns of 2^-9, 448 and NaN; 0x00 is zero, and from 0x80 on the same with a minus sign."""


@dataclass
class Values:
    """What was read.

    Attributes:
        histograms: Count of each of the 256 bit patterns among a module's block scales.
        scalars: Every one-element scale by tensor name: global, input and KV scales, as stored.
        extremes: Smallest and largest value of each floating tensor that is neither; NaN if it holds one.
        unreadable: Tensors that could not be read, and why.
    """

    histograms: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    extremes: dict[str, tuple[float, float]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def read_values(checkpoint: Checkpoint) -> Values:
    """Read every scale and every unquantized floating tensor of `checkpoint`; codes are not read."""
    values = Values()
    block_scales = {linear.block_scale.name: module for module, linear in checkpoint.linears.items()}
    for name, info in checkpoint.tensors.items():
        try:
            if name in block_scales:
                bits = checkpoint.tensor(name).view(torch.uint8).flatten()
                values.histograms[block_scales[name]] = torch.bincount(bits, minlength=256)
            elif info.dtype in FLOATING and info.numel:
                low, high = checkpoint.tensor(name).aminmax()
                if info.numel == 1 and name.endswith(("_scale", "_scale_2")):
                    values.scalars[name] = float(low)
                else:
                    values.extremes[name] = float(low), float(high)
        except CheckpointError as error:
            values.unreadable[name] = str(error)
    return values
