"""Turning records into samples: seeded order, chat template, packing to `seq_len`."""

import random
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fp4pipe import console
from fp4pipe.calib_data.calibration_set import CalibrationSet
from fp4pipe.calib_data.records import Record, Turn
from fp4pipe.calib_data.sources import BUNDLED, bundled_records, file_records, hub_records, is_path
from fp4pipe.errors import UsageError


def load_calibration(
    dataset: str,
    tokenizer: Any,
    *,
    samples: int,
    seq_len: int,
    seed: int,
    split: str | None = None,
    text_column: str | None = None,
    chat_template: bool = True,
) -> CalibrationSet:
    """Draw `samples` samples of `seq_len` token ids from a calibration set.

    Records are taken in a seeded order; short ones are packed together, long ones cut, so that every sample is exactly
    `seq_len` long, save the last when the text runs out. No text is used twice: when the set is too small the samples
    are fewer, and a warning says so. What is cut off a record is used only once every record had its turn. Records in
    one sample are set apart by whatever the tokenizer begins a text with (bos), or else by a blank line.

    Args:
        dataset: `bundled`, a path to a .jsonl, .txt or .parquet file, or a Hugging Face dataset (`NAME[:CONFIG]`).
        tokenizer: A Hugging Face tokenizer; special tokens are added as it adds them by default.
        samples: Samples wanted, at least 1.
        seq_len: Ids a sample, at least 1.
        seed: Decides which records are drawn and their order.
        split: Split of a Hugging Face dataset; by default `train`, or the first there is.
        text_column: Column that holds the text; by default the first known one (`messages`, `text`, `prompt`, ...).
        chat_template: Render dialogues through the tokenizer's chat template, where it has one.

    Raises:
        UsageError: the set is missing, damaged, empty or unreachable, or has no column of text.
    """
    if samples < 1 or seq_len < 1:
        raise UsageError(f"calibration needs samples >= 1 and seq_len >= 1, not {samples} and {seq_len}")
    name, records = _ordered(dataset, seed=seed, split=split, text_column=text_column)
    ids = (_encode(record, tokenizer, chat_template) for record in records if not record.empty)
    packed = _pack(ids, tokenizer, samples, seq_len)
    if not packed:
        raise UsageError(f"calibration set {name} yields no sample", because="it holds no text")
    calibration = CalibrationSet.from_ids(name, packed)
    if calibration.num_tokens < samples * seq_len:
        console.warn(
            f"calibration set {name} holds text for {len(packed)} samples ({calibration.num_tokens} tokens) "
            f"where {samples} x {seq_len} were asked; nothing is used twice"
        )
    return calibration


def _ordered(dataset: str, *, seed: int, split: str | None, text_column: str | None) -> tuple[str, Iterable[Record]]:
    rng = random.Random(seed)
    if dataset == BUNDLED:
        if split is not None or text_column is not None:
            raise UsageError("the bundled set has neither splits nor columns to choose")
        return BUNDLED, _interleave_kinds(bundled_records(), rng)
    if is_path(dataset):
        if split is not None:
            raise UsageError(f"split {split!r} was given, but {dataset} is a file and has no splits")
        records = file_records(Path(dataset), text_column)
        rng.shuffle(records)
        return Path(dataset).name, records
    return dataset, hub_records(dataset, text_column, split=split, seed=seed)


def _interleave_kinds(records: list[Record], rng: random.Random) -> list[Record]:
    """A seeded order in which any prefix holds the kinds in about the proportions of the whole."""
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record.kind, []).append(record)
    placed: list[tuple[float, Record]] = []
    for members in by_kind.values():
        rng.shuffle(members)
        offset = rng.random()
        placed += [((rank + offset) / len(members), record) for rank, record in enumerate(members)]
    return [record for _, record in sorted(placed, key=lambda pair: pair[0])]


def _encode(record: Record, tokenizer: Any, chat_template: bool) -> list[int]:
    if not record.turns:
        return tokenizer(record.text, verbose=False)["input_ids"]
    if chat_template and getattr(tokenizer, "chat_template", None):
        # The template writes the special tokens itself.
        return tokenizer(_render(record.turns, tokenizer), add_special_tokens=False, verbose=False)["input_ids"]
    plain = "\n\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in record.turns)
    return tokenizer(plain, verbose=False)["input_ids"]


def _render(turns: tuple[Turn, ...], tokenizer: Any) -> str:
    from jinja2.exceptions import TemplateError

    asks = turns[-1]["role"] == "user"
    try:
        return tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=asks)
    except TemplateError:
        if turns[0]["role"] != "system" or len(turns) < 2:
            raise
        # Some templates know no system role; their own advice is to say it in the first user turn.
        first = {"role": turns[1]["role"], "content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}
        return tokenizer.apply_chat_template([first, *turns[2:]], tokenize=False, add_generation_prompt=asks)


def _pack(records: Iterable[list[int]], tokenizer: Any, samples: int, seq_len: int) -> list[list[int]]:
    """Fill samples of exactly `seq_len` ids in turn; what a record has beyond its share waits until all had theirs."""
    opening = tokenizer("", verbose=False)["input_ids"]  # what the tokenizer begins every text with: [bos] or nothing
    blank_line = tokenizer("\n\n", add_special_tokens=False, verbose=False)["input_ids"]
    reopening = opening if len(opening) < seq_len else []
    waiting: deque[list[int]] = deque()

    def stream() -> Iterator[list[int]]:
        yield from records
        while waiting:
            yield reopening + waiting.popleft()

    done: list[list[int]] = []
    current: list[int] = []
    for ids in stream():
        piece = blank_line + ids if current and not opening else ids
        room = seq_len - len(current)
        current += piece[:room]
        if len(piece) > room:
            waiting.append(piece[room:])
        if len(current) == seq_len:
            done.append(current)
            current = []
            if len(done) == samples:
                return done
    return [*done, current] if current else done
