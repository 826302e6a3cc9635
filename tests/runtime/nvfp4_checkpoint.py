"""NVFP4 checkpoints in both layouts, made from tiny models with `fp4pipe.nvfp4` alone: fast, and without ModelOpt."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp4pipe import nvfp4

INPUT_AMAX = 8.0
"""Calibrated activation amax that every linear claims."""


def is_linear(name: str, head: bool) -> bool:
    return name.endswith("_proj.weight") or (head and name == "lm_head.weight")


def quantize_tiny(
    source: Path, out: Path, *, layout: str = "modelopt", activations: bool = True, head: bool = False
) -> Path:
    """Quantize every projection of the tiny model in `source`; embeddings stay.

    Args:
        source: Directory of an unquantized model in one file.
        out: Directory to create.
        layout: ``modelopt`` or ``compressed-tensors``.
        activations: Whether linears carry input scales. They differ between layers and projections, but are equal
            where an exporter makes them so: q, k and v, and gate and up.
        head: Whether the head is quantized too (ModelOpt's layout only).
    """
    shutil.copytree(source, out)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not is_linear(name, head):
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        codes, block_scale, global_scale = nvfp4.quantize_weight(tensor.float())
        input_scale = nvfp4.global_scale_of(torch.tensor(INPUT_AMAX + len(module.split("_proj")[0]) % 2))
        if layout == "modelopt":
            tensors |= {name: codes, f"{module}.weight_scale": block_scale, f"{module}.weight_scale_2": global_scale}
            if activations:
                tensors[f"{module}.input_scale"] = input_scale
        else:
            tensors |= {f"{module}.weight_packed": codes, f"{module}.weight_scale": block_scale}
            tensors[f"{module}.weight_global_scale"] = global_scale.reciprocal().reshape(1)
            if activations:
                tensors[f"{module}.input_global_scale"] = input_scale.reciprocal().reshape(1)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = (
        _modelopt(activations, head) if layout == "modelopt" else _compressed_tensors(activations)
    )
    (out / "config.json").write_text(json.dumps(config))
    return out


def _modelopt(activations: bool, head: bool) -> dict[str, object]:
    algo = "NVFP4" if activations else "W4A16_NVFP4"
    weights = {"num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    group = {"weights": weights, "targets": ["Linear"]} | ({"input_activations": weights} if activations else {})
    ignore = [] if head else ["lm_head"]
    return {"quant_method": "modelopt", "quant_algo": algo, "config_groups": {"group_0": group}, "ignore": ignore}


def _compressed_tensors(activations: bool) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK, "strategy": "tensor_group", "symmetric": True}
    inputs = weights | {"dynamic": "local"} if activations else None
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
