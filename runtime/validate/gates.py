"""Gates: bounds that a run's figures must keep, written as ``{"perplexity.ratio": "<=1.25", "gsm8k.verdict": "pass"}``.

A name is a check's name and one of its figures. The mode in between may be left out, and then the bound holds for every
mode measured: ``parity.top1`` covers ``parity.w4a4.top1`` and ``parity.w4a16.top1``.
"""

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp4pipe.errors import UsageError
from fp4pipe.runtime.validate.check import Check

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_SPEC = re.compile(r"\s*(>=|<=|==|!=|>|<)?\s*(\S+)\s*")
_MODES = re.compile(r"\.(w4a4|w4a16)(?=\.)")


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate held against the figures."""

    name: str
    bound: str
    ok: bool
    observed: dict[str, float | int | str | None]
    """Every figure the gate covers; empty when none was measured, which fails it."""

    @property
    def summary(self) -> str:
        """One line: the gate, and what was observed."""
        seen = ", ".join(f"{name} = {_short(value)}" for name, value in self.observed.items())
        return f"{self.name} {self.bound}: {seen or 'not measured'}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"summary": self.summary}


def parse_bound(name: str, bound: str) -> tuple[str, float | str]:
    """Operator and value of a bound; a bare value means equality.

    Raises:
        UsageError: It is not an operator and a value, or orders a word.
    """
    match = _SPEC.fullmatch(str(bound))
    if match is None:
        raise UsageError(f"gate {name}: cannot read the bound {bound!r}", fix='a bound like ">=0.99" or "pass"')
    sign, text = match[1] or "==", match[2]
    try:
        return sign, float(text)
    except ValueError:
        if sign not in ("==", "!="):
            raise UsageError(f"gate {name}: {sign} needs a number, got {text!r}") from None
        return sign, text


def judge(gates: Mapping[str, str], checks: Sequence[Check]) -> list[GateResult]:
    """Hold `gates` against the figures of `checks`. A figure that was not measured, or is not a number, fails its gate.

    Raises:
        UsageError: A bound cannot be read.
    """
    figures = {f"{check.name}.{key}": value for check in checks for key, value in check.figures.items()}
    results = []
    for name, bound in gates.items():
        sign, value = parse_bound(name, bound)
        observed = {key: seen for key, seen in figures.items() if name in (key, _MODES.sub("", key))}
        ok = bool(observed) and all(_holds(seen, sign, value) for seen in observed.values())
        results.append(GateResult(name, str(bound), ok, observed))
    return results


def check_names(gates: Mapping[str, str], steps: Sequence[str]) -> None:
    """Refuse, before anything runs, gates on a step that was not asked for and bounds that cannot be read.

    Raises:
        UsageError: Naming the gate, and the nearest step.
    """
    for name, bound in gates.items():
        parse_bound(name, bound)
        step = name.partition(".")[0]
        if step not in steps:
            near = difflib.get_close_matches(step, steps, n=1)
            raise UsageError(
                f"gate {name}: no {step!r} check in this run",
                because=f"it makes {', '.join(steps) or 'none'}",
                fix=f"{near[0]}.{name.partition('.')[2]}" if near else f"ask for the {step} check, or drop the gate",
            )


def _holds(seen: float | int | str | None, sign: str, value: float | str) -> bool:
    if isinstance(value, str):
        return isinstance(seen, str) and _OPERATORS[sign](seen, value)
    return isinstance(seen, int | float) and not math.isnan(seen) and _OPERATORS[sign](seen, value)


def _short(value: float | int | str | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
