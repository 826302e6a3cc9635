"""GSM8K: grade-school word problems, prompted with worked examples and graded strictly.

Two styles. *ours* draws the examples from the train split, drops the dataset's ``<<3*4=12>>`` calculator marks, stops
at the next question and reads answers with `answers.strict_number`. *sglang* reproduces SGLang's
``benchmark/gsm8k/bench_sglang.py`` exactly, its faults included (the first test items are the examples and are scored
too), so that figures can be laid beside published ones.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp4pipe.errors import Unavailable, UsageError
from fp4pipe.runtime.validate.answers import SGLANG_INVALID, sglang_number, strict_number

Style = Literal["ours", "sglang"]
Outcome = Literal["right", "wrong", "invalid", "truncated"]
STOPS: dict[str, tuple[str, ...]] = {
    "ours": ("\nQuestion:",),
    "sglang": ("Question", "Assistant:", "<|separator|>"),
}
DEFAULT_SHOTS = {"ours": 8, "sglang": 5}
HUB_DATASET = ("openai/gsm8k", "main")
_CALCULATOR = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True, slots=True)
class Item:
    """One problem; `answer` is the worked solution, ending in ``#### number``."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem to put to a model; `index` is its place in the test split."""

    index: int
    text: str
    answer: str


def load_gsm8k(data: str | Path | None = None) -> tuple[list[Item], list[Item]]:
    """Train and test split.

    Args:
        data: A directory with train.jsonl and test.jsonl, a test file beside a train.jsonl, or None for the hub.

    Raises:
        UsageError: A file is missing or is not GSM8K's JSON lines.
        Unavailable: No hub.
    """
    if data is None:
        return _from_hub()
    path = Path(data)
    directory, test = (path, path / "test.jsonl") if path.is_dir() else (path.parent, path)
    return _read(directory / "train.jsonl"), _read(test)


def _read(path: Path) -> list[Item]:
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except OSError as error:
        raise UsageError(
            f"--data: {path} cannot be read", because=error.strerror, fix="a directory with train.jsonl and test.jsonl"
        ) from error
    items = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            items.append(Item(row["question"], row["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--data: {path} line {number} is no GSM8K item", because=repr(error)) from error
        if strict_number(items[-1].answer) is None:
            raise UsageError(f"--data: {path} line {number} has an answer without a number after ####")
    return items


def _from_hub() -> tuple[list[Item], list[Item]]:
    from datasets import load_dataset

    try:
        splits = [load_dataset(*HUB_DATASET, split=split) for split in ("train", "test")]
    except Exception as error:  # the hub client raises whatever its transport does
        raise Unavailable(
            f"{HUB_DATASET[0]} cannot be had from the hub",
            because=str(error).partition("\n")[0],
            fix="--data DIR with train.jsonl and test.jsonl",
        ) from error
    train, test = ([Item(row["question"], row["answer"]) for row in split] for split in splits)  # type: ignore[index]
    return train, test


def make_prompts(
    train: Sequence[Item],
    test: Sequence[Item],
    *,
    style: Style = "ours",
    questions: int | None = None,
    shots: int | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """The prompts of a run.

    In our style the test split is taken in a seeded order, so that a longer run contains every shorter one; SGLang's
    takes it from the top.

    Args:
        train: Where our style draws its examples, the same for every question.
        test: What is asked.
        style: See the module.
        questions: How many; all when absent.
        shots: Worked examples in front of the question; the style's own number when absent.
        seed: Of our style's draws.

    Raises:
        UsageError: More questions or shots than there are.
    """
    shots = DEFAULT_SHOTS[style] if shots is None else shots
    count = len(test) if questions is None else questions
    if not 0 < count <= len(test):
        raise UsageError(f"--questions {count}: the test split has {len(test)}")
    pool = test if style == "sglang" else train
    if not 0 <= shots <= len(pool):
        raise UsageError(f"--shots {shots}: there are {len(pool)} items to take examples from")
    if style == "sglang":
        examples, order = list(test[:shots]), list(range(count))
    else:
        examples = [
            Item(item.question, _CALCULATOR.sub("", item.answer)) for item in random.Random(seed).sample(train, shots)
        ]
        order = list(range(len(test)))
        random.Random(seed).shuffle(order)
        order = order[:count]
    preamble = "".join(f"Question: {item.question}\nAnswer: {item.answer}\n\n" for item in examples)
    return [Prompt(i, f"{preamble}Question: {test[i].question}\nAnswer:", test[i].answer) for i in order]


def grade(style: Style, answer: str, completion: str, *, truncated: bool) -> Outcome:
    """Grade a completion.

    Args:
        style: Whose parser reads both sides.
        answer: The item's worked solution.
        completion: What the model wrote.
        truncated: It stopped at the length limit. In our style a completion that gave its answer before that counts.
    """
    if style == "sglang":
        predicted = sglang_number(completion)
        if predicted == SGLANG_INVALID:
            return "invalid"
        return "right" if predicted == sglang_number(answer) else "wrong"
    number = strict_number(completion, truncated=truncated)
    if number is None:
        return "truncated" if truncated else "invalid"
    return "right" if number == strict_number(answer) else "wrong"


def tally(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts of each outcome and the accuracy, over all questions asked."""
    counts: dict[str, Any] = {kind: outcomes.count(kind) for kind in ("right", "wrong", "invalid", "truncated")}
    return counts | {"questions": len(outcomes), "accuracy": counts["right"] / len(outcomes) if outcomes else 0.0}
