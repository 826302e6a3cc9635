"""Read the number a completion ends on: this project's strict parser, and SGLang's, kept exactly as it is.

*Strict* takes the first ``####`` line that carries a number, as the worked examples in the prompt end on, and refuses
anything that could be read two ways. A line that a length limit cut short is no answer: digits may be missing.
"""

import ast
import re
from decimal import Decimal

SGLANG_INVALID = -9999999
"""What SGLang's script returns, and counts as wrong, when it finds no number."""

_MARK = re.compile(r"#{4,}[^\S\n]*([^\n]*)")
_LATEX = re.compile(r"\\(?:boxed|text|mathrm|mathbf|left|right)\b|\\(?=[$%()\[\],;! ])")
_NUMBER = re.compile(
    r"""[\s*_`({\[$]* (?P<sign>[-+]?) [\s$€£¥]* (?P<inner>[-+]?)
        (?P<whole>\d{1,3}(?:,\d{3})+(?!\d) | \d{1,3}(?:[\u00a0\u202f\u2009]\d{3})+(?!\d) | \d+ | (?=\.\d))
        (?P<fraction>\.\d+)? (?P<rest>.*)""",
    re.VERBOSE,
)
_REST = re.compile(r"""[*_`)}\]$€£¥]* (?: [.,;:!]? [*_`)}\]$]* | \s*%.* | \s*[^\W\d_].* | [,;:]?\s+.* )""", re.VERBOSE)
_SEPARATORS = str.maketrans("", "", ",\u00a0\u202f\u2009")


def strict_number(text: str, *, truncated: bool = False) -> Decimal | None:
    """The number after the first ``####`` that carries one.

    The line must be one number or ``expression = number``. Currency signs, Markdown and LaTeX dressing, a percent sign
    and a unit in words may surround it; sign, decimals and thousands separators (commas, thin or non-breaking spaces)
    count. Two numbers, a fraction, a time, a malformed group (``1,23``) or a numbered heading (``1. First``) are no
    answer; a heading of words is passed over.

    Args:
        text: A completion, or the answer field of a GSM8K item.
        truncated: The completion stopped at its length limit, so its last line may lack digits.
    """
    for mark in _MARK.finditer(text):
        if truncated and mark.end() == len(text):
            return None
        line = _LATEX.sub("", mark[1].replace("\u2212", "-")).rpartition("=")[2].strip()
        number = _NUMBER.fullmatch(line)
        if number is None:
            if line[:1].isalpha() or not any(c.isdigit() for c in line):
                continue
            return None
        rest = number["rest"]
        if (number["sign"] and number["inner"]) or any(c.isdigit() for c in rest) or not _REST.fullmatch(rest):
            return None
        whole = number["whole"].translate(_SEPARATORS) or "0"
        return Decimal(number["sign"] + number["inner"] + whole + (number["fraction"] or ""))
    return None


def sglang_number(text: str) -> int | float:
    """SGLang's ``get_answer_value``: the last run of digits, after removing commas.

    Its faults are part of it: the sign is dropped, ``18.00`` reads 0 and ``007`` is invalid.
    """
    numbers = re.findall(r"\d+", text.replace(",", ""))
    if not numbers:
        return SGLANG_INVALID
    try:
        return ast.literal_eval(numbers[-1])
    except SyntaxError:
        return SGLANG_INVALID
