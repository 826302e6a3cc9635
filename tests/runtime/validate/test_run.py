"""Whole validation runs on the tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fp4pipe import console
from fp4pipe.checkpoint import Checkpoint
from fp4pipe.convert.reference import ModelOptReference
from fp4pipe.errors import UsageError
from fp4pipe.runtime.validate import Gsm8kOptions, Report, ValidateOptions, load_engine, validate
from fp4pipe.runtime.validate.numerics import loaded_layers
from tests.runtime.nvfp4_checkpoint import quantize_tiny
from tests.tiny_models import make_tiny

QUICK: dict[str, Any] = {"runner": "off", "window": 96, "progress": False}


class Dequantized:
    """transformers over the checkpoint's dequantized weights: the w4a16 reference."""

    activations = False

    def __init__(self, source: Path, checkpoint: Checkpoint) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        with torch.no_grad():
            for module in checkpoint.linears:
                self.model.get_submodule(module).weight.copy_(checkpoint.dequantize(module))

    def logits(self, input_ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(input_ids).logits[0]


@pytest.fixture(scope="module")
def everything(source: Path, quantized: Path) -> Report:
    """All checks on a model, in both modes."""
    options = ValidateOptions(
        ops=True,
        graphs=True,
        parity_positions=300,
        perplexity_tokens=500,
        agreement_tokens=200,
        modes=("w4a16", "w4a4"),
        buckets=2,
        gates={"parity.top1": ">=0.99", "perplexity.ratio": "<=1.5", "agreement.kl": "<=0.5", "graphs.recompiles": "0"},
        **QUICK,
    )
    return validate(quantized, options, reference=ModelOptReference(source, quantized), baseline_path=source)


def test_every_check_is_made_in_every_mode(everything: Report) -> None:
    names = [check.name for check in everything.checks]
    assert len(names) == len(set(names))
    assert {"ops.registration", "ops.values", "ops.batch", "ops.w4a16.layers", "ops.w4a4.layers"} <= set(names)
    for mode in ("w4a16", "w4a4"):
        assert f"graphs.{mode}.buckets" in names
        assert {f"parity.{mode}", f"perplexity.{mode}", f"agreement.{mode}"} <= set(names)
    assert [check.summary for check in everything.checks if check.ok is False] == []


def test_parity_is_exact_where_codes_are_compared(everything: Report) -> None:
    assert everything.figures["parity.w4a4.top1"] == 1
    assert everything.figures["parity.w4a4.rel_error"] == pytest.approx(0, abs=1e-6)
    assert everything.figures["parity.w4a16.rel_error"] == pytest.approx(0, abs=1e-4)
    assert everything.figures["parity.w4a4.positions"] >= 300  # type: ignore[operator]


def test_gates_are_judged(everything: Report) -> None:
    by_name = {gate.name: gate for gate in everything.gates}
    assert by_name["parity.top1"].ok
    assert set(by_name["parity.top1"].observed) == {"parity.w4a16.top1", "parity.w4a4.top1"}
    assert not by_name["graphs.recompiles"].ok  # the figure is graphs.recompiles.count
    assert not everything.ok
    assert everything.exit_code == 3
    assert everything.failures == ["gate graphs.recompiles 0: not measured"]


def test_the_report_is_plain_json(everything: Report) -> None:
    document = json.loads(console.to_json(everything))
    assert document["schema_version"] == 1
    assert document["kind"] == "validation"
    assert document["modes"].keys() == {"w4a4", "w4a16"}
    assert "emulated" in document["modes"]["w4a4"]
    assert document["environment"]["device"] == "cpu"
    assert document["environment"]["torch"]
    assert set(document["seconds"]) >= {"ops", "graphs", "parity", "text", "load baseline"}
    assert document["figures"]["perplexity.w4a4.ratio"] == pytest.approx(1, abs=0.3)


def test_w4a16_parity_with_transformers(source: Path, quantized: Path, checkpoint: Checkpoint) -> None:
    options = ValidateOptions(parity_positions=100, modes=("w4a16",), **QUICK)
    report = validate(quantized, options, reference=Dequantized(source, checkpoint))
    assert report.ok
    assert report.exit_code == 0


def test_parity_catches_swapped_scales(source: Path, quantized: Path, checkpoint: Checkpoint) -> None:
    """Global scales of two layers exchanged in the file: every structural check passes, the logits do not."""
    options = ValidateOptions(parity_positions=100, modes=("w4a16",), **QUICK)
    engine = load_engine(quantized, "w4a16", options)
    layers = dict(loaded_layers(engine.model, checkpoint))
    one, other = (layers[f"model.layers.0.mlp.{name}_proj"] for name in ("down", "gate"))
    one.alpha, other.alpha = other.alpha, one.alpha
    report = validate(quantized, options, reference=Dequantized(source, checkpoint), engines={"w4a16": engine})
    assert report.exit_code == 3
    assert report.failures[0].startswith("parity.w4a16: top-1")


def test_an_unquantized_model_is_validated_too(source: Path) -> None:
    options = ValidateOptions(ops=True, graphs=True, perplexity_tokens=100, agreement_tokens=100, buckets=1, **QUICK)
    report = validate(source, options, baseline_path=source)
    assert report.ok
    assert report.figures["perplexity.unquantized.ratio"] == pytest.approx(1)
    assert report.figures["agreement.unquantized.top1"] == 1


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    for name, count in (("train", 4), ("test", 6)):
        lines = [
            json.dumps({"question": f"{i}+1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"})
            for i in range(count)
        ]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.mark.parametrize("style", ["ours", "sglang"])
def test_gsm8k(source: Path, quantized: Path, questions: Path, tmp_path: Path, style: Any) -> None:
    asked = Gsm8kOptions(
        data=questions, questions=5, shots=1, style=style, max_tokens=6, in_flight=2, answers=tmp_path / "answers"
    )
    options = ValidateOptions(gsm8k=asked, modes=("w4a16",), gates={"gsm8k.verdict": "!=regress"}, **QUICK)
    report = validate(quantized, options, baseline_path=source)
    (check,) = report.checks
    assert check.name == "gsm8k.w4a16"
    figures = check.figures
    assert figures["questions"] == 5
    assert sum(figures[kind] for kind in ("right", "wrong", "invalid", "truncated")) == 5  # type: ignore[misc]
    assert figures["verdict"] == "inconclusive"  # five questions decide nothing
    assert "questions would decide" in check.summary
    assert report.ok
    stored = sorted(path.name for path in (tmp_path / "answers").iterdir())
    assert stored == ["gsm8k-baseline.jsonl", "gsm8k-w4a16.jsonl"]
    again = validate(quantized, options, baseline_path=source)
    assert again.checks[0].to_dict() == check.to_dict()
    assert len((tmp_path / "answers" / "gsm8k-w4a16.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to validate"),
        ({"parity_positions": 5}, "--parity needs"),
        ({"agreement_tokens": 5}, "--agreement compares"),
        ({"ops": True, "modes": ("w4a4", "w4a4")}, "names no mode, or one twice"),
        ({"ops": True, "gates": {"parity.top1": ">=1"}}, "no 'parity' check"),
        ({"gsm8k": Gsm8kOptions(in_flight=501)}, "--in-flight 501"),
        ({"gsm8k": Gsm8kOptions(style="theirs")}, "--style theirs"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_done_is_refused_before_loading(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate(tmp_path / "nowhere", ValidateOptions(**options))


def test_a_tokenizer_or_text_of_its_own(tmp_path: Path) -> None:
    path = quantize_tiny(make_tiny("qwen2", tmp_path / "source"), tmp_path / "nvfp4")
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten " * 5)
    options = ValidateOptions(perplexity_tokens=50, modes=("w4a4",), text=tmp_path / "text.txt", **QUICK)
    report = validate(path, options)
    assert report.figures["perplexity.w4a4.tokens"] == 50
    assert "ratio" not in report.checks[0].figures
    with pytest.raises(UsageError, match="fewer than the 5000"):
        validate(path, ValidateOptions(perplexity_tokens=5000, text=tmp_path / "text.txt", **QUICK))
