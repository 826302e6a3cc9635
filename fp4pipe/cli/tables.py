"""Tables a person reads: the plan and the audit of a quantization."""

import re
from typing import TYPE_CHECKING, Any

from fp4pipe import console

if TYPE_CHECKING:
    from fp4pipe.convert.audit import Audit
    from fp4pipe.convert.plan import Plan
    from fp4pipe.runtime.validate import Report

_WORST = 3
"""Matrices named in the audit's summary."""


def show_plan(plan: "Plan") -> None:
    """Print which modules are quantized, which are kept and why, and the sizes before and after.

    Modules that differ in a number of their name only (the layers) are one row.
    """
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in plan.rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.name)
        groups.setdefault((pattern, row.shape, row.dtype, row.decision, row.reason), []).append(row)
    rows = [
        {
            "module": pattern,
            "count": len(members),
            "shape": " x ".join(map(str, shape)),
            "from": dtype,
            "to": decision,
            "before": console.format_bytes(sum(row.bytes_before for row in members)),
            "after": console.format_bytes(sum(row.bytes_after for row in members)),
            "why": reason,
        }
        for (pattern, shape, dtype, decision, reason), members in groups.items()
    ]
    console.table(rows, f"Plan for {plan.source}: {plan.algo}, scheme {plan.scheme}, KV cache {plan.kv_cache}")
    before, after = plan.bytes_before, plan.bytes_after
    share = f", {after / before:.0%}" if before else ""
    console.say(
        f"{console.format_bytes(before)} -> {console.format_bytes(after)}{share}; {len(plan.quantized)} of "
        f"{len(plan.rows)} modules quantized; {plan.calibration_tokens} calibration tokens at most; about "
        f"{console.format_bytes(plan.memory_bytes)} of memory needed"
    )
    for problem in plan.problems:
        console.say(f"problem: {problem}")
    for warning in plan.warnings:
        console.warn(warning)


def show_audit(audit: "Audit") -> None:
    """Print how close the files on disk are to the source, the worst matrices, and what was found."""
    worst = sorted(audit.rows, key=lambda row: row.sqnr_db)[:_WORST]
    rows = [
        {
            "module": row.module,
            "SQNR dB": round(row.sqnr_db, 2),
            "relative error": row.rel_error,
            "scales at 448": f"{row.clipped:.2%}",
            "scales at 2^-9": f"{row.floored:.2%}",
        }
        for row in worst
    ]
    console.table(rows, f"Audit of the files on disk against the source, worst of {len(audit.rows)} matrices:")
    console.say(
        f"mean SQNR {audit.mean_sqnr_db:.2f} dB; {audit.identical} tensors identical to the source; "
        f"{'no errors' if audit.ok else f'{len(audit.errors)} errors'}"
    )
    for finding in audit.findings:
        console.say(f"{finding.severity}: {finding}")


def show_checks(report: "Report") -> None:
    """Print every check and gate of a validation, one line each."""
    verdicts = {True: "ok", False: "FAILED", None: "measured"}
    rows = [{"check": c.name, "": verdicts[c.ok], "what was seen": c.summary} for c in report.checks]
    rows += [{"check": f"gate {g.name}", "": verdicts[g.ok], "what was seen": g.summary} for g in report.gates]
    console.table(rows, f"Validation of {report.checkpoint}")
