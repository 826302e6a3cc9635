"""The tables of `docs/kernels.md` are the figures of the JSON they name."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
ROWS = json.loads((ROOT / "benchmarks" / "results" / "h200-gemm.json").read_text())["rows"]
NAMES = ("qkv", "o", "gate_up", "down")
TEXT = (ROOT / "docs" / "kernels.md").read_text()


def row(name: str, tokens: int, mode: str = "w4a16") -> dict[str, Any]:
    return next(r for r in ROWS if (r["name"], r["M"], r["mode"]) == (name, tokens, mode))


def shown(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def test_times() -> None:
    lines = re.findall(r"^\| (\d+) \| (.*\(.*\).*) \|$", TEXT, re.MULTILINE)
    assert len(lines) == 14
    for tokens, cells in lines:
        for name, cell in zip(NAMES, cells.split(" | "), strict=True):
            figures = row(name, int(tokens))
            assert cell == f"{shown(figures['us'])} ({shown(figures['bf16_us'])}, {shown(figures['floor_us'])})"


def test_ratios() -> None:
    lines = re.findall(r"^\| (\d+) \| (\d\.\d\d / .*) \|$", TEXT, re.MULTILINE)
    assert len(lines) == 6
    for tokens, cells in lines:
        for name, cell in zip(NAMES, cells.split(" | "), strict=True):
            bf16 = row(name, int(tokens))["bf16_us"]
            ratios = [row(name, int(tokens), mode)["us"] / bf16 for mode in ("w4a4_emulated", "fp8_prefill")]
            assert cell == " / ".join(f"{ratio:.2f}" for ratio in ratios)


def test_errors() -> None:
    exact = max(r["rel_error"] for r in ROWS if r["mode"] != "fp8_prefill")
    approximate = max(r["rel_error"] for r in ROWS if r["mode"] == "fp8_prefill")
    assert f"{exact:.1e}".replace("e-0", "e-") in TEXT
    assert f"{approximate:.1e}".replace("e-0", "e-") in TEXT


def test_heads() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "smollm2-135m-lm-head.json").read_text())["rows"]
    for figures in stored:
        cells = [figures["lm_head"], f"{figures['perplexity']:.2f}"]
        cells += [f"{figures['kl']:.4f}", f"{figures['top1']:.1%}"] if "kl" in figures else ["", ""]
        assert "| " + " | ".join(cells).replace(" |  | ", " | | ").rstrip() + " |" in TEXT
