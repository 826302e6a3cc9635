"""ModelOpt's NVFP4 fake quantization on machines without CUDA.

ModelOpt calibrates and exports on a CPU, but its quantize-dequantize kernels for activations are CUDA only. Its backend
hook lets us supply that step. It takes the scales from ModelOpt's own tensor functions and shares nothing with this
project's numerics, which are tested against it. It is put on input quantizers only: on weight quantizers it would
silently switch off ModelOpt's scale searches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp4pipe.convert.quiet import quiet
from fp4pipe.nvfp4 import BLOCK, E2M1_MAX, E4M3_MAX

BACKEND = "fp4pipe_nvfp4"
"""Rounds by ModelOpt's formulas (`round_activation`)."""
HARDWARE_BACKEND = "fp4pipe_nvfp4_hardware"
"""Rounds in Blackwell's order of operations (`round_as_hardware`)."""


def register_backend(name: str = BACKEND) -> str:
    """Make `name`, one of the two backends, known to ModelOpt, once; returns it, for ``cfg["backend"]``."""
    with quiet():
        from modelopt.torch.quantization.nn.modules.tensor_quantizer import (
            is_registered_quant_backend,
            register_quant_backend,
        )

        if not is_registered_quant_backend(name):
            register_quant_backend(name, _backend_of(_ROUNDINGS[name]))
    return name


def round_weight(weight: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight ``[N, K]`` packed and unpacked by ModelOpt.

    Args:
        weight: Floating, ``K % 16 == 0``.
        global_scale: float32 scalar, amax / (6 * 448).
        dtype: Of the result. ModelOpt unpacks in float32; for float64 the global scale, which alone makes its products
            inexact, is multiplied on in float64.
    """
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    packed: Any
    packed, block_scale, global_scale = NVFP4QTensor.quantize(weight, BLOCK, weights_scaling_factor_2=global_scale)
    exact = dtype == torch.float64
    scales = {"scale": block_scale, "double_scale": torch.ones_like(global_scale) if exact else global_scale}
    values = packed.dequantize(dtype=torch.float32, block_sizes={-1: BLOCK}, **scales)
    return values.double() * global_scale.double() if exact else values.to(dtype)


def round_activation(x: Tensor, global_scale: Tensor) -> Tensor:
    """What `round_weight` gives for ``[..., K]``, value for value, without packing: several times faster.

    Rounding to E2M1 is rounding to a multiple of the spacing at that magnitude (0.5 below 2, 1 below 4, then 2); ties
    go to the even multiple, which is the even code.
    """
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    block_scale, _ = NVFP4QTensor.get_weights_scaling_factor(x, BLOCK, global_scale)
    scale = (block_scale.float() * global_scale).unsqueeze(-1)
    scaled = x.unflatten(-1, (-1, BLOCK)) / scale
    return (_to_e2m1(scaled) * scale).flatten(-2)


def round_as_hardware(x: Tensor, global_scale: Tensor) -> Tensor:
    """Activations ``[..., K]`` quantized and dequantized in the order of operations of Blackwell's quantizer.

    ModelOpt divides by the product of the two scales; the hardware multiplies by the reciprocal of one and divides by
    the other; both in float32. About one code in 100,000 comes out differently, and a small model amplifies one
    different code to the size of the quantization noise within a few layers. Codes are decided in float32 whatever the
    dtype of `x`; the values they stand for are formed in `x`'s dtype, so a float64 model adds no rounding of its own.
    """
    inverse = 1.0 / global_scale.float()
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    wanted = (blocks.abs().amax(-1, keepdim=True) / E2M1_MAX * inverse).clamp(max=E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn).float()
    scaled = blocks * inverse / torch.where(scale == 0, 1.0, scale)
    return (_to_e2m1(scaled).to(x.dtype) * (scale.to(x.dtype) * global_scale.to(x.dtype))).flatten(-2)


def _to_e2m1(scaled: Tensor) -> Tensor:
    magnitude = scaled.abs()
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(((magnitude / spacing).round() * spacing).clamp(max=E2M1_MAX), scaled)


_ROUNDINGS = {BACKEND: round_activation, HARDWARE_BACKEND: round_as_hardware}


def _backend_of(rounding: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    def fake_quantize(inputs: Tensor, quantizer: Any) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        return rounding(rows, quantizer.amax.float() / (E2M1_MAX * E4M3_MAX)).view(inputs.shape).to(inputs.dtype)

    return fake_quantize
