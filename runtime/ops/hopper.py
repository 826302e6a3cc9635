"""Launches the SM90 kernels on a tiled weight: decode for few tokens, wgmma for many."""

from functools import cache

import torch
from torch import Tensor

from fp4pipe.runtime.ops import plans, tuning
from fp4pipe.runtime.ops.build import load_library


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of `device`."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums and arrival counters, shared by every product on `device`: they must run one after another.

    Made at load by `forms.prepare_weight`, never inside a graph capture, whose memory pool would own it.
    """
    partial = torch.empty(plans.WORKSPACE_BYTES // 4, dtype=torch.float32, device=device)
    return partial, torch.zeros(1 << 16, dtype=torch.int32, device=device)


def gemm(
    x: Tensor,
    w: Tensor,
    alpha: Tensor,
    out_features: int,
    bias: Tensor | None,
    plan: plans.Plan | None = None,
) -> Tensor:
    """``alpha * (x @ w.T) + bias`` of bf16 ``x [M, K]`` and a tiled weight, accumulated in float32.

    Args:
        plan: How to cut it up; looked up when absent.
    """
    x = x.contiguous()
    tokens, columns = x.shape
    out = x.new_empty((tokens, out_features))
    if tokens == 0:
        return out
    count = processors(x.device)
    if plan is None:
        if tuning.wanted(tokens, out_features, columns):

            def run(copy: Tensor, tried: plans.Plan) -> Tensor:
                return gemm(x, copy, alpha, out_features, bias, tried)

            tuning.tune(w, run, tokens, out_features, columns, count)
        plan = plans.plan_for(tokens, out_features, columns, count)
    pointers = [w.data_ptr(), x.data_ptr(), alpha.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()]
    shape = (tokens, out_features, columns, 0 if alpha.numel() == 1 else 1)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    if isinstance(plan, plans.DecodePlan):
        error = load_library().fp4pipe_decode(*pointers, *shape, *plan, 1, stream)
    else:
        pointers += [buffer.data_ptr() for buffer in workspace(x.device)]
        error = load_library().fp4pipe_prefill(*pointers, *shape, *plan, count, 1, stream)
    if error:
        raise RuntimeError(f"fp4pipe kernel failed with CUDA error {error} for {shape}, {plan}")
    return out
