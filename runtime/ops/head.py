"""A language-model head quantized at load: fewer bytes for every token generated, other logits than the checkpoint's.

Unlike the layers of a checkpoint it is quantized without calibration, to nearest.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fp4pipe.errors import UsageError
from fp4pipe.nvfp4 import BLOCK, E4M3_MAX, global_scale_of, quantize_weight, round_up
from fp4pipe.runtime.ops import fp8
from fp4pipe.runtime.ops.linear import NVFP4Linear

_ROWS = 16
"""The products' kernels take rows of 16-byte aligned output."""
_CHUNK = 1 << 26
"""Weights quantized at a time: bounds the float32 temporaries."""


class NVFP4Head(nn.Module):
    """``x @ weight.T + bias`` with `weight` in NVFP4 and activations as they are.

    Args:
        weight: Floating ``[V, H]``, H a multiple of 16.
        bias: ``[V]`` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, columns = weight.shape
        if columns % BLOCK:
            raise UsageError(
                "--lm-head nvfp4 is not possible",
                because=f"the head has {columns} columns, which {BLOCK} does not divide",
                fix="--lm-head bf16",
            )
        scale = global_scale_of(weight.abs().amax())
        scale = torch.where(scale == 0, 1.0, scale)
        parts = [quantize_weight(rows, scale) for rows in _padded(weight).split(max(1, _CHUNK // columns))]
        codes = torch.cat([part.codes for part in parts])
        block_scale = torch.cat([part.block_scale.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        self.linear = NVFP4Linear(columns, codes.shape[0], bias is not None, "w4a16", dtype=weight.dtype)
        self.linear.load(codes, block_scale, scale, bias=None if bias is None else _padded(bias))
        self.linear.prepare(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., V]``, in `x`'s dtype."""
        return self.linear(x)[..., : self.out_features]


class FP8Head(nn.Module):
    """``x @ weight.T + bias`` with `weight` in E4M3, a scale a row, and activations in E4M3, a scale a token.

    Args:
        weight: Floating ``[V, H]``.
        bias: ``[V]`` or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, columns = weight.shape
        codes, scales = [], []
        for rows in _padded(weight).split(max(1, _CHUNK // columns)):
            scale = rows.float().abs().amax(1).clamp(min=2.0**-100) / E4M3_MAX
            codes.append((rows.float() / scale.unsqueeze(1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))
            scales.append(scale)
        stacked = torch.cat([part.view(torch.uint8) for part in codes]).view(torch.float8_e4m3fn)
        # A CPU multiplies in float32: the same values, converted once rather than for every token.
        self.register_buffer("weight", stacked.float() if weight.device.type == "cpu" else stacked)
        self.register_buffer("scale", torch.cat(scales))
        self.register_buffer("bias", None if bias is None else _padded(bias))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., V]``, in `x`'s dtype."""
        rows = x.reshape(-1, x.shape[-1])
        out = fp8.multiply(rows, self.weight, self.scale, self.bias)
        return out.view(*x.shape[:-1], -1)[..., : self.out_features]


@torch.no_grad()
def quantize_head(head: nn.Module | None, kind: str) -> nn.Module:
    """The head that takes `head`'s place.

    Args:
        head: A model's output embeddings, filled, on their device.
        kind: ``fp8`` or ``nvfp4``.

    Raises:
        UsageError: The model has no linear head, or it is quantized in the checkpoint already.
    """
    if not isinstance(head, nn.Linear):
        what = "already quantized in the checkpoint" if isinstance(head, NVFP4Linear) else "not a linear layer"
        raise UsageError(f"--lm-head {kind} is not possible", because=f"the head is {what}", fix="--lm-head bf16")
    return {"fp8": FP8Head, "nvfp4": NVFP4Head}[kind](head.weight, head.bias)


def _padded(rows: Tensor) -> Tensor:
    more = round_up(rows.shape[0], _ROWS) - rows.shape[0]
    return pad(rows, (0, 0) * (rows.dim() - 1) + (0, more)) if more else rows
