"""Forms a weight takes: as stored in the checkpoint, and as each backend's kernels read it. Made once, at load."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fp4pipe.errors import Unavailable
from fp4pipe.runtime.ops.backend import capability, has_native_fp4
from fp4pipe.runtime.ops.reference import weight_values
from fp4pipe.runtime.ops.tiled import TILE, pack_tiled


class PreparedWeight(NamedTuple):
    """What the GEMM operators take for one weight ``[out_features, K]``; `schema` describes the forms."""

    w: Tensor
    w_scales: Tensor
    alpha: Tensor
    out_features: int


def prepare_weight(weight: PreparedWeight, device: torch.device | str, mode: str = "w4a16") -> PreparedWeight:
    """Move a stored `weight` to `device` in the form its kernels read; a prepared one is only moved.

    On a CPU that is float32 ``code value x block scale``: eight times the bytes, so that no product decodes anything.
    On SM90 it is the tiled form, if the kernels can be built; on SM100 and newer the form of FlashInfer's kernels for
    `mode`; elsewhere the weight stays as stored.
    """
    device = torch.device(device)
    w, w_scales, alpha = (tensor.to(device) for tensor in weight[:3])
    if w.dtype == torch.uint8 and device.type == "cpu":
        w, w_scales = weight_values(w, w_scales), w_scales.new_empty(0)
    elif w.dtype == torch.uint8 and capability(device) == (9, 0) and hopper_kernels(device):
        w, w_scales = pack_tiled(w, w_scales), w_scales.new_empty(0)
        torch.cuda.synchronize(device)  # the kernels fetch weights before they wait for what ran just before them
    elif w.dtype == torch.uint8 and w_scales.dtype != torch.uint8 and has_native_fp4(device):
        from fp4pipe.runtime.ops import blackwell

        w, w_scales = blackwell.prepare(w, w_scales, mode)
    return PreparedWeight(w, w_scales, alpha, weight.out_features)


@cache
def hopper_kernels(device: torch.device) -> bool:
    """Whether the SM90 kernels can be built here; builds them and makes their workspace. Warns once if not."""
    from fp4pipe.runtime.ops import build, hopper, tuning

    try:
        build.load_library()
    except Unavailable as error:
        warnings.warn(str(error), stacklevel=2)
        return False
    hopper.workspace(device)
    tuning.load_plans(device)
    return True


def fuse_rows(weights: Sequence[PreparedWeight]) -> PreparedWeight | None:
    """Stack weights that share an input (q/k/v, gate/up) into one whose product is theirs side by side.

    Args:
        weights: All in one form, with one K.

    Returns:
        The stacked weight; its alpha keeps every shard's own scale. None when the shards' forms do not stack:
        different K or dtype, or a padded shard.
    """
    first = weights[0]
    tiled, swizzled = first.w.dtype == torch.int32, first.w_scales.dtype == torch.uint8
    for each in weights:
        rows = each.w.shape[0] * (TILE if tiled else 1)
        padded = rows != each.out_features or (swizzled and rows % 128)
        if padded or each.w.dtype != first.w.dtype or each.w.shape[1:] != first.w.shape[1:]:
            return None
    one_alpha = all(each.alpha.numel() == 1 and torch.equal(each.alpha, first.alpha) for each in weights)
    if swizzled and not one_alpha:  # FlashInfer's products take one alpha: two products rather than a wrong one
        return None
    alpha = first.alpha if one_alpha else torch.cat([each.alpha.expand(each.out_features) for each in weights])
    scales = torch.cat([each.w_scales.view(torch.uint8) for each in weights]).view(first.w_scales.dtype)
    w = torch.cat([each.w for each in weights])
    if tiled and w.is_cuda:
        torch.cuda.synchronize(w.device)
    return PreparedWeight(w, scales, alpha, sum(each.out_features for each in weights))
