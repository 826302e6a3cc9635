"""Writing the checkpoint: ModelOpt's exporter, then the mending of what it leaves, then the files it does not write."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fp4pipe import console
from fp4pipe.convert.model import source_dtype
from fp4pipe.convert.quiet import quiet
from fp4pipe.convert.source import Source
from fp4pipe.errors import Fp4pipeError
from fp4pipe.quant_config import read_json
from fp4pipe.safetensors_file import TensorInfo, read_header, read_tensor
from fp4pipe.shards import INDEX

COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
_WRITTEN_HERE = ("config.json", "hf_quant_config.json", "provenance.json", INDEX)
_COPIED_FOLDERS = ("additional_chat_templates",)


def export(model: nn.Module, source: Source, directory: Path, *, max_shard_size: str) -> None:
    """Export the calibrated `model` to `directory`. The model is unusable afterwards: its weights become codes.

    Raises:
        Fp4pipeError: The disk is full or not writable.
    """
    with quiet():
        from modelopt.torch.export import export_hf_checkpoint

        try:
            with torch.no_grad():
                export_hf_checkpoint(
                    model, dtype=source_dtype(source), export_dir=directory, max_shard_size=max_shard_size
                )
        except OSError as error:
            raise _unwritable(directory, error) from error
        except Exception as error:
            if "No space left" in str(error) or "File too large" in str(error):  # safetensors' own error class
                raise _unwritable(directory, error) from error
            raise
    mend_tensors(directory, source)
    mend_config(directory, source)
    copy_files(source, directory)


def mend_tensors(directory: Path, source: Source) -> None:
    """Correct the tensors of an export, rewriting only the files that need it.

    - KV scales of fused attention (Phi3) are named after projections that do not exist: `qkv_proj` is what loaders map.
    - An all-zero matrix is exported with NaN block scales; it becomes zeros with scales of one.
    - Tensors that are not quantized become the source's own bytes where the model had cast them.
    - Every file gets the metadata ``{"format": "pt"}``.
    """
    files = {path: read_header(path) for path in sorted(directory.glob("*.safetensors"))}
    present = {name: info for tensors, _ in files.values() for name, info in tensors.items()}
    mended: dict[str, str] = {}
    total = 0
    for path, (tensors, metadata) in files.items():
        changes = dict(_changes(tensors, present, source))
        total += sum(info.nbytes for info in tensors.values())
        if not changes and metadata.get("format") == "pt":
            mended |= dict.fromkeys(tensors, path.name)
            continue
        contents: dict[str, Tensor] = {}
        for name, info in tensors.items():
            new_name, tensor = changes.get(name, (name, None))
            contents[new_name] = read_tensor(info) if tensor is None else tensor.contiguous()
            total += contents[new_name].nbytes - info.nbytes
        _save(contents, path)
        mended |= dict.fromkeys(contents, path.name)
    if (directory / INDEX).exists():
        index = read_json(directory / INDEX)
        index["weight_map"] = dict(sorted(mended.items()))
        index.setdefault("metadata", {})["total_size"] = total
        write_json(directory / INDEX, index)


def _changes(
    tensors: dict[str, TensorInfo], present: dict[str, TensorInfo], source: Source
) -> Iterator[tuple[str, tuple[str, Tensor | None]]]:
    """(name, (new name, new value or None for the old one)) of each tensor to correct."""
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in ("k_scale", "v_scale"):
            fused = f"{module.rpartition('.')[0]}.qkv_proj"
            if f"{module}.weight" not in present and f"{fused}.weight" in present:
                yield name, (f"{fused}.{leaf}", None)
        elif (scale := present.get(f"{module}.weight_scale_2")) is not None:
            if leaf in ("weight", "weight_scale", "weight_scale_2") and not read_tensor(scale).any():
                if leaf == "weight":
                    console.warn(f"{module} is all zero in the source; it is stored as zeros with scales of 1")
                fill = 0.0 if leaf == "weight" else 1.0
                yield name, (name, torch.full(info.shape, fill).to(info.torch_dtype))
        elif (original := source.tensors.get(name)) is not None:
            if original.dtype != info.dtype and original.shape == info.shape:
                yield name, (name, read_tensor(original))


def _save(contents: dict[str, Tensor], path: Path) -> None:
    temporary = path.with_suffix(".rewriting")
    try:
        save_file(contents, temporary, metadata={"format": "pt"})
    except Exception as error:  # OSError or safetensors' own class, by version
        raise _unwritable(path.parent, error) from error
    os.replace(temporary, path)


def mend_config(directory: Path, source: Source) -> None:
    """Make config.json the source's own plus ``quantization_config``.

    transformers rewrites the fields of older configs in its newest spelling, which the servers' older versions do not read.
    """
    exported = read_json(directory / "config.json")
    write_json(directory / "config.json", source.config | {"quantization_config": exported["quantization_config"]})


def copy_files(source: Source, directory: Path) -> None:
    """Copy what belongs to the model byte for byte: tokenizer, chat templates, generation config, code, licence."""
    for pattern in COPIED:
        for path in source.path.glob(pattern):
            if path.is_file() and path.name not in _WRITTEN_HERE and not path.name.endswith(".index.json"):
                shutil.copyfile(path, directory / path.name)
    for folder in _COPIED_FOLDERS:
        if (source.path / folder).is_dir():
            shutil.copytree(source.path / folder, directory / folder, dirs_exist_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _unwritable(directory: Path, error: Exception) -> Fp4pipeError:
    reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
    return Fp4pipeError(f"{directory.parent}: the checkpoint cannot be written", because=reason, fix="free space there")
