"""A head quantized at load: its error, its padding, and what is refused."""

import pytest
import torch
from torch import nn

from fp4pipe import nvfp4
from fp4pipe.errors import UsageError
from fp4pipe.runtime import ops


@pytest.mark.parametrize(("kind", "low", "high"), [("fp8", 0.01, 0.06), ("nvfp4", 0.05, 0.15)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [160, 101])
def test_error_and_shape(kind: str, low: float, high: float, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(64, rows, bias=bias)
    x = torch.randn(1, 7, 64)
    quantized = ops.quantize_head(head, kind)
    want, got = head(x).detach(), quantized(x).detach()
    assert got.shape == want.shape
    assert low < float((got - want).norm() / want.norm()) < high
    assert torch.allclose(quantized(x[:, :1]), got[:, :1], atol=1e-6)


def test_nvfp4_is_the_formula_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4pipe.runtime.ops import head as heads

    monkeypatch.setattr(heads, "_CHUNK", 64 * 5)
    head = nn.Linear(64, 48, bias=False)
    quantized = ops.quantize_head(head, "nvfp4")
    want = nn.functional.linear(torch.eye(64), nvfp4.dequantize(*nvfp4.quantize_weight(head.weight.detach())))
    assert torch.allclose(quantized(torch.eye(64)), want, rtol=1e-6)
    in_chunks = heads.FP8Head(head.weight.detach(), None)
    monkeypatch.undo()
    whole = heads.FP8Head(head.weight.detach(), None)
    assert torch.equal(in_chunks.weight, whole.weight)
    assert torch.equal(in_chunks.scale, whole.scale)


def test_an_all_zero_head_stays_zero() -> None:
    head = nn.Linear(32, 16, bias=False)
    nn.init.zeros_(head.weight)
    for kind in ("fp8", "nvfp4"):
        assert torch.equal(ops.quantize_head(head, kind)(torch.randn(3, 32)), torch.zeros(3, 16))


def test_refusals() -> None:
    with pytest.raises(UsageError, match="16 does not divide"):
        ops.quantize_head(nn.Linear(40, 16), "nvfp4")
    with pytest.raises(UsageError, match="already quantized"):
        ops.quantize_head(ops.NVFP4Linear(32, 16, False, "w4a16"), "fp8")
    with pytest.raises(UsageError, match="not a linear layer"):
        ops.quantize_head(None, "fp8")
