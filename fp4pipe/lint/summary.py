"""`summary`: what a checkpoint holds, by category and by module type, with bits a parameter.

Counted by category, the E4M3 block scales of an NVFP4 checkpoint are not mistaken for an FP8 model, nor an unquantized
embedding for a failed quantization.
"""

from collections import Counter, defaultdict
from typing import Any

from fp4pipe.checkpoint import Checkpoint


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Inventory of `checkpoint`, ready for JSON.

    Returns:
        ``quantization`` (method, algo, ...), ``tensors`` (count, bytes, by dtype), ``parameters`` (total, quantized),
        ``bytes`` and ``bits_per_parameter`` by category (codes, block scales, other scales, unquantized), and
        ``layers``: for each kind of module its count, shapes and whether it is quantized.
    """
    linears = checkpoint.linears
    codes = sum(linear.weight.nbytes for linear in linears.values())
    blocks = sum(linear.block_scale.nbytes for linear in linears.values())
    scalars = {info.name for linear in linears.values() for info in linear.scales} - {
        linear.block_scale.name for linear in linears.values()
    }
    scalars |= {info.name for pair in checkpoint.kv_scales.values() for info in pair if info}
    other = sum(checkpoint.tensors[name].nbytes for name in scalars)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    kept = total - codes - blocks - other
    ours = {info.name for linear in linears.values() for info in (linear.weight, *linear.scales)} | scalars
    quantized = sum(linear.out_features * linear.in_features for linear in linears.values())
    unquantized = sum(info.numel for name, info in checkpoint.tensors.items() if name not in ours)
    return {
        "model_type": checkpoint.config.get("model_type"),
        "quantization": _quantization(checkpoint),
        "files": len(checkpoint.metadata),
        "tensors": {
            "count": len(checkpoint.tensors),
            "by_dtype": dict(Counter(info.dtype for info in checkpoint.tensors.values()).most_common()),
        },
        "parameters": {"total": quantized + unquantized, "nvfp4": quantized, "unquantized": unquantized},
        "bytes": {
            "total": total,
            "codes": codes,
            "block_scales": blocks,
            "other_scales": other,
            "unquantized": kept,
        },
        "bits_per_parameter": {
            "total": _bits(total, quantized + unquantized),
            "nvfp4": _bits(codes + blocks + other, quantized),
            "unquantized": _bits(kept, unquantized),
        },
        "modules": _modules(checkpoint),
    }


def _bits(nbytes: int, parameters: int) -> float | None:
    return round(8 * nbytes / parameters, 3) if parameters else None


def _quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    quant = checkpoint.quant
    if quant is None:
        return None
    return {
        "method": quant.method,
        "algo": quant.algo,
        "group_size": quant.group_size,
        "kv_cache": quant.kv_cache,
        "exclude": list(quant.ignore),
        "stated_in": quant.source,
    }


def _modules(checkpoint: Checkpoint) -> dict[str, str]:
    """Kinds of matrices by the last part of their name: how many, their shapes, and how they are stored."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for name, info in checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in ("weight", "weight_packed") or len(info.shape) < 2:
            continue
        linear = checkpoint.linears.get(module)
        stored, shape = ("NVFP4", (linear.out_features, linear.in_features)) if linear else (info.dtype, info.shape)
        kinds[module.rpartition(".")[2]][f"{stored} {' x '.join(map(str, shape))}"] += 1
    return {kind: ", ".join(f"{count} of {what}" for what, count in seen.items()) for kind, seen in kinds.items()}
