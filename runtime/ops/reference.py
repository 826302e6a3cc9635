"""The operators in plain PyTorch: the CPU backend, and what a device without a backend of its own falls back to.

Everything is computed in float32 and the result rounded to the output dtype; asked for float64, sums are float64, which
lets two implementations be compared without the rounding that quantized activations amplify.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from fp4pipe.nvfp4 import BLOCK, decode_e2m1, quantize_activation, swizzle_scales, unpack, unswizzle_scales
from fp4pipe.runtime.ops.schema import LIBRARY
from fp4pipe.runtime.ops.tiled import tiled_values

HALF = (torch.bfloat16, torch.float16)
"""Types that GPU kernels take as activations."""


@cache
def _pair_values(device: torch.device) -> Tensor:
    """float32 ``[256, 2]``: the two values a packed byte stands for. One gather decodes two columns."""
    return decode_e2m1(unpack(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)))


def dequantize_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """``e2m1(code) * block_scale`` as float32 ``[rows, K]``.

    Takes uint8 codes ``[rows, K/2]`` and scales, e4m3 ``[rows, K/16]`` or uint8 in 128x4 tiles.
    """
    if scales.dtype == torch.uint8:
        scales = unswizzle_scales(scales, codes.shape[0], codes.shape[1] * 2 // BLOCK).view(torch.float8_e4m3fn)
    values = embedding(codes.to(torch.int32), _pair_values(codes.device)).view(codes.shape[0], -1, BLOCK)
    return values.mul_(scales.float().unsqueeze(-1)).flatten(1)


def weight_values(w: Tensor, w_scales: Tensor) -> Tensor:
    """Code value x block scale as float32 ``[N, K]``, padded as the form is padded."""
    if w.is_floating_point():
        return w.float()
    return tiled_values(w) if w.dtype == torch.int32 else dequantize_rows(w, w_scales)


def _matmul(x: Tensor, w: Tensor, w_scales: Tensor, alpha: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
    out = linear(x, weight_values(w, w_scales)[:out_features, : x.shape[1]].to(x.dtype)) * alpha
    return out if bias is None else out + bias.to(x.dtype)


def _sums_for(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def fp4_quantize(x: Tensor, input_scale: Tensor, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize activations ``[M, K]``: uint8 codes ``[M, K/2]`` and scales, e4m3 or, in 128x4 tiles, uint8.

    Raises:
        ValueError: `x` is not a matrix, or K is not a multiple of 16.
    """
    if x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(f"fp4_quantize: x must be [M, K] with K a multiple of {BLOCK}, got {tuple(x.shape)}")
    codes, scales = quantize_activation(x, input_scale)
    return codes, swizzle_scales(scales.view(torch.uint8)) if swizzled else scales


def fp4_gemm(
    a: Tensor,
    a_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    alpha: Tensor,
    out_features: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """W4A4 product ``[M, out_features]`` of quantized activations and a weight; scales of `a` linear or swizzled."""
    x = dequantize_rows(a, a_scales).to(_sums_for(out_dtype))
    return _matmul(x, w, w_scales, alpha, out_features, bias).to(out_dtype)


def fp4_gemm_w4a16(
    x: Tensor, w: Tensor, w_scales: Tensor, alpha: Tensor, out_features: int, bias: Tensor | None = None
) -> Tensor:
    """Product ``[M, out_features]`` of unquantized activations and an NVFP4 weight, in `x`'s dtype."""
    return _matmul(x.to(_sums_for(x.dtype)), w, w_scales, alpha, out_features, bias).to(x.dtype)


for _kernel in (fp4_quantize, fp4_gemm, fp4_gemm_w4a16):
    LIBRARY.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")
