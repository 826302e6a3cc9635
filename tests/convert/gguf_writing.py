"""Writes tiny GGUF files the way llama.cpp's converter does, so that reading them back needs no big file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.tiny_models import CHAT_TEMPLATE, make_tokenizer

ARCHITECTURES = {"gemma3_text": "gemma3"}  # where GGUF's name differs from Hugging Face's
INTERLEAVED = ("llama", "granite", "smollm3")
CONTROL = ("<|pad|>", "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    "granite": {
        "tie_word_embeddings": True,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 8.0,
    },
    "smollm3": {"tie_word_embeddings": True, "num_hidden_layers": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": False},
    "olmo2": {"tie_word_embeddings": False},
    "gemma2": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 24,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        "num_hidden_layers": 7,
    },
    "phi3": {"tie_word_embeddings": False, "original_max_position_embeddings": 256},
}


def make_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A random bf16 model of `family`; norms and biases are random too, so that a wrong one shows."""
    config = AutoConfig.for_model(family, **(_SHAPE | SPECIFIC[family] | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                parameter.data = parameter.bfloat16()  # model.to() would round the rotary frequencies too
    return model.eval()


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kinds: Callable[[str], str] = lambda name: "F32",
    extra: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    metadata: Callable[[GGUFWriter], None] | None = None,
    tokenizer: Tokenizer | None = None,
    split: int = 0,
) -> Path:
    """Write `model` as GGUF.

    Args:
        path: The file to write.
        model: A model of `make_model`.
        kinds: GGML type by GGUF tensor name.
        extra: Tensors to add (they replace those of the same name).
        drop: Names of tensors to leave out.
        metadata: Adds or replaces metadata after the usual has been written.
        tokenizer: A byte-level BPE; by default the one of `make_tokenizer`.
        split: Tensors a part, for a model in parts.
    """
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, arch, split_max_tensors=split)
    _write_metadata(writer, config)
    write_tokenizer(writer, tokenizer or make_tokenizer().backend_tokenizer)
    if metadata:
        metadata(writer)
    tensors = {name: value for name, value in _tensors(model, arch).items() if name not in drop} | (extra or {})
    for name, value in tensors.items():
        kind = kinds(name) if value.ndim > 1 else "F32"
        data = quants.quantize(np.ascontiguousarray(value, np.float32), GGMLQuantizationType[kind])
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def replace(writer: GGUFWriter, key: str, value: Any) -> None:
    """Give `key` another value, or remove it with None."""
    for data in writer.kv_data:
        if value is None:
            data.pop(key, None)
        elif key in data:
            data[key].value = value


def write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, pre: str = "gpt-2") -> None:
    """The metadata of a byte-level BPE tokenizer."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    # The embedding has a few rows more than there are tokens, as many models do.
    padding = [f"[PAD{index}]" for index in range(len(tokens), _SHAPE["vocab_size"])]
    writer.add_token_list([*tokens, *padding])
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens] + [5] * len(padding))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(4)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_metadata(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None) and config.model_type != "qwen2":
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _tensors(model: nn.Module, arch: str) -> dict[str, np.ndarray]:
    config: Any = model.config
    key = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(key, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = parameter.float().numpy()
        if arch in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return tensors
