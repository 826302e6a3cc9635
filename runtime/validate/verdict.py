"""Did quantization cost accuracy? A paired verdict over the same questions, never a bare threshold.

McNemar's exact test looks only at the questions that one model got right and the other wrong; the bootstrap gives an
interval for the difference in accuracy. Both use the pairing, which removes most of the noise of a question set.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import binomtest, norm

Outcome = Literal["pass", "regress", "inconclusive"]
_ROUNDING = 1e-12  # a loss of 4 in 200 is a loss of 0.02, whatever binary fractions say


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a candidate with its baseline; shares are fractions, differences candidate minus baseline."""

    outcome: Outcome
    questions: int
    baseline_accuracy: float
    candidate_accuracy: float
    difference: float
    low: float
    """Lower end of the bootstrap interval on `difference`."""
    high: float
    p_value: float
    """McNemar's exact two-sided p."""
    lost: int
    """Questions only the baseline got right."""
    won: int
    """Questions only the candidate got right."""
    margin: float
    confidence: float
    questions_needed: int | None
    """About how many questions would decide it at these rates; `None` once decided, or when the loss sits on the
    margin itself and no number would."""

    @property
    def summary(self) -> str:
        """One sentence with the figures the outcome rests on."""
        accuracy = f"{self.baseline_accuracy:.1%} → {self.candidate_accuracy:.1%} over {self.questions} questions"
        interval = f"{self.confidence:.0%} interval {100 * self.low:+.1f} to {100 * self.high:+.1f}"
        text = (
            f"{self.outcome}: {accuracy} ({100 * self.difference:+.1f} points, {interval},"
            f" McNemar p = {self.p_value:.3g}, margin {100 * self.margin:.1f})"
        )
        return f"{text}; about {self.questions_needed} questions would decide" if self.questions_needed else text

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"summary": self.summary}


def verdict(
    baseline: Sequence[bool],
    candidate: Sequence[bool],
    *,
    margin: float = 0.02,
    confidence: float = 0.95,
    resamples: int = 20_000,
    seed: int = 0,
) -> Verdict:
    """Compare right/wrong answers to the same questions, in the same order.

    * *pass*: the whole interval lies above ``-margin``: a loss of `margin` or more is excluded.
    * *regress*: the loss is real (McNemar's p below ``1 - confidence``) and its estimate is at least `margin`.
    * *inconclusive*: neither; `Verdict.questions_needed` says how many questions would do.

    The bootstrap resamples questions with one question added to each kind of disagreement (Bonett and Price's
    adjustment, 2012), so that twenty answers without a disagreement do not pass for proof.

    Raises:
        ValueError: The sequences differ in length or are empty, or `margin` is not in (0, 1).
    """
    if len(baseline) != len(candidate) or not baseline:
        raise ValueError(f"paired answers need equal, non-zero lengths, got {len(baseline)} and {len(candidate)}")
    if not 0 < margin < 1:
        raise ValueError(f"margin is a share of questions between 0 and 1, got {margin}")
    n = len(baseline)
    lost = sum(b and not c for b, c in zip(baseline, candidate, strict=True))
    won = sum(c and not b for b, c in zip(baseline, candidate, strict=True))
    difference = (won - lost) / n
    p_value = 1.0 if lost + won == 0 else float(binomtest(lost, lost + won, 0.5).pvalue)

    rate_lost, rate_won = (lost + 1) / (n + 2), (won + 1) / (n + 2)
    low, high = _interval(rate_lost, rate_won, n, confidence, resamples, seed)
    outcome: Outcome = "inconclusive"
    if low > -margin:
        outcome = "pass"
    elif p_value < 1 - confidence and difference <= -margin + _ROUNDING:
        outcome = "regress"
    needed = None
    if outcome == "inconclusive":
        needed = _needed(n, lost / n, won / n, margin, confidence, resamples, seed)
    return Verdict(
        outcome=outcome,
        questions=n,
        baseline_accuracy=sum(baseline) / n,
        candidate_accuracy=sum(candidate) / n,
        difference=difference,
        low=min(low, difference),
        high=max(high, difference),
        p_value=p_value,
        lost=lost,
        won=won,
        margin=margin,
        confidence=confidence,
        questions_needed=needed,
    )


def _interval(lost: float, won: float, n: int, confidence: float, resamples: int, seed: int) -> tuple[float, float]:
    # Resampling n paired differences in {-1, 0, +1} is drawing their counts from one multinomial.
    rest = max(0.0, 1.0 - lost - won)
    total = lost + won + rest
    counts = np.random.default_rng(seed).multinomial(n, [lost / total, won / total, rest / total], size=resamples)
    low, high = np.quantile((counts[:, 1] - counts[:, 0]) / n, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _needed(n: int, lost: float, won: float, margin: float, confidence: float, resamples: int, seed: int) -> int | None:
    """Questions at which one of the two rules would fire, the shares `lost` and `won` of disagreements holding."""
    z = float(norm.ppf((1 + confidence) / 2))
    loss = lost - won
    size = n
    while size < 10_000_000:
        size += max(1, size // 200)
        # Normal approximations first: they cost nothing. McNemar's carries the continuity correction.
        if loss >= margin - _ROUNDING and loss * size - 1 > z * math.sqrt((lost + won) * size):
            return size
        a, b = (lost * size + 1) / (size + 2), (won * size + 1) / (size + 2)
        if b - a - z * math.sqrt((a + b - (a - b) ** 2) / size) <= -margin:
            continue
        if _interval(a, b, size, confidence, resamples, seed)[0] > -margin:
            return size
    return None
