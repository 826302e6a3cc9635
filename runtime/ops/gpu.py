"""The operators on CUDA tensors: picks the kernels a weight's form and a device allow. Registered at import."""

import torch
from torch import Tensor

from fp4pipe.nvfp4 import BLOCK
from fp4pipe.runtime.ops import reference
from fp4pipe.runtime.ops.backend import backend_for
from fp4pipe.runtime.ops.schema import LIBRARY


def fp4_quantize(x: Tensor, input_scale: Tensor, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize on the GPU: FlashInfer on Blackwell, Triton before it; float32 input in plain PyTorch."""
    if x.dtype not in reference.HALF or x.dim() != 2 or x.shape[1] % BLOCK:
        return reference.fp4_quantize(x, input_scale, swizzled)
    if backend_for(x.device) == "flashinfer":
        from fp4pipe.runtime.ops import blackwell

        return blackwell.quantize(x, input_scale, swizzled)
    from fp4pipe.runtime.ops import triton_kernels

    return triton_kernels.quantize(x, input_scale, swizzled)


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
    """W4A4 product: native on Blackwell; before it activations become bf16, exactly, and multiply as in w4a16."""
    if out_dtype != torch.bfloat16:
        return reference.fp4_gemm(a, a_scales, w, w_scales, alpha, out_features, out_dtype, bias)
    if backend_for(a.device) == "flashinfer":
        from fp4pipe.runtime.ops import blackwell

        return blackwell.gemm(a, a_scales, w, w_scales, alpha, out_features, out_dtype, bias)
    from fp4pipe.runtime.ops import triton_kernels

    return fp4_gemm_w4a16(triton_kernels.dequantize(a, a_scales), w, w_scales, alpha, out_features, bias)


def fp4_gemm_w4a16(
    x: Tensor, w: Tensor, w_scales: Tensor, alpha: Tensor, out_features: int, bias: Tensor | None = None
) -> Tensor:
    """Product of 16-bit activations and an NVFP4 weight; float32 activations in plain PyTorch."""
    if x.dtype == torch.bfloat16 and w.dtype == torch.int32:
        from fp4pipe.runtime.ops import hopper

        return hopper.gemm(x, w, alpha, out_features, bias)
    if x.dtype in reference.HALF and w.dtype == torch.uint8:
        if backend_for(x.device) == "flashinfer":
            from fp4pipe.runtime.ops import blackwell

            return blackwell.gemm_w4a16(x, w, w_scales, alpha, out_features, bias)
        from fp4pipe.runtime.ops import triton_kernels

        return triton_kernels.gemm(x, w, w_scales, alpha, out_features, bias)
    return reference.fp4_gemm_w4a16(x, w, w_scales, alpha, out_features, bias)


for _kernel in (fp4_quantize, fp4_gemm, fp4_gemm_w4a16):
    LIBRARY.impl(_kernel.__name__, _kernel, "CUDA")
