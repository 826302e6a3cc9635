"""What a validation step hands back: a verdict, one sentence, figures that gates can name, details for the report."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Check:
    """One thing that was proved, disproved or measured."""

    name: str
    """Dotted: the step, then what it looked at (``graphs.padding``, ``parity.w4a4``)."""
    ok: bool | None
    """``None`` for a measurement that has no bound of its own; gates may still judge its figures."""
    summary: str
    figures: dict[str, float | int | str | None] = field(default_factory=dict)
    """Single values; a gate names one as ``<check name>.<key>``."""
    details: dict[str, Any] = field(default_factory=dict)
    """Anything else worth keeping, as plain JSON values."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "ok": self.ok,
            "summary": self.summary,
            "figures": dict(self.figures),
            "details": dict(self.details),
        }
