"""The operators on CPU against a float64 product, and their registration."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from fp4pipe import nvfp4
from fp4pipe.runtime import ops
from fp4pipe.runtime.ops.tiled import pack_tiled

N, K = 48, 128
SHAPES = [1, 3, 17, 128]


def make_weight(rows: int = N, columns: int = K, seed: int = 0) -> nvfp4.NVFP4Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight[0] *= 2.0**-16  # its block scales become subnormal
    return nvfp4.quantize_weight(weight)


def stored(weight: nvfp4.NVFP4Tensor, alpha: Tensor | None = None) -> ops.PreparedWeight:
    alpha = weight.global_scale.reshape(1) if alpha is None else alpha
    return ops.PreparedWeight(weight.codes, weight.block_scale, alpha, weight.codes.shape[0])


def in_tiles(scales: Tensor) -> Tensor:
    return nvfp4.swizzle_scales(scales.view(torch.uint8)) if scales.numel() else scales.view(torch.uint8)


def relative_error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


@pytest.fixture(params=["stored", "folded", "tiled", "swizzled"])
def weight(request: pytest.FixtureRequest) -> ops.PreparedWeight:
    form = stored(make_weight())
    if request.param == "folded":
        return ops.prepare_weight(form, "cpu")
    if request.param == "tiled":
        return form._replace(w=pack_tiled(form.w, form.w_scales), w_scales=form.w_scales.new_empty(0))
    return form._replace(w_scales=in_tiles(form.w_scales)) if request.param == "swizzled" else form


@pytest.mark.parametrize("rows", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_w4a16_is_the_exact_product(rows: int, dtype: torch.dtype, bias: bool, weight: ops.PreparedWeight) -> None:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)
    shift = torch.randn(N).to(dtype) if bias else None
    out = torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight, shift)
    exact = x.double() @ nvfp4.dequantize(*make_weight(), dtype=torch.float64).T
    exact = exact if shift is None else exact + shift.double()
    assert out.dtype == dtype
    assert relative_error(out, exact) < (1e-6 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("rows", SHAPES)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_w4a4_is_the_exact_product_of_quantized_operands(
    rows: int, swizzled: bool, bias: bool, weight: ops.PreparedWeight
) -> None:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows))
    input_scale = nvfp4.global_scale_of(x.abs().amax())
    shift = torch.randn(N) if bias else None
    codes, scales = torch.ops.fp4pipe.fp4_quantize(x, input_scale, swizzled)
    weight = weight._replace(alpha=weight.alpha * input_scale)
    out = torch.ops.fp4pipe.fp4_gemm(codes, scales, *weight, torch.float32, shift)
    activations = nvfp4.dequantize(*nvfp4.quantize_activation(x, input_scale), input_scale, torch.float64)
    exact = activations @ nvfp4.dequantize(*make_weight(), dtype=torch.float64).T
    assert relative_error(out, exact if shift is None else exact + shift.double()) < 1e-6


def test_subnormal_block_scales_are_kept() -> None:
    weight = make_weight()
    assert weight.block_scale[0].float().max() < 2.0**-6
    out = torch.ops.fp4pipe.fp4_gemm_w4a16(torch.eye(K), *stored(weight))
    assert torch.equal(out.T, nvfp4.dequantize_blocks(weight.codes, weight.block_scale) * weight.global_scale)
    assert out[:, 0].abs().max() > 0


def test_alpha_is_applied_per_row_in_float32() -> None:
    weight = make_weight()
    alpha = torch.linspace(1, 2, N) * (1 + 2.0**-20)  # bfloat16 would lose the last factor
    out = torch.ops.fp4pipe.fp4_gemm_w4a16(torch.eye(K), *stored(weight, alpha))
    assert torch.equal(out, nvfp4.dequantize_blocks(weight.codes, weight.block_scale).T * alpha)


@pytest.mark.parametrize("rows", [2, 5, 130])
def test_batch_agrees_with_single(rows: int, weight: ops.PreparedWeight) -> None:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(1))
    scale = nvfp4.global_scale_of(x.abs().amax())
    codes, scales = torch.ops.fp4pipe.fp4_quantize(x, scale)
    together = torch.ops.fp4pipe.fp4_gemm(codes, scales, *weight, torch.float32)
    for row in range(rows):
        one = torch.ops.fp4pipe.fp4_quantize(x[row : row + 1], scale)
        assert torch.equal(one[0], codes[row : row + 1])
        assert torch.equal(one[1].float(), scales[row : row + 1].float())
        single = torch.ops.fp4pipe.fp4_gemm(*one, *weight, torch.float32)
        assert torch.allclose(single, together[row : row + 1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (127, 48), (129, 80), (256, 4096)])
def test_fake_shapes(rows: int, columns: int) -> None:
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    scale = torch.empty((), device="meta")
    codes, linear = torch.ops.fp4pipe.fp4_quantize(x, scale)
    _, swizzled = torch.ops.fp4pipe.fp4_quantize(x, scale, True)
    assert codes.shape == (rows, columns // 2)
    assert linear.shape == (rows, columns // 16)
    assert swizzled.shape == (nvfp4.round_up(rows, 128), nvfp4.round_up(columns // 16, 4))
    assert (linear.dtype, swizzled.dtype) == (torch.float8_e4m3fn, torch.uint8)
    real = torch.ops.fp4pipe.fp4_quantize(torch.randn(rows, columns), torch.tensor(1e-3), True)[1]
    assert real.shape == swizzled.shape


def test_swizzled_scales_are_the_linear_ones_in_tiles() -> None:
    x = torch.randn(130, 80)
    scale = nvfp4.global_scale_of(x.abs().amax())
    _, linear = torch.ops.fp4pipe.fp4_quantize(x, scale)
    _, swizzled = torch.ops.fp4pipe.fp4_quantize(x, scale, True)
    assert torch.equal(nvfp4.unswizzle_scales(swizzled, 130, 5), linear.view(torch.uint8))


@pytest.mark.parametrize("swizzled", [False, True])
def test_opcheck_quantize(swizzled: bool) -> None:
    opcheck(torch.ops.fp4pipe.fp4_quantize.default, (torch.randn(5, K), torch.tensor(1e-3), swizzled))


@pytest.mark.parametrize("bias", [False, True])
def test_opcheck_gemms(bias: bool, weight: ops.PreparedWeight) -> None:
    # The schema test compares its inputs before and after, which PyTorch cannot do for e4m3: scales in tiles, as bytes.
    x, shift = torch.randn(5, K), torch.randn(N) if bias else None
    quantized = torch.ops.fp4pipe.fp4_quantize(x, torch.tensor(1e-3), True)
    weight = weight._replace(w_scales=in_tiles(weight.w_scales))
    opcheck(torch.ops.fp4pipe.fp4_gemm.default, (*quantized, *weight, torch.bfloat16, shift))
    opcheck(torch.ops.fp4pipe.fp4_gemm_w4a16.default, (x, *weight, shift))


def test_one_graph_serves_every_row_count(weight: ops.PreparedWeight) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = torch.ops.fp4pipe.fp4_quantize(x, torch.tensor(1e-3), True)
        exact = torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight)
        return torch.ops.fp4pipe.fp4_gemm(codes, scales, *weight, torch.float32), exact

    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(module)
        return module

    compiled = torch.compile(both, backend=backend, fullgraph=True, dynamic=True)
    for rows in (3, 129, 64):
        x = torch.randn(rows, K)
        for got, want in zip(compiled(x), both(x), strict=True):
            assert torch.equal(got, want)
    assert len(graphs) == 1


def test_bad_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"multiple of 16.*\(2, 20\)"):
        torch.ops.fp4pipe.fp4_quantize(torch.randn(2, 20), torch.tensor(1.0))


def test_fuse_rows_keeps_every_shards_scale() -> None:
    first, second = make_weight(seed=1), make_weight(rows=32, seed=2)
    fused = ops.fuse_rows([stored(first), stored(second)])
    assert fused is not None
    assert fused.alpha.shape == (N + 32,)
    x = torch.randn(4, K)
    parts = [torch.ops.fp4pipe.fp4_gemm_w4a16(x, *stored(part)) for part in (first, second)]
    assert torch.allclose(torch.ops.fp4pipe.fp4_gemm_w4a16(x, *fused), torch.cat(parts, 1), rtol=1e-5, atol=1e-5)
    assert ops.fuse_rows([stored(first), stored(make_weight(columns=32))]) is None
