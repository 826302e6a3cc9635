"""Choosing E4M3 block scales by search instead of by the block's largest magnitude.

For each block of 16 weights the search tries the E4M3 scales around ``amax / 6`` and keeps the one with the least
error, either plain (sum of squared errors) or weighted by the block's input covariance ``H = E[x x^T]`` (16 x 16,
"local Hessian"): ``d^T H d`` is the expected squared error that the block's weight error ``d`` adds to the output.
Positive E4M3 numbers are ordered as their bytes are, so "around" is plain integer steps of the byte.

The loaders' arithmetic is unchanged: a searched checkpoint differs from a plain one in its block scales and codes only.
"""

import functools

import torch
from torch import Tensor

from fp4pipe import nvfp4

STEPS = 12
"""Candidates on either side of the plain scale. Eight E4M3 steps are a factor of two; smaller scales clip the block's
largest weights, larger ones leave the top codes unused, and no minimum was found outside this range
(`tests/convert/test_scale_search.py` compares with the search over all 126 scales)."""
_LARGEST_BYTE = 0x7E  # 448.0


def _block_errors(blocks: Tensor, scale: Tensor, hessian: Tensor | None) -> Tensor:
    """Error of each block ``[R, B, 16]`` at its float32 `scale` ``[R, B]``; `hessian` is ``[B, 16, 16]`` or None."""
    scaled = blocks / scale.unsqueeze(-1)
    magnitude = scaled.abs()
    # Nearest E2M1 value, ties to even: the grid has steps of 1/2 below 2, of 1 below 4 and of 2 above, up to 6.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.clamp(torch.round(magnitude / step) * step, max=nvfp4.E2M1_MAX)
    error = (magnitude - rounded) * scale.unsqueeze(-1)
    if hessian is None:
        return error.square().sum(-1)
    signed = error * torch.sign(scaled)
    return (torch.einsum("rbi,bij->rbj", signed, hessian) * signed).sum(-1)


def _search(blocks: Tensor, start: Tensor, global_scale: Tensor, hessian: Tensor | None) -> Tensor:
    best_byte = start
    best = torch.full(start.shape, torch.inf, device=blocks.device)
    # The plain scale comes first and a candidate must be strictly better, so a tie leaves the plain scale in place.
    for step in (0, *range(-STEPS, 0), *range(1, STEPS + 1)):
        byte = (start + step).clamp(1, _LARGEST_BYTE)
        scale = byte.to(torch.uint8).view(torch.float8_e4m3fn).float() * global_scale
        error = _block_errors(blocks, scale, hessian)
        better = error < best
        best = torch.where(better, error, best)
        best_byte = torch.where(better, byte, best_byte)
    return best_byte


@functools.cache
def _compiled_search():
    """`_search` as one fused loop; eager PyTorch spends its time on temporaries."""
    return torch.compile(_search, dynamic=True)


def search_block_scales(
    weight: Tensor,
    global_scale: Tensor,
    *,
    hessian: Tensor | None = None,
    rows_at_once: int = 1 << 22,
    compiled: bool = True,
) -> Tensor:
    """Block scales of a weight that minimise the quantization error of every block.

    Args:
        weight: ``[N, K]`` floating, ``K % 16 == 0``.
        global_scale: float32 scalar, kept as it is (fused siblings share it).
        hessian: float32 ``[K/16, 16, 16]``, input covariance of each block of columns, or None for plain squared error.
        rows_at_once: Weights searched at a time, which bounds the temporaries.
        compiled: Use `torch.compile`; the result is the same.

    Returns:
        e4m3 ``[N, K/16]``. No block's error is above that of `nvfp4.weight_block_scale`.
    """
    start = nvfp4.weight_block_scale(weight, global_scale).view(torch.uint8).to(torch.int32)
    blocks = weight.unflatten(-1, (-1, nvfp4.BLOCK))
    search = _compiled_search() if compiled else _search
    rows = max(1, rows_at_once // weight.shape[1])
    parts = [
        search(blocks[i : i + rows].float(), start[i : i + rows], global_scale.float(), hessian)
        for i in range(0, weight.shape[0], rows)
    ]
    return torch.cat(parts).to(torch.uint8).view(torch.float8_e4m3fn)
