"""The HTML page of a run or of a validation: one file, no network, no script; verdict first.

`render` takes the document that `fp4pipe run` or `fp4pipe validate` writes as report.json; what the document lacks is
left out of the page.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from fp4pipe import console
from fp4pipe.report_plots import accuracy_plots, graph_plots, quantization_plots, time_plot

Document = Mapping[str, Any]
_WORST = 10


class Markup(str):
    """HTML made here; every other text is escaped."""

    __slots__ = ()


def render(document: Document) -> str:
    """The page, a complete HTML document.

    Args:
        document: Of kind ``run`` or ``validation``, as plain JSON values.
    """
    validation: Document = document if document.get("kind") == "validation" else document.get("validation") or {}
    quantized: Document = document.get("quantize") or {}
    title = (document.get("recipe") or {}).get("name") or str(document.get("checkpoint", "")).rpartition("/")[2]
    body = [
        _head(document, title),
        _tiles(_facts(document, quantized, validation)),
        _section("Gates", _gates(document, validation)),
        _section("Accuracy", _plots(accuracy_plots(validation))),
        _section("Quantization", _plots(quantization_plots(quantized)) + _worst(quantized)),
        _section("Graphs", _plots(graph_plots(validation))),
        _section("Checks", _checks(validation)),
        _section("Answer", _answer(document.get("answer") or {})),
        _section("Time", _plots([time_plot(document)])),
        _section("Conditions", _conditions(document, validation)),
    ]
    style = files("fp4pipe").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{escape(title)} · fp4pipe</title>'
        f"<style>{style}</style></head>\n<body>{''.join(body)}</body></html>\n"
    )


def _head(document: Document, title: str) -> str:
    ok, failures = bool(document.get("ok")), document.get("failures") or []
    word, kind = ("Pass", "good") if ok else ("Fail", "bad")
    listed = "".join(f"<li>{escape(str(failure))}</li>" for failure in failures)
    sentence = "Every check that has a bound passed and every gate held." if ok else "What failed:"
    description = (document.get("recipe") or {}).get("description", "")
    return (
        f"<h1>{escape(title)}</h1>"
        + (f'<p class="dim">{escape(description)}</p>' if description else "")
        + f'<div class="verdict {kind}"><strong>{word}</strong><p>{sentence}</p>'
        + (f"<ul>{listed}</ul>" if listed else "")
        + "</div>"
    )


def _facts(document: Document, quantized: Document, validation: Document) -> Iterator[tuple[str, str]]:
    """The figures a reader looks for first: (name, value)."""
    plan, audit = quantized.get("plan") or {}, quantized.get("audit") or {}
    if plan:
        before, after = plan["bytes_before"], plan["bytes_after"]
        yield "size", f"{console.format_bytes(before)} → {console.format_bytes(after)}"
    if audit:
        yield "worst layer", f"{number(audit['worst_sqnr_db'])} dB SQNR"
    figures = validation.get("figures") or {}
    for mode in validation.get("modes") or {}:
        for figure, name, text in (
            ("perplexity.{}.ratio", "perplexity, NVFP4 over source", "× {:.4f}"),
            ("agreement.{}.top1", "top-1 equal to the source's", "{:.1%}"),
            ("agreement.{}.kl", "KL from the source", "{:.4g} nats"),
            ("parity.{}.top1", "top-1 equal to ModelOpt's", "{:.2%}"),
            ("gsm8k.{}.accuracy", "GSM8K", "{:.1%}"),
            ("gsm8k.{}.verdict", "GSM8K against the source", "{}"),
            ("graphs.{}.capture.distinct_pieces", "distinct graph pieces", "{}"),
        ):
            value = figures.get(figure.format(mode))
            if value is not None:
                yield f"{name}, {mode}", text.format(value)
    if document.get("peak_rss_bytes"):
        yield "peak memory", console.format_bytes(document["peak_rss_bytes"])


def _tiles(facts: Iterator[tuple[str, str]]) -> str:
    tiles = "".join(f'<div class="tile"><b>{escape(v)}</b><span class="dim">{escape(n)}</span></div>' for n, v in facts)
    return f'<div class="tiles">{tiles}</div>'


def _gates(document: Document, validation: Document) -> str:
    gates = {gate["name"]: gate for gate in [*(validation.get("gates") or []), *(document.get("gates") or [])]}
    return table(
        ("gate", "bound", "", "observed"),
        [
            (gate["name"], gate["bound"], _mark(gate["ok"]), _observed(gate["observed"]) or "not measured")
            for gate in gates.values()
        ],
    )


def _observed(observed: Document) -> str:
    return ", ".join(f"{name} = {number(value)}" for name, value in observed.items())


def _checks(validation: Document) -> str:
    rows = [(check["name"], _mark(check["ok"]), check["summary"]) for check in validation.get("checks") or []]
    return table(("check", "", "what was seen"), rows)


def _worst(quantized: Document) -> str:
    rows = (quantized.get("audit") or {}).get("rows") or []
    worst = sorted((row for row in rows if row["sqnr_db"] is not None), key=lambda row: row["sqnr_db"])[:_WORST]
    if not worst:
        return ""
    shown = []
    for row in worst:
        shape, shares = "×".join(map(str, row["shape"])), (f"{row['clipped']:.2%}", f"{row['floored']:.2%}")
        shown.append((row["module"], shape, number(row["sqnr_db"]), *shares))
    head = ("worst layers", "shape", "SQNR, dB", "blocks clipped", "blocks floored")
    return table(head, shown, numbers=(2, 3, 4))


def _answer(answer: Document) -> str:
    if not answer:
        return ""
    speed = [f"in {escape(str(answer.get('mode')))}"]
    if answer.get("first_token_s") is not None:
        speed.append(f"first token after {number(answer['first_token_s'])} s")
    if answer.get("tokens_per_s") is not None:
        speed.append(f"then {number(answer['tokens_per_s'])} tokens/s")
    return (
        f"<p>{escape(str(answer['question']))}</p><blockquote>{escape(str(answer['answer']))}</blockquote>"
        f'<p class="dim">Through the HTTP server, {", ".join(speed)}.</p>'
    )


def _conditions(document: Document, validation: Document) -> str:
    rows: list[Sequence[str]] = [("checkpoint", str(document.get("checkpoint", "")))]
    source = document.get("source") or {}
    rows += [("source", f"{source['spec']} ({str(source.get('fingerprint'))[:16]})")] if source else []
    rows += [("baseline", str(validation["baseline"]))] if validation.get("baseline") else []
    rows += [(f"mode {mode}", why) for mode, why in (validation.get("modes") or {}).items()]
    rows += [(key, str(value)) for key, value in (validation.get("environment") or {}).items()]
    recipe = escape(console.to_json(document["recipe"])) if document.get("recipe") else ""
    folded = f"<details><summary>recipe</summary><pre>{recipe}</pre></details>" if recipe else ""
    return table(("", ""), rows) + folded


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _plots(plots: Sequence[str]) -> str:
    shown = "".join(plots)
    return f'<div class="plots">{shown}</div>' if shown else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """An HTML table; empty text for no rows."""
    if not rows:
        return ""

    def kind(index: int) -> str:
        return "num" if index in numbers else "name" if index == 0 else ""

    def cell(index: int, value: str) -> str:
        return f'<td class="{kind(index)}">{value if isinstance(value, Markup) else escape(value)}</td>'

    lines = "".join(f"<tr>{''.join(cell(i, value) for i, value in enumerate(row))}</tr>" for row in rows)
    names = "".join(f'<th class="{kind(i)}">{escape(name)}</th>' for i, name in enumerate(head)) if any(head) else ""
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'


def _mark(ok: bool | None) -> Markup:
    kind, text = {True: ("good", "pass"), False: ("bad", "FAIL"), None: ("dim", "measured")}[ok]
    return Markup(f'<span class="{kind}">{text}</span>')


def number(value: Any) -> str:
    """A figure as a reader wants it; JSON's null, which stands for NaN and infinity, as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return str(value)
