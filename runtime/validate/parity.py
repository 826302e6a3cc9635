"""Is the runtime right? Its logits against an independent implementation of the same checkpoint.

The reference is ModelOpt's fake-quantized Hugging Face model, with which the runtime shares no kernel, attention or
loader. Quantized activations must be compared in float64 on both sides. A float32 sum taken in another order now and
then lands an activation on the other side of a rounding boundary, and a small model amplifies one such code to the size
of the quantization noise; from then on the two agree no better than with another way of rounding (SmolLM2-135M: top-1
on about 70 % of positions). In float64 the codes are the same, and so is everything after them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4pipe import console
from fp4pipe.runtime.validate.check import Check
from fp4pipe.runtime.validate.likelihood import Scorer
from fp4pipe.runtime.validate.scores import Divergence

MIN_TOP1 = 0.99
"""Share of positions whose most likely token must be the same."""
MAX_REL_ERROR = 1e-2
"""Norm of the difference over norm of the reference logits."""


def parity(
    engine: Scorer,
    reference: Callable[[Tensor], Tensor],
    windows: Sequence[list[int]],
    *,
    name: str = "parity",
    min_top1: float = MIN_TOP1,
    max_rel_error: float = MAX_REL_ERROR,
) -> Check:
    """Compare logits over every position of `windows`.

    Args:
        engine: The runtime under test.
        reference: int64 ids ``[1, T]`` to float32 logits ``[T, V]``.
        windows: Token ids.
        name: Of the check.
        min_top1: Bound on the share of equal top-1 tokens.
        max_rel_error: Bound on the relative error over all logits.
    """
    divergence = Divergence()
    with console.progress(sum(map(len, windows)), "parity", "tok") as bar:
        for ids in windows:
            (logits,) = engine.prompt_logits([ids])
            divergence.add(reference(torch.tensor([ids])), logits)
            bar.update(len(ids))
    top1, error = divergence.top1, divergence.rel_error
    ok = top1 >= min_top1 and error < max_rel_error
    return Check(
        name,
        ok,
        f"top-1 equal on {top1:.2%} of {divergence.positions} positions (bound {min_top1:.0%}), relative error of the"
        f" logits {error:.2e} (bound {max_rel_error:.0e})",
        {
            "top1": top1,
            "rel_error": error,
            "worst_rel_error": divergence.worst,
            "positions": divergence.positions,
            **divergence.kl_figures(),
        },
        {"min_top1": min_top1, "max_rel_error": max_rel_error},
    )
