"""How wrong the opt-in products are that trade accuracy for speed. Measured, never passed or failed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4pipe.runtime.ops import fp8, prepare_weight
from fp4pipe.runtime.validate.check import Check
from fp4pipe.runtime.validate.numerics import Weight, activations, dtype_on


def check_fp8_prefill(weights: Sequence[Weight], device: torch.device, generator: torch.Generator) -> Check:
    """Relative error of ``fp8_prefill_gemm`` against the exact W4A16 product of the same activations.

    Args:
        weights: Stored weights, one of each shape.
        device: Where to run.
        generator: Of the activations, which have outliers and tiny values as `numerics.activations` makes them.

    Returns:
        ``ops.fp8_prefill``, with the norm of the difference over the norm of the exact product, the worst shape's.
    """
    errors: dict[str, float] = {}
    for _, stored in weights:
        exact = prepare_weight(stored, device)
        folded = fp8.fold_weight(*(tensor.to(device) for tensor in stored[:3]))
        columns = stored.w.shape[1] * 2
        x = activations(fp8.MIN_TOKENS, columns, device, dtype_on(device), generator)
        want: Tensor = torch.ops.fp4pipe.fp4_gemm_w4a16(x, *exact).double()
        got: Tensor = torch.ops.fp4pipe.fp8_prefill_gemm(x, *exact[:3], *folded, stored.out_features).double()
        errors[f"{stored.out_features}x{columns}"] = float((got - want).norm() / want.norm())
    worst = max(errors, key=lambda shape: errors[shape])
    figures: dict[str, Any] = {"rel_error": errors[worst], "shapes": len(errors)}
    summary = (
        f"--prefill fp8 against exact w4a16, {fp8.MIN_TOKENS} tokens: relative error up to {errors[worst]:.1e} "
        f"({worst}); approximate, not what the checkpoint computes"
    )
    return Check("ops.fp8_prefill", None, summary, figures, errors)
