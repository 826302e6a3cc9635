"""The Hugging Face config of a GGUF model, from its metadata and the presence of tensors."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4pipe.convert.gguf_file import GGUFFile
from fp4pipe.errors import SourceError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Family:
    """How GGUF stores an architecture.

    Attributes:
        model_type: Hugging Face's name of it.
        interleaved_rope: Rows of q and k pair rotary dimensions as (2i, 2i+1), where Hugging Face has (i, i + d/2).
        unit_norms: Norm weights are stored as the factor itself, where Hugging Face stores factor - 1.
        extra: Fields of the config that only this family has.
    """

    model_type: str
    interleaved_rope: bool = False
    unit_norms: bool = False
    extra: Callable[[GGUFFile, dict[str, Any]], dict[str, Any]] = lambda file, common: {}


def _llama(file: GGUFFile, _: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def _granite(file: GGUFFile, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_llama(file, common),
        "attention_multiplier": float(file.require("{arch}.attention.scale")),
        "embedding_multiplier": float(file.require("{arch}.embedding_scale")),
        "residual_multiplier": float(file.require("{arch}.residual_scale")),
        "logits_scaling": float(file.require("{arch}.logit_scale")),
    }


def _gemma2(file: GGUFFile, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": int(file.require("{arch}.attention.sliding_window")),
        "attn_logit_softcapping": _optional_float(file, "{arch}.attn_logit_softcapping"),
        "final_logit_softcapping": _optional_float(file, "{arch}.final_logit_softcapping"),
        "query_pre_attn_scalar": _gemma_query_scalar(common, depth_of_27b=46),
    }


def _gemma3(file: GGUFFile, common: dict[str, Any]) -> dict[str, Any]:
    pattern = file.get("{arch}.attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray):
        local = [bool(flag) for flag in pattern][: common["num_hidden_layers"]]
    else:
        local = [bool((layer + 1) % int(pattern)) for layer in range(common["num_hidden_layers"])]
    sliding_theta = float(file.get("{arch}.rope.freq_base_swa", 10_000.0))
    return {
        "sliding_window": int(file.require("{arch}.attention.sliding_window")),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in local],
        "final_logit_softcapping": _optional_float(file, "{arch}.final_logit_softcapping"),
        "query_pre_attn_scalar": _gemma_query_scalar(common, depth_of_27b=62),
        # Scaling stretches the global layers alone.
        "rope_parameters": {
            "full_attention": common["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding_theta},
        },
    }


def _gemma_query_scalar(common: dict[str, Any], *, depth_of_27b: int) -> int:
    """Not in the metadata: 27B models, known by their depth, scale by hidden size a head, all others by head size."""
    if common["num_hidden_layers"] == depth_of_27b:
        return common["hidden_size"] // common["num_attention_heads"]
    return common["head_dim"]


def _phi3(file: GGUFFile, common: dict[str, Any]) -> dict[str, Any]:
    rotary = int(file.get("{arch}.rope.dimension_count", common["head_dim"]))
    rope = {**common["rope_parameters"], "partial_rotary_factor": rotary / common["head_dim"]}
    original = int(file.get("{arch}.rope.scaling.original_context_length", common["max_position_embeddings"]))
    if "rope_factors_long.weight" in file.tensors:
        rope["rope_type"] = "longrope"
        rope["original_max_position_embeddings"] = original
        for length in ("long", "short"):
            rope[f"{length}_factor"] = [float(value) for value in _vector(file, f"rope_factors_{length}.weight")]
    window = int(file.get("{arch}.attention.sliding_window", 0))
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": window or None,
    }


FAMILIES = {
    "llama": Family("llama", interleaved_rope=True, extra=_llama),
    "granite": Family("granite", interleaved_rope=True, extra=_granite),
    "smollm3": Family("smollm3", interleaved_rope=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "olmo2": Family("olmo2"),
    "gemma2": Family("gemma2", unit_norms=True, extra=_gemma2),
    "gemma3": Family("gemma3_text", unit_norms=True, extra=_gemma3),
    "phi3": Family("phi3", extra=_phi3),
}


def family_of(file: GGUFFile) -> Family:
    """The family of a GGUF model.

    Raises:
        SourceError: the architecture, or its mixture-of-experts form, is not one that can be converted.
    """
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise SourceError(
            f"{file.path.name}: architecture {file.architecture!r} cannot be converted from GGUF",
            because=f"these can: {', '.join(sorted(FAMILIES))}",
            fix="start from the model's Hugging Face directory",
        )
    if file.get("{arch}.expert_count"):
        raise SourceError(
            f"{file.path.name}: mixture-of-experts models cannot be converted from GGUF",
            fix="start from the model's Hugging Face directory",
        )
    return family


def build_config(file: GGUFFile, *, tied: bool, token_ids: dict[str, Any]) -> "PreTrainedConfig":
    """The Hugging Face config, of its own config class.

    Args:
        file: The GGUF model.
        tied: Whether the output head is the embedding matrix.
        token_ids: `bos_token_id`, `eos_token_id` and so on, as the tokenizer has them.

    Raises:
        SourceError: metadata is missing, or says something no Hugging Face config of this family can.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = family_of(file)
    common = _common(file)
    fields = {**common, "tie_word_embeddings": tied, **token_ids, **family.extra(file, common)}
    try:
        config = AutoConfig.for_model(family.model_type, **fields)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]]
    except (ValueError, TypeError) as error:
        reason = first_line(error)
        raise SourceError(f"{file.path.name}: metadata is inconsistent", because=reason) from error
    config.dtype = "bfloat16"
    return config


def _common(file: GGUFFile) -> dict[str, Any]:
    hidden, heads = _one(file, "{arch}.embedding_length"), _one(file, "{arch}.attention.head_count")
    if "token_embd.weight" not in file.tensors:
        raise SourceError(f"{file.path.name}: tensor token_embd.weight is missing")
    if hidden < 1 or heads < 1:
        raise SourceError(f"{file.path.name}: embedding_length is {hidden} and head_count {heads}")
    blocks = {int(name.split(".")[1]) for name in file.tensors if re.match(r"blk\.\d+\.", name)}
    layers = _one(file, "{arch}.block_count")
    if layers != len(blocks) or blocks != set(range(layers)):
        found = ", ".join(map(str, sorted(blocks)[:8])) + (", ..." if len(blocks) > 8 else "")
        raise SourceError(f"{file.path.name}: metadata says {layers} blocks, and there are tensors of blocks {found}")
    head_dim = _one(file, "{arch}.attention.key_length", hidden // heads)
    value_dim = _one(file, "{arch}.attention.value_length", head_dim)
    rotary = _one(file, "{arch}.rope.dimension_count", head_dim)
    if value_dim != head_dim:
        raise SourceError(
            f"{file.path.name}: keys of {head_dim} and values of {value_dim} dimensions are not supported"
        )
    if rotary != head_dim and file.architecture != "phi3":
        raise SourceError(f"{file.path.name}: rotary positions on {rotary} of {head_dim} dimensions are not supported")
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": _one(file, "{arch}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _one(file, "{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _one(file, "{arch}.context_length"),
        "rms_norm_eps": float(file.require("{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, head_dim),
    }


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.get("{arch}.rope.freq_base", 10_000.0))}
    kind = file.get("{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3_scaling(file, head_dim, rope["rope_theta"])
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(file.require("{arch}.rope.scaling.factor"))}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = _one(file, "{arch}.rope.scaling.original_context_length")
    elif kind not in ("none", "longrope"):
        raise SourceError(f"{file.path.name}: rope scaling {kind!r} is not supported")
    return rope


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF keeps only as the resulting divisors of the rotary frequencies.

    The rule (`rope_type: llama3`): wavelengths over `original` are stretched by `factor`, those under `original / 4`
    not at all, those between by a linear blend of frequencies. Every published model has the 1, 4 and 8192 used here;
    the divisors are recomputed from them and must agree.
    """
    stored = _vector(file, "rope_freqs.weight")
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    kept = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - kept) / factor + kept)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise SourceError(
            f"{file.path.name}: rope_freqs.weight follows no known rope scaling",
            because=f"Llama 3's rule with factor {factor:g} over {original} positions gives other divisors",
        )
    scaling = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": original}


def _vector(file: GGUFFile, name: str) -> np.ndarray:
    if name not in file.tensors:
        raise SourceError(f"{file.path.name}: tensor {name} is missing")
    return file.rows(file.tensors[name], 0, 1)[0]


def _one(file: GGUFFile, key: str, default: int | None = None) -> int:
    """An integer; GGUF may give one a layer, which the families here cannot have unless all are equal."""
    value = file.get(key, default) if default is not None else file.require(key)
    if isinstance(value, np.ndarray):
        if len(set(value.tolist())) != 1:
            raise SourceError(f"{file.path.name}: {key.format(arch=file.architecture)} differs between layers")
        value = value[0]
    return int(value)


def _optional_float(file: GGUFFile, key: str) -> float | None:
    value = file.get(key)
    return None if value is None else float(value)
