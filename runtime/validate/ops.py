"""Are the operators right? Every one registered soundly, and the products right wherever they are used."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.library import opcheck

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.runtime.attention import Step, attending
from fp4pipe.runtime.batch import Batch, Segment
from fp4pipe.runtime.cache import KVCache, LayerKV
from fp4pipe.runtime.model import Model
from fp4pipe.runtime.ops import fp8, prepare_weight
from fp4pipe.runtime.ops.backend import capability
from fp4pipe.runtime.validate import numerics
from fp4pipe.runtime.validate.approximate import check_fp8_prefill
from fp4pipe.runtime.validate.check import Check


def check_ops(
    checkpoint: Checkpoint,
    model: Model | None = None,
    *,
    device: torch.device | str = "cpu",
    rows: Sequence[int] = numerics.AWKWARD_ROWS,
    layers: int = 64,
    seed: int = 0,
) -> list[Check]:
    """Check every fp4pipe operator on `device`.

    Args:
        checkpoint: Whose layer shapes and tensors to try.
        model: The checkpoint as the runtime loaded it; each of its layers is then held against the files.
        device: Where to run.
        rows: Row counts to try.
        layers: Most layers of `model` to look at, evenly spread.
        seed: Of the random inputs.

    Returns:
        ``ops.registration``, ``ops.values``, ``ops.batch``, ``ops.fp8_prefill`` where the device has FP8 and,
        given a quantized model, ``ops.layers``.
    """
    device = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    weights = numerics.sample_weights(checkpoint, generator)
    checks = [
        check_registration(device),
        numerics.check_values(weights, device, rows, generator),
        numerics.check_batch(*weights[0], device, generator),
    ]
    if _multiplies_fp8(device):
        checks.append(check_fp8_prefill(weights, device, generator))
    if model is not None and checkpoint.linears:
        checks.append(numerics.check_layers(model, checkpoint, layers, generator))
    return checks


def check_registration(device: torch.device) -> Check:
    """``torch.library.opcheck`` on every operator of the namespace; one without a sample to try fails."""
    samples = _samples(device)
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fp4pipe::"))
    results: dict[str, str] = {}
    with attending(_one_sequence(5, device)):
        for name in names:
            operator = name.partition("::")[2]
            if operator not in samples:
                results[operator] = "no sample arguments to try it on"
                continue
            try:
                for arguments in samples[operator]:
                    opcheck(getattr(torch.ops.fp4pipe, operator).default, arguments, test_utils=_tests_for(arguments))
            except Exception as error:  # opcheck reports by exceptions of many types
                results[operator] = " ".join(str(error).split())[:500] or type(error).__name__
            else:
                results[operator] = "ok"
    bad = [f"{name}: {result}" for name, result in results.items() if result != "ok"]
    summary = f"opcheck of {len(results)} operators on {device.type}: " + ("; ".join(bad) or "all pass")
    return Check("ops.registration", not bad, summary, {"operators": len(results), "failed": len(bad)}, results)


def _tests_for(arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """opcheck's tests; the schema test compares inputs before and after, which PyTorch cannot do for e4m3."""
    unreadable = any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments)
    schema = () if unreadable else ("test_schema",)
    return (*schema, "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def _samples(device: torch.device) -> dict[str, list[tuple[Any, ...]]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 64, generator=generator).to(device, numerics.dtype_on(device))
    scale = torch.tensor(1e-3, device=device)
    stored = numerics.made_up(48, 64, generator)
    weight = prepare_weight(stored, device)
    if not weight.w_scales.numel():
        weight = weight._replace(w_scales=weight.w_scales.view(torch.uint8))
    bias = torch.randn(48, generator=generator).to(device, x.dtype)
    q, k = (torch.randn(5, heads, 16, generator=generator).to(device, x.dtype) for heads in (4, 2))
    quantized = torch.ops.fp4pipe.fp4_quantize(x, scale, True)
    as_stored = [tensor.to(device) for tensor in stored[:3]]
    long = torch.randn(fp8.MIN_TOKENS, 64, generator=generator).to(device, x.dtype)
    folded = (*as_stored, *fp8.fold_weight(*as_stored), stored.out_features)
    return {
        "fp4_quantize": [(x, scale), (x, scale, True)],
        "fp4_gemm": [(*quantized, *weight, x.dtype), (*quantized, *weight, x.dtype, bias)],
        "fp4_gemm_w4a16": [(x, *weight), (x, *weight, bias)],
        "fp8_prefill_gemm": [(x, *folded), *([(long, *folded, bias)] if _multiplies_fp8(device) else [])],
        "silu_mul_fp4_quantize": [(long, scale), (x, scale, True)],
        "rmsnorm_fp4_quantize": [(x, x[0].clone(), 1e-6, scale), (x, x[0].clone(), 1e-6, scale, True)],
        "paged_attention": [(q, k, k.clone(), torch.empty_like(q), 0, 0.25, window) for window in (0, 3)],
    }


def _multiplies_fp8(device: torch.device) -> bool:
    """In hardware, or on a CPU in float32."""
    return (capability(device) or (8, 9)) >= (8, 9)


def _one_sequence(tokens: int, device: torch.device) -> Step:
    cache = KVCache([LayerKV(num_kv_heads=2, head_dim=16)], 2, 16, numerics.dtype_on(device), device)
    return Step(Batch.pack([Segment(range(tokens), 0, [1])], 16), cache)
