"""Proof that a checkpoint works: operators, graphs, parity with ModelOpt, perplexity, agreement, GSM8K verdicts."""

from fp4pipe.runtime.validate.check import Check
from fp4pipe.runtime.validate.graphs import check_graphs
from fp4pipe.runtime.validate.likelihood import agreement, perplexity
from fp4pipe.runtime.validate.ops import check_ops
from fp4pipe.runtime.validate.options import Gsm8kOptions, ValidateOptions
from fp4pipe.runtime.validate.parity import parity
from fp4pipe.runtime.validate.report import Report
from fp4pipe.runtime.validate.run import load_engine, validate
from fp4pipe.runtime.validate.verdict import Verdict, verdict

__all__ = [
    "Check",
    "Gsm8kOptions",
    "Report",
    "ValidateOptions",
    "Verdict",
    "agreement",
    "check_graphs",
    "check_ops",
    "load_engine",
    "parity",
    "perplexity",
    "validate",
    "verdict",
]
