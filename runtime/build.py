"""Hugging Face's model on the meta device: checked, its attention replaced, and asked what each layer caches."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fp4pipe.errors import CheckpointError, Unavailable, first_line
from fp4pipe.runtime import attention
from fp4pipe.runtime.cache import LayerKV
from fp4pipe.runtime.ops import NVFP4Linear

SUPPORTED = (
    "dense decoder-only text models whose attention goes through transformers' attention interface "
    "(Llama, Qwen2, Qwen3, Mistral, Gemma 3 text, Phi3 and their like)"
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOWERS = ("vision_config", "audio_config", "speech_config")
_HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "is_causal"}
"""Attention arguments that change nothing here; `is_causal` is checked apart."""


def read_config(path: Path) -> PretrainedConfig:
    """The model's configuration, without its quantization, which is the checkpoint's to tell.

    Raises:
        CheckpointError: No readable config.json.
        Unavailable: A kind of model that the runtime does not run.
    """
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json", fix="the directory of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever a wrong field leads to
        raise CheckpointError(
            f"{path / 'config.json'} is not a configuration transformers knows", because=first_line(error)
        ) from error
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    _refuse_unsupported(config)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and not (isinstance(context, int) and context > 0):
        raise CheckpointError(f"{path / 'config.json'}: max_position_embeddings is {context!r}, no positive number")
    return config


def _refuse_unsupported(config: PretrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _unavailable(config, "it is an encoder-decoder model")
    for tower in _TOWERS:
        if getattr(config, tower, None) is not None:
            raise _unavailable(config, f"it is multimodal ({tower} in its config.json)")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise _unavailable(config, "transformers has no causal language model of that type")
    for name in _EXPERTS:
        if (getattr(config, name, None) or 0) > 1:
            raise _unavailable(config, f"it is a mixture of experts ({name} = {getattr(config, name)})")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if "dynamic" in rope_type or rope_type == "longrope":
            raise _unavailable(config, f"its rotary embedding ({rope_type}) depends on the longest sequence of a batch")


def _rope_types(parameters: Any) -> list[str]:
    """Rope types of a config, which nests them by layer type when they differ."""
    if not isinstance(parameters, dict):
        return []
    own = [parameters["rope_type"]] if isinstance(parameters.get("rope_type"), str) else []
    return own + [t for nested in parameters.values() for t in _rope_types(nested)]


def _unavailable(config: PretrainedConfig, because: str) -> Unavailable:
    return Unavailable(
        f"models of type {config.model_type!r} do not run here", because=because, fix=f"one of the {SUPPORTED}"
    )


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights: every parameter and buffer on the meta device, attention ours.

    Raises:
        Unavailable: The model does not take an attention function of another's.
        CheckpointError: The configuration describes no model that can be built.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=dtype)
    except ValueError as error:
        raise _unavailable(config, first_line(error)) from error
    except Exception as error:  # whatever a wrong field leads to
        raise CheckpointError(
            f"the {config.model_type} model of config.json cannot be built",
            because=f"{type(error).__name__}: {first_line(error)}",
            fix="the config.json that belongs to the weights",
        ) from error
    model.eval().requires_grad_(False)
    if not model.is_backend_compatible():
        raise _unavailable(config, "its attention does not go through transformers' attention interface")
    return model


def replace_linears(
    model: PreTrainedModel, names: Iterable[str], mode: str, dtype: torch.dtype
) -> dict[str, NVFP4Linear]:
    """Put an empty `NVFP4Linear` in the place of each linear in `names`.

    Raises:
        CheckpointError: The model has no linear layer of that name.
    """
    replaced: dict[str, NVFP4Linear] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        try:
            linear = model.get_submodule(name)
        except AttributeError:
            linear = None
        if not isinstance(linear, nn.Linear):
            kind = "no such module" if linear is None else f"a {type(linear).__name__} there"
            raise CheckpointError(f"{name} is quantized in the checkpoint, but the model has {kind}")
        has_bias = linear.bias is not None
        replaced[name] = NVFP4Linear(
            linear.in_features, linear.out_features, has_bias, mode, device="meta", dtype=dtype
        )
        setattr(model.get_submodule(parent), leaf, replaced[name])
    return replaced


def kv_layers_of(model: PreTrainedModel) -> list[LayerKV]:
    """What each layer caches, learnt by running the model on the meta device and watching its attention calls.

    Raises:
        Unavailable: A layer attends in a way that the paged attention does not compute, or not at all.
    """
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with torch.no_grad(), _AttentionCalls() as seen:
        try:
            model.base_model(input_ids=ids, position_ids=ids, use_cache=False)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise _unavailable(model.config, f"its forward does not run without data: {first_line(error)}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(seen.calls) != list(range(layers)):
        raise _unavailable(model.config, f"{len(seen.calls)} of its {layers} layers call the attention interface")
    return [seen.calls[layer] for layer in range(layers)]


class _AttentionCalls(TorchDispatchMode):
    """Records the shape of each layer's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, LayerKV] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fp4pipe.paged_attention.default:
            _, k, _, _, layer, _, window = args
            self.calls[layer] = LayerKV(k.shape[1], k.shape[2], window or None)
        return func(*args, **(kwargs or {}))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls to attend: ``[1, heads, T, head_dim]`` in, ``[1, T, heads, head_dim]`` out."""
    unknown = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        because = f"{type(module).__name__} asks for {', '.join(unknown)}, which the paged attention does not do"
        raise _unavailable(module.config, because)  # type: ignore[arg-type]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    torch.ops.fp4pipe.paged_attention.default(q, k, v, out, module.layer_idx, float(scale), sliding_window or 0)
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(attention.NAME, _attend)


def recompute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give `device` the buffers that no checkpoint holds (rotary frequencies, embedding scales), as transformers does.

    Call it while the parameters are still on the meta device, where initializing them costs nothing.

    Raises:
        Unavailable: transformers does not initialize one of them.
    """
    owners: list[tuple[str, nn.Module, str]] = []
    for prefix, module in model.named_modules():
        names = [name for name in module._buffers if name in module._non_persistent_buffers_set]
        module._is_hf_initialized = not names  # type: ignore[assignment]
        for name in names:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
                owners.append((prefix, module, name))
    model.initialize_weights()
    for prefix, module, name in owners:
        if module._buffers[name]._version == 0:  # type: ignore[union-attr]
            raise _unavailable(model.config, f"transformers does not say how to compute its buffer {prefix}.{name}")
