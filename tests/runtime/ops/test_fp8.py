"""FP8 prefill: how a weight folds, how wrong the product is, and when the exact one runs instead."""

import pytest
import torch

from fp4pipe import nvfp4
from fp4pipe.errors import Unavailable, UsageError
from fp4pipe.runtime import ops
from fp4pipe.runtime.ops import fp8
from fp4pipe.runtime.ops.choices import require_e4m3

N, K = 64, 256


@pytest.fixture
def weight() -> ops.PreparedWeight:
    quantized = nvfp4.quantize_weight(torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
    return ops.PreparedWeight(quantized.codes, quantized.block_scale, quantized.global_scale.reshape(1), N)


def test_most_weights_fold_exactly(weight: ops.PreparedWeight) -> None:
    folded, scale = fp8.fold_weight(*weight[:3])
    exact = nvfp4.dequantize_blocks(*weight[:2]) * weight.alpha
    values = folded.float() * scale.unsqueeze(1)
    mantissa, _ = torch.frexp(scale / weight.alpha)
    assert torch.equal(mantissa, torch.full_like(mantissa, 0.5))  # powers of two
    assert (values == exact).float().mean() > 0.7
    assert float((values - exact).norm() / exact.norm()) < 0.025


def test_many_tokens_are_approximate_and_few_exact(weight: ops.PreparedWeight) -> None:
    folded = fp8.fold_weight(*weight[:3])
    for tokens, low, high in ((fp8.MIN_TOKENS - 1, 0.0, 1e-6), (fp8.MIN_TOKENS, 0.01, 0.045)):
        x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(1))
        exact = torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight)
        out = torch.ops.fp4pipe.fp8_prefill_gemm(x, *weight[:3], *folded, N)
        assert low <= float((out - exact).norm() / exact.norm()) <= high


def test_layer(weight: ops.PreparedWeight) -> None:
    layer = ops.NVFP4Linear(K, N, True, "w4a16")
    bias = torch.randn(N)
    layer.load(weight.w, weight.w_scales, weight.alpha, bias=bias)
    layer.prepare("cpu", fp8_prefill=True)
    x = torch.randn(1, 300, K)
    exact = torch.nn.functional.linear(x, nvfp4.dequantize(weight.w, weight.w_scales, weight.alpha), bias)
    assert 0.01 < float((layer(x) - exact).norm() / exact.norm()) < 0.045
    assert torch.allclose(layer(x[:, :9]), exact[:, :9], atol=1e-4)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="w4a16"):
        ops.NVFP4Linear(K, N, False, "w4a4").prepare("cpu", fp8_prefill=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(Unavailable, match="SM80"):
        require_e4m3("cuda", "--prefill fp8")


def test_opcheck(weight: ops.PreparedWeight) -> None:
    # Without the schema test, which cannot compare e4m3 inputs before and after.
    arguments = (torch.randn(300, K), *weight[:3], *fp8.fold_weight(*weight[:3]), N)
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.fp4pipe.fp8_prefill_gemm.default, arguments, test_utils=utilities)
