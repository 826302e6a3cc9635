"""A small NVFP4 checkpoint written by hand in either exporter's spelling, and the means to edit it.

Written without ModelOpt or compressed-tensors, so that what is tested is the published layout and not one exporter.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp4pipe import nvfp4

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 64, 96, 128, 2
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
Q = "model.layers.0.self_attn.q_proj"
"""The module most damages hit."""
SHARD1, SHARD2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def random_weights(seed: int = 0) -> dict[str, Tensor]:
    """The bfloat16 model that the checkpoints below quantize."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.1).bfloat16()

    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN), "lm_head.weight": normal(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in LINEARS.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + normal(HIDDEN)
    tensors["model.norm.weight"] = 1 + normal(HIDDEN)
    return tensors


def quantized(tensors: dict[str, Tensor], method: str, activations: bool, kv: bool) -> dict[str, Tensor]:
    """`tensors` with every decoder linear as NVFP4, sibling projections sharing their global scale."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            out[name] = tensor
            continue
        module = name.removesuffix(".weight")
        # One global scale for the whole model is the simplest that every sibling shares.
        codes, block, scale = nvfp4.quantize_weight(tensor, nvfp4.global_scale_of(torch.tensor(0.6)))
        input_scale = torch.tensor(0.004)
        if method == "modelopt":
            out |= {f"{module}.weight": codes, f"{module}.weight_scale": block, f"{module}.weight_scale_2": scale}
            out |= {f"{module}.input_scale": input_scale} if activations else {}
        else:
            out |= {f"{module}.weight_packed": codes, f"{module}.weight_scale": block}
            out[f"{module}.weight_global_scale"] = scale.reciprocal().reshape(1)
            out |= {f"{module}.input_global_scale": input_scale.reciprocal().reshape(1)} if activations else {}
        if kv and module.endswith(("k_proj", "v_proj")):
            letter = module.rpartition(".")[2][0]
            parent = module if method == "modelopt" else module.rpartition(".")[0]
            out[f"{parent}.{letter}_scale"] = torch.tensor(0.02)
    return out


def quant_section(method: str, activations: bool, kv: bool) -> dict[str, Any]:
    """``quantization_config`` as the exporters write it."""
    four: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": {**four, "dynamic": False}, "targets": ["Linear"]}
    if activations:
        group["input_activations"] = {**four, "dynamic": False if method == "modelopt" else "local"}
    section: dict[str, Any] = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quant_method": method}
    if kv:
        section["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if method == "modelopt":
        return section | {"quant_algo": "NVFP4" if activations else "W4A16_NVFP4"}
    return section | {"format": "nvfp4-pack-quantized", "quantization_status": "compressed"}


def write_checkpoint(
    path: Path,
    *,
    method: str = "modelopt",
    activations: bool = True,
    kv: bool = False,
    sharded: bool = True,
    configs: tuple[str, ...] = ("config.json", "hf_quant_config.json"),
) -> Path:
    """Write a sound checkpoint to `path`.

    Args:
        path: Directory to create.
        method: ``"modelopt"`` or ``"compressed-tensors"``.
        activations: W4A4 with input scales, else W4A16.
        kv: With FP8 KV scales.
        sharded: Two files and an index, else one file.
        configs: Which files state the quantization (the second for ModelOpt only).
    """
    path.mkdir(parents=True)
    tensors = quantized(random_weights(), method, activations, kv)
    save_shards(path, tensors, sharded)
    section = quant_section(method, activations, kv)
    config = CONFIG | ({"quantization_config": section} if "config.json" in configs else {})
    write_json(path / "config.json", config)
    if method == "modelopt" and "hf_quant_config.json" in configs:
        quantization = {
            "quant_algo": section["quant_algo"],
            "kv_cache_quant_algo": "FP8" if kv else None,
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        }
        write_json(path / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": quantization})
    write_json(path / "generation_config.json", {"eos_token_id": 2})
    write_json(path / "tokenizer.json", {"version": "1.0"})
    write_json(path / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    return path


def save_shards(path: Path, tensors: dict[str, Tensor], sharded: bool) -> None:
    """Save `tensors` as one file, or as two and an index."""
    if not sharded:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    parts = {SHARD1: names[: len(names) // 2], SHARD2: names[len(names) // 2 :]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, path / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map = {name: file for file, members in parts.items() for name in members}
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


# ---- editing --------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path`."""
    path.write_text(json.dumps(value, indent=2))


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let `change` alter the object in `path`."""
    value = json.loads(path.read_text())
    change(value)
    write_json(path, value)


def edit_tensors(file: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Let `change` alter the tensors of `file`."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_index(path: Path, change: Callable[[dict[str, str]], Any]) -> None:
    """Let `change` alter the weight map."""
    edit_json(path / "model.safetensors.index.json", lambda index: change(index["weight_map"]))


def poke(path: Path, name: str, value: float, index: int = 0) -> None:
    """Set one element of the scale `name`, wherever it lies."""
    for file in path.glob("*.safetensors"):
        if name in load_file(file):

            def change(tensors: dict[str, Tensor]) -> None:
                tensors[name].view(-1)[index] = torch.tensor(value).to(tensors[name].dtype)

            edit_tensors(file, change)


def raw_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Bytes of a safetensors file with any header (an object, or bytes as they are)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data
