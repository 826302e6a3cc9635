"""Rules a checkpoint is held against: files, index, configs, names, dtypes, scales, companions.

for finding in lint("checkpoint"):
    print(finding.rule.severity, finding.where, finding.detail)
"""

from fp4pipe.lint.rules import RULES, Finding, Rule
from fp4pipe.lint.run import lint
from fp4pipe.lint.summary import summary

__all__ = ["RULES", "Finding", "Rule", "lint", "summary"]
