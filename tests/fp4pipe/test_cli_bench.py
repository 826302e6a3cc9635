"""`fp4pipe bench gemm`: refused without a GPU, and what it shows and writes when there is one."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from fp4pipe.runtime.bench import gemm
from fp4pipe.runtime.bench.plot import plot

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200-gemm.json"


def test_help(cli):
    result = cli("bench", "--help")
    assert result.code == 0
    assert "gemm" in result.stdout
    assert cli("bench").stdout == result.stdout
    assert "--out" in cli("bench", "gemm", "--help").stdout


def test_without_a_gpu(cli, monkeypatch):
    monkeypatch.setattr(gemm.torch.cuda, "is_available", lambda: False)
    result = cli("bench", "gemm")
    assert result.code == 4
    assert "needs a CUDA GPU" in result.stderr


@pytest.mark.parametrize(
    "words", [("--shape", "qkv"), ("--shape", "a=100x20"), ("--mode", "w8a8"), ("--tokens", "0"), ("--tokens", "x")]
)
def test_usage(cli, words):
    assert cli("bench", "gemm", *words).code == 2


def test_table_json_and_plot(cli, monkeypatch, tmp_path):
    """The measured document of an H200 stands in for a measurement here."""
    measured = json.loads(MEASURED.read_text())
    monkeypatch.setattr(gemm, "bench_gemm", lambda shapes, tokens, modes, report: dict(measured))
    result = cli("bench", "gemm", "--json", "--out", tmp_path / "new")
    assert result.code == 0
    document = json.loads(result.stdout)
    assert {"device", "versions", "date", "command", "rows"} == set(document)
    assert json.loads((tmp_path / "new" / "gemm.json").read_text()) == document
    assert "gate_up 28672x4096" in result.stderr
    assert "floor" in result.stderr
    ET.parse(tmp_path / "new" / "gemm.svg")


def test_plot_draws_every_series_of_every_shape():
    svg = ET.fromstring(plot(json.loads(MEASURED.read_text())))
    lines = svg.findall(".//{*}polyline")
    assert len(lines) == 4 * 6
    numbers = [float(n) for line in lines for point in line.attrib["points"].split() for n in point.split(",")]
    assert all(0 <= n <= 460 for n in numbers)


def test_plot_of_one_row():
    row = {"name": "a<b", "N": 8, "K": 16, "M": 1, "mode": "w4a16", "us": 0.5, "bf16_us": 2.0, "fp8_us": None}
    svg = plot({"device": "X", "rows": [row | {"floor_us": 0.01, "rel_error": 0.0}]})
    assert len(ET.fromstring(svg).findall(".//{*}polyline")) == 3
