"""Which plots a report shows, and where in its document their figures are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp4pipe import console
from fp4pipe.plots import Bar, Dot, Interval, bars, columns, dots, intervals

Document = Mapping[str, Any]
_MODE_KINDS = {"w4a16": "a", "w4a4": "b"}
_COLOURS = {"w4a16": "blue", "w4a4": "orange"}
_CONTRIBUTORS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def accuracy_plots(validation: Document) -> list[str]:
    """Perplexity, agreement with the source, GSM8K."""
    checks = {check["name"]: check for check in validation.get("checks") or []}
    modes = list(validation.get("modes") or {})
    return [*_perplexity(checks, modes), *_agreement(checks, modes), *_gsm8k(checks, modes)]


def _perplexity(checks: Document, modes: Sequence[str]) -> Iterator[str]:
    found = {mode: checks[f"perplexity.{mode}"]["figures"] for mode in modes if f"perplexity.{mode}" in checks}
    if not found:
        return
    first = next(iter(found.values()))
    rows = []
    if first.get("baseline") is not None:
        rows.append(Bar("source, unquantized", first["baseline"], f"{first['baseline']:.4g}", "c"))
    for mode, figures in found.items():
        value, ratio = figures["perplexity"], figures.get("ratio")
        text = "not finite" if value is None else f"{value:.4g}" + (f" (× {ratio:.4f})" if ratio else "")
        rows.append(Bar(mode, float("inf") if value is None else value, text, _kind(mode) if value else "bad"))
    yield bars(f"Perplexity over {first['tokens']} tokens", rows)


def _agreement(checks: Document, modes: Sequence[str]) -> Iterator[str]:
    found = {mode: checks[f"agreement.{mode}"]["figures"] for mode in modes if f"agreement.{mode}" in checks}
    rows = []
    for mode, figures in found.items():
        for key, name in (("kl_median", "median"), ("kl", "mean"), ("kl_p99", "99th percentile")):
            value = figures[key]
            if value is not None:
                rows.append(Bar(f"{mode}, {name}", value, f"{value:.3g}", _kind(mode)))
    if rows:
        yield bars("KL divergence of the next token from the source's, nats", rows)


def _gsm8k(checks: Document, modes: Sequence[str]) -> Iterator[str]:
    found = [(mode, checks[f"gsm8k.{mode}"]) for mode in modes if f"gsm8k.{mode}" in checks]
    outcome_rows = []
    for mode, check in found:
        figures = check["figures"]
        for key, kind in (("right", "c"), ("wrong", "b"), ("invalid", "d"), ("truncated", "d")):
            outcome_rows.append(Bar(f"{mode}, {key}", figures[key], str(figures[key]), kind))
    if outcome_rows:
        yield bars(f"GSM8K answers, {found[0][1]['figures']['questions']} questions", outcome_rows)
    paired = [(mode, check["details"]["verdict"]) for mode, check in found if "verdict" in check["details"]]
    rows = [
        Interval(mode, 100 * v["low"], 100 * v["difference"], 100 * v["high"], v["outcome"], _kind(mode))
        for mode, v in paired
    ]
    if rows:
        margin = -100 * paired[0][1]["margin"]
        name = f"GSM8K accuracy minus the source's, points, {paired[0][1]['confidence']:.0%} interval"
        yield intervals(name, rows, [(0.0, "equal"), (margin, "margin")], "")


def quantization_plots(quantized: Document) -> list[str]:
    """Bytes before and after, signal to noise of every layer."""
    plots = []
    plan = quantized.get("plan") or {}
    if plan:
        before, after = plan["bytes_before"], plan["bytes_after"]
        rows = [
            Bar("source", before, console.format_bytes(before), "c"),
            Bar("NVFP4 checkpoint", after, f"{console.format_bytes(after)} ({after / before:.0%})", "a"),
        ]
        plots.append(bars("Bytes of all tensors", rows))
    layers = [row for row in (quantized.get("audit") or {}).get("rows") or [] if row["sqnr_db"] is not None]
    if layers:
        marked = min(10, 1 + len(layers) // 20)
        worst = {row["module"] for row in sorted(layers, key=lambda row: row["sqnr_db"])[:marked]}
        values = [
            (f"{row['module']}: {row['sqnr_db']:.2f} dB", row["sqnr_db"], "bad" if row["module"] in worst else "a")
            for row in sorted(layers, key=lambda row: _place(row["module"]))
        ]
        plots.append(columns("SQNR of each quantized layer in order, dB; the worst marked", values, ""))
    return plots


def _place(module: str) -> tuple[Any, ...]:
    """Sorts modules by layer number, then in the order a layer computes them."""
    parts = module.split(".")
    order = _CONTRIBUTORS.index(parts[-1]) if parts[-1] in _CONTRIBUTORS else len(_CONTRIBUTORS)
    return [int(part) for part in parts if part.isdigit()], order, module


def graph_plots(validation: Document) -> list[str]:
    """Error and time of every bucket."""
    errors, seconds, bound = [], [], 0.0
    names = ", ".join(f"{mode} {_COLOURS[mode]}" for mode in validation.get("modes") or {} if mode in _COLOURS)
    key = f" ({names})" if names else ""
    for check in validation.get("checks") or []:
        step, _, rest = check["name"].partition(".")
        mode, _, leaf = rest.partition(".")
        if step != "graphs" or leaf != "buckets":
            continue
        bound = max(bound, check["details"]["bound"])
        for row in check["details"]["rows"]:
            note = f"{mode}, bucket {row['bucket']}, {row['tokens']} tokens"
            kind = _kind(mode) if row["ok"] else "bad"
            if row["rel_error"] is not None:
                errors.append(Dot(row["bucket"], row["rel_error"], f"{note}: {row['rel_error']:.2e}", kind))
            seconds.append(Dot(row["bucket"], 1e3 * row["seconds"], f"{note}: {1e3 * row['seconds']:.2f} ms", kind))
    if not seconds:
        return []
    return [
        dots(
            f"Relative error of each bucket against the model run eagerly{key}", errors, "bucket, tokens", bound=bound
        ),
        dots(f"Time of one step of each bucket, ms{key}", seconds, "bucket, tokens"),
    ]


def time_plot(document: Document) -> str:
    """Seconds of every step, those of the steps within beside them."""
    steps: list[tuple[str, float]] = []
    for name, seconds in (document.get("seconds") or {}).items():
        steps.append((name, seconds))
        inner = document.get("quantize" if name == "quantize" else "validation") if name != "ask" else None
        if document.get("kind") == "run" and inner and name in ("quantize", "validate"):
            steps += [(f"{name}: {part}", value) for part, value in inner["seconds"].items() if value >= 0.1]
    rows = [Bar(name, value, f"{value:.1f} s", "a" if ":" in name else "c") for name, value in steps]
    return bars("Seconds of each step", rows) if rows else ""


def _kind(mode: str) -> str:
    return _MODE_KINDS.get(mode, "d")
