"""What a quantization will do, found out on the meta device: nothing is loaded and nothing is computed.

ModelOpt itself inserts its quantizers into the empty model, so the plan cannot differ from what it then does.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

from torch import nn

from fp4pipe.convert.model import build_empty
from fp4pipe.convert.options import QuantizeOptions
from fp4pipe.convert.quiet import quiet
from fp4pipe.convert.scheme import Scheme, exclusion_rules, resolve_scheme
from fp4pipe.convert.source import Source
from fp4pipe.exclusions import FUSED
from fp4pipe.nvfp4 import BLOCK

_LIBRARIES_BYTES = 1 << 30
"""What Python, PyTorch, transformers and ModelOpt themselves take."""
_QUANTIZER_BYTES = 20
"""Bytes of temporaries ModelOpt needs for each element of the matrix it is packing."""


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
        memory_bytes: Estimated peak memory.
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
    """
    scheme = resolve_scheme(options)
    model = build_empty(source, options.trust_remote_code)
    with quiet():
        import modelopt.torch.quantization as mtq

        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        try:
            mtq.quantize(model, scheme.config(calibrate=False))
            nothing = False
        except RuntimeError:  # its check that any weight quantizer is enabled, after they have been set
            nothing = True
    modules = dict(_owners(model))
    rows = tuple(_row(name, module, source, scheme, tied) for name, module in modules.items())
    kv_cache, kv_scales = _kv_cache(model)
    quantized = {row.name for row in rows if row.decision == "NVFP4"}
    with_inputs = {name for name in quantized if _enabled(modules[name], "input_quantizer")}
    problems = [
        *_unmatched(scheme, modules),
        *(["nothing would be quantized: no rule of the scheme fits a linear layer of this model"] * nothing),
        *(
            problem
            for row in rows
            if row.decision == "NVFP4"
            for problem in _row_problems(row, modules[row.name], tied)
        ),
    ]
    if with_inputs and with_inputs != quantized:
        problems.append(
            f"{min(quantized - with_inputs)} would have NVFP4 weights only and {min(with_inputs)} NVFP4 activations too; "
            "a mixture is not supported"
        )
    if options.kv_cache != "none" and kv_cache == "none":
        problems.append(f"kv_cache {options.kv_cache}: ModelOpt finds no attention it can quantize in this model")
    calibrated = bool(with_inputs) or kv_cache == "fp8"
    calibration = options.calibration
    return Plan(
        source=source.spec,
        scheme=scheme.name,
        algo="NVFP4" if with_inputs else "W4A16_NVFP4",
        kv_cache=kv_cache,
        rows=rows,
        problems=tuple(problems),
        warnings=tuple(_warnings(rows, source)),
        calibration_tokens=calibration.samples * calibration.seq_len if calibrated else 0,
        bytes_before=sum(info.nbytes for info in source.tensors.values()),
        bytes_after=sum(row.bytes_after for row in rows) + 4 * kv_scales,
        memory_bytes=_memory(model, rows, options, calibrated),
    )


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own parameters; ModelOpt's quantizers own buffers only."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield name, module


def _row(name: str, module: nn.Module, source: Source, scheme: Scheme, tied: set[str]) -> PlanRow:
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight", next(iter(parameters.values())))
    infos = [source.tensors[f"{name}.{key}"] for key in parameters if f"{name}.{key}" in source.tensors]
    quantized = _enabled(module, "weight_quantizer")
    after = sum(info.nbytes for info in infos)
    if f"{name}.weight" in tied:
        after = 0
    if quantized:
        after += weight.numel() // 2 + weight.numel() // BLOCK + 4 - weight.numel() * weight.element_size()
        after += 4 * _enabled(module, "input_quantizer")
    kind = module.get_original_cls_by_level(level=0) if hasattr(module, "get_original_cls_by_level") else type(module)
    return PlanRow(
        name=name,
        kind=kind.__name__,
        shape=tuple(weight.shape),
        dtype=next((i.dtype for i in infos if i.name == f"{name}.weight"), infos[0].dtype if infos else "none"),
        decision="NVFP4" if quantized else "kept",
        reason=_reason(name, module, kind, scheme, tied),
        bytes_before=sum(info.nbytes for info in infos),
        bytes_after=after,
    )


def _reason(name: str, module: nn.Module, kind: type, scheme: Scheme, tied: set[str]) -> str:
    quantizer = f"{name}.weight_quantizer"
    if not hasattr(module, "weight_quantizer"):
        return "not a linear layer"
    rule = scheme.rule_for(quantizer, kind)
    if module.weight_quantizer.is_enabled:
        activations = " and activations" if _enabled(module, "input_quantizer") else ""
        return f"weights{activations}, by rule {rule} of {scheme.name}"
    if f"{name}.weight" in tied:
        return "shares the embedding's weight"
    if issubclass(kind, nn.Embedding):
        return "embeddings are looked up, not multiplied"
    for pattern in scheme.excluded:
        if any(fnmatch(quantizer, excluding) for excluding in exclusion_rules(pattern)):
            return f"excluded by you: {pattern}"
    return f"no rule of {scheme.name} includes it" if rule in (None, "*") else f"rule {rule} of {scheme.name} keeps it"


def _enabled(module: nn.Module, quantizer: str) -> bool:
    return bool(getattr(getattr(module, quantizer, None), "is_enabled", False))


def _kv_cache(model: nn.Module) -> tuple[str, int]:
    """The KV cache format as ModelOpt has set it, and how many scales it will export."""
    found = [
        module
        for name, module in model.named_modules()
        if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer")) and getattr(module, "is_enabled", False)
    ]
    if not found:
        return "none", 0
    constant = [module for module in found if getattr(module, "_use_constant_amax", False)]
    return ("fp8_cast", 0) if constant else ("fp8", len(found))


def _unmatched(scheme: Scheme, modules: dict[str, nn.Module]) -> Iterator[str]:
    for pattern in scheme.excluded:
        rules = exclusion_rules(pattern)
        if not any(fnmatch(f"{name}.weight_quantizer", rule) for name in modules for rule in rules):
            yield f"exclude {pattern!r} matches no module"


def _row_problems(row: PlanRow, module: nn.Module, tied: set[str]) -> Iterator[str]:
    if not isinstance(module, nn.Linear):
        yield f"{row.name} is a {row.kind}; only linear layers can be NVFP4: exclude {row.name}"
    elif row.shape[-1] % BLOCK:
        yield (
            f"{row.name} has {row.shape[-1]} columns, which is no multiple of {BLOCK}, the size of an NVFP4 block: "
            f"exclude {row.name}"
        )
    if f"{row.name}.weight" in tied:
        yield f"{row.name} shares its weight with the embedding, which stays as it is: exclude {row.name}"


def _warnings(rows: tuple[PlanRow, ...], source: Source) -> Iterator[str]:
    decisions = {row.name: row.decision for row in rows}
    for name in decisions:
        parent, _, leaf = name.rpartition(".")
        for shards in FUSED.values():
            group = [f"{parent}.{shard}" for shard in shards]
            if leaf == shards[0] and len({decisions.get(member, "") for member in group}) > 1:
                yield f"{parent}: {', '.join(shards)} are not all quantized alike; servers that fuse them will refuse that"
    owned = {row.name for row in rows}
    strays = sorted(name for name in source.tensors if name.rpartition(".")[0] not in owned)
    if strays:
        yield f"{len(strays)} tensors of the source belong to no module of the model and are left out: {strays[0]} ..."


def _memory(model: nn.Module, rows: tuple[PlanRow, ...], options: QuantizeOptions, calibrated: bool) -> int:
    """Weights, plus the larger of one batch's activations and the temporaries of packing the largest matrix."""
    config: Any = model.config
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    tokens = options.calibration.batch_size * options.calibration.seq_len if calibrated else 0
    hidden = getattr(config, "hidden_size", 0)
    wide = getattr(config, "intermediate_size", 4 * hidden)
    activations = (
        tokens * (12 * hidden + 4 * wide) * 4 + options.calibration.batch_size * getattr(config, "vocab_size", 0) * 4
    )
    largest = max((row.shape[0] * row.shape[-1] for row in rows if row.decision == "NVFP4"), default=0)
    return _LIBRARIES_BYTES + weights + max(activations, largest * _QUANTIZER_BYTES)
