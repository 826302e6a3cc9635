"""Forms a weight takes: as stored in the checkpoint, and as each backend's kernels read it. Made once, at load."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4pipe.runtime.ops.reference import weight_values


class PreparedWeight(NamedTuple):
    """What the GEMM operators take for one weight ``[out_features, K]``; `schema` describes the forms."""

    w: Tensor
    w_scales: Tensor
    alpha: Tensor
    out_features: int


def prepare_weight(weight: PreparedWeight, device: torch.device | str) -> PreparedWeight:
    """Move a stored `weight` to `device` in the form its kernels read.

    On a CPU that is float32 ``code value x block scale``: eight times the bytes, so that no product decodes anything.
    """
    device = torch.device(device)
    moved = PreparedWeight(
        weight.w.to(device), weight.w_scales.to(device), weight.alpha.to(device), weight.out_features
    )
    if device.type != "cpu" or moved.w.is_floating_point():
        return moved
    empty = moved.w_scales.new_empty(0)
    return PreparedWeight(weight_values(moved.w, moved.w_scales), empty, moved.alpha, moved.out_features)


def fuse_rows(weights: Sequence[PreparedWeight]) -> PreparedWeight | None:
    """Stack weights that share an input (q/k/v, gate/up) into one whose product is theirs side by side.

    Args:
        weights: All in one form, with one K.

    Returns:
        The stacked weight; its alpha keeps every shard's own scale. None when the shards' forms do not stack:
        different K or dtype, or a padded shard.
    """
    first = weights[0]
    for each in weights:
        rows_per_entry = 1 if each.w.dtype != torch.int32 else 16
        padded = each.w.shape[0] * rows_per_entry != each.out_features
        if padded or each.w.dtype != first.w.dtype or each.w.shape[1:] != first.w.shape[1:]:
            return None
    one_alpha = all(each.alpha.numel() == 1 and torch.equal(each.alpha, first.alpha) for each in weights)
    alpha = first.alpha if one_alpha else torch.cat([each.alpha.expand(each.out_features) for each in weights])
    scales = torch.cat([each.w_scales.view(torch.uint8) for each in weights]).view(first.w_scales.dtype)
    return PreparedWeight(torch.cat([each.w for each in weights]), scales, alpha, sum(w.out_features for w in weights))
