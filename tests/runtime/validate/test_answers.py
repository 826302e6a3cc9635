"""Hard cases for reading an answer out of a completion."""

import json
from decimal import Decimal
from pathlib import Path

import pytest

from fp4pipe.runtime.validate.answers import SGLANG_INVALID, sglang_number, strict_number

DATA = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"

STRICT = {
    # plain
    "She makes 9 * 2 = $18.\n#### 18": "18",
    "####18": "18",
    "##### 18": "18",
    "#### 18\n\nQuestion: next\nAnswer: ... \n#### 99": "18",
    "#### 0": "0",
    "#### 007": "7",
    # sign
    "#### -10": "-10",
    "#### \u221210": "-10",
    "#### - 10": "-10",
    "#### +10": "10",
    "#### -$10": "-10",
    "#### $-10": "-10",
    "#### --10": None,
    "#### -$-10": None,
    # decimals
    "#### 18.00": "18",
    "#### 2.5": "2.5",
    "#### .5": "0.5",
    "#### 18.": "18",
    "#### 1.2.3": None,
    # thousands separators
    "#### 1,450,000": "1450000",
    "#### 1,234.50": "1234.5",
    "#### 70\u202f000": "70000",
    "#### 70\u00a0000": "70000",
    "#### 1,23": None,
    "#### 1,2345": None,
    "#### 12,34,567": None,
    "#### 70 000": None,
    "#### 1.234,56": None,
    # units and dressing
    "#### $18": "18",
    "#### $1,200.50.": "1200.5",
    "#### 18 dollars per day": "18",
    "#### 5km": "5",
    "#### 50%": "50",
    "#### 50 % of them": "50",
    "#### 18€": "18",
    "#### **18**": "18",
    "#### **18** dollars": "18",
    "#### `18`": "18",
    "#### \\boxed{18}": "18",
    "#### $\\boxed{-1,800}$": "-1800",
    "#### \\$18": "18",
    "#### 18 \\text{ apples}": "18",
    "#### 18, because she sells the rest": "18",
    # several numbers
    "#### 10 - 5 = 5": "5",
    "#### x = 12": "12",
    "#### 3*4=12": "12",
    "#### 3*4": None,
    "#### 3**2": None,
    "#### 10 - 5": None,
    "#### 1/2": None,
    "#### 3 or 4": None,
    "#### 3:30 pm": None,
    "#### 1e3": None,
    "#### 12 apples and 5 pears": None,
    "#### 1. First add them": None,
    # headings, and a later answer
    "#### Step 1: add\n2+2=4\n#### 4": "4",
    "####\n#### 7": "7",
    "#### The answer is 18": None,
    # no answer at all
    "": None,
    "   \n": None,
    "The answer is 18.": None,
    "### 18": None,
    "####": None,
    "#### eighteen": None,
    "#### ?": None,
}


@pytest.mark.parametrize(("text", "expected"), STRICT.items())
def test_strict(text: str, expected: str | None) -> None:
    assert strict_number(text) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 12", None),  # perhaps 120
        ("#### 12.", None),  # perhaps 12.5
        ("#### 12 dol", None),  # perhaps "12 dollars and 50 cents"
        ("#### 12\n", "12"),
        ("#### 12\n\nAnd then", "12"),
        ("so 3 + 4", None),
        ("", None),
    ],
)
def test_strict_at_the_length_limit(text: str, expected: str | None) -> None:
    assert strict_number(text, truncated=True) == (None if expected is None else Decimal(expected))


SGLANG = {
    "#### 18": 18,
    "#### 1,450,000": 1450000,
    "#### -10": 10,  # the sign is lost
    "#### 18.00": 0,  # the last run of digits is "00"
    "#### 007": SGLANG_INVALID,
    "no number": SGLANG_INVALID,
    "": SGLANG_INVALID,
    "it costs $5 for 3": 3,
}


@pytest.mark.parametrize(("text", "expected"), SGLANG.items())
def test_sglang(text: str, expected: int) -> None:
    assert sglang_number(text) == expected


@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs GSM8K in {DATA}")
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_label_reads(split: str) -> None:
    for line in (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)["answer"]
        number = strict_number(answer)
        assert number == Decimal(answer.rpartition("####")[2].replace(",", "").strip())
        assert sglang_number(answer) == abs(int(number))
