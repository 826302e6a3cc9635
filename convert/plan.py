"""What a quantization will do, found out on the meta device: nothing is loaded and nothing is computed.

ModelOpt itself inserts its quantizers into the empty model, so the plan cannot differ from what it then does.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from fp4pipe.convert.decisions import PlanRow, decide, enabled, kv_cache_of, owners, problems_of, unmatched
from fp4pipe.convert.model import build_empty, compute_dtype
from fp4pipe.convert.options import QuantizeOptions
from fp4pipe.convert.quiet import quiet
from fp4pipe.convert.scheme import resolve_scheme
from fp4pipe.convert.source import Source
from fp4pipe.device import pick_device
from fp4pipe.exclusions import FUSED

__all__ = ["Plan", "PlanRow", "make_plan"]

_LIBRARIES_BYTES = 700 << 20
"""What Python, PyTorch, transformers and ModelOpt themselves take."""
_PACKING_BYTES = 30
"""Bytes of temporaries ModelOpt needs for each element of the matrix it is packing."""


@dataclass(frozen=True)
class Plan:
    """The outcome of `make_plan`.

    Attributes:
        source: What the user named.
        scheme: Preset or recipe.
        algo: What the checkpoint's config will say: ``NVFP4`` or ``W4A16_NVFP4``.
        kv_cache: ``fp8`` (with scales), ``fp8_cast`` (without) or ``none``.
        rows: Every module with parameters, in the model's order.
        problems: What makes the plan impossible; `quantize` refuses it with these sentences.
        warnings: What the user should know.
        calibration_tokens: Tokens to run through the model at most; 0 where nothing has to be measured.
        bytes_before: Bytes of tensors in the source.
        bytes_after: Bytes of tensors in the checkpoint.
        memory_bytes: Estimated peak memory, that of the GPU included where one is used.
    """

    source: str
    scheme: str
    algo: str
    kv_cache: str
    rows: tuple[PlanRow, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    calibration_tokens: int
    bytes_before: int
    bytes_after: int
    memory_bytes: int

    @property
    def quantized(self) -> tuple[PlanRow, ...]:
        """Rows of the matrices that become NVFP4."""
        return tuple(row for row in self.rows if row.decision == "NVFP4")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def make_plan(source: Source, options: QuantizeOptions) -> Plan:
    """Decide for every module whether it is quantized, and what the result will weigh.

    Raises:
        UsageError: The scheme is unknown or not supported.
        SourceError: The source is no model that can be converted.
        Unavailable: The device is not there.
    """
    scheme = resolve_scheme(options)
    model = build_empty(source, options.trust_remote_code)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    with quiet():
        import modelopt.torch.quantization as mtq

        try:
            mtq.quantize(model, scheme.config(calibrate=False))
            nothing = False
        except RuntimeError:  # its own check, made after the quantizers have been set: no weight quantizer is on
            nothing = True
    modules = owners(model)
    rows = tuple(decide(name, module, source, scheme, tied) for name, module in modules.items())
    quantized = [row for row in rows if row.decision == "NVFP4"]
    with_inputs = [row.name for row in quantized if enabled(modules[row.name], "input_quantizer")]
    without = [row.name for row in quantized if row.name not in set(with_inputs)]
    kv_cache, kv_scales = kv_cache_of(model)
    problems = [*unmatched(scheme, modules)]
    if nothing or not quantized:
        problems.append(f"nothing would be quantized: no rule of {scheme.name} fits a linear layer of this model")
    for row in quantized:
        problems += problems_of(row, modules[row.name], tied)
    if with_inputs and without:
        problems.append(f"{without[0]} would be NVFP4 in its weights only and {with_inputs[0]} in its activations too")
    if options.kv_cache != "none" and kv_cache == "none":
        problems.append(f"kv_cache {options.kv_cache}: ModelOpt finds no attention it can quantize in this model")
    calibrated = bool(with_inputs) or kv_cache == "fp8"
    context = getattr(model.config, "max_position_embeddings", None)
    if calibrated and context and options.calibration.seq_len > context:
        problems.append(
            f"calibration texts of {options.calibration.seq_len} tokens are longer than the model's {context} positions"
        )
    return Plan(
        source=source.spec,
        scheme=scheme.name,
        algo="NVFP4" if with_inputs else "W4A16_NVFP4",
        kv_cache=kv_cache,
        rows=rows,
        problems=tuple(problems),
        warnings=tuple(_warnings(rows, source)),
        calibration_tokens=options.calibration.samples * options.calibration.seq_len if calibrated else 0,
        bytes_before=sum(info.nbytes for info in source.tensors.values()),
        bytes_after=sum(row.bytes_after for row in rows) + 4 * kv_scales,
        memory_bytes=_memory(model, source, quantized, options, calibrated),
    )


def _warnings(rows: tuple[PlanRow, ...], source: Source) -> Iterator[str]:
    decisions = {row.name: row.decision for row in rows}
    for name in decisions:
        parent, _, leaf = name.rpartition(".")
        for shards in FUSED.values():
            group = {decisions.get(f"{parent}.{shard}") for shard in shards}
            if leaf == shards[0] and len(group) > 1:
                yield f"{parent}: {', '.join(shards)} are not treated alike; servers that fuse them will refuse that"
    strays = sorted(name for name in source.tensors if name.rpartition(".")[0] not in decisions)
    if strays:
        yield f"{len(strays)} tensors of the source belong to no module of the model and are left out: {strays[0]} ..."


def _memory(
    model: nn.Module, source: Source, quantized: list[PlanRow], options: QuantizeOptions, calibrated: bool
) -> int:
    """Weights before and after, and the larger of one batch's activations and the temporaries of packing a matrix."""
    config: Any = model.config
    itemsize = compute_dtype(source, pick_device(options.device)).itemsize
    weights = sum(parameter.numel() for parameter in model.parameters()) * itemsize
    hidden = getattr(config, "hidden_size", 0)
    wide = getattr(config, "intermediate_size", 4 * hidden)
    a_token = (12 * hidden + 4 * wide) * 4
    activations = options.calibration.batch_size * options.calibration.seq_len * a_token if calibrated else 0
    packing = max((row.shape[0] * row.shape[-1] for row in quantized), default=0) * _PACKING_BYTES
    packed = sum(row.bytes_after for row in quantized)
    return _LIBRARIES_BYTES + weights + packed + max(activations, packing)
