"""Opt-in prefill in FP8: weights folded to E4M3, activations to E4M3 per token. Faster than exact, and never lossless.

Code value x block scale needs up to six significant bits and E4M3 has four, so folding rounds about a quarter of the
weights. With a power-of-two scale a row the others stay exact; that costs a byte a weight beside the packed one.
"""

import torch
from torch import Tensor
from torch.library import register_fake
from torch.nn.functional import linear

from fp4pipe.nvfp4 import E4M3_MAX
from fp4pipe.runtime.ops.reference import dequantize_rows, fp4_gemm_w4a16
from fp4pipe.runtime.ops.schema import LIBRARY

MIN_TOKENS = 256
"""Tokens from which the FP8 product runs; fewer take the exact one, which is then as fast."""
_CHUNK = 1 << 26
"""Weights folded at a time: bounds the float32 temporaries to a quarter of a gigabyte."""

LIBRARY.define(
    "fp8_prefill_gemm(Tensor x, Tensor w, Tensor w_scales, Tensor alpha, Tensor w8, Tensor w8_scale, "
    "SymInt out_features, Tensor? bias=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@register_fake("fp4pipe::fp8_prefill_gemm")
def _(
    x: Tensor,
    w: Tensor,
    w_scales: Tensor,
    alpha: Tensor,
    w8: Tensor,
    w8_scale: Tensor,
    out_features: int,
    bias: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features))


def fold_weight(w: Tensor, w_scales: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a stored weight to E4M3.

    Args:
        w: uint8 ``[N, K/2]``.
        w_scales: e4m3 ``[N, K/16]``.
        alpha: float32 ``[1]`` or ``[N]``.

    Returns:
        e4m3 ``[N, K]`` and float32 ``[N]``: alpha times a power of two that brings the row's largest value under 448.
    """
    step = max(1, _CHUNK // (w.shape[1] * 2))
    folded, scales = [], []
    for start in range(0, w.shape[0], step):
        values = dequantize_rows(w[start : start + step], w_scales[start : start + step])
        largest = values.abs().amax(1).clamp(min=2.0**-100)
        scale = torch.exp2(torch.ceil(torch.log2(largest / E4M3_MAX)))
        folded.append((values / scale.unsqueeze(1)).to(torch.float8_e4m3fn))
        scales.append(scale)
    return torch.cat([part.view(torch.uint8) for part in folded]).view(torch.float8_e4m3fn), torch.cat(scales) * alpha


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations ``[M, K]`` to e4m3 and a float32 scale a token ``[M, 1]``, its largest magnitude over 448."""
    largest = x.abs().amax(1, keepdim=True).float().clamp(min=2.0**-100)
    codes = (x.float() * (E4M3_MAX / largest)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, largest / E4M3_MAX


def multiply(x: Tensor, w8: Tensor, w8_scale: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ (w8 * w8_scale).T + bias`` with `x` rounded to E4M3 a token.

    cuBLAS's row-wise scaled product for bf16 on a GPU, float32 in plain PyTorch otherwise.

    Args:
        x: ``[M, K]``.
        w8: e4m3 ``[N, K]``, or the same values as float32.
        w8_scale: float32 ``[N]``.
        bias: ``[N]`` or None.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        from fp4pipe.runtime.ops import triton_kernels

        x8, x_scale = triton_kernels.quantize_tokens(x)
        scaled = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x8, w8.T, scale_a=x_scale, scale_b=w8_scale.unsqueeze(0), out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return scaled if bias is None else scaled + bias
    x8, x_scale = quantize_tokens(x)
    out = linear(x8.float(), w8.float()) * x_scale * w8_scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def reference_gemm(
    x: Tensor,
    w: Tensor,
    w_scales: Tensor,
    alpha: Tensor,
    w8: Tensor,
    w8_scale: Tensor,
    out_features: int,
    bias: Tensor | None = None,
) -> Tensor:
    """`fp8_prefill_gemm` in plain PyTorch."""
    if x.shape[0] < MIN_TOKENS:
        return fp4_gemm_w4a16(x, w, w_scales, alpha, out_features, bias)
    return multiply(x, w8, w8_scale, bias)


def cuda_gemm(
    x: Tensor,
    w: Tensor,
    w_scales: Tensor,
    alpha: Tensor,
    w8: Tensor,
    w8_scale: Tensor,
    out_features: int,
    bias: Tensor | None = None,
) -> Tensor:
    """`fp8_prefill_gemm` on the GPU: exact for few tokens, by the kernels a weight's form allows."""
    if x.shape[0] < MIN_TOKENS:
        return torch.ops.fp4pipe.fp4_gemm_w4a16(x, w, w_scales, alpha, out_features, bias)
    return multiply(x, w8, w8_scale, bias)


LIBRARY.impl("fp8_prefill_gemm", reference_gemm, "CompositeExplicitAutograd")
LIBRARY.impl("fp8_prefill_gemm", cuda_gemm, "CUDA")
