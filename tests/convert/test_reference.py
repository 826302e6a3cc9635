"""ModelOpt's fake-quantized model: its weights are the checkpoint's, its activation rounding is ModelOpt's."""

from collections.abc import Callable

import pytest
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from transformers import AutoModelForCausalLM

from fp4pipe import nvfp4
from fp4pipe.checkpoint import Checkpoint
from fp4pipe.convert.fakequant import round_activation, round_as_hardware, round_weight
from fp4pipe.convert.quantize import QuantizeResult
from fp4pipe.convert.reference import ModelOptReference, amax_of
from fp4pipe.convert.source import Source
from fp4pipe.errors import SourceError, UsageError
from tests.tiny_models import FAMILIES

Quantized = Callable[..., QuantizeResult]
IDS = torch.randint(5, 500, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_checkpoints_bit_for_bit(family: str, quantized: Quantized) -> None:
    result = quantized(family)
    reference = ModelOptReference(result.source.path, result.out, dtype=torch.float32)
    checkpoint = Checkpoint.open(result.out)
    for module in checkpoint.linears:
        assert torch.equal(reference.weight(module), checkpoint.dequantize(module))
        amax = reference.model.get_submodule(module).input_quantizer.amax  # type: ignore[union-attr]
        assert torch.equal(amax / 2688, checkpoint.input_scale(module))  # type: ignore[arg-type, operator]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, quantized: Quantized) -> None:
    """W4A16 is transformers over dequantized weights; rounding the activations too changes a little more."""
    result = quantized(family)
    reference = ModelOptReference(result.source.path, result.out, dtype=torch.float32)
    w4a4 = reference.logits(IDS)
    reference.activations = False
    w4a16 = reference.logits(IDS)
    plain = AutoModelForCausalLM.from_pretrained(result.source.path, dtype=torch.float32)
    checkpoint = Checkpoint.open(result.out)
    with torch.no_grad():
        original = plain(IDS).logits[0]
        for module in checkpoint.linears:
            plain.get_submodule(module).weight.copy_(checkpoint.dequantize(module))
        expected = plain(IDS).logits[0]
    assert w4a4.dtype == torch.float32
    assert w4a4.shape == (40, 512)
    assert torch.equal(w4a16, expected)
    assert 0.01 < (w4a4 - w4a16).norm() / w4a16.norm() < 0.6
    assert (w4a16 - original).norm() / original.norm() < 0.6
    reference.activations = True
    assert torch.equal(reference.logits(IDS), w4a4)


def test_weight_only_checkpoint_has_no_w4a4_reference(quantized: Quantized) -> None:
    result = quantized("llama", "w4a16_nvfp4")
    with pytest.raises(UsageError, match="weights only"):
        ModelOptReference(result.source.path, result.out)
    reference = ModelOptReference(result.source.path, result.out, activations=False)
    assert reference.logits(IDS).isfinite().all()


def test_another_source_is_refused(tiny: Callable[[str], Source], quantized: Quantized) -> None:
    with pytest.raises(SourceError, match="was not made from"):
        ModelOptReference(tiny("phi3").path, quantized("llama").out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_modelopts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=generator) * torch.logspace(-6, 3, 64).unsqueeze(1)
    x[3] = 0
    ties = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]
    )
    x[5] = ties.repeat(16)
    x = x.to(dtype)
    for scale in (torch.tensor(1.0), torch.tensor(448.0).reciprocal(), x.abs().amax().float() / 2688):
        packed, block_scale, double_scale = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=scale)
        theirs = packed.dequantize(
            dtype=torch.float32, scale=block_scale, double_scale=double_scale, block_sizes={-1: 16}
        )
        assert torch.equal(round_activation(x, scale), theirs)
        assert torch.equal(round_weight(x, scale), theirs)


def test_hardware_rounding_is_the_quantizers_and_nearly_modelopts() -> None:
    x = torch.randn(256, 4096, generator=torch.Generator().manual_seed(3))
    x[7, :32] = 0
    scale = nvfp4.global_scale_of(x.abs().amax() * 0.9)  # some blocks saturate
    hardware = round_as_hardware(x, scale)
    assert torch.equal(hardware, nvfp4.fake_quantize_activation(x, scale))
    torch.testing.assert_close(round_as_hardware(x.double(), scale).float(), hardware, rtol=2e-7, atol=0)
    differing = (hardware - round_activation(x, scale)).abs() > 1e-6
    assert differing.float().mean() < 1e-4


def test_amax_of_inverts_modelopts_division() -> None:
    for amax in torch.rand(2000, generator=torch.Generator().manual_seed(2)) * 100:
        scale = amax / 2688
        assert amax_of(scale) / 2688 == scale
