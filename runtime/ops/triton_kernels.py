"""Triton kernels: the activation quantizer, its inverse, and a GEMM for every GPU without kernels of its own.

They use no FP8 or FP4 instruction, so one source serves SM80 and newer. Imported only when a CUDA tensor needs it.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4pipe.nvfp4 import BLOCK
from fp4pipe.runtime.ops.schema import scale_shape


@triton.jit
def _pair(words, X_DTYPE: tl.constexpr):
    """Two floats from a 32-bit word that holds two 16-bit ones."""
    if tl.bfloat16 == X_DTYPE:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    low = (words & 0xFFFF).to(tl.uint16).to(X_DTYPE, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.uint16).to(X_DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _e4m3_bits(scale):
    """E4M3 bits of floats in [0, 448], to nearest, ties to even, subnormals included."""
    bits = scale.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (scale + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # ulp(16384) = 2^-9
    return tl.where(scale < 0.015625, subnormal, normal)


@triton.jit
def _e4m3_value(bits):
    normal = ((bits + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    return tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _encode(value, scale, inverse_scale):
    """E2M1 codes of value / scale, to nearest, ties to even.

    The quotient is the correctly rounded one: a product with the rounded inverse, corrected once by its remainder. Then
    adding 2^22 (2^23 from 2 on, 2^24 from 4 on) rounds it to the grid, whose steps are 0.5, 1 and 2 there: the float's
    low bits count steps. Two steps more, and the exponent's 256 less two, vanish modulo 8.
    """
    quotient = value * inverse_scale
    quotient = tl.fma(tl.fma(-quotient, scale, value), inverse_scale, quotient)
    size = tl.minimum(tl.abs(quotient), 6.0)
    binade = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)  # 1, 2 or 4
    steps = tl.fma(binade.to(tl.float32, bitcast=True), 4194305.0, size).to(tl.int32, bitcast=True)
    return ((steps + (binade >> 22)) & 7) | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _decode(code):
    """Float values of 4-bit codes, by their bits: exponent and mantissa move to a float32's, subnormal 0.5 apart."""
    size = code & 7
    bits = (((size >> 1) + 126) << 23) | ((size & 1) << 22)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, bits.to(tl.float32, bitcast=True))
    return tl.where(code >= 8, -value, value)


@triton.jit
def _swizzled_offset(index, blocks, padded_blocks):
    row, block = index // blocks, index % blocks
    tile = (row // 128) * (padded_blocks // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4


@triton.jit
def _quantize_kernel(
    x_ptr, input_scale_ptr, codes_ptr, scales_ptr, count, blocks, padded_blocks,
    X_DTYPE: tl.constexpr, SWIZZLED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * SIZE
    block, column = tl.arange(0, SIZE), tl.arange(0, 8)
    inside = block < count - first
    place = block[:, None] * 8 + column[None, :]
    inverse = tl.div_rn(1.0, tl.load(input_scale_ptr))
    words = tl.load(x_ptr + first * 8 + place, mask=inside[:, None], other=0)
    low, high = _pair(words, X_DTYPE)
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
    sixth = largest * 0.16666667163372040  # 1/6 rounded; corrected by the remainder it gives the rounded quotient
    sixth = tl.fma(tl.fma(-sixth, 6.0, largest), 0.16666667163372040, sixth)
    bits = _e4m3_bits(tl.minimum(sixth * inverse, 448.0))
    scale = tl.where(bits == 0, 1.0, _e4m3_value(bits))[:, None]
    # One step makes an approximate reciprocal the rounded one: none of a four-bit number's lies near a midpoint.
    inverse_scale = 1.0 / scale
    inverse_scale = tl.fma(tl.fma(-inverse_scale, scale, 1.0), inverse_scale, inverse_scale)
    # Adding zero turns -0 into +0, whose code has no sign.
    low, high = tl.fma(low, inverse, 0.0), tl.fma(high, inverse, 0.0)
    codes = _encode(low, scale, inverse_scale) | (_encode(high, scale, inverse_scale) << 4)
    tl.store(codes_ptr + first * 8 + place, codes.to(tl.uint8), mask=inside[:, None])
    offset = _swizzled_offset(first + block, blocks, padded_blocks) if SWIZZLED else first + block
    tl.store(scales_ptr + offset, bits.to(tl.uint8), mask=inside)


@triton.jit
def _dequantize_kernel(
    codes_ptr, scales_ptr, out_ptr, count, blocks, padded_blocks, SWIZZLED: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * SIZE
    block, column = tl.arange(0, SIZE), tl.arange(0, 8)
    inside = block < count - first
    place = block[:, None] * 8 + column[None, :]
    offset = _swizzled_offset(first + block, blocks, padded_blocks) if SWIZZLED else first + block
    scale = _e4m3_value(tl.load(scales_ptr + offset, mask=inside, other=0).to(tl.int32))[:, None]
    codes = tl.load(codes_ptr + first * 8 + place, mask=inside[:, None], other=0).to(tl.int32)
    # A product of code and scale has at most six significant bits: its bf16 is the upper half of its float32.
    low = (_decode(codes & 15) * scale).to(tl.uint32, bitcast=True) >> 16
    high = (_decode(codes >> 4) * scale).to(tl.uint32, bitcast=True) & 0xFFFF0000
    tl.store(out_ptr + first * 8 + place, low | high, mask=inside[:, None])


@triton.jit
def _gemm_kernel(
    x_ptr, w_ptr, scales_ptr, alpha_ptr, bias_ptr, out_ptr, M, N, K, alpha_stride,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    k_blocks: tl.constexpr = BK // 16
    total = tl.zeros((BN, BM), tl.float32)
    for k in range(0, K, BK):
        block = k // 16 + tl.arange(0, k_blocks)
        scale_mask = (outputs[:, None] < N) & (block[None, :] < K // 16)
        scales = tl.load(scales_ptr + outputs[:, None] * (K // 16) + block[None, :], mask=scale_mask, other=0)
        byte = k // 2 + tl.arange(0, BK // 2)
        code_mask = (outputs[:, None] < N) & (byte[None, :] < K // 2)
        codes = tl.load(w_ptr + outputs[:, None].to(tl.int64) * (K // 2) + byte[None, :], mask=code_mask, other=0)
        values = tl.interleave(_decode(codes.to(tl.int32) & 15), _decode(codes.to(tl.int32) >> 4))
        scale = _e4m3_value(scales.to(tl.int32))
        weight = tl.reshape(values, (BN, k_blocks, 16)) * tl.reshape(scale, (BN, k_blocks, 1))
        column = k + tl.arange(0, BK)
        x_mask = (rows[None, :] < M) & (column[:, None] < K)
        x = tl.load(x_ptr + rows[None, :].to(tl.int64) * K + column[:, None], mask=x_mask, other=0.0)
        total += tl.dot(tl.reshape(weight, (BN, BK)).to(x.dtype), x)
    alpha = tl.load(alpha_ptr + outputs * alpha_stride, mask=outputs < N, other=0.0)
    total = total * alpha[:, None]
    if BIAS:
        total += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    mask = (outputs[:, None] < N) & (rows[None, :] < M)
    tl.store(out_ptr + rows[None, :].to(tl.int64) * N + outputs[:, None], total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_tokens_kernel(x_ptr, codes_ptr, scales_ptr, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + start + column, mask=start + column < K, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    bound = tl.maximum(tl.max(largest, axis=0), 7.888609052210118e-31)
    inverse = 448.0 / bound
    for start in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + start + column, mask=start + column < K, other=0.0).to(tl.float32) * inverse
        codes = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv)
        tl.store(codes_ptr + row * K + start + column, codes, mask=start + column < K)
    tl.store(scales_ptr + row, bound / 448.0)


_SIZE = 256
_X_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def quantize(x: Tensor, input_scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """`fp4_quantize` of bf16 or f16 activations ``[M, K]``."""
    rows, columns = x.shape
    codes = x.new_empty((rows, columns // 2), dtype=torch.uint8)
    shape = scale_shape(rows, columns, swizzled)
    padded = shape != (rows, columns // BLOCK)
    scales = (x.new_zeros if padded else x.new_empty)(shape, dtype=torch.uint8)
    count = rows * columns // BLOCK
    if count:
        _quantize_kernel[(triton.cdiv(count, _SIZE),)](
            x.contiguous().view(torch.int32), input_scale, codes, scales, count, columns // BLOCK, shape[1],
            X_DTYPE=_X_DTYPES[x.dtype], SWIZZLED=swizzled, SIZE=_SIZE,
        )  # fmt: skip
    return codes, scales if swizzled else scales.view(torch.float8_e4m3fn)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Code value x block scale of ``[rows, K/2]`` codes as bf16 ``[rows, K]``: exact, no global scale."""
    rows, columns = codes.shape[0], codes.shape[1] * 2
    out = codes.new_empty((rows, columns), dtype=torch.bfloat16)
    count = rows * columns // BLOCK
    if count:
        _dequantize_kernel[(triton.cdiv(count, _SIZE),)](
            codes, scales.view(torch.uint8), out.view(torch.int32), count, columns // BLOCK, scales.shape[1],
            SWIZZLED=scales.dtype == torch.uint8, SIZE=_SIZE,
        )  # fmt: skip
    return out


def gemm(x: Tensor, w: Tensor, w_scales: Tensor, alpha: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
    """`fp4_gemm_w4a16` of bf16 or f16 ``x [M, K]`` and a stored weight, any M."""
    (m, k), n = x.shape, out_features
    out = x.new_empty((m, n))
    if m:
        bm = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else 128
        bn = 64 if m <= 64 else 128
        _gemm_kernel[(triton.cdiv(n, bn), triton.cdiv(m, bm))](
            x.contiguous(), w, w_scales.view(torch.uint8), alpha, x if bias is None else bias, out, m, n, k,
            0 if alpha.numel() == 1 else 1, BIAS=bias is not None, BM=bm, BN=bn, BK=64, num_warps=4 if m <= 64 else 8,
            num_stages=3,
        )  # fmt: skip
    return out


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8.quantize_tokens` of bf16 or f16 activations: e4m3 ``[M, K]`` and float32 ``[M, 1]``. SM89 and newer."""
    rows, columns = x.shape
    codes = x.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
    scales = x.new_empty((rows, 1), dtype=torch.float32)
    if rows:
        block = min(4096, triton.next_power_of_2(columns))
        _quantize_tokens_kernel[(rows,)](x.contiguous(), codes, scales, columns, BLOCK=block, num_warps=8)
    return codes, scales
