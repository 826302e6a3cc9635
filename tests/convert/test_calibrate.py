"""Calibration statistics are those of the plain model on the same tokens, and unusable ones are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp4pipe.calib_data import load_calibration
from fp4pipe.checkpoint import Checkpoint
from fp4pipe.convert.calibrate import calibrate, check_effect, enabled_quantizers
from fp4pipe.convert.model import compute_dtype, load
from fp4pipe.convert.quantize import QuantizeResult
from fp4pipe.convert.scheme import resolve_scheme
from fp4pipe.convert.source import Source
from fp4pipe.errors import SourceError
from tests.convert.conftest import CALIBRATION, options


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_input_scales_are_the_largest_inputs_of_the_plain_model(
    family: str, quantized: Callable[..., QuantizeResult]
) -> None:
    result = quantized(family)
    tokenizer = AutoTokenizer.from_pretrained(result.source.path)
    text = load_calibration("bundled", tokenizer, samples=4, seq_len=48, seed=0)
    dtype = compute_dtype(result.source, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(result.source.path, dtype=dtype).eval()
    seen: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen[name] = max(seen.get(name, 0.0), float(args[0].abs().max()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for batch in text.batches(CALIBRATION.batch_size):
            model(batch, use_cache=False)
    checkpoint = Checkpoint.open(result.out)
    for module in checkpoint.linears:
        scale = checkpoint.input_scale(module)
        assert scale is not None
        assert float(scale) == pytest.approx(seen[module] / 2688, rel=1e-6), module


@pytest.fixture
def calibrated(tiny: Callable[[str], Source]) -> nn.Module:
    source = tiny("llama")
    model = load(source, device=torch.device("cpu"), trust_remote_code=False)
    text = load_calibration("bundled", AutoTokenizer.from_pretrained(source.path), samples=1, seq_len=8, seed=0)
    calibrate(model, resolve_scheme(options(kv_cache="fp8")), text, 1)
    return model


def test_every_quantizer_is_set(calibrated: nn.Module) -> None:
    names = [name for name, _ in enabled_quantizers(calibrated)]
    assert len(names) == 2 * (7 * 2 + 2)
    check_effect(calibrated)


@pytest.mark.parametrize(
    ("amax", "message"),
    [
        (0.0, r"model\.layers\.1\.mlp\.up_proj: its input was zero for every calibration token"),
        (float("inf"), r"model\.layers\.1\.mlp\.up_proj: its input reached NaN or infinity"),
        (float("nan"), r"model\.layers\.1\.mlp\.up_proj: its input reached NaN or infinity"),
        (None, r"model\.layers\.1\.mlp\.up_proj: calibration never saw its input"),
    ],
)
def test_unusable_statistics_are_refused_by_name(amax: float | None, message: str, calibrated: nn.Module) -> None:
    quantizers = dict(enabled_quantizers(calibrated))
    quantizer = quantizers["model.layers.1.mlp.up_proj.input_quantizer"]
    if amax is None:
        del quantizer._amax
    else:
        quantizer._amax.fill_(amax)
    with pytest.raises(SourceError, match=message):
        check_effect(calibrated)


def test_kv_statistics_are_checked_too(calibrated: nn.Module) -> None:
    dict(enabled_quantizers(calibrated))["model.layers.0.self_attn.v_bmm_quantizer"]._amax.zero_()
    with pytest.raises(SourceError, match=r"model\.layers\.0\.self_attn: its v was zero"):
        check_effect(calibrated)
