"""`lint`: hold a checkpoint against every rule."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fp4pipe.checkpoint import survey
from fp4pipe.lint import companions, names, scales, sizes, structure  # noqa: F401 (importing them declares their rules)
from fp4pipe.lint.rules import CHECKS, RULES, VALUE_CHECKS, Finding
from fp4pipe.lint.values import read_values

MAX_PER_RULE = 10
"""Findings of one rule that are listed one by one; a last one counts the rest."""
_ORDER = {"error": 0, "warning": 1, "info": 2}


def lint(checkpoint_dir: str | Path, *, scan_values: bool = True, unfinished: bool = False) -> list[Finding]:
    """Hold the checkpoint in `checkpoint_dir` against every rule that can be checked.

    Args:
        checkpoint_dir: The directory. Nothing in it makes this raise; damage becomes findings.
        scan_values: Also read every scale and every unquantized tensor (codes are never read).
        unfinished: Read it although it is marked as still being written.

    Returns:
        Findings, errors first. At most `MAX_PER_RULE` of a rule, and one more that counts the others.
    """
    checkpoint, problems = survey(checkpoint_dir, unfinished=unfinished)
    findings = [Finding(RULES[p.rule], p.where, p.error.what + _because(p.error.because)) for p in problems]
    if checkpoint is not None:
        for id, check in CHECKS.items():
            findings += [Finding(RULES[id], *hit) for hit in check(checkpoint)]
        if scan_values:
            values = read_values(checkpoint)
            for id, check in VALUE_CHECKS.items():
                findings += [Finding(RULES[id], *hit) for hit in check(checkpoint, values)]
    return sorted(_shortened(findings), key=lambda finding: _ORDER[finding.rule.severity])


def _because(because: str | None) -> str:
    return f" ({because})" if because else ""


def _shortened(findings: Iterable[Finding]) -> list[Finding]:
    """`findings` with those of one rule beyond the first `MAX_PER_RULE` counted instead of listed."""
    kept: list[Finding] = []
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.rule.id] += 1
        if counts[finding.rule.id] <= MAX_PER_RULE:
            kept.append(finding)
    for id, count in counts.items():
        if count > MAX_PER_RULE:
            kept.append(Finding(RULES[id], "elsewhere", f"and {count - MAX_PER_RULE} more like these"))
    return kept
