"""What a rule is, and the register of all of them.

A rule is declared next to the function that checks it. The structural ones have no function:
`fp4pipe.checkpoint.survey` finds what breaks them, because loading must refuse the same things.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.lint.values import Values

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Rule:
    """One thing a checkpoint should satisfy.

    Attributes:
        id: Short name, for filtering.
        severity: ``error``: cannot be loaded, or would give wrong output; ``warning``: some loaders will stumble;
            ``info``: worth knowing.
        sentence: What should hold.
        fix: What to do when it does not.
    """

    id: str
    severity: Severity
    sentence: str
    fix: str


@dataclass(frozen=True)
class Finding:
    """A rule broken: by which tensor, module or file, and how."""

    rule: Rule
    where: str
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """All fields with the rule's spread out, for JSON."""
        return asdict(self.rule) | {"where": self.where, "detail": self.detail}


Hit = tuple[str, str]
"""Where, and what was seen there."""
Check = Callable[[Checkpoint], Iterator[Hit]]
ValueCheck = Callable[[Checkpoint, Values], Iterator[Hit]]

RULES: dict[str, Rule] = {}
"""Every rule by id."""
CHECKS: dict[str, Check] = {}
"""Checks that need headers and configs only, by rule id."""
VALUE_CHECKS: dict[str, ValueCheck] = {}
"""Checks that need values, by rule id."""


def declare(id: str, severity: Severity, sentence: str, fix: str) -> Rule:
    """Enter a rule into the register."""
    if id in RULES:
        raise ValueError(f"rule {id} is declared twice")
    RULES[id] = Rule(id, severity, sentence, fix)
    return RULES[id]


def rule(id: str, severity: Severity, sentence: str, *, fix: str) -> Callable[[Check], Check]:
    """Declare a rule whose check is the decorated function of a `Checkpoint`."""
    declare(id, severity, sentence, fix)

    def register(check: Check) -> Check:
        CHECKS[id] = check
        return check

    return register


def value_rule(id: str, severity: Severity, sentence: str, *, fix: str) -> Callable[[ValueCheck], ValueCheck]:
    """Declare a rule whose check is the decorated function of a `Checkpoint` and its `Values`."""
    declare(id, severity, sentence, fix)

    def register(check: ValueCheck) -> ValueCheck:
        VALUE_CHECKS[id] = check
        return check

    return register
