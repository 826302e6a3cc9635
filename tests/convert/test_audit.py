"""The audit notices what was changed on disk after the export."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp4pipe import nvfp4
from fp4pipe.checkpoint import Checkpoint
from fp4pipe.convert.audit import Audit, audit
from fp4pipe.convert.quantize import QuantizeResult
from fp4pipe.errors import CheckpointError
from fp4pipe.safetensors_file import read_tensor

MODULE = "model.layers.0.mlp.up_proj"
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture
def tampered(quantized: Callable[..., QuantizeResult], tmp_path: Path) -> Callable[[Change], Audit]:
    """`tampered(change)`: the audit of a checkpoint whose tensors were changed."""

    def run(change: Change) -> Audit:
        result = quantized("llama")
        out = Path(shutil.copytree(result.out, tmp_path / "checkpoint"))
        tensors = load_file(out / "model.safetensors")
        change(tensors)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        return audit(out, result.source, plan=result.plan)

    return run


def test_untouched(tampered: Callable[[Change], Audit]) -> None:
    result = tampered(lambda tensors: None)
    assert result.ok
    assert not result.findings
    assert len(result.rows) == 14
    assert result.identical == 7


def test_figures(quantized: Callable[..., QuantizeResult]) -> None:
    result = quantized("llama")
    row = next(row for row in result.audit.rows if row.module == MODULE)
    weight = read_tensor(result.source.tensors[f"{MODULE}.weight"]).double()
    checkpoint = Checkpoint.open(result.out)
    error = weight - checkpoint.dequantize(MODULE).double()
    assert row.sqnr_db == pytest.approx(float(20 * torch.log10(weight.norm() / error.norm())), abs=1e-3)
    assert row.rel_error == pytest.approx(10 ** (-row.sqnr_db / 20), rel=1e-6)
    scales = checkpoint.tensor(f"{MODULE}.weight_scale").float()
    assert row.clipped == pytest.approx(float((scales == nvfp4.E4M3_MAX).float().mean()))
    assert result.audit.worst is not None
    assert result.audit.worst.sqnr_db <= result.audit.mean_sqnr_db


def test_codes_of_another_matrix(tampered: Callable[[Change], Audit]) -> None:
    result = tampered(lambda t: t[f"{MODULE}.weight"].copy_(t["model.layers.1.mlp.up_proj.weight"].clone()))
    assert not result.ok
    errors = [finding for finding in result.errors if finding.where == MODULE]
    assert "SQNR" in errors[0].detail


def test_one_changed_code_is_seen_but_no_error(tampered: Callable[[Change], Audit]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MODULE}.weight"][0, 0] ^= 1

    result = tampered(change)
    assert result.ok
    assert [row.module for row in result.rows if not row.plain] == [MODULE]


def test_scales_of_another_size(tampered: Callable[[Change], Audit]) -> None:
    result = tampered(lambda tensors: tensors[f"{MODULE}.weight_scale_2"].mul_(2))
    assert MODULE in [finding.where for finding in result.errors]


def test_nan_scale(tampered: Callable[[Change], Audit]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MODULE}.weight_scale"].view(torch.uint8)[0, 0] = 0x7F

    result = tampered(change)
    assert f"{MODULE}.weight_scale" in [finding.where for finding in result.errors]
    assert math.isnan(next(row for row in result.rows if row.module == MODULE).sqnr_db)


def test_unquantized_tensor_changed(tampered: Callable[[Change], Audit]) -> None:
    result = tampered(lambda tensors: tensors["model.norm.weight"].mul_(1.01))
    assert [(f.where, f.severity) for f in result.findings] == [("model.norm.weight", "error")]


def test_extra_and_missing_tensors(tampered: Callable[[Change], Audit]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.bias"] = tensors.pop("model.norm.weight")

    result = tampered(change)
    assert {(f.where, f.severity) for f in result.findings} == {
        ("model.norm.bias", "error"),
        ("model.norm.weight", "error"),
    }


def test_unfinished_directory_is_refused_to_others(quantized: Callable[..., QuantizeResult], tmp_path: Path) -> None:
    result = quantized("llama")
    out = Path(shutil.copytree(result.out, tmp_path / "checkpoint"))
    (out / "INCOMPLETE").touch()
    with pytest.raises(CheckpointError, match="unfinished"):
        audit(out, result.source)
    assert audit(out, result.source, unfinished=True).ok
