"""Which kernels may be asked for where."""

import pytest
import torch

from fp4pipe.errors import Fp4pipeError, Unavailable, UsageError
from fp4pipe.runtime.ops import KernelChoices
from fp4pipe.runtime.ops.choices import GEMM_BACKENDS

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")


def test_defaults_go_everywhere() -> None:
    for mode in ("w4a4", "w4a16"):
        KernelChoices().require(mode, CPU, quantized=False)


@pytest.mark.parametrize(
    ("choices", "mode", "error", "words"),
    [
        (KernelChoices(fp4_gemm_backend="triton"), "w4a4", UsageError, "--fp4-gemm-backend triton is unknown"),
        (KernelChoices(prefill="int8"), "w4a16", UsageError, "--prefill int8 is unknown"),
        (KernelChoices(lm_head="int4"), "w4a16", UsageError, "--lm-head int4 is unknown"),
        (KernelChoices(fp4_gemm_backend="cutlass"), "w4a4", Unavailable, "not possible on the CPU"),
        (KernelChoices(prefill="fp8"), "w4a16", Unavailable, "not possible on the CPU"),
        (KernelChoices(prefill="fp8"), "w4a4", UsageError, "the mode is w4a4"),
    ],
)
def test_refused_on_a_cpu(choices: KernelChoices, mode: str, error: type[Fp4pipeError], words: str) -> None:
    with pytest.raises(error, match=words):
        choices.require(mode, CPU, quantized=True)
    KernelChoices(lm_head="fp8").require(mode, CPU, quantized=True)
    KernelChoices(lm_head="nvfp4").require(mode, CPU, quantized=True)


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_hopper(gpu: None) -> None:
    KernelChoices(prefill="fp8", lm_head="fp8").require("w4a16", GPU, quantized=True)
    with pytest.raises(UsageError, match="has none"):
        KernelChoices(prefill="fp8").require("w4a16", GPU, quantized=False)
    with pytest.raises(Unavailable, match="cutlass is not possible on NVIDIA X"):
        KernelChoices("cutlass").require("w4a4", GPU, quantized=True)


@pytest.mark.parametrize("gpu", [(10, 0), (12, 0)], indirect=True)
def test_blackwell(gpu: None) -> None:
    for backend in GEMM_BACKENDS:
        KernelChoices(backend).require("w4a4", GPU, quantized=True)
    with pytest.raises(UsageError, match="the mode is w4a16"):
        KernelChoices("cutlass").require("w4a16", GPU, quantized=True)
    with pytest.raises(Unavailable, match="Hopper"):
        KernelChoices(prefill="fp8").require("w4a16", GPU, quantized=True)


@pytest.mark.parametrize("gpu", [(8, 0)], indirect=True)
def test_ampere(gpu: None) -> None:
    with pytest.raises(Unavailable, match="--lm-head fp8 needs E4M3"):
        KernelChoices(lm_head="fp8").require("w4a16", GPU, quantized=True)
