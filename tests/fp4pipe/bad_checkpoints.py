"""Every way of damaging the checkpoints of `tests.fp4pipe.checkpoints` that loading must refuse."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.fp4pipe.checkpoints import (
    SHARD1,
    SHARD2,
    Q,
    edit_index,
    edit_json,
    edit_tensors,
    random_weights,
    raw_file,
    save_shards,
)


@dataclass(frozen=True)
class Damage:
    """One way to spoil a sharded ModelOpt checkpoint, the lint rule it breaks, and what the error must say."""

    name: str
    apply: Callable[[Path], Any]
    rule: str
    says: tuple[str, ...]


def _truncate(path: Path) -> None:
    file = path / SHARD2
    file.write_bytes(file.read_bytes()[:-100])


def _long_header(path: Path) -> None:
    file = path / SHARD1
    file.write_bytes((1 << 20).to_bytes(8, "little") + file.read_bytes()[8:])


def _drop(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        edit_index(path, lambda weight_map: weight_map.pop(name))
        edit_tensors(path / SHARD1, lambda tensors: tensors.pop(name))

    return apply


def _retype(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda path: edit_tensors(path / SHARD1, lambda t: t.update({name: t[name].to(dtype)}))


def _duplicate(path: Path) -> None:
    tensor = load_file(path / SHARD1)["model.embed_tokens.weight"]
    edit_tensors(path / SHARD2, lambda tensors: tensors.update({"model.embed_tokens.weight": tensor}))


def _bf16_weights(path: Path) -> None:
    save_shards(path, random_weights(), sharded=True)


def _set_exclusions(patterns: list[str]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        edit_json(path / "config.json", lambda config: config["quantization_config"].update(ignore=patterns))
        edit_json(path / "hf_quant_config.json", lambda c: c["quantization"].update(exclude_modules=patterns))

    return apply


def _only_pickles(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), path / "model.safetensors.index.json"]:
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _section(**changes: Any) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "config.json", lambda c: c["quantization_config"].update(changes))


def _group_size_32(path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32

    edit_json(path / "config.json", change)
    edit_json(path / "hf_quant_config.json", lambda config: config["quantization"].update(group_size=32))


def _no_config(path: Path) -> None:
    edit_json(path / "config.json", lambda config: config.pop("quantization_config"))
    (path / "hf_quant_config.json").unlink()


DAMAGES = (
    Damage("truncated shard", _truncate, "file-damaged", ("truncated", SHARD2, "tensor model.layers.1")),
    Damage("header longer than the file", _long_header, "file-damaged", ("longer than the file", SHARD1)),
    Damage("empty file", lambda p: (p / SHARD1).write_bytes(b""), "file-damaged", ("truncated", SHARD1)),
    Damage(
        "git lfs pointer",
        lambda p: (p / SHARD1).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "file-damaged",
        ("Git LFS", SHARD1),
    ),
    Damage("missing shard", lambda p: (p / SHARD2).unlink(), "file-missing", (SHARD2, "missing", "index")),
    Damage(
        "orphan shard",
        lambda p: (p / "model-00003-of-00002.safetensors").write_bytes(raw_file({})),
        "file-unlisted",
        ("model-00003-of-00002.safetensors",),
    ),
    Damage(
        "tensor not in the index",
        lambda p: edit_tensors(p / SHARD1, lambda t: t.update(extra=torch.zeros(2))),
        "tensor-unlisted",
        ("tensor extra", SHARD1, "offset"),
    ),
    Damage(
        "index lists an absent tensor",
        lambda p: edit_index(p, lambda m: m.update({"model.ghost.weight": SHARD1})),
        "tensor-missing",
        ("model.ghost.weight", SHARD1),
    ),
    Damage(
        "index names the wrong file",
        lambda p: edit_index(p, lambda m: m.update({"model.norm.weight": SHARD1})),
        "index-wrong-file",
        ("model.norm.weight", SHARD1, SHARD2),
    ),
    Damage(
        "index leaves the directory",
        lambda p: edit_index(p, lambda m: m.update({"model.norm.weight": "../x.safetensors"})),
        "index-invalid",
        ("model.norm.weight", "../x.safetensors"),
    ),
    Damage(
        "index is not JSON",
        lambda p: (p / "model.safetensors.index.json").write_text("{"),
        "index-invalid",
        ("index.json", "not valid JSON"),
    ),
    Damage(
        "no index",
        lambda p: (p / "model.safetensors.index.json").unlink(),
        "index-invalid",
        ("2 safetensors files", "no model.safetensors.index.json"),
    ),
    Damage("duplicate tensor", _duplicate, "tensor-duplicate", ("model.embed_tokens.weight", SHARD1, SHARD2)),
    Damage("only pickles", _only_pickles, "weights-absent", ("pytorch_model.bin", "never read")),
    Damage(
        "missing block scale", _drop(f"{Q}.weight_scale"), "scale-missing", (f"{Q}.weight_scale is missing", SHARD1)
    ),
    Damage("missing global scale", _drop(f"{Q}.weight_scale_2"), "scale-missing", (f"{Q}.weight_scale_2", SHARD1)),
    Damage("missing input scale", _drop(f"{Q}.input_scale"), "scale-missing", (f"{Q}.input_scale", SHARD1)),
    Damage(
        "block scale in float32",
        _retype(f"{Q}.weight_scale", torch.float32),
        "scale-shape",
        (f"{Q}.weight_scale ", SHARD1, "F32", "F8_E4M3", "offset"),
    ),
    Damage(
        "global scale in bfloat16",
        _retype(f"{Q}.weight_scale_2", torch.bfloat16),
        "scale-shape",
        (f"{Q}.weight_scale_2", SHARD1, "BF16", "F32", "offset"),
    ),
    Damage(
        "NVFP4 in the config, bf16 in the file",
        _bf16_weights,
        "unquantized-not-excluded",
        ("model.layers.0.", "_proj.weight", SHARD1, "BF16", "NVFP4", "config.json"),
    ),
    Damage(
        "exclude list misses the head",
        _set_exclusions([]),
        "unquantized-not-excluded",
        ("lm_head.weight", SHARD1, "does not exclude"),
    ),
    Damage(
        "exclude list names a quantized module",
        _set_exclusions(["lm_head", "model.layers.0.self_attn*"]),
        "excluded-but-quantized",
        ("model.layers.0.self_attn.", ".weight", SHARD1, "U8", "excludes"),
    ),
    Damage("configs disagree", _section(quant_algo="W4A16_NVFP4"), "quant-config-invalid", ("disagree", "quant_algo")),
    Damage(
        "exclude lists disagree", _section(ignore=["x", "lm_head"]), "quant-config-invalid", ("disagree", "x is only")
    ),
    Damage("unknown method", _section(quant_method="gptq"), "quant-config-invalid", ("gptq", "config.json")),
    Damage("group size 32", _group_size_32, "group-size", ("group_size 32", "config.json")),
    Damage(
        "no quantization config", _no_config, "config-absent", ("model.layers.0.", "_proj.weight", SHARD1, "no config")
    ),
    Damage("no config.json", lambda p: (p / "config.json").unlink(), "config-invalid", ("config.json",)),
    Damage(
        "unfinished export", lambda p: (p / "INCOMPLETE").write_text(""), "export-unfinished", ("unfinished export",)
    ),
)
"""What `Checkpoint.open` must refuse."""

BAD_SCALES = (
    (f"{Q}.weight_scale", float("nan"), 5),
    (f"{Q}.weight_scale", 0.0, 7),
    (f"{Q}.weight_scale", -1.0, 0),
    (f"{Q}.weight_scale_2", float("nan"), 0),
    (f"{Q}.weight_scale_2", float("inf"), 0),
    (f"{Q}.weight_scale_2", -0.25, 0),
    (f"{Q}.input_scale", 0.0, 0),
)
"""Scale, value and element: what only a look at the values can find."""
