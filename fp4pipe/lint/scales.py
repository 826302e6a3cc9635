"""Rules about the scales: their values, those of sibling projections, and those of the KV cache."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.exclusions import fused_of
from fp4pipe.lint.rules import Hit, rule, value_rule
from fp4pipe.lint.values import E4M3_FLOOR, E4M3_NAN, E4M3_TOP, Values
from fp4pipe.quantized_linear import QuantizedLinear

MAX_EXTREME_SHARE = 0.01
"""Share of block scales at the top or the floor of E4M3 above which a matrix is reported."""


@value_rule(
    "scale-invalid",
    "error",
    "Every scale is finite and positive.",
    fix="export the checkpoint again; an all-zero weight or an expert without calibration tokens is the usual cause",
)
def scale_invalid(checkpoint: Checkpoint, values: Values) -> Iterator[Hit]:
    for module, histogram in values.histograms.items():
        counts = {
            "NaN": int(histogram[E4M3_NAN] + histogram[0x80 | E4M3_NAN]),
            "zero": int(histogram[0] + histogram[0x80]),
            "negative": int(histogram[0x81 : 0x80 | E4M3_NAN].sum()),
        }
        if any(counts.values()):
            scale = checkpoint.linears[module].block_scale
            found = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            yield scale.name, f"{found} of {scale.numel} in {scale.file.name} at offset {scale.start}"
    for name, value in values.scalars.items():
        if not (math.isfinite(value) and value > 0):
            info = checkpoint.tensors[name]
            yield name, f"is {value:g} in {info.file.name} at offset {info.start}"


@value_rule(
    "weight-not-finite",
    "error",
    "Every unquantized weight is finite.",
    fix="look at the source model: quantization does not touch these tensors",
)
def weight_not_finite(checkpoint: Checkpoint, values: Values) -> Iterator[Hit]:
    for name, (low, high) in values.extremes.items():
        if not (math.isfinite(low) and math.isfinite(high)):
            yield name, f"holds values from {low:g} to {high:g}"


@value_rule("tensor-unreadable", "error", "Every tensor can be read.", fix="download or copy the checkpoint again")
def tensor_unreadable(checkpoint: Checkpoint, values: Values) -> Iterator[Hit]:
    yield from values.unreadable.items()


@value_rule(
    "scales-saturated",
    "warning",
    "Few block scales sit at E4M3's largest value, 448.",
    fix="the global scale is too small for these blocks, which are clipped; calibrate the weight again",
)
def scales_saturated(checkpoint: Checkpoint, values: Values) -> Iterator[Hit]:
    yield from _extreme(values, E4M3_TOP, "448")


@value_rule(
    "scales-floored",
    "warning",
    "Few block scales sit at E4M3's smallest value, 2^-9.",
    fix="the global scale is too large for these blocks, which lose precision: look for an outlier in the weight",
)
def scales_floored(checkpoint: Checkpoint, values: Values) -> Iterator[Hit]:
    yield from _extreme(values, E4M3_FLOOR, "2^-9")


def _extreme(values: Values, pattern: int, name: str) -> Iterator[Hit]:
    for module, histogram in values.histograms.items():
        share = float(histogram[pattern] / histogram.sum().clamp(min=1))
        if share > MAX_EXTREME_SHARE:
            yield module, f"{share:.1%} of its block scales are {name}"


@value_rule(
    "sibling-global-scales",
    "warning",
    "Projections that are served as one matrix (q/k/v, gate/up) share their global scale.",
    fix="quantize with scales shared over the group: serving stacks that fuse them keep one, and the other part is off",
)
def sibling_global_scales(checkpoint: Checkpoint, values: Values) -> Iterator[Hit]:
    for where, linears in _siblings(checkpoint.linears):
        yield from _unequal(where, {leaf: values.scalars.get(one.global_scale.name) for leaf, one in linears.items()})


@value_rule(
    "sibling-input-scales",
    "warning",
    "Projections that read the same activations (q/k/v, gate/up) share their input scale.",
    fix="quantize with scales shared over the group: the activations would otherwise be quantized once a projection",
)
def sibling_input_scales(checkpoint: Checkpoint, values: Values) -> Iterator[Hit]:
    for where, linears in _siblings(checkpoint.linears):
        scales = {leaf: one.input_scale for leaf, one in linears.items()}
        yield from _unequal(where, {leaf: values.scalars.get(info.name) for leaf, info in scales.items() if info})


def _siblings(linears: Mapping[str, QuantizedLinear]) -> Iterator[tuple[str, dict[str, QuantizedLinear]]]:
    """Groups of quantized projections that serving stacks fuse, by where they sit: name of the last part -> linear."""
    groups: dict[str, dict[str, QuantizedLinear]] = defaultdict(dict)
    for module, linear in linears.items():
        if (fused := fused_of(module)) is not None:
            groups[fused][module.rpartition(".")[2]] = linear
    yield from groups.items()


def _unequal(where: str, scales: Mapping[str, float | None]) -> Iterator[Hit]:
    known = {leaf: value for leaf, value in scales.items() if value is not None}
    if len(set(known.values())) > 1:
        yield where, ", ".join(f"{leaf} {value:.6g}" for leaf, value in sorted(known.items()))


# ---- KV cache -------------------------------------------------------------------------------------------------------


@rule(
    "kv-scales-unstated",
    "warning",
    "Scales of the KV cache come with a config that says it is quantized.",
    fix='set "kv_cache_scheme" in quantization_config, or remove the scales',
)
def kv_scales_unstated(checkpoint: Checkpoint) -> Iterator[Hit]:
    if checkpoint.kv_scales and (checkpoint.quant is None or checkpoint.quant.kv_cache is None):
        yield next(iter(checkpoint.kv_scales)), f"{len(checkpoint.kv_scales)} layers have scales, no config says so"


@rule(
    "kv-scales-default",
    "info",
    "A quantized KV cache comes with calibrated scales.",
    fix="nothing to mend if it was meant (fp8_cast): loaders use 1.0; else calibrate the KV cache",
)
def kv_scales_default(checkpoint: Checkpoint) -> Iterator[Hit]:
    if checkpoint.quant is not None and checkpoint.quant.kv_cache and not checkpoint.kv_scales:
        yield checkpoint.quant.source, f"says the KV cache is {checkpoint.quant.kv_cache}, no scale is stored"


@rule(
    "kv-scales-partial",
    "warning",
    "Either every layer has a K and a V scale, or none has.",
    fix="calibrate the KV cache again: a missing scale is silently taken as 1.0",
)
def kv_scales_partial(checkpoint: Checkpoint) -> Iterator[Hit]:
    for attention, (k, v) in checkpoint.kv_scales.items():
        if k is None or v is None:
            yield attention, f"has no {'k' if k is None else 'v'}_scale"
    layers = checkpoint.config.get("num_hidden_layers")
    if checkpoint.kv_scales and isinstance(layers, int) and len(checkpoint.kv_scales) != layers:
        yield "config.json", f"{layers} layers, {len(checkpoint.kv_scales)} of them with KV scales"


@rule(
    "kv-scales-misplaced",
    "warning",
    "Scales of the KV cache sit at modules that exist.",
    fix="rename them to `<attention>.k_scale` and `<attention>.v_scale`: the projections are fused in this model",
)
def kv_scales_misplaced(checkpoint: Checkpoint) -> Iterator[Hit]:
    for attention, pair in checkpoint.kv_scales.items():
        for info in pair:
            module = info.name.rpartition(".")[0] if info else attention
            weights = (f"{module}.weight", f"{module}.weight_packed")
            if info is not None and module != attention and not any(name in checkpoint.tensors for name in weights):
                yield info.name, f"{module} does not exist"


@value_rule(
    "kv-scales-one",
    "info",
    "Calibrated KV scales are not all 1.0.",
    fix="nothing to mend if it was meant; else the observers never ran",
)
def kv_scales_one(checkpoint: Checkpoint, values: Values) -> Iterator[Hit]:
    names = [info.name for pair in checkpoint.kv_scales.values() for info in pair if info is not None]
    scales = torch.tensor([values.scalars.get(name, math.nan) for name in names])
    if names and bool((scales == 1).all()):
        yield names[0], f"all {len(names)} KV scales are 1.0"
