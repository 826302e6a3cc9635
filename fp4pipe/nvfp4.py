"""NVFP4 numerics in plain PyTorch: the one place that holds the formulas, and what every kernel is tested against.

A matrix ``[rows, K]`` with ``K % 16 == 0`` is stored as

===============  =================  =======================================================================
codes            uint8 [rows, K/2]  two E2M1 codes a byte, low nibble = even column; code = sign << 3 | index
block scale      e4m3 [rows, K/16]  one per 16 consecutive columns
global scale     float32 []         one per matrix
===============  =================  =======================================================================

and means ``e2m1(code) * float32(block_scale) * global_scale``. Rounding to E2M1 is to nearest, ties to even.

Weights follow ModelOpt's exporter (`modelopt.torch.quantization.qtensor.nvfp4_tensor`), activations the CUDA
quantizer of FlashInfer (`flashinfer.trace.templates.quantize`); both are checked bit for bit in the tests.
Everything is computed in float32, whatever the input dtype.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16
"""Columns that share one block scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""Smallest positive E4M3 number (a subnormal)."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code."""


class NVFP4Tensor(NamedTuple):
    """A quantized matrix ``[rows, K]``; see the module's table for shapes and dtypes."""

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


# ---- E2M1 codes -----------------------------------------------------------------------------------------------------


def encode_e2m1(values: Tensor) -> Tensor:
    """Round to the nearest E2M1 number, ties to even, saturating at +-6.

    Args:
        values: Any shape, floating.

    Returns:
        uint8 codes of the same shape. A negative input that rounds to zero keeps its sign (code 8).
    """
    magnitude = values.abs()
    # A tie belongs to the neighbour with an even index: > where the lower one is even, >= where the upper one is.
    index = (magnitude > 0.25).to(torch.uint8)
    index += magnitude >= 0.75
    index += magnitude > 1.25
    index += magnitude >= 1.75
    index += magnitude > 2.5
    index += magnitude >= 3.5
    index += magnitude > 5.0
    return index + (values < 0).to(torch.uint8) * 8


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of 4-bit `codes` (uint8, any shape, one code an element)."""
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)[codes.to(torch.int32)]


def pack(codes: Tensor) -> Tensor:
    """Pack one code an element ``[..., K]`` into two a byte ``[..., K/2]``, even columns in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`: uint8 ``[..., K/2]`` to uint8 ``[..., K]``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


# ---- quantize and dequantize ----------------------------------------------------------------------------------------


def global_scale_of(amax: Tensor) -> Tensor:
    """Global scale (weights) or input scale (activations) of a tensor whose largest magnitude is `amax`."""
    return amax.float() / (E2M1_MAX * E4M3_MAX)


def block_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each block: ``[rows, K]`` to float32 ``[rows, K/16]``."""
    return x.unflatten(-1, (-1, BLOCK)).abs().amax(dim=-1).float()


def weight_block_scale(weight: Tensor, global_scale: Tensor) -> Tensor:
    """E4M3 block scales of a weight ``[N, K]``: clamp(block_amax / (6 global), 2^-9, 448); an all-zero block gets 1."""
    scale = block_amax(weight) / (E2M1_MAX * global_scale.float())
    scale = torch.where(scale == 0, 1.0, scale)
    return scale.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_weight(
    weight: Tensor, global_scale: Tensor | None = None, block_scale: Tensor | None = None
) -> NVFP4Tensor:
    """Quantize a weight ``[N, K]`` as ModelOpt exports it.

    Args:
        weight: Floating, ``K % 16 == 0``.
        global_scale: float32 scalar; from the weight's own amax when absent. An all-zero weight gets 1.
        block_scale: e4m3 ``[N, K/16]``; from the blocks' amax when absent.

    Raises:
        ValueError: `K` is not a multiple of 16.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 needs the last dimension to be a multiple of {BLOCK}, got {tuple(weight.shape)}")
    if global_scale is None:
        global_scale = global_scale_of(weight.abs().amax())
        global_scale = torch.where(global_scale == 0, 1.0, global_scale)
    if block_scale is None:
        block_scale = weight_block_scale(weight, global_scale)
    scale = block_scale.float() * global_scale
    scaled = weight.float().unflatten(-1, (-1, BLOCK)) / scale.unsqueeze(-1)
    return NVFP4Tensor(pack(encode_e2m1(scaled.flatten(-2))), block_scale, global_scale)


def quantize_activation(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize activations ``[M, K]`` as Blackwell's quantizer does.

    Args:
        x: Floating, ``K % 16 == 0``.
        input_scale: float32 scalar, calibrated amax / (6 * 448).

    Returns:
        codes uint8 ``[M, K/2]`` and block scales e4m3 ``[M, K/16]`` (linear layout). A block scale saturates at 448
        and may round to 0, in which case the block's codes are 0 too.
    """
    inverse = 1.0 / input_scale.float()
    scale = (block_amax(x) / E2M1_MAX * inverse).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    divisor = scale.float()
    divisor = torch.where(divisor == 0, 1.0, divisor)
    scaled = x.float().unflatten(-1, (-1, BLOCK)) * inverse / divisor.unsqueeze(-1)
    return pack(encode_e2m1(scaled.flatten(-2))), scale


def dequantize_blocks(codes: Tensor, block_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``e2m1(code) * block_scale`` as ``[rows, K]``, exact in float32 and in bfloat16; the global scale stays apart."""
    values = decode_e2m1(unpack(codes)).unflatten(-1, (-1, BLOCK))
    return (values * block_scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def dequantize(codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix ``[rows, K]`` that an NVFP4 tensor stands for.

    Formed in float32 as ``code * (block_scale * global_scale)``, the order of ModelOpt's dequantizer, so that the two
    agree bit for bit; then cast to `dtype`.
    """
    scale = block_scale.float() * global_scale.float()
    values = decode_e2m1(unpack(codes)).unflatten(-1, (-1, BLOCK))
    return (values * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quantize_activation(x: Tensor, input_scale: Tensor) -> Tensor:
    """Quantize and dequantize activations ``[M, K]``; the result has `x`'s dtype."""
    return dequantize(*quantize_activation(x, input_scale), input_scale, x.dtype)


# ---- scale layouts --------------------------------------------------------------------------------------------------


def swizzle_scales(scales: Tensor) -> Tensor:
    """Lay block scales ``[rows, K/16]`` out in the 128x4 tiles that Blackwell's FP4 GEMMs read.

    Rows are padded to 128 and columns to 4 with zeros. Within a tile, row ``r`` and column ``c`` sit at byte
    ``(r % 32) * 16 + (r // 32) * 4 + c`` (cuBLAS, "1D block scaling factors layout").

    Returns:
        Same dtype, ``[round_up(rows, 128), round_up(K/16, 4)]``.
    """
    rows, cols = scales.shape
    padded = scales.new_zeros(round_up(rows, 128), round_up(cols, 4))
    padded[:rows, :cols] = scales
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(padded.shape)


def unswizzle_scales(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of `swizzle_scales`, without the padding: ``[rows, cols]``."""
    padded_rows, padded_cols = swizzled.shape
    tiles = swizzled.view(padded_rows // 128, padded_cols // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_cols)[:rows, :cols].contiguous()
