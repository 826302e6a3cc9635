"""The HTML page: whole, self-contained, escaped, and right about what it was given."""

import copy
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fp4pipe import console
from fp4pipe.plots import Bar, Dot, Interval, bars, columns, dots, intervals
from fp4pipe.report import render

BUCKETS = [
    {"bucket": b, "tokens": b - 1, "rel_error": e, "ok": e < 1e-4, "seconds": b * 1e-4, "padding_inert": True}
    for b, e in ((4, 0.0), (16, 3e-7), (64, 4e-7), (512, 2e-2))
]
VERDICT = {
    "outcome": "regress", "low": -0.09, "high": -0.02, "difference": -0.055, "margin": 0.02, "confidence": 0.95,
}  # fmt: skip
VALIDATION: dict[str, Any] = {
    "schema_version": 1,
    "kind": "validation",
    "ok": False,
    "failures": ["graphs.w4a4.buckets: wrong in buckets [512]", "gate perplexity.ratio <=1.1: 1.2"],
    "checkpoint": "out/tiny/checkpoint",
    "baseline": "models/tiny",
    "modes": {"w4a4": "w4a4, emulated on the CPU"},
    "checks": [
        {"name": "ops.values", "ok": True, "summary": "4 shapes", "figures": {"worst_error": 1e-6}, "details": {}},
        {"name": "graphs.w4a4.buckets", "ok": False, "summary": "wrong in buckets [512]", "figures": {},
         "details": {"bound": 1e-4, "rows": BUCKETS}},
        {"name": "perplexity.w4a4", "ok": None, "summary": "perplexity 12", "details": {},
         "figures": {"perplexity": 12.0, "nll": 2.48, "tokens": 4096, "baseline": 10.0, "ratio": 1.2}},
        {"name": "agreement.w4a4", "ok": None, "summary": "KL 0.2", "details": {},
         "figures": {"kl": 0.2, "kl_median": 0.1, "kl_p99": 1.5, "kl_max": 3.0, "top1": 0.8, "positions": 2048}},
        {"name": "gsm8k.w4a4", "ok": False, "summary": "regress", "details": {"verdict": VERDICT},
         "figures": {"right": 100, "wrong": 80, "invalid": 15, "truncated": 5, "questions": 200, "accuracy": 0.5}},
    ],
    "gates": [{"name": "perplexity.ratio", "bound": "<=1.1", "ok": False, "observed": {"perplexity.w4a4.ratio": 1.2}}],
    "figures": {"perplexity.w4a4.ratio": 1.2, "gsm8k.w4a4.accuracy": 0.5},
    "seconds": {"ops": 2.0, "graphs": 3.5},
    "environment": {"device": "cpu", "torch": "2.13.0"},
}  # fmt: skip
RUN: dict[str, Any] = {
    "kind": "run",
    "ok": True,
    "failures": [],
    "recipe": {"name": "tiny-random", "description": "a tiny one"},
    "source": {"spec": "random:llama", "kind": "random", "fingerprint": "c2b5" * 16},
    "checkpoint": "out/tiny/checkpoint",
    "quantize": {
        "plan": {"bytes_before": 4_000_000, "bytes_after": 1_500_000},
        "audit": {
            "ok": True,
            "worst_sqnr_db": 17.5,
            "rows": [
                {"module": f"model.layers.{i}.mlp.{n}_proj", "shape": [64, 128], "sqnr_db": 20.0 - i / 4,
                 "clipped": 0.01, "floored": 0.0}
                for i in range(11)
                for n in ("up", "down")
            ],
        },
        "seconds": {"calibrate": 0.9, "plan": 0.01},
    },
    "validation": VALIDATION,
    "gates": [{"name": "audit.worst_sqnr_db", "bound": ">=15", "ok": True, "observed": {"audit.worst_sqnr_db": 17.5}}],
    "answer": {"question": "Who?", "answer": "<b>I & you</b>", "mode": "w4a4", "first_token_s": 0.1,
               "tokens_per_s": 9.5},
    "seconds": {"quantize": 13.6, "validate": 78.75, "ask": 3.7},
    "peak_rss_bytes": 694_169_600,
}  # fmt: skip


class Page(HTMLParser):
    """Checks that every element is closed in order, and keeps the text and the attributes."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("document", [RUN, VALIDATION], ids=["run", "validation"])
def test_whole_and_self_contained(document: dict[str, Any]) -> None:
    html = render(document)
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert not {"script", "img", "iframe", "object", "embed"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "action", "data")]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", html)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert 'name="viewport"' in html
    assert "prefers-color-scheme: dark" in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)
        assert "nan" not in svg.lower()
        assert 'role="img"' in svg


def test_the_verdict_comes_first() -> None:
    text = Page(render(VALIDATION)).text
    places = [
        text.index(part) for part in ("Fail", "wrong in buckets [512]", "Gates", "Accuracy", "Checks", "Conditions")
    ]
    assert places == sorted(places)
    passing = Page(render(RUN)).text
    assert passing.index("Pass") < passing.index("Gates")
    assert "What failed" not in passing


def test_plots_show_what_was_measured() -> None:
    html = render(RUN)
    assert html.count("<svg") == 9
    for title in (
        "Perplexity over 4096 tokens",
        "KL divergence",
        "GSM8K answers, 200 questions",
        "GSM8K accuracy minus the source&#x27;s",
        "Bytes of all tensors",
        "SQNR of each quantized layer",
        "Relative error of each bucket",
        "Time of one step",
        "Seconds of each step",
    ):
        assert f"<figcaption>{title}" in html
    assert html.count('<circle class="bad"') == 2  # the wrong bucket, in both plots
    assert html.count("<title>model.layers.") == 22
    assert "12 (× 1.2000)" in html
    text = Page(html).text
    assert text.count("model.layers.10.mlp.up_proj") == 2  # the plot's note, and the table of the worst
    assert "quantize: calibrate" in text
    assert "quantize: plan" not in text  # too short to show


def test_text_is_escaped_everywhere() -> None:
    evil = '<span onload="x">&"\'</span>'
    document = json.loads(json.dumps(RUN).replace("tiny", "PLACE").replace("w4a4, emulated on the CPU", "PLACE"))
    document["answer"]["answer"] = document["failures"] = ["PLACE"]
    document["answer"]["question"] = document["source"]["spec"] = "PLACE"
    document["validation"]["checks"][0]["summary"] = document["gates"][0]["bound"] = "PLACE"
    document["quantize"]["audit"]["rows"][0]["module"] = "PLACE"
    html = render(json.loads(json.dumps(document).replace("PLACE", json.dumps(evil)[1:-1])))
    assert "<span onload" not in html
    assert html.count("&lt;span onload=") >= 8
    Page(html)


def test_figures_that_are_not_finite() -> None:
    document = copy.deepcopy(VALIDATION)
    by_name = {check["name"]: check for check in document["checks"]}
    by_name["perplexity.w4a4"]["figures"] |= {"perplexity": float("nan"), "ratio": float("inf")}
    by_name["agreement.w4a4"]["figures"] |= {"kl": float("nan"), "kl_p99": float("inf")}
    by_name["graphs.w4a4.buckets"]["details"]["rows"][0]["rel_error"] = float("nan")
    document["figures"] = {"perplexity.w4a4.ratio": float("nan")}
    html = render(json.loads(console.to_json(document)))
    Page(html)
    assert "not finite" in html


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "run", "ok": True},
        {"kind": "validation", "ok": True, "checkpoint": "x", "modes": {}, "checks": [], "gates": [], "seconds": {}},
        RUN | {"validation": None, "answer": None, "gates": []},
    ],
)
def test_what_is_missing_is_left_out(document: dict[str, Any]) -> None:
    text = Page(render(document)).text
    assert "Pass" in text
    assert "Graphs" not in text


def test_plots_of_nothing_and_of_one() -> None:
    assert "<svg" in bars("none", [])
    assert "<svg" in columns("none", [], "")
    assert "<svg" in dots("none", [], "x")
    ElementTree.fromstring(re.findall(r"<svg.*</svg>", bars("zero", [Bar("a", 0.0, "0")]))[0])
    ElementTree.fromstring(re.findall(r"<svg.*</svg>", dots("one", [Dot(4, 1e-3, "n")], "x", bound=1e-3))[0])
    point = intervals("point", [Interval("a", 0.0, 0.0, 0.0, "t")], [(0.0, "equal")], "")
    ElementTree.fromstring(re.findall(r"<svg.*</svg>", point)[0])


def test_bars_are_in_proportion() -> None:
    svg = bars("t", [Bar("a", 10.0, ""), Bar("b", 5.0, "")])
    first, second = (float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', svg))
    assert first == pytest.approx(2 * second, abs=0.2)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on PATH")
@pytest.mark.parametrize("width", [360, 1100])
def test_a_browser_shows_it(tmp_path: Path, width: int) -> None:
    page, shot = tmp_path / "report.html", tmp_path / "shot.png"
    page.write_text(render(RUN), encoding="utf-8")
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr
    assert shot.stat().st_size > 10_000
