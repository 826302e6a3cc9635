"""`NVFP4Linear` in both modes, and how a device's mode and backend are chosen."""

import pytest
import torch

from fp4pipe import nvfp4
from fp4pipe.errors import UsageError
from fp4pipe.runtime import ops

N, K = 32, 64


@pytest.mark.parametrize("mode", ["w4a4", "w4a16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_forward(mode: str, bias: bool, prepared: bool) -> None:
    weight = nvfp4.quantize_weight(torch.randn(N, K))
    shift = torch.randn(N) if bias else None
    x = torch.randn(2, 3, K)
    input_scale = nvfp4.global_scale_of(x.abs().amax())
    layer = ops.NVFP4Linear(K, N, bias, mode, device="meta")
    layer.load(*weight, input_scale=input_scale.reshape(1), bias=shift)
    if prepared:
        layer.prepare("cpu")
        assert layer.weight.dtype == torch.float32
    activations = x if mode == "w4a16" else nvfp4.fake_quantize_activation(x.flatten(0, 1), input_scale).view_as(x)
    exact = torch.nn.functional.linear(activations, nvfp4.dequantize(*weight), shift)
    assert torch.allclose(layer(x), exact, rtol=1e-4, atol=1e-4)


def test_load_does_not_copy() -> None:
    weight = nvfp4.quantize_weight(torch.randn(N, K))
    layer = ops.NVFP4Linear(K, N, False, "w4a16", device="meta")
    layer.load(*weight)
    assert layer.weight.data_ptr() == weight.codes.data_ptr()


def test_refusals() -> None:
    weight = nvfp4.quantize_weight(torch.randn(N, K))
    with pytest.raises(UsageError, match="input_scale"):
        ops.NVFP4Linear(K, N, False, "w4a4").load(*weight)
    with pytest.raises(UsageError, match="shapes"):
        ops.NVFP4Linear(K, N + 1, False, "w4a16").load(*weight)
    with pytest.raises(UsageError, match="bias"):
        ops.NVFP4Linear(K, N, True, "w4a16").load(*weight)
    with pytest.raises(UsageError, match="mode"):
        ops.NVFP4Linear(K, N, True, "w8a8")
    with pytest.raises(UsageError, match="multiple of 16"):
        ops.NVFP4Linear(40, N, True, "w4a16")


def test_modes_on_a_cpu() -> None:
    assert ops.backend_for("cpu") == "reference"
    assert ops.resolve_mode("auto", "cpu")[0] == "w4a16"
    mode, sentence = ops.resolve_mode("w4a4", "cpu")
    assert mode == "w4a4"
    assert "emulated" in sentence
    with pytest.raises(UsageError, match="w4a8"):
        ops.resolve_mode("w4a8", "cpu")


def test_modes_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for capability, backend, mode in (((9, 0), "cuda", "w4a16"), ((10, 0), "flashinfer", "w4a4")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, sm=capability: sm)
        assert ops.backend_for("cuda") == backend
        assert ops.resolve_mode("auto", "cuda")[0] == mode


def test_importing_the_operators_imports_no_gpu_package() -> None:
    import subprocess
    import sys

    script = "import sys, fp4pipe.runtime.ops; sys.exit(any(m in sys.modules for m in ('triton', 'flashinfer')))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
