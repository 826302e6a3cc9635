"""Correcting what ModelOpt's exporter leaves in a checkpoint; only the files that need it are rewritten."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fp4pipe import console
from fp4pipe.convert.source import Source
from fp4pipe.quant_config import read_json
from fp4pipe.safetensors_file import TensorInfo, read_header, read_tensor
from fp4pipe.shards import INDEX

_METADATA = {"format": "pt"}
_PARTS = ("weight", "weight_scale", "weight_scale_2")


def mend_tensors(directory: Path, source: Source) -> None:
    """Correct names and values of an export.

    - KV scales of fused attention (Phi3) are named after projections that do not exist; loaders map `qkv_proj`.
    - An all-zero matrix has NaN block scales; it becomes zeros with scales of one.
    - Tensors that are not quantized become the source's own bytes where the model had cast them.
    - Every file gets the metadata ``{"format": "pt"}``, and the index the new names and sizes.
    """
    headers = {path: read_header(path) for path in sorted(directory.glob("*.safetensors"))}
    tensors = {name: info for header, _ in headers.values() for name, info in header.items()}
    names = _new_names(tensors)
    values = _new_values(tensors, source)
    weight_map: dict[str, str] = {}
    total = 0
    for path, (header, metadata) in headers.items():
        if metadata == _METADATA and not header.keys() & (names.keys() | values.keys()):
            weight_map |= dict.fromkeys(header, path.name)
            total += sum(info.nbytes for info in header.values())
            continue
        contents = {
            names.get(name, name): values[name].contiguous() if name in values else read_tensor(info)
            for name, info in header.items()
        }
        temporary = path.with_suffix(".rewriting")
        save_file(contents, temporary, metadata=_METADATA)
        os.replace(temporary, path)
        weight_map |= dict.fromkeys(contents, path.name)
        total += sum(tensor.nbytes for tensor in contents.values())
    if (directory / INDEX).exists():
        index = read_json(directory / INDEX)
        index["weight_map"] = dict(sorted(weight_map.items()))
        index.setdefault("metadata", {})["total_size"] = total
        write_json(directory / INDEX, index)


def _new_names(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    renamed = {}
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        fused = f"{module.rpartition('.')[0]}.qkv_proj"
        if leaf in ("k_scale", "v_scale") and f"{module}.weight" not in tensors and f"{fused}.weight" in tensors:
            renamed[name] = f"{fused}.{leaf}"
    return renamed


def _new_values(tensors: Mapping[str, TensorInfo], source: Source) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_scale_2" and not read_tensor(info).any():
            console.warn(f"{module} is all zero in the source; it is stored as zeros with scales of 1")
            for part in _PARTS:
                old = tensors[f"{module}.{part}"]
                values[old.name] = torch.full(old.shape, float(part != "weight")).to(old.torch_dtype)
        quantized = leaf == "weight" and f"{module}.weight_scale_2" in tensors
        original = source.tensors.get(name)
        if original is not None and not quantized and original.dtype != info.dtype and original.shape == info.shape:
            values[name] = read_tensor(original)
    return values


def mend_config(directory: Path, source: Source) -> None:
    """Make config.json the source's own plus ``quantization_config``.

    transformers rewrites older configs in its newest spelling, which servers on older versions do not read.
    """
    exported = read_json(directory / "config.json")
    merged = source.config | {"quantization_config": exported["quantization_config"]}
    write_json(directory / "config.json", merged)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
