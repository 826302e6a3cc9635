"""What ModelOpt has decided for each module of an empty model, put into rows: quantized or not, why, and bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import nn

from fp4pipe.convert.scheme import Scheme, exclusion_rules
from fp4pipe.convert.source import Source
from fp4pipe.nvfp4 import BLOCK

_SCALAR = 4
"""Bytes of a float32 scale."""


@dataclass(frozen=True)
class PlanRow:
    """One module that owns parameters.

    Attributes:
        name: As in the source's tensor names, without the parameter.
        kind: Its class.
        shape: Of its weight.
        dtype: Of its weight in the source.
        decision: ``NVFP4`` or ``kept``.
        reason: Why.
        bytes_before: Bytes of its tensors in the source.
        bytes_after: Bytes of its tensors in the checkpoint.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    decision: str
    reason: str
    bytes_before: int
    bytes_after: int


def owners(model: nn.Module) -> dict[str, Any]:
    """Modules that own parameters, by name; ModelOpt's quantizers own buffers only."""
    return {
        name: module
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }


def decide(name: str, module: Any, source: Source, scheme: Scheme, tied: set[str]) -> PlanRow:
    """The row of one module.

    Args:
        name: Of the module.
        module: Of a model on the meta device that has ModelOpt's quantizers.
        source: For the sizes and dtypes on disk.
        scheme: For the rule that decided.
        tied: Names of parameters that share another's storage and are not exported.
    """
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight", next(iter(parameters.values())))
    infos = {key: source.tensors[f"{name}.{key}"] for key in parameters if f"{name}.{key}" in source.tensors}
    after = sum(info.nbytes for key, info in infos.items() if f"{name}.{key}" not in tied)
    quantized = enabled(module, "weight_quantizer")
    if quantized and "weight" in infos:
        after += weight.numel() // 2 + weight.numel() // BLOCK + _SCALAR - infos["weight"].nbytes
        after += _SCALAR * enabled(module, "input_quantizer")
    kind = original_class(module)
    return PlanRow(
        name=name,
        kind=kind.__name__,
        shape=tuple(weight.shape),
        dtype=infos["weight"].dtype if "weight" in infos else next((i.dtype for i in infos.values()), "shared"),
        decision="NVFP4" if quantized else "kept",
        reason=_reason(name, module, kind, scheme, tied),
        bytes_before=sum(info.nbytes for info in infos.values()),
        bytes_after=after,
    )


def problems_of(row: PlanRow, module: Any, tied: set[str]) -> Iterator[str]:
    """What makes it impossible to quantize the module of `row`, which is to become NVFP4."""
    if not isinstance(module, nn.Linear):
        yield f"{row.name} is a {row.kind}; only linear layers can be NVFP4: exclude {row.name}"
    elif row.shape[-1] % BLOCK:
        yield (
            f"{row.name} has {row.shape[-1]} columns, which is no multiple of {BLOCK}, the size of an NVFP4 block: "
            f"exclude {row.name}"
        )
    if f"{row.name}.weight" in tied:
        yield f"{row.name} shares its weight with the embedding, which stays as it is: exclude {row.name}"


def kv_cache_of(model: nn.Module) -> tuple[str, int]:
    """The KV cache format as ModelOpt has set it, and how many scales it will export."""
    found: list[Any] = [
        module
        for name, module in model.named_modules()
        if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer")) and getattr(module, "is_enabled", False)
    ]
    if not found:
        return "none", 0
    return ("fp8_cast", 0) if any(q._use_constant_amax for q in found) else ("fp8", len(found))


def unmatched(scheme: Scheme, modules: Mapping[str, Any]) -> Iterator[str]:
    """The user's exclusions that mean no module."""
    for pattern in scheme.excluded:
        rules = exclusion_rules(pattern)
        if not any(fnmatch(f"{name}.weight_quantizer", rule) for name in modules for rule in rules):
            yield f"exclude {pattern!r} matches no module"


def enabled(module: Any, quantizer: str) -> bool:
    """Whether `module` has a quantizer of that name and it is on."""
    return bool(getattr(getattr(module, quantizer, None), "is_enabled", False))


def original_class(module: Any) -> type:
    """The class of `module` before ModelOpt wrapped it."""
    return module.get_original_cls_by_level(level=0) if hasattr(module, "get_original_cls_by_level") else type(module)


def _reason(name: str, module: Any, kind: type, scheme: Scheme, tied: set[str]) -> str:
    quantizer = f"{name}.weight_quantizer"
    rule = scheme.rule_for(quantizer, kind)
    if enabled(module, "weight_quantizer"):
        activations = " and activations" if enabled(module, "input_quantizer") else ""
        return f"weights{activations}, by rule {rule} of {scheme.name}"
    if f"{name}.weight" in tied:
        return "shares the embedding's weight"
    if issubclass(kind, nn.Embedding):
        return "embeddings are looked up, not multiplied"
    if not hasattr(module, "weight_quantizer"):
        return "not a linear layer"
    for pattern in scheme.excluded:
        if any(fnmatch(quantizer, excluding) for excluding in exclusion_rules(pattern)):
            return f"excluded by you: {pattern}"
    return f"no rule of {scheme.name} includes it" if rule in (None, "*") else f"rule {rule} of {scheme.name} keeps it"
