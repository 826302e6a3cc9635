"""One schema and one fake an operator: what goes in, and the shapes that come out, whatever the backend.

Weights come in one of these forms, told apart by dtype, so that one operator serves every backend:

=============  ==========================  =====================  ==================================================
form           ``w``                       ``w_scales``           made by
=============  ==========================  =====================  ==================================================
stored         uint8 ``[N, K/2]``          e4m3 ``[N, K/16]``     the checkpoint
folded         floating ``[N, K]``         empty ``[0]``          `forms.prepare_weight`, CPU: code value x block scale
tiled          int32 ``[N/64, K/64, 576]`` empty ``[0]``          `forms.prepare_weight`, SM90: see `tiled`
swizzled       uint8 ``[N', K'/2]``        uint8, 128x4 tiles     `forms.prepare_weight`, SM100 and newer: `blackwell`
=============  ==========================  =====================  ==================================================

Block scales are e4m3 where they lie row by row, and uint8 with the same bits where they lie in 128x4 tiles: the two
layouts can have one shape, so the dtype tells them apart.

``out_features`` is explicit because a prepared weight may be padded. ``alpha`` (float32, ``[1]`` or ``[N]``) carries
the global scale of every output row, multiplied onto the float32 accumulator; it is never rounded to a narrower type.
"""

import torch
from torch import Tensor
from torch.library import Library, register_fake

from fp4pipe.nvfp4 import BLOCK

LIBRARY = Library("fp4pipe", "FRAGMENT")
"""Registrations live as long as this object."""
_TAGS = (torch.Tag.pt2_compliant_tag,)

LIBRARY.define(
    "fp4_quantize(Tensor x, Tensor input_scale, bool swizzled=False) -> (Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.define(
    "fp4_gemm(Tensor a, Tensor a_scales, Tensor w, Tensor w_scales, Tensor alpha, SymInt out_features, "
    "ScalarType out_dtype, Tensor? bias=None) -> Tensor",
    tags=_TAGS,
)
LIBRARY.define(
    "fp4_gemm_w4a16(Tensor x, Tensor w, Tensor w_scales, Tensor alpha, SymInt out_features, "
    "Tensor? bias=None) -> Tensor",
    tags=_TAGS,
)


def scale_shape(rows: int, columns: int, swizzled: bool) -> tuple[int, int]:
    """Shape of the block scales of activations ``[rows, columns]``, padded to 128x4 tiles when swizzled."""
    blocks = columns // BLOCK
    return ((rows + 127) // 128 * 128, (blocks + 3) // 4 * 4) if swizzled else (rows, blocks)


@register_fake("fp4pipe::fp4_quantize")
def _(x: Tensor, input_scale: Tensor, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    torch._check(x.dim() == 2, lambda: f"fp4_quantize: x must be [M, K], got {tuple(x.shape)}")
    rows, columns = x.shape
    torch._check(columns % BLOCK == 0, lambda: f"fp4_quantize: K must be a multiple of {BLOCK}, got {columns}")
    return (
        x.new_empty((rows, columns // 2), dtype=torch.uint8),
        x.new_empty(scale_shape(rows, columns, swizzled), dtype=torch.uint8 if swizzled else torch.float8_e4m3fn),
    )


@register_fake("fp4pipe::fp4_gemm")
def _(
    a: Tensor,
    a_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    alpha: Tensor,
    out_features: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    return a.new_empty((a.shape[0], out_features), dtype=out_dtype)


@register_fake("fp4pipe::fp4_gemm_w4a16")
def _(x: Tensor, w: Tensor, w_scales: Tensor, alpha: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], out_features))
