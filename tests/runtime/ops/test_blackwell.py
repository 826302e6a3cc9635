"""The FlashInfer backend as far as it can be checked without its GPU: signatures, shapes, and what it would call."""

import ast
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fp4pipe import nvfp4
from fp4pipe.errors import UsageError
from fp4pipe.runtime import ops
from fp4pipe.runtime.ops import forms
from fp4pipe.runtime.ops.schema import scale_shape

flashinfer = pytest.importorskip("flashinfer", reason="flashinfer is not installed")
blackwell = pytest.importorskip("fp4pipe.runtime.ops.blackwell", reason="flashinfer is not installed")

CALLS = {
    "nvfp4_quantize": ["a", "a_global_sf", "sfLayout", "do_shuffle", "nvfp4_4over6"],
    "mm_fp4": ["a", "b", "a_descale", "b_descale", "alpha", "out_dtype", "backend"],
    "mm_bf16_fp4": ["a", "b", "b_descale", "alpha", "backend"],
    "prepare_bf16_fp4_weights": ["b", "b_descale", "alpha", "backend"],
    "shuffle_matrix_a": ["input_tensor", "epilogue_tile_m"],
    "shuffle_matrix_sf_a": ["input_tensor", "epilogue_tile_m"],
    "autotune": ["tune_mode"],
    "silu_and_mul_nvfp4_quantize": ["input", "global_scale", "is_sf_swizzled_layout", "nvfp4_4over6"],
}
"""Arguments `blackwell` gives each function, in order."""


@pytest.mark.parametrize("name", CALLS)
def test_signature(name: str) -> None:
    parameters = inspect.signature(inspect.unwrap(getattr(flashinfer, name))).parameters
    assert [p for p in parameters if p in CALLS[name]] == CALLS[name]
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    assert set(needed) <= set(CALLS[name])


def test_signature_of_the_fused_norm() -> None:
    path = Path(flashinfer.__file__).parent / "cute_dsl" / "rmsnorm_fp4quant.py"  # importing it needs CUTLASS's DSL
    tree = ast.parse(path.read_text())
    function = next(f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "rmsnorm_fp4quant")
    names = [argument.arg for argument in function.args.args]
    assert names[:2] == ["input", "weight"]
    assert {"global_scale", "eps", "block_size", "is_sf_swizzled_layout"} <= set(names)
    # What the kernel does with the global scale, which its documentation describes the other way round.
    assert "scale_float = global_scale_val * max_abs * fp4_max_rcp" in path.read_text()


@pytest.mark.parametrize("swizzled", [False, True])
def test_fused_quantizers_reach_the_kernels(monkeypatch: pytest.MonkeyPatch, swizzled: bool) -> None:
    """FlashInfer's own references of the two kernels stand in for them."""
    scale, weight = torch.tensor(0.002), torch.rand(64).bfloat16() + 0.5
    x = torch.randn(5, 128).bfloat16()

    def silu(input, global_scale, is_sf_swizzled_layout, nvfp4_4over6):
        gate, up = input.float().chunk(2, dim=1)
        return fake(gate * gate.sigmoid() * up, global_scale, is_sf_swizzled_layout)

    def norm(input, weight, global_scale, eps, block_size, is_sf_swizzled_layout):
        y = input.float() * torch.rsqrt(input.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        return fake(y, global_scale, is_sf_swizzled_layout)

    def fake(y: Tensor, global_scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
        codes, scales = nvfp4.quantize_activation(y.bfloat16(), 1.0 / global_scale.reshape(()))
        return codes, nvfp4.swizzle_scales(scales.view(torch.uint8)).flatten() if swizzled else scales

    monkeypatch.setattr(flashinfer, "silu_and_mul_nvfp4_quantize", silu)
    monkeypatch.setitem(sys.modules, "flashinfer.cute_dsl", SimpleNamespace(rmsnorm_fp4quant=norm))
    monkeypatch.setattr(flashinfer, "cute_dsl", sys.modules["flashinfer.cute_dsl"], raising=False)
    rows = x[:, :64].contiguous()
    pairs = (
        (blackwell.silu_mul_quantize(x, scale, swizzled), ops.fused.silu_mul_fp4_quantize(x, scale, swizzled)),
        (
            blackwell.rmsnorm_quantize(rows, weight, 1e-6, scale, swizzled),
            ops.fused.rmsnorm_fp4_quantize(rows, weight, 1e-6, scale, swizzled),
        ),
    )
    for got, want in pairs:
        assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]
        # Rounded once instead of twice: a code may be its neighbour, a block scale differ in its last bit.
        assert float((got[0] != want[0]).float().mean()) < 0.05
        assert int((got[1].view(torch.uint8).int() - want[1].view(torch.uint8).int()).abs().max()) <= 1


def test_backends_are_flashinfers() -> None:
    annotation = str(inspect.signature(inspect.unwrap(flashinfer.mm_fp4)).parameters["backend"].annotation)
    assert all(f"'{name}'" in annotation for name in blackwell.GEMM_BACKENDS)
    assert {"layout_128x4", "layout_linear"} <= set(dir(flashinfer.SfLayout))


def test_the_backend_option_is_checked() -> None:
    with pytest.raises(UsageError, match="triton does not exist"):
        blackwell.select_gemm_backend("triton")


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (127, 48), (129, 80), (300, 4096)])
def test_scale_shapes_are_flashinfers(rows: int, columns: int) -> None:
    fake = pytest.importorskip("flashinfer.quantization.fp4_quantization")._fp4_quantize_fake
    codes, scales = fake(torch.empty(rows, columns, device="meta", dtype=torch.bfloat16), is_sf_swizzled_layout=True)
    assert codes.shape == (rows, columns // 2)
    assert scales.shape == scale_shape(rows, columns, True)
    assert scales.dtype == torch.uint8


class Recorder:
    """Stands in for FlashInfer's kernels: computes with our reference, so that what reaches them is checked too."""

    SfLayout = flashinfer.SfLayout

    def nvfp4_quantize(
        self, a: Tensor, a_global_sf: Tensor, sfLayout: object, do_shuffle: bool, nvfp4_4over6: None
    ) -> tuple[Tensor, Tensor]:
        codes, scales = nvfp4.quantize_activation(a, 1.0 / a_global_sf.reshape(()))
        swizzled = nvfp4.swizzle_scales(scales.view(torch.uint8))
        return codes, swizzled.flatten() if sfLayout == self.SfLayout.layout_128x4 else scales.view(torch.uint8)

    def mm_fp4(
        self, a: Tensor, b: Tensor, a_descale: Tensor, b_descale: Tensor, alpha: Tensor, out: torch.dtype, backend: str
    ) -> Tensor:
        assert a.shape[1] == b.shape[0]
        assert a.shape[1] % 16 == b.shape[1] % 8 == 0
        assert alpha.numel() == 1
        assert b.T.is_contiguous()
        assert b_descale.T.shape == scale_shape(b.shape[1], a.shape[1] * 2, True)
        columns = a.shape[1] * 2 // 16
        a_scales = nvfp4.unswizzle_scales(a_descale, a.shape[0], columns)[:, :columns].view(torch.float8_e4m3fn)
        b_scales = nvfp4.unswizzle_scales(b_descale.T, b.shape[1], columns).view(torch.float8_e4m3fn)
        product = nvfp4.dequantize_blocks(a, a_scales) @ nvfp4.dequantize_blocks(b.T, b_scales).T
        return (product * alpha).to(out)

    def prepare_bf16_fp4_weights(
        self, b: Tensor, b_descale: Tensor, alpha: None, backend: str
    ) -> tuple[Tensor, Tensor, None]:
        return b, b_descale, alpha

    def mm_bf16_fp4(self, a: Tensor, b: Tensor, b_descale: Tensor, alpha: Tensor, backend: str) -> Tensor:
        assert a.shape[1] % 64 == b.shape[0] % 64 == 0
        scales = nvfp4.unswizzle_scales(b_descale, b.shape[0], b.shape[1] // 8).view(torch.float8_e4m3fn)
        return ((a.float() @ nvfp4.dequantize_blocks(b, scales).T) * alpha).to(a.dtype)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blackwell, "flashinfer", Recorder())
    monkeypatch.setattr(blackwell, "_w4a16_backend", lambda device: "cute-dsl")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 40, 64), (5, 72, 192), (130, 128, 256), (3, 96, 128)])
@pytest.mark.parametrize("mode", ["w4a4", "w4a16"])
def test_products_pad_and_agree_with_the_reference(tokens: int, rows: int, columns: int, mode: str) -> None:
    weight = nvfp4.quantize_weight(torch.randn(rows, columns))
    x, bias = torch.randn(tokens, columns), torch.randn(rows)
    w, w_scales = blackwell.prepare(weight.codes, weight.block_scale, mode)
    assert w_scales.shape == scale_shape(w.shape[0], w.shape[1] * 2, True)
    alpha = weight.global_scale.reshape(1)
    if mode == "w4a16":
        out = blackwell.gemm_w4a16(x, w, w_scales, alpha, rows, bias)
        want = torch.ops.fp4pipe.fp4_gemm_w4a16(x, weight.codes, weight.block_scale, alpha, rows, bias)
    else:
        scale = nvfp4.global_scale_of(x.abs().amax())
        codes, scales = blackwell.quantize(x, scale, True)
        want_codes, want_scales = torch.ops.fp4pipe.fp4_quantize(x, scale, True)
        assert torch.equal(codes, want_codes)
        assert torch.equal(scales, want_scales)
        out = blackwell.gemm(codes, scales, w, w_scales, alpha, rows, torch.float32, bias)
        stored = weight.codes, weight.block_scale
        want = torch.ops.fp4pipe.fp4_gemm(codes, scales, *stored, alpha, rows, torch.float32, bias)
    assert out.shape == (tokens, rows)
    assert out.is_contiguous()
    assert torch.allclose(out, want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("pretended")
def test_shards_stack_only_with_one_alpha() -> None:
    def shard(alpha: float, rows: int = 128) -> ops.PreparedWeight:
        weight = nvfp4.quantize_weight(torch.randn(rows, 64))
        prepared = blackwell.prepare(weight.codes, weight.block_scale, "w4a4")
        return ops.PreparedWeight(*prepared, torch.tensor([alpha]), rows)

    fused = forms.fuse_rows([shard(1.0), shard(1.0, 256)])
    assert fused is not None
    assert fused.out_features == 384
    assert forms.fuse_rows([shard(1.0), shard(2.0)]) is None
    assert forms.fuse_rows([shard(1.0), shard(1.0, 64)]) is None
