"""ModelOpt's presets and recipes: finding one by name, and refusing what this project cannot do right."""

import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fp4pipe.convert.options import QuantizeOptions
from fp4pipe.convert.quiet import quiet
from fp4pipe.errors import UsageError, first_line

NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
FP8 = {"num_bits": (4, 3)}
FP8_CAST = {"num_bits": (4, 3), "use_constant_amax": True}
KV_FORMATS = ("none", "fp8", "fp8_cast")
ALGORITHMS = ("max",)
_RECIPES = "general/ptq"


@dataclass(frozen=True)
class Scheme:
    """What ModelOpt is told.

    Attributes:
        name: Preset or recipe, as given.
        quant_cfg: ModelOpt's ordered list of rules; later ones win.
        algorithm: Its calibration algorithm.
        excluded: The user's patterns, each the cause of two rules at the end of `quant_cfg`.
    """

    name: str
    quant_cfg: list[dict[str, Any]]
    algorithm: Any
    excluded: tuple[str, ...]

    def config(self, *, calibrate: bool = True) -> dict[str, Any]:
        """The argument of `mtq.quantize`; without `calibrate` the quantizers are inserted and nothing is measured."""
        return {"quant_cfg": copy.deepcopy(self.quant_cfg), "algorithm": self.algorithm if calibrate else None}

    def rule_for(self, quantizer: str, parent: type) -> str | None:
        """Pattern of the last rule about the quantizer of this name in a module of class `parent`; None if none is."""
        classes = {None, *(f"nn.{base.__name__}" for base in parent.__mro__)}
        matching = [
            rule["quantizer_name"]
            for rule in self.quant_cfg
            if fnmatch(quantizer, rule["quantizer_name"]) and rule.get("parent_class") in classes
        ]
        return matching[-1] if matching else None


def resolve_scheme(options: QuantizeOptions) -> Scheme:
    """Look the scheme up, add the KV cache format and the user's exclusions.

    Raises:
        UsageError: Unknown names, or a scheme outside what is supported: NVFP4 with blocks of 16 for weights, NVFP4 or
            nothing for activations, FP8 or nothing for the KV cache, calibrated by `max`.
    """
    if options.algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm {options.algorithm!r} is not supported", fix=f"one of: {', '.join(ALGORITHMS)}")
    if options.kv_cache not in KV_FORMATS:
        raise UsageError(
            f"KV cache format {options.kv_cache!r} is not supported", fix=f"one of: {', '.join(KV_FORMATS)}"
        )
    config = _look_up(options.scheme)
    if (reason := _unsupported(config)) is not None:
        raise UsageError(
            f"scheme {options.scheme} is not supported",
            because=reason,
            fix=f"a preset ({', '.join(supported_presets())}) or a recipe of the same kind",
        )
    rules = [dict(rule) for rule in config["quant_cfg"]]
    with quiet():
        from modelopt.recipe.presets import KV_QUANT_CFG_CHOICES
    if options.kv_cache != "none":
        rules += copy.deepcopy(KV_QUANT_CFG_CHOICES[options.kv_cache]["quant_cfg"])
    for pattern in options.exclude:
        rules += [{"quantizer_name": name, "enable": False} for name in exclusion_rules(pattern)]
    return Scheme(options.scheme, rules, config["algorithm"], options.exclude)


def exclusion_rules(pattern: str) -> tuple[str, str]:
    """Quantizer patterns for everything in the modules that `pattern` means; the KV cache is no module's."""
    return f"{pattern}.*weight_quantizer", f"{pattern}.*input_quantizer"


def supported_presets() -> list[str]:
    """Names of ModelOpt's presets that `resolve_scheme` accepts."""
    with quiet():
        from modelopt.recipe.presets import QUANT_CFG_CHOICES
    return [name for name, config in QUANT_CFG_CHOICES.items() if _unsupported(config) is None]


def _look_up(name: str) -> Mapping[str, Any]:
    with quiet():
        from modelopt.recipe import load_recipe
        from modelopt.recipe.presets import QUANT_CFG_CHOICES

        if name in QUANT_CFG_CHOICES:
            return QUANT_CFG_CHOICES[name]
        for candidate in (name, f"{_RECIPES}/{name}"):
            try:
                recipe = load_recipe(candidate)
            except ValueError as error:
                if "not a valid YAML file" in str(error):
                    continue
                raise UsageError(f"ModelOpt recipe {name} cannot be read", because=first_line(error)) from error
            except Exception as error:  # YAML and import errors of several libraries
                raise UsageError(f"ModelOpt recipe {name} cannot be read", because=first_line(error)) from error
            section = getattr(recipe, "quantize", None)
            if section is None:
                raise UsageError(f"ModelOpt recipe {name} does not quantize", because="it has no `quantize` section")
            return section.model_dump(exclude_unset=True)
    if Path(name).suffix in (".yaml", ".yml"):
        raise UsageError(f"ModelOpt recipe {name}: no such file")
    close = difflib.get_close_matches(name, supported_presets(), n=1)
    raise UsageError(
        f"unknown scheme {name!r}",
        fix=f"{close[0]}" if close else f"a preset ({', '.join(supported_presets())}), a ModelOpt recipe or its path",
    )


def _unsupported(config: Mapping[str, Any]) -> str | None:
    """Why this configuration cannot be done right here; None if it can."""
    algorithm = config["algorithm"]
    method = algorithm.get("method") if isinstance(algorithm, Mapping) else algorithm
    if method not in ALGORITHMS:
        return f"its algorithm is {method}"
    if isinstance(algorithm, Mapping) and any(map(_is_set, (v for k, v in algorithm.items() if k != "method"))):
        return f"its algorithm is {dict(algorithm)}"
    weights = False
    for rule in config["quant_cfg"]:
        cfg = rule.get("cfg")
        if not cfg or rule.get("enable") is False:
            continue
        name = rule["quantizer_name"]
        formats = _formats_for(name)
        if formats is None:
            return f"it quantizes {name}"
        if _plain(cfg) not in formats:
            return f"its rule for {name} is {_plain(cfg)}"
        weights |= name.endswith("weight_quantizer")
    return None if weights else "it quantizes no weights to NVFP4"


def _formats_for(quantizer: str) -> tuple[dict[str, Any], ...] | None:
    if quantizer.endswith(("weight_quantizer", "input_quantizer")):
        return (NVFP4,)
    if quantizer.endswith("[kv]_bmm_quantizer"):
        return FP8, FP8_CAST
    return None


def _is_set(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_set, value.values()))
    return bool(value)


def _plain(cfg: Any) -> Any:
    """A quantizer's attributes without those that are unset or only informative; sequences as tuples."""
    if not isinstance(cfg, Mapping):
        return cfg
    kept = {key: _value(value) for key, value in cfg.items() if key not in ("effective_bits", "enable")}
    return {key: value for key, value in kept.items() if value is not None}


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {int(k) if str(k).lstrip("-").isdigit() else k: _value(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return value
