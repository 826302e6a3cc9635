"""Bounds on figures."""

import math

import pytest

from fp4pipe.errors import UsageError
from fp4pipe.runtime.validate.check import Check
from fp4pipe.runtime.validate.gates import check_names, judge

CHECKS = [
    Check("parity.w4a4", True, "", {"top1": 0.995, "rel_error": 2e-3}),
    Check("parity.w4a16", True, "", {"top1": 1.0}),
    Check("graphs.w4a4.capture", True, "", {"graph_breaks": 0}),
    Check("gsm8k.w4a4", None, "", {"verdict": "inconclusive"}),
    Check("perplexity.w4a4", None, "", {"perplexity": math.nan, "ratio": math.inf}),
]


@pytest.mark.parametrize(
    ("name", "bound", "ok"),
    [
        ("parity.top1", ">=0.99", True),
        ("parity.top1", ">=0.999", False),  # one of the two modes is below
        ("parity.w4a16.top1", ">= 0.999", True),
        ("parity.w4a4.rel_error", "<1e-2", True),
        ("parity.w4a4.rel_error", "<1e-3", False),
        ("graphs.capture.graph_breaks", "0", True),
        ("graphs.capture.graph_breaks", "!=0", False),
        ("gsm8k.verdict", "pass", False),
        ("gsm8k.verdict", "!=regress", True),
        ("gsm8k.verdict", "<=1", False),  # a word is not a number
        ("perplexity.perplexity", "<=100", False),  # NaN keeps no bound
        ("perplexity.perplexity", "!=5", False),
        ("perplexity.ratio", "<=1.5", False),
        ("parity.kl", "<=1", False),  # not measured
        ("parity.w4a8.top1", ">=0", False),
    ],
)
def test_judge(name: str, bound: str, ok: bool) -> None:
    (result,) = judge({name: bound}, CHECKS)
    assert result.ok is ok
    assert name in result.summary
    assert result.to_dict()["ok"] is ok


def test_what_was_observed_is_said() -> None:
    (both, none) = judge({"parity.top1": ">=0.99", "parity.kl": "<=1"}, CHECKS)
    assert both.observed == {"parity.w4a4.top1": 0.995, "parity.w4a16.top1": 1.0}
    assert "parity.w4a4.top1 = 0.995" in both.summary
    assert "not measured" in none.summary


@pytest.mark.parametrize("bound", ["", ">=", ">= a b", "<=good"])
def test_unreadable_bounds(bound: str) -> None:
    with pytest.raises(UsageError, match=r"gate parity\.top1"):
        check_names({"parity.top1": bound}, ["parity"])


def test_a_gate_on_a_step_that_is_not_made() -> None:
    with pytest.raises(UsageError, match=r"no 'perplexty' check.*try: perplexity\.ratio"):
        check_names({"perplexty.ratio": "<=1.1"}, ["ops", "perplexity"])
    with pytest.raises(UsageError, match="ask for the gsm8k check"):
        check_names({"gsm8k.verdict": "pass"}, ["ops"])
