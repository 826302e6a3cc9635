"""What a checkpoint says about its own quantization, whichever of the three published spellings it uses.

- ``config.json: quantization_config`` with ``quant_method: modelopt``
- ``hf_quant_config.json`` (ModelOpt; many published checkpoints have only this one)
- ``config.json: quantization_config`` (or ``compression_config``) with ``quant_method: compressed-tensors``

Formats: https://github.com/NVIDIA/Model-Optimizer (`modelopt.torch.export.convert_hf_config`) and
https://github.com/vllm-project/compressed-tensors (`quantization.quant_config`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fp4pipe.errors import CheckpointError, first_line
from fp4pipe.exclusions import Patterns, compiled, is_excluded, is_glob, shards_of, without_wrappers

NVFP4_ALGOS = frozenset({"NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "NVFP4_AWQ", "NVFP4_SVD"})
"""Algorithms that store weights as NVFP4."""
NVFP4_INPUT_ALGOS = frozenset({"NVFP4", "NVFP4_AWQ", "NVFP4_SVD"})
"""Those of them that also quantize activations to NVFP4, and so need an input scale on disk."""
MIXED = "MIXED_PRECISION"
NONE = "NONE"
"""Algorithm of a checkpoint that quantizes its KV cache only."""


@dataclass(frozen=True)
class QuantConfig:
    """One checkpoint's quantization.

    Attributes:
        method: ``"modelopt"`` or ``"compressed-tensors"``.
        algo: ModelOpt's name: ``"NVFP4"``, ``"W4A16_NVFP4"``, ``"FP8"``, ``"MIXED_PRECISION"``, ...
        group_size: Columns that share a block scale; None when the config does not say.
        ignore: Exclude patterns as written; see `fp4pipe.exclusions`.
        kv_cache: ``"fp8"``, ``"nvfp4"`` or None.
        layers: Algorithm by module name, module pattern or class name (``"Linear"``); empty when `algo` holds for all.
        source: File the config was read from.
    """

    method: str
    algo: str
    group_size: int | None = None
    ignore: tuple[str, ...] = ()
    kv_cache: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict)
    source: str = "config.json"

    def algo_of(self, module: str) -> str | None:
        """Algorithm of the linear `module`, or None when it is left in its original precision.

        Fused names (``qkv_proj``) are resolved through their shards, and wrapping prefixes are tolerated.

        Raises:
            CheckpointError: The shards of a fused `module` have different algorithms.
        """
        if self.algo == NONE or is_excluded(module, self.ignore):
            return None
        if not self.layers:
            return self.algo
        if (own := self._listed(module)) is not None:
            return own
        found = {self._listed(shard) for shard in shards_of(module)} or {None}
        if len(found) > 1:
            raise CheckpointError(
                f"{self.source}: the parts of fused module {module} have different algorithms",
                because=", ".join(sorted(str(algo) for algo in found)),
            )
        return found.pop() or self.layers.get("Linear")

    def _listed(self, module: str) -> str | None:
        """The algorithm that `layers` gives `module` by name or pattern; a listed parent covers its children."""
        bare = without_wrappers(module)
        for name in (bare, bare.rpartition(".")[0]):
            if (algo := self._named.get(name)) is not None:
                return algo
        return next((algo for patterns, algo in self._patterned if patterns.match(module)), None)

    @cached_property
    def _named(self) -> dict[str, str]:
        return {without_wrappers(target): algo for target, algo in self.layers.items() if not _is_pattern(target)}

    @cached_property
    def _patterned(self) -> list[tuple[Patterns, str]]:
        return [(Patterns((target,)), algo) for target, algo in self.layers.items() if _is_pattern(target)]


def _is_pattern(target: str) -> bool:
    return target.startswith("re:") or is_glob(target)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: The file is missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read", because=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON", because=first_line(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def read_quant_config(directory: Path, config: dict[str, Any]) -> QuantConfig | None:
    """The quantization of the checkpoint in `directory` whose ``config.json`` holds `config`; None when it has none.

    Raises:
        CheckpointError: A config is malformed or of an unknown method, or ``config.json`` and ``hf_quant_config.json``
            contradict each other.
    """
    found: list[QuantConfig] = []
    section = config.get("quantization_config") or config.get("compression_config")
    if section is not None:
        found.append(parse_section(_object(section, f"{directory / 'config.json'}: quantization_config")))
    path = directory / "hf_quant_config.json"
    if path.exists():
        document = read_json(path)
        section = _object(document.get("quantization", document), f"{path}: quantization")
        if section.get("quant_algo") or section.get("kv_cache_quant_algo"):
            found.append(_modelopt(section, "hf_quant_config.json"))
    for quant in found:
        for patterns in (quant.ignore, tuple(quant.layers)):
            compiled(patterns)  # an invalid regular expression is an error here, not at the first module asked for
    if len(found) == 2:
        _require_agreement(directory, *found)
    return found[0] if found else None


def parse_section(section: dict[str, Any]) -> QuantConfig:
    """Read ``config.json: quantization_config``.

    Raises:
        CheckpointError: Unknown method or malformed entry.
    """
    method = section.get("quant_method") or "modelopt"
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    if method == "modelopt" or str(method).startswith("modelopt_"):
        return _modelopt(section, "config.json")
    raise CheckpointError(
        f"config.json: quantization_config.quant_method {method!r} is not read here",
        fix="use a checkpoint of ModelOpt or compressed-tensors, or quantize the original with `fp4pipe quantize`",
    )


def _modelopt(section: dict[str, Any], source: str) -> QuantConfig:
    algo = section.get("quant_algo") or (NONE if _kv_cache(section, source) else None)
    if not isinstance(algo, str):
        raise CheckpointError(f"{source}: the quantization config has no quant_algo")
    layers: dict[str, str] = {}
    sizes = [section.get("group_size")]
    for module, entry in _object(section.get("quantized_layers") or {}, f"{source}: quantized_layers").items():
        entry = _object(entry, f"{source}: quantized_layers.{module}")
        layers[module] = str(entry.get("quant_algo"))
        if layers[module] in NVFP4_ALGOS:
            sizes.append(entry.get("group_size"))
    if algo == MIXED and not layers:
        raise CheckpointError(f"{source}: quant_algo {MIXED} without quantized_layers")
    if algo in NVFP4_ALGOS:
        groups = _object(section.get("config_groups") or {}, f"{source}: config_groups")
        for name, group in groups.items():
            weights = _object(_object(group, f"{source}: {name}").get("weights") or {}, f"{source}: {name}.weights")
            sizes.append(weights.get("group_size"))
    return QuantConfig(
        method="modelopt",
        algo=algo,
        group_size=_group_size(sizes, source),
        ignore=_patterns(section, source),
        kv_cache=_kv_cache(section, source),
        layers=layers,
        source=source,
    )


def _compressed_tensors(section: dict[str, Any]) -> QuantConfig:
    source = "config.json"
    layers: dict[str, str] = {}
    sizes: list[Any] = []
    for name, group in _object(section.get("config_groups") or {}, f"{source}: config_groups").items():
        group = _object(group, f"{source}: config_groups.{name}")
        algo = _algo_of_group(group, f"{source}: config_groups.{name}")
        if algo in NVFP4_ALGOS:
            sizes.append(group["weights"].get("group_size"))
        layers |= dict.fromkeys(_strings(group.get("targets", []), f"{source}: config_groups.{name}.targets"), algo)
    if not layers:
        raise CheckpointError(f"{source}: compressed-tensors config without config_groups")
    algos = set(layers.values())
    return QuantConfig(
        method="compressed-tensors",
        algo=algos.pop() if len(algos) == 1 else MIXED,
        group_size=_group_size(sizes, source),
        ignore=_patterns(section, source),
        kv_cache=_kv_cache(section, source),
        layers={} if set(layers) == {"Linear"} else layers,
        source=source,
    )


def _algo_of_group(group: dict[str, Any], where: str) -> str:
    """ModelOpt's name of what a compressed-tensors group does."""
    weights = _object(group.get("weights"), f"{where}.weights")
    inputs = _object(group.get("input_activations") or {}, f"{where}.input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type")
    if (bits, kind) == (8, "float"):
        return "FP8"
    if (bits, kind) != (4, "float") or weights.get("group_size") != 16:
        return f"{kind}{bits}".upper()  # INT4, INT8, or FLOAT4 with another group size (MXFP4)
    if not inputs:
        return "W4A16_NVFP4"
    input_bits = inputs.get("num_bits")
    return "NVFP4" if input_bits == 4 else "W4A8_NVFP4_FP8" if input_bits == 8 else f"W4A{input_bits}"


def _patterns(section: dict[str, Any], source: str) -> tuple[str, ...]:
    for key in ("ignore", "exclude_modules", "modules_to_not_convert"):
        if section.get(key) is not None:
            return tuple(_strings(section[key], f"{source}: {key}"))
    return ()


def _kv_cache(section: dict[str, Any], source: str) -> str | None:
    scheme = section.get("kv_cache_scheme") or section.get("kv_cache_quant_algo")
    if scheme is None:
        return None
    if isinstance(scheme, str):
        return scheme.lower()
    scheme = _object(scheme, f"{source}: kv_cache_scheme")
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    if kind == "float":
        return "fp8" if bits == 8 else "nvfp4" if bits == 4 else f"fp{bits}"
    return f"{kind}{bits}"


def _group_size(sizes: list[Any], source: str) -> int | None:
    known = [size for size in sizes if size is not None]
    if not all(type(size) is int for size in known) or len(set(known)) > 1:
        raise CheckpointError(f"{source}: group_size is stated as {', '.join(map(str, known))}")
    return known[0] if known else None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is a JSON {type(value).__name__}, not an object")
    return value


def _strings(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{where} is not a list of strings")
    return value


def _require_agreement(directory: Path, ours: QuantConfig, other: QuantConfig) -> None:
    """Refuse two configs that a loader reading the one and a loader reading the other would understand differently."""
    differences = [
        f"{name} {a!r} in {ours.source}, {b!r} in {other.source}"
        for name, a, b in (
            ("quant_method", ours.method, other.method),
            ("quant_algo", ours.algo, other.algo),
            ("kv cache", ours.kv_cache, other.kv_cache),
            ("group_size", ours.group_size or other.group_size, other.group_size or ours.group_size),
        )
        if a != b
    ]
    for a, b in ((ours, other), (other, ours)):
        only = [*sorted(set(a.ignore) - set(b.ignore)), *sorted(map(" = ".join, a.layers.items() - b.layers.items()))]
        if only:
            more = f", with {len(only) - 1} more" if only[1:] else ""
            differences.append(f"{only[0]} is only in {a.source}{more}")
    if differences:
        raise CheckpointError(
            f"{directory}: config.json and hf_quant_config.json disagree",
            because="; ".join(differences),
            fix="correct the wrong one, or delete hf_quant_config.json if config.json is right",
        )
