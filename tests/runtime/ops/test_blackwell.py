"""The FlashInfer backend as far as it can be checked without its GPU: signatures, shapes, and what it would call."""

import inspect

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
}
"""Arguments `blackwell` gives each function, in order."""


@pytest.mark.parametrize("name", CALLS)
def test_signature(name: str) -> None:
    parameters = inspect.signature(inspect.unwrap(getattr(flashinfer, name))).parameters
    assert [p for p in parameters if p in CALLS[name]] == CALLS[name]
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    assert set(needed) <= set(CALLS[name])


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
