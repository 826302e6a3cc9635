"""What a row of a calibration file or dataset says: a text, or the turns of a dialogue."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fp4pipe.errors import UsageError

# In order of preference: a dialogue says more about deployment than its flattened text.
TEXT_COLUMNS = ("messages", "conversations", "text", "prompt", "question", "instruction", "input")
# Where a row asks in one column and answers in another, both are calibrated on.
ANSWER_COLUMNS = {
    "prompt": ("completion", "response", "chosen"),
    "question": ("answer", "response"),
    "instruction": ("output", "response"),
    "input": ("output", "response"),
}
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}

Turn = dict[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """One text (`text`) or one dialogue (`turns`, of {"role", "content"}), and the kind it belongs to, if said."""

    text: str = ""
    turns: tuple[Turn, ...] = ()
    kind: str = ""

    @property
    def empty(self) -> bool:
        """Nothing to calibrate on."""
        return not self.text.strip() and not any(turn["content"].strip() for turn in self.turns)


def pick_column(columns: Iterable[str], wanted: str | None, where: str) -> str:
    """The column that holds the text.

    Raises:
        UsageError: `wanted` is not among `columns`, or none of them is a known text column; both name what exists.
    """
    names = [str(name) for name in columns]
    listing = ", ".join(names) or "none"
    if wanted is not None:
        if wanted not in names:
            raise UsageError(f"{where} has no column {wanted!r}", because=f"its columns are: {listing}")
        return wanted
    for name in TEXT_COLUMNS:
        if name in names:
            return name
    raise UsageError(
        f"{where} has no column known to hold text ({', '.join(TEXT_COLUMNS)})",
        because=f"its columns are: {listing}",
        fix="name the one that does (text_column)",
    )


def record_of(row: Mapping[str, Any], column: str, where: str) -> Record:
    """Read `column` of one row, with the answer beside it where there is one.

    Raises:
        UsageError: the column is absent in this row, or is neither text nor a list of turns.
    """
    if column not in row:
        raise UsageError(f"{where}: no {column!r}", because=f"this row has: {', '.join(map(str, row)) or 'nothing'}")
    value = row[column]
    kind = str(row.get("kind") or "")
    if value is None:
        return Record(kind=kind)
    if isinstance(value, list):
        return Record(turns=tuple(_turn(item, where) for item in value), kind=kind)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {column!r} is {type(value).__name__}, neither text nor a list of messages")
    for name in ANSWER_COLUMNS.get(column, ()):
        answer = row.get(name)
        if isinstance(answer, str) and answer.strip():
            return Record(
                turns=({"role": "user", "content": value}, {"role": "assistant", "content": answer}), kind=kind
            )
    return Record(text=value, kind=kind)


def _turn(item: Any, where: str) -> Turn:
    role = item.get("role", item.get("from")) if isinstance(item, Mapping) else None
    content = item.get("content", item.get("value")) if isinstance(item, Mapping) else None
    if isinstance(content, list):  # parts; only the written ones concern a language model
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    if not isinstance(role, str) or not isinstance(content, str):
        raise UsageError(f'{where}: a message must be {{"role": ..., "content": ...}}, not {str(item)[:80]}')
    return {"role": ROLES.get(role, role), "content": content}
