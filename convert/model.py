"""Building the Hugging Face model of a source, empty or with its weights, and refusing the kinds not supported."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fp4pipe.convert.quiet import quiet
from fp4pipe.convert.source import FLOATING, Source
from fp4pipe.errors import Fp4pipeError, SourceError, first_line

_CAUSAL_LM = ("ForCausalLM", "LMHeadModel")
"""How the names of causal language models' classes end."""
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_SUPPORTED = "dense decoder-only language models (Llama, Qwen2, Qwen3, Mistral, Gemma 3 text, Phi3 and their like)"


def read_config(source: Source, trust_remote_code: bool) -> Any:
    """The transformers config of `source`.

    Raises:
        SourceError: transformers does not know the model type, or it is no kind of model that can be converted.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises whatever a wrong field leads to
        raise SourceError(
            f"{source.spec}: config.json is not understood by transformers", because=first_line(error)
        ) from error
    if (reason := unsupported_architecture(config)) is not None:
        raise SourceError(f"{source.spec} cannot be converted", because=reason, fix=f"one of the {_SUPPORTED}")
    return config


def unsupported_architecture(config: Any) -> str | None:
    """Why models of this config are refused, None for one that is supported."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        return f"{config.model_type} is an encoder-decoder model"
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            return f"{config.model_type} has a {part.removesuffix('_config')} part; only text models are converted"
    if any(_count(config, name) > 1 for name in _EXPERT_COUNTS):
        return f"{config.model_type} is a mixture of experts, which is not supported yet"
    own_code = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and own_code is None:
        return f"{config.model_type} is no causal language model"
    classes = getattr(config, "architectures", None) or []
    if own_code is None and classes and not any(name.endswith(_CAUSAL_LM) for name in classes):
        return f"its weights are those of {classes[0]}, not of a causal language model"
    return None


def build_empty(source: Source, trust_remote_code: bool) -> nn.Module:
    """The model on the meta device: structure, shapes and dtypes without memory.

    Raises:
        SourceError: The kind of model is not supported, or it cannot be built from its config.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(source, trust_remote_code)
    try:
        with quiet(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=source_dtype(source), trust_remote_code=trust_remote_code
            )
    except Exception as error:  # as above
        raise SourceError(f"{source.spec}: the model cannot be built", because=first_line(error)) from error


def load(source: Source, *, device: torch.device, trust_remote_code: bool) -> nn.Module:
    """The model with its weights in `compute_dtype`, ready for inference.

    Raises:
        SourceError: A tensor is missing from the files or has another shape than the config says.
    """
    from transformers import AutoModelForCausalLM

    read_config(source, trust_remote_code)
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.path,
                dtype=compute_dtype(source, device),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else it raises without saying which
            )
    except (Fp4pipeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # as above
        raise SourceError(f"{source.spec}: the weights cannot be loaded", because=first_line(error)) from error
    model, info = loaded
    if names := sorted(info["missing_keys"]):
        others = f" and {len(names) - 1} others" if names[1:] else ""
        raise SourceError(
            f"{source.spec}: {names[0]} is missing in the weights", because=f"config.json promises it{others}"
        )
    for name, held, promised in sorted(info["mismatched_keys"]):
        raise SourceError(
            f"{source.spec}: {name} is {_shape(held)} in the weights",
            because=f"config.json promises {_shape(promised)}",
        )
    return model.to(device).eval()


def source_dtype(source: Source) -> torch.dtype:
    """The dtype most of the source's floating-point bytes have."""
    sizes: dict[torch.dtype, int] = {}
    for info in source.tensors.values():
        if info.dtype in FLOATING:
            sizes[info.torch_dtype] = sizes.get(info.torch_dtype, 0) + info.nbytes
    if not sizes:
        raise SourceError(f"{source.spec} holds no bf16, fp16 or fp32 tensor")
    return max(sizes, key=lambda dtype: sizes[dtype])


def compute_dtype(source: Source, device: torch.device) -> torch.dtype:
    """The dtype calibration runs in: the source's, or float32 on a CPU that multiplies that one many times slower."""
    dtype = source_dtype(source)
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return dtype if dtype == torch.bfloat16 and has_bf16 else torch.float32


def _count(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))
