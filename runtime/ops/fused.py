"""What comes before a quantizer, in one kernel with it: put into the graph where FlashInfer has that kernel.

The references do what the graph did before: the same operations, rounded in the same places. FlashInfer's kernels keep
the values between in float32, so on hardware a value close to a threshold may fall either way.
"""

import torch
from torch import Tensor
from torch.library import register_fake
from torch.nn.functional import silu

from fp4pipe.nvfp4 import BLOCK
from fp4pipe.runtime.ops import reference
from fp4pipe.runtime.ops.backend import backend_for
from fp4pipe.runtime.ops.schema import LIBRARY, scale_shape

LIBRARY.define(
    "silu_mul_fp4_quantize(Tensor x, Tensor input_scale, bool swizzled=False) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "rmsnorm_fp4_quantize(Tensor x, Tensor weight, float eps, Tensor input_scale, bool swizzled=False) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _outputs(x: Tensor, columns: int, swizzled: bool) -> tuple[Tensor, Tensor]:
    torch._check(columns % BLOCK == 0, lambda: f"K must be a multiple of {BLOCK}, got {columns}")
    return (
        x.new_empty((x.shape[0], columns // 2), dtype=torch.uint8),
        x.new_empty(scale_shape(x.shape[0], columns, swizzled), dtype=torch.uint8 if swizzled else torch.float8_e4m3fn),
    )


@register_fake("fp4pipe::silu_mul_fp4_quantize")
def _(x: Tensor, input_scale: Tensor, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    return _outputs(x, x.shape[1] // 2, swizzled)


@register_fake("fp4pipe::rmsnorm_fp4_quantize")
def _(x: Tensor, weight: Tensor, eps: float, input_scale: Tensor, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    return _outputs(x, x.shape[1], swizzled)


def silu_mul_fp4_quantize(x: Tensor, input_scale: Tensor, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    """`fp4_quantize` of ``silu(gate) * up``, where `x` is ``[M, 2K]``, gate beside up."""
    gate, up = x.chunk(2, dim=1)
    return torch.ops.fp4pipe.fp4_quantize(silu(gate) * up, input_scale, swizzled)


def rmsnorm_fp4_quantize(
    x: Tensor, weight: Tensor, eps: float, input_scale: Tensor, swizzled: bool = False
) -> tuple[Tensor, Tensor]:
    """`fp4_quantize` of ``weight * (x / rms(x))``, x ``[M, K]`` normalized in float32 and rounded before the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return torch.ops.fp4pipe.fp4_quantize(weight * normed.to(x.dtype), input_scale, swizzled)


def _cuda_silu(x: Tensor, input_scale: Tensor, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    if not _has_kernel(x, x.shape[1] // 2):
        return silu_mul_fp4_quantize(x, input_scale, swizzled)
    from fp4pipe.runtime.ops import blackwell

    return blackwell.silu_mul_quantize(x, input_scale, swizzled)


def _cuda_rmsnorm(
    x: Tensor, weight: Tensor, eps: float, input_scale: Tensor, swizzled: bool = False
) -> tuple[Tensor, Tensor]:
    if not _has_kernel(x, x.shape[1]) or weight.dtype != x.dtype:
        return rmsnorm_fp4_quantize(x, weight, eps, input_scale, swizzled)
    from fp4pipe.runtime.ops import blackwell

    return blackwell.rmsnorm_quantize(x, weight, eps, input_scale, swizzled)


def _has_kernel(x: Tensor, columns: int) -> bool:
    shaped = x.dim() == 2 and columns % BLOCK == 0 and columns >= 64
    return shaped and x.dtype in reference.HALF and backend_for(x.device) == "flashinfer"


for _name, _reference, _kernel in (
    ("silu_mul_fp4_quantize", silu_mul_fp4_quantize, _cuda_silu),
    ("rmsnorm_fp4_quantize", rmsnorm_fp4_quantize, _cuda_rmsnorm),
):
    LIBRARY.impl(_name, _reference, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, _kernel, "CUDA")
