"""The operator checks pass on what is right and name what is wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.runtime.model import Model
from fp4pipe.runtime.ops import NVFP4Linear, reference
from fp4pipe.runtime.validate import Check, check_ops
from fp4pipe.runtime.validate.numerics import check_layers, check_values, loaded_layers, sample_weights
from fp4pipe.runtime.validate.ops import check_registration

CPU = torch.device("cpu")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def layers(model: Model, checkpoint: Checkpoint) -> Check:
    return check_layers(model, checkpoint, 64, generator())


@pytest.mark.parametrize("mode", ["w4a4", "w4a16"])
def test_everything_holds(quantized: Path, checkpoint: Checkpoint, mode: str) -> None:
    model = Model.load(quantized, mode=mode, progress=False)
    checks = check_ops(checkpoint, model, rows=(1, 3, 64))
    names = ["ops.registration", "ops.values", "ops.batch", "ops.fp8_prefill", "ops.layers"]
    assert [check.name for check in checks] == names
    registration, values, _, approximate, loaded = checks
    assert [check.summary for check in checks if check.ok is not True] == [approximate.summary]
    assert approximate.ok is None
    assert "approximate" in approximate.summary
    error = approximate.figures["rel_error"]
    assert isinstance(error, float)
    assert 0.005 < error < 0.1
    assert set(registration.details) >= {"fp4_quantize", "fp4_gemm", "fp4_gemm_w4a16", "paged_attention"}
    assert values.figures["shapes"] == 4  # q and o, k and v, gate and up, down
    assert loaded.figures["layers"] == 14


def test_a_model_without_nvfp4_is_tried_on_weights_made_up(source: Path) -> None:
    checks = check_ops(Checkpoint.open(source), rows=(1, 17))
    assert [check.name for check in checks if check.ok] == ["ops.registration", "ops.values", "ops.batch"]
    assert [check.name for check in checks if not check.ok] == ["ops.fp8_prefill"]


@contextmanager
def replaced(operator: str, implementation: Callable[..., Any]) -> Iterator[None]:
    library = torch.library.Library("fp4pipe", "IMPL")
    library.impl(operator, implementation, "CPU")
    try:
        yield
    finally:
        library._destroy()


def gemm_with_swapped_nibbles(x: Tensor, w: Tensor, scales: Tensor, alpha: Tensor, n: int, bias: Any = None) -> Tensor:
    swapped = w.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return reference.fp4_gemm_w4a16(x, swapped, scales, alpha, n, bias)


def gemm_with_one_alpha(x: Tensor, w: Tensor, scales: Tensor, alpha: Tensor, n: int, bias: Any = None) -> Tensor:
    return reference.fp4_gemm_w4a16(x, w, scales, alpha.amax().reshape(1), n, bias)


def gemm_with_bf16_alpha(x: Tensor, w: Tensor, scales: Tensor, alpha: Tensor, n: int, bias: Any = None) -> Tensor:
    return reference.fp4_gemm_w4a16(x, w, scales, alpha.bfloat16().float(), n, bias)


@pytest.mark.parametrize("wrong", [gemm_with_swapped_nibbles, gemm_with_one_alpha, gemm_with_bf16_alpha])
def test_a_wrong_product_is_caught(checkpoint: Checkpoint, wrong: Callable[..., Tensor]) -> None:
    weights = sample_weights(checkpoint, generator())
    with replaced("fp4_gemm_w4a16", wrong):
        check = check_values(weights, CPU, (1, 5), generator())
    assert check.ok is False
    assert "fp4_gemm_w4a16 at 64x64" in check.summary
    assert "fp4_gemm at" not in check.summary


def test_a_quantizer_that_rounds_ties_up_is_caught(checkpoint: Checkpoint) -> None:
    def half_up(x: Tensor, input_scale: Tensor, swizzled: bool = False) -> tuple[Tensor, Tensor]:
        return reference.fp4_quantize(x * (1 + 1e-3), input_scale, swizzled)

    with replaced("fp4_quantize", half_up):
        check = check_values(sample_weights(checkpoint, generator()), CPU, (5,), generator())
    assert check.ok is False
    assert "fp4_quantize at" in check.summary


def test_a_product_that_depends_on_its_neighbours_is_caught(checkpoint: Checkpoint) -> None:
    def leaky(x: Tensor, *rest: Any) -> Tensor:
        return reference.fp4_gemm_w4a16(x + 1e-3 * x.mean(0), *rest)

    with replaced("fp4_gemm_w4a16", leaky):
        batch = next(check for check in check_ops(checkpoint, rows=(1,)) if check.name == "ops.batch")
    assert batch.ok is False
    assert "wrong: fp4_gemm_w4a16" in batch.summary


def test_an_operator_without_a_sample_is_named() -> None:
    library = torch.library.Library("fp4pipe", "FRAGMENT")
    library.define("forgotten(Tensor x) -> Tensor")
    try:
        check = check_registration(CPU)
    finally:
        library._destroy()
    assert check.ok is False
    assert "forgotten: no sample arguments" in check.summary


def test_a_fake_with_the_wrong_shape_is_named() -> None:
    def one_column_short(x: Tensor, w: Tensor, w_scales: Tensor, alpha: Tensor, n: int, bias: Any = None) -> Tensor:
        return reference.fp4_gemm_w4a16(x, w, w_scales, alpha, n, bias)[:, 1:].clone()

    with replaced("fp4_gemm_w4a16", one_column_short):
        check = check_registration(CPU)
    assert check.ok is False
    assert "fp4_gemm_w4a16:" in check.summary


def test_swapped_scales_are_caught_and_named(model: Model, checkpoint: Checkpoint) -> None:
    found: dict[str, NVFP4Linear] = dict(loaded_layers(model, checkpoint))
    gate, up = (found[f"model.layers.1.mlp.{name}_proj"] for name in ("gate", "up"))
    gate.alpha, up.alpha = up.alpha, gate.alpha
    check = layers(model, checkpoint)
    assert check.ok is False
    assert check.summary.endswith("wrong: model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj")


def test_block_scales_of_another_layer_are_caught(quantized: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in quantized.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    tensors = load_file(damaged / "model.safetensors")
    one, other = (f"model.layers.{i}.self_attn.o_proj.weight_scale" for i in (0, 1))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    check = layers(Model.load(damaged, mode="w4a16", progress=False), checkpoint)
    assert check.ok is False
    assert "wrong: model.layers.0.self_attn.o_proj, model.layers.1.self_attn.o_proj" in check.summary


@pytest.mark.parametrize("factor", [1.001, -1.0, torch.nan])
def test_a_wrong_alpha_is_caught(model: Model, checkpoint: Checkpoint, factor: float) -> None:
    name, layer = next(iter(loaded_layers(model, checkpoint)))
    layer.alpha = layer.alpha * factor
    check = layers(model, checkpoint)
    assert check.ok is False
    assert f"wrong: {name}" in check.summary


def test_a_wrong_input_scale_is_caught(quantized: Path, checkpoint: Checkpoint) -> None:
    model = Model.load(quantized, mode="w4a4", progress=False)
    name, layer = next(iter(loaded_layers(model, checkpoint)))
    assert layer.input_scale is not None
    layer.input_scale = layer.input_scale * 2
    check = layers(model, checkpoint)
    assert check.ok is False
    assert f"wrong: {name}" in check.summary
