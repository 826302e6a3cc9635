"""The weights of a GGUF model as bf16 safetensors under Hugging Face's names, one shard in memory at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fp4pipe import console
from fp4pipe.convert.gguf_config import Family
from fp4pipe.convert.gguf_file import GGUFFile, GGUFTensor
from fp4pipe.errors import SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHARD_BYTES = 2 << 30
# Dequantizing goes through float32 intermediates several times the size of the rows at hand.
CHUNK_NUMBERS = 1 << 22
# What a model may hold besides its parameters: rotary frequencies, which the config states.
NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def head_is_tied(file: GGUFFile) -> bool:
    """Whether the output head is the embedding matrix, which GGUF does not state.

    It is when there is no head. Where a file holds both, a tied model's are two quantizations of the same matrix: they
    differ by rounding (about 5 % at 4 bits), while unrelated matrices differ by 140 %. 256 rows decide.
    """
    if HEAD not in file.tensors:
        return True
    embedding, head = file.tensors.get(EMBEDDING), file.tensors[HEAD]
    if embedding is None or embedding.shape != head.shape:
        return False
    chosen = np.unique(np.linspace(0, head.num_rows - 1, 256).astype(int))
    ours = np.concatenate([file.rows(embedding, row, row + 1) for row in chosen])
    theirs = np.concatenate([file.rows(head, row, row + 1) for row in chosen])
    return bool(np.linalg.norm(ours - theirs) < 0.5 * np.linalg.norm(theirs))


def match_tensors(file: GGUFFile, config: "PreTrainedConfig") -> dict[str, GGUFTensor]:
    """Each parameter of the Hugging Face model, by its name, with the GGUF tensor that holds it.

    Raises:
        SourceError: tensors are missing, left over, or of another shape.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).state_dict()
    tied = config.tie_word_embeddings
    # Of two copies of a tied matrix the one with more bits is the better.
    matrices = [file.tensors[name] for name in (HEAD, EMBEDDING) if tied and name in file.tensors]
    pairs: dict[str, GGUFTensor] = {}
    missing: list[str] = []
    for name, parameter in parameters.items():
        if tied and name == "lm_head.weight":
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        found = file.tensors.get(gguf_name)
        if gguf_name == EMBEDDING and matrices:
            found = max(matrices, key=lambda tensor: tensor.bits_per_weight)
        if found is None:
            missing.append(gguf_name)
        elif found.shape != tuple(parameter.shape):
            raise SourceError(
                f"{file.path.name}: tensor {found.name} has shape {list(found.shape)}",
                because=f"{name} needs {list(parameter.shape)}",
            )
        else:
            pairs[name] = found
    if missing:
        raise SourceError(f"{file.path.name}: {_count(missing, 'tensor')} missing: {_some(missing)}")
    used = {tensor.name for tensor in pairs.values()} | {tensor.name for tensor in matrices} | {*NOT_PARAMETERS}
    if unknown := [name for name in file.tensors if name not in used]:
        raise SourceError(f"{file.path.name}: {_count(unknown, 'tensor')} without a place: {_some(unknown)}")
    return pairs


def write_weights(
    file: GGUFFile, config: "PreTrainedConfig", family: Family, pairs: dict[str, GGUFTensor], out: Path
) -> None:
    """Write `pairs` as one or more safetensors files, and the index that more than one needs."""
    from safetensors.torch import save_file

    shards = list(_shards(pairs))
    weight_map: dict[str, str] = {}
    total = sum(_bf16_bytes(tensor) for tensor in pairs.values())
    with console.progress(total, f"dequantizing {file.path.name}", "B", bytes=True) as bar:
        for index, shard in enumerate(shards, start=1):
            many = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
            filename = many if len(shards) > 1 else "model.safetensors"
            tensors: dict[str, Tensor] = {}
            for name, source in shard:
                tensors[name] = _convert(file, source, name, family, config)
                bar.update(_bf16_bytes(source))
            save_file(tensors, out / filename, metadata={"format": "pt"})
            (out / filename).chmod(0o644)  # safetensors leaves it readable by the owner alone
            weight_map |= dict.fromkeys(tensors, filename)
    if len(shards) > 1:
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")


def _shards(pairs: dict[str, GGUFTensor]) -> Iterator[list[tuple[str, GGUFTensor]]]:
    shard: list[tuple[str, GGUFTensor]] = []
    size = 0
    for name, tensor in pairs.items():
        if shard and size + _bf16_bytes(tensor) > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += _bf16_bytes(tensor)
    yield shard


def _bf16_bytes(tensor: GGUFTensor) -> int:
    return 2 * tensor.num_rows * tensor.shape[-1]


def _convert(file: GGUFFile, source: GGUFTensor, name: str, family: Family, config: "PreTrainedConfig") -> Tensor:
    out = torch.empty(source.num_rows, source.shape[-1], dtype=torch.bfloat16)
    step = max(1, CHUNK_NUMBERS // source.shape[-1])
    for start in range(0, source.num_rows, step):
        stop = min(start + step, source.num_rows)
        rows = file.rows(source, start, stop)
        if family.unit_norms and name.endswith("norm.weight"):
            rows = rows - 1.0  # in float32: bf16 would round the factor first
        if not np.isfinite(rows).all():
            raise SourceError(f"{file.path.name}: tensor {source.name} holds values that are not finite")
        out[start:stop] = torch.from_numpy(np.require(rows, requirements=["C", "W"]))
    out = out.reshape(source.shape)
    if family.interleaved_rope and ".self_attn.q_proj." in name:
        return _split_halves(out, config.num_attention_heads)
    if family.interleaved_rope and ".self_attn.k_proj." in name:
        return _split_halves(out, config.num_key_value_heads)
    return out


def _split_halves(rows: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows from rotary pairs (2i, 2i + 1) to (i, i + d/2); weights `[N, K]` and biases `[N]`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()


def _count(items: list[str], what: str) -> str:
    return f"{len(items)} {what}{'s' if len(items) > 1 else ''}"


def _some(items: list[str]) -> str:
    return ", ".join(items[:5]) + (", ..." if len(items) > 5 else "")
