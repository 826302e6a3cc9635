"""The `fp4pipe::` operators, registered when this package is imported.

==========================  ========================================================  ==========================
operator                    arguments                                                 returns
==========================  ========================================================  ==========================
``fp4_quantize``            ``x, input_scale, swizzled=False``                        codes, block scales
``fp4_gemm``                ``a, a_scales, w, w_scales, alpha, out_features,          ``[M, out_features]``
                            out_dtype, bias=None``
``fp4_gemm_w4a16``          ``x, w, w_scales, alpha, out_features, bias=None``        ``[M, out_features]``
``silu_mul_fp4_quantize``   ``x, input_scale, swizzled=False``                        codes, block scales
``rmsnorm_fp4_quantize``    ``x, weight, eps, input_scale, swizzled=False``           codes, block scales
``fp8_prefill_gemm``        ``x, w, w_scales, alpha, w8, w8_scale, out_features,``    ``[M, out_features]``
                            ``bias=None``
==========================  ========================================================  ==========================

Importing this package imports PyTorch and nothing heavier; Triton, a CUDA compiler or FlashInfer are reached for
only when an operator first meets a CUDA tensor.
"""

from fp4pipe.runtime.ops import fused, gpu, reference, schema
from fp4pipe.runtime.ops.backend import MODES, backend_for, has_native_fp4, resolve_mode
from fp4pipe.runtime.ops.choices import KernelChoices
from fp4pipe.runtime.ops.forms import PreparedWeight, fuse_rows, prepare_weight
from fp4pipe.runtime.ops.head import quantize_head
from fp4pipe.runtime.ops.linear import NVFP4Linear

__all__ = [
    "MODES",
    "KernelChoices",
    "NVFP4Linear",
    "PreparedWeight",
    "backend_for",
    "fuse_rows",
    "fused",
    "gpu",
    "has_native_fp4",
    "prepare_weight",
    "quantize_head",
    "reference",
    "resolve_mode",
    "schema",
]
