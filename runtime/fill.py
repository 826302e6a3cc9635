"""A checkpoint's tensors into a built model: each parameter and scale from one tensor, no tensor left over."""

import re

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fp4pipe.checkpoint import Checkpoint, QuantizedLinear
from fp4pipe.errors import CheckpointError, Unavailable
from fp4pipe.runtime.ops import NVFP4Linear
from fp4pipe.runtime.weights import Expected, Loaded, ReadReport, expected_of_linear, load_tensors

_FLOATING = ("BF16", "F16", "F32")
_ALGOS = ("NVFP4", "W4A16_NVFP4")
_DERIVED = (r"rotary_emb\.inv_freq$",)
"""Tensors that old exporters saved and that follow from the configuration."""


def refuse_unsupported(checkpoint: Checkpoint) -> None:
    """Check that the linears of `checkpoint` are NVFP4 as the operators compute it, or not quantized.

    Raises:
        Unavailable: They are quantized in another way.
    """
    fix = f"a checkpoint whose quantized layers are all {' or '.join(_ALGOS)}"
    for name, info in checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and info.dtype not in (*_FLOATING, "U8"):
            raise Unavailable(f"{checkpoint.path} does not run here", because=f"{name} is {info.dtype}", fix=fix)
    for module in checkpoint.linears:
        algo = checkpoint.quant.algo_of(module) if checkpoint.quant else None
        if algo not in _ALGOS:
            raise Unavailable(f"{checkpoint.path} does not run here", because=f"{module} is {algo}", fix=fix)


def fill(
    model: PreTrainedModel,
    linears: dict[str, NVFP4Linear],
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    progress: bool,
    fp8_prefill: bool = False,
) -> ReadReport:
    """Load every weight of `model`, whose NVFP4 linears are `linears`, onto `device`; other weights become `dtype`.

    With `fp8_prefill` the linears keep an E4M3 copy too: see `NVFP4Linear.prepare`.

    Raises:
        CheckpointError: A tensor is missing, left over, damaged or not as the model needs it.
    """
    homes = _homes(model, linears)
    expected = {
        name: Expected(_FLOATING, tuple(tensor.shape), name)
        for names, tensor in homes
        for name in _present(names, checkpoint)
    }
    for name, module in linears.items():
        expected |= expected_of_linear(checkpoint.linears[name], activations=module.mode == "w4a4")
    unread = [info.name for pair in checkpoint.kv_scales.values() for info in pair if info is not None]
    ignore = [*_DERIVED, *(f"^{re.escape(name)}$" for name in (*unread, *_computed(model)))]
    loaded = load_tensors(checkpoint, expected, device=device, threads=threads, progress=progress, ignore=ignore)
    for names, tensor in homes:
        value = _claim_one(names, loaded, checkpoint).to(dtype)
        _place(model, names, nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value)
    for name, module in linears.items():
        _load_linear(module, checkpoint.linears[name], loaded)
        module.prepare(device, fp8_prefill=fp8_prefill)
    loaded.finish()
    return loaded.report


def _homes(model: PreTrainedModel, linears: dict[str, NVFP4Linear]) -> list[tuple[list[str], Tensor]]:
    """What a checkpoint must fill, apart from NVFP4 matrices: each tensor with all its names (a tied head has two)."""
    quantized = {f"{name}.{leaf}" for name in linears for leaf in ("weight", "weight_scale", "alpha", "input_scale")}
    homes: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in quantized:
            homes.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(homes.values())


def _present(names: list[str], checkpoint: Checkpoint) -> list[str]:
    """The names under which a checkpoint holds a tensor; when it holds none, the first is the one missing."""
    return [name for name in names if name in checkpoint.tensors] or names[:1]


def _computed(model: PreTrainedModel) -> list[str]:
    """Buffers that are never saved, because the model computes them."""
    saved = model.state_dict(keep_vars=True)
    return [name for name, _ in model.named_buffers() if name not in saved]


def _claim_one(names: list[str], loaded: Loaded, checkpoint: Checkpoint) -> Tensor:
    """The tensor behind `names`; a checkpoint that holds it twice must hold it twice alike."""
    first, *others = (name for name in names if name in loaded)
    tensor = loaded.claim(first)
    for other in others:
        if not torch.equal(tensor, loaded.claim(other)):
            raise CheckpointError(
                f"{checkpoint.path}: {first} and {other} differ",
                because="config.json ties them (tie_word_embeddings)",
                fix="set tie_word_embeddings to false, or remove the tensor that should not be there",
            )
    return tensor


def _place(model: PreTrainedModel, names: list[str], tensor: Tensor) -> None:
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, tensor)


def _load_linear(module: NVFP4Linear, linear: QuantizedLinear, loaded: Loaded) -> None:
    """Give `module` its codes and scales; its bias, when it has one, has been placed already."""
    weight, block_scale, global_scale = (
        loaded.claim(info.name) for info in (linear.weight, linear.block_scale, linear.global_scale)
    )
    input_scale = loaded.claim(linear.input_scale.name) if linear.input_scale else None
    if linear.reciprocal_scales:
        global_scale = global_scale.reciprocal()
        input_scale = None if input_scale is None else input_scale.reciprocal()
    module.load(weight, block_scale, global_scale, input_scale, module.bias)
