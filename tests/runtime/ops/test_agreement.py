"""Bit agreement with the PyTorch references of FlashInfer and with ModelOpt's exporter."""

import pytest
import torch
from torch import Tensor

from fp4pipe import nvfp4
from fp4pipe.runtime import ops  # noqa: F401  registers the operators

E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def activations(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 3, rows).unsqueeze(1)
    x[0, :16] = 0
    return x


def tie_mask(x: Tensor, scales: Tensor, inverse: Tensor) -> Tensor:
    """Packed bytes that hold a value exactly between two codes: FlashInfer's reference takes the lower code there
    (its argmin keeps the first of two equal distances), the format's rule and the hardware take the even one."""
    divisor = torch.where(scales.float() == 0, 1.0, scales.float())
    scaled = (x.float().unflatten(1, (-1, 16)) * inverse / divisor.unsqueeze(-1)).flatten(1).abs()
    tie = torch.stack([scaled == value for value in E2M1_TIES]).any(0)
    return tie[:, 0::2] | tie[:, 1::2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (33, 176), (128, 512)])
def test_quantize_agrees_with_flashinfer(rows: int, columns: int, dtype: torch.dtype) -> None:
    quantize = pytest.importorskip("flashinfer.trace.templates.quantize", reason="flashinfer is not installed")
    x = activations(rows, columns, seed=columns).to(dtype)
    input_scale = nvfp4.global_scale_of(x.abs().amax())
    want_codes, want_scales = quantize._nvfp4_quantize_reference(x, 1.0 / input_scale)
    codes, scales = torch.ops.fp4pipe.fp4_quantize(x, input_scale)
    assert torch.equal(scales.view(torch.uint8), want_scales.view(torch.uint8))
    differs = (codes != want_codes) & ~tie_mask(x, scales, 1.0 / input_scale)
    assert not differs.any()


@pytest.mark.parametrize(("rows", "columns", "features"), [(1, 32, 8), (7, 128, 40), (130, 256, 136)])
def test_w4a16_agrees_with_flashinfer(rows: int, columns: int, features: int) -> None:
    gemm = pytest.importorskip("flashinfer.trace.templates.gemm", reason="flashinfer is not installed")
    weight = nvfp4.quantize_weight(torch.randn(features, columns))
    x = torch.randn(rows, columns)
    # A power of two: FlashInfer's reference multiplies alpha onto the weight, ours onto the sum.
    alpha = torch.full((1,), 2.0**-9)
    got = torch.ops.fp4pipe.fp4_gemm_w4a16(x, weight.codes, weight.block_scale, alpha, features)
    want = gemm._mm_bf16_fp4_cudnn_reference(x, weight.codes, weight.block_scale, alpha)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (127, 48), (129, 80), (256, 1024)])
def test_swizzled_scales_agree_with_flashinfer(rows: int, columns: int) -> None:
    # Its reference of mm_fp4 multiplies the raw nibbles, so the layout is compared where it is defined: the unswizzle.
    gemm = pytest.importorskip("flashinfer.trace.templates.gemm", reason="flashinfer is not installed")
    x = activations(rows, columns, seed=rows)
    input_scale = nvfp4.global_scale_of(x.abs().amax())
    _, linear = torch.ops.fp4pipe.fp4_quantize(x, input_scale)
    _, swizzled = torch.ops.fp4pipe.fp4_quantize(x, input_scale, True)
    restored = gemm._unswizzle_sf_128x4(swizzled.view(torch.uint8), rows, columns // 16)
    assert torch.equal(restored, linear.view(torch.uint8))


def test_weights_agree_with_modelopt() -> None:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor", reason="nvidia-modelopt is not installed")
    weight = torch.randn(40, 160, generator=torch.Generator().manual_seed(5))
    weight[3] = 0
    weight[4] *= 2.0**-14
    tensor, block_scale, global_scale = qtensor.NVFP4QTensor.quantize(weight, 16)
    ours = nvfp4.quantize_weight(weight, global_scale)
    assert torch.equal(ours.codes, tensor._quantized_data)
    assert torch.equal(ours.block_scale.view(torch.uint8), block_scale.view(torch.uint8))
    x = torch.randn(5, 160)
    out = torch.ops.fp4pipe.fp4_gemm_w4a16(x, ours.codes, ours.block_scale, ours.global_scale.reshape(1), 40)
    restored = tensor.dequantize(torch.float32, scale=block_scale, double_scale=global_scale, block_sizes={-1: 16})
    assert torch.allclose(out, x @ restored.T, rtol=1e-5, atol=1e-5)
