"""Cut a text into windows of tokens for a model to score."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from fp4pipe.errors import UsageError

BUNDLED = "bundled"
"""Name of the original held-out text that ships with the project; it shares nothing with the calibration passages."""


def read_text(data: str | Path = BUNDLED) -> str:
    """A UTF-8 text: `BUNDLED`, or a file's.

    Raises:
        UsageError: No such file, or not UTF-8.
    """
    if str(data) == BUNDLED:
        return files("fp4pipe.runtime.validate").joinpath("texts/heldout.txt").read_text(encoding="utf-8")
    try:
        return Path(data).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--text {data} cannot be read", because=error.strerror) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {data} is not UTF-8", because=f"byte {error.start} is {error.reason}") from error


def windows(text: str, tokenizer: Any, *, tokens: int, length: int = 512) -> list[list[int]]:
    """Non-overlapping windows of at most `length` token ids, with `tokens` tokens in all that have a predecessor.

    A tokenizer that begins its texts with a BOS token gets one in front of each window, so that every token of the text
    is scored; without one, the first token of each window is context only.

    Args:
        text: What to tokenize, once, without special tokens.
        tokenizer: A Hugging Face tokenizer.
        tokens: Tokens to score in all.
        length: Longest window; keep it within the model's context.

    Raises:
        UsageError: The text gives fewer than `tokens` scored tokens.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    prefix = first if first == [tokenizer.bos_token_id] else []
    step = length - len(prefix)
    result, scored = [], 0
    for start in range(0, len(ids), step):
        window = prefix + ids[start : start + min(step, tokens - scored + 1 - len(prefix))]
        if len(window) < 2:
            break
        result.append(window)
        scored += len(window) - 1
        if scored == tokens:
            return result
    raise UsageError(
        f"the text gives {scored} scored tokens, fewer than the {tokens} asked for",
        fix="a longer --text file, or fewer tokens",
    )
