"""The one table a run ends with."""

from collections.abc import Iterator, Mapping
from typing import Any

from fp4pipe import console


def summary_table(run: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows of what was measured: sizes, SQNR, perplexity, agreement, parity, graphs, the answer, seconds.

    Args:
        run: The document of a run (see `Pipeline.run`).
    """
    return [{"figure": figure, "value": value} for figure, value in _rows(run)]


def _rows(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    plan, audit = run["quantize"]["plan"], run["quantize"]["audit"]
    yield "source", run["source"]["spec"]
    before, after = plan["bytes_before"], plan["bytes_after"]
    sizes = f"{console.format_bytes(before)} -> {console.format_bytes(after)} ({after / before:.0%})"
    yield "size", sizes
    mean, worst = _number(audit["mean_sqnr_db"]), _number(audit["worst_sqnr_db"])
    yield f"SQNR of {audit['matrices']} matrices", f"mean {mean} dB, worst {worst} dB ({audit['worst_module']})"
    if run["validation"]:
        yield from _validation_rows(run["validation"])
    if answer := run["answer"]:
        speed = "" if answer["tokens_per_s"] is None else f", then {answer['tokens_per_s']:.1f} tokens/s"
        yield "answer over HTTP", f"{answer['mode']}, first token after {_number(answer['first_token_s'])} s{speed}"
    kept = set(run["kept"])
    yield "seconds", ", ".join(f"{s} {t:.1f}{' (kept)' if s in kept else ''}" for s, t in run["seconds"].items())
    yield "peak memory", console.format_bytes(run["peak_rss_bytes"])
    held = sum(gate["ok"] for gate in run["gates"])
    yield "gates", f"{held} of {len(run['gates'])} held"


def _validation_rows(validation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    figures = {check["name"]: check["figures"] for check in validation["checks"]}
    modes = [mode for mode in validation["modes"] if f"perplexity.{mode}" in figures]
    if modes:
        first = figures[f"perplexity.{modes[0]}"]
        parts = [f"bf16 {_number(first['baseline'])}"] if "baseline" in first else []
        for mode in modes:
            found = figures[f"perplexity.{mode}"]
            ratio = f" (x {found['ratio']:.3f})" if "ratio" in found else ""
            parts.append(f"{mode} {_number(found['perplexity'])}{ratio}")
        yield f"perplexity, {first['tokens']} tokens", "; ".join(parts)
    yield from _by_mode(validation, figures, "agreement", "agreement with bf16", "top-1 {top1:.1%}, KL {kl:.3g}")
    yield from _by_mode(
        validation, figures, "parity", "parity with ModelOpt", "top-1 {top1:.2%}, error {rel_error:.1e}"
    )
    yield from _by_mode(validation, figures, "gsm8k", "GSM8K", "{accuracy:.1%}")
    yield from _by_mode(
        validation, figures, "graphs", "graph pieces", "{pieces} pieces, {distinct_pieces} distinct", leaf=".capture"
    )
    checks = [check for check in validation["checks"] if check["ok"] is not None]
    yield "checks", f"{sum(check['ok'] for check in checks)} of {len(checks)} passed"


def _by_mode(
    validation: Mapping[str, Any], figures: Mapping[str, Any], check: str, label: str, text: str, leaf: str = ""
) -> Iterator[tuple[str, str]]:
    found = {mode: figures.get(f"{check}.{mode}{leaf}") for mode in validation["modes"]}
    parts = [f"{mode} {text.format(**values)}" for mode, values in found.items() if values]
    if parts:
        yield label, "; ".join(parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
