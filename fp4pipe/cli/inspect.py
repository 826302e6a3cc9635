"""`fp4pipe inspect`: what is in a checkpoint, and what is wrong with it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fp4pipe import console
from fp4pipe.cli.outcome import Outcome
from fp4pipe.errors import CheckpointError

_KEYED_BY_NAME = ("by_dtype", "modules")
"""Parts of the summary whose keys are names found in the checkpoint."""


def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Checkpoint directory, of any tool.")],
    values: Annotated[bool, typer.Option(help="Read every scale too, not only headers and configs.")] = True,
) -> Outcome:
    """Show what a checkpoint holds and check it: files, configs, names, dtypes, scales."""
    from fp4pipe.checkpoint import survey
    from fp4pipe.lint import lint, summary

    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such directory", fix="the path of a checkpoint directory")
    opened, _ = survey(checkpoint)
    findings = lint(checkpoint, scan_values=values)
    document = {
        "checkpoint": checkpoint,
        "summary": summary(opened) if opened else None,
        "findings": [
            {"rule": f.rule.id, "severity": f.rule.severity, "where": f.where, "detail": f.detail, "fix": f.rule.fix}
            for f in findings
        ],
    }
    errors = [f for f in findings if f.rule.severity == "error"]
    document["ok"] = not errors
    return Outcome(document, _text(document), tuple(_sentence(f.where, f.detail) for f in errors))


def _sentence(where: str, detail: str) -> str:
    """Where and what, the place once: the details of damaged files begin with their paths."""
    return detail if where in detail.partition(": ")[0] else f"{where}: {detail}"


def _text(document: dict[str, Any]) -> str:
    lines = [str(document["checkpoint"]), *_summary_lines(document["summary"] or {})]
    for finding in document["findings"]:
        sentence = _sentence(finding["where"], finding["detail"])
        lines.append(f"{finding['severity']}: {sentence} [{finding['rule']}]")
        if finding["fix"]:
            lines.append(f"  try: {finding['fix']}")
    lines.append("ok" if document["ok"] else "not ok")
    return "\n".join(lines)


def _summary_lines(summary: dict[str, Any], part: str = "", indent: str = "  ") -> list[str]:
    """`summary`, which is the `part` of the whole of that name, as indented lines."""
    lines = []
    for key, value in summary.items():
        label = key if part in _KEYED_BY_NAME else key.replace("_", " ")
        if isinstance(value, dict):
            lines += [f"{indent}{label}", *_summary_lines(value, key, indent + "  ")]
        else:
            lines.append(f"{indent}{label}: {_shown(value, is_bytes=part == 'bytes')}")
    return lines


def _shown(value: Any, *, is_bytes: bool) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return console.format_bytes(value) if is_bytes else str(value)
