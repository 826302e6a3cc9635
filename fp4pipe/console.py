"""What the command says: messages, bars and tables on stderr, data on stdout as one JSON document.

Stderr is for people: bars are drawn only when it is a terminal; in a log each becomes at most one line every ten
seconds. Stdout is for programs: what a command finds goes there, as one JSON document or as plain text, nothing else.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import Any, Protocol

LOG_INTERVAL_S = 10.0
"""Seconds between two progress lines when stderr is not a terminal."""


class Bar(Protocol):
    """What `progress` yields."""

    def update(self, n: int = 1) -> Any:
        """Advance by `n` units."""


def say(message: str) -> None:
    """Write one line to stderr."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Write one warning line to stderr."""
    say(f"warning: {message}")


@contextmanager
def progress(total: int, desc: str, unit: str = "it", bytes: bool = False) -> Iterator[Bar]:
    """Show progress through `total` units while the block runs.

    Args:
        total: Units of work expected.
        desc: What is being done, two or three words.
        unit: Name of one unit; ignored for bytes.
        bytes: Units are bytes: shown in MiB/GiB.
    """
    if not sys.stderr.isatty():
        yield _LogBar(total, desc, unit, bytes)
        return
    from tqdm import tqdm

    scale = {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if bytes else {"unit": unit}
    with tqdm(total=total, desc=desc, file=sys.stderr, dynamic_ncols=True, leave=False, **scale) as bar:  # type: ignore[arg-type]
        yield bar


class _LogBar:
    """Progress for logs: one line every `LOG_INTERVAL_S`, none for work that is over sooner."""

    def __init__(self, total: int, desc: str, unit: str, bytes: bool) -> None:
        self.total, self.desc, self.unit, self.bytes = total, desc, unit, bytes
        self.done = 0
        self.last = time.monotonic()

    def update(self, n: int = 1) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last >= LOG_INTERVAL_S:
            self.last = now
            done, total = (format_bytes(n) if self.bytes else str(n) for n in (self.done, self.total))
            say(f"{self.desc}: {done} of {total}{'' if self.bytes else f' {self.unit}'}")


def format_bytes(n: float) -> str:
    """`n` bytes in the largest binary unit that keeps the number above one: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def format_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Rows as aligned text columns: names left, numbers right.

    Args:
        rows: One mapping a row; the columns are the keys in order of first appearance, a missing key is an empty cell.
        title: Line above the table.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    right = [all(_is_number(row.get(column)) or row.get(column) is None for row in rows) for column in columns]

    def line(texts: Sequence[str]) -> str:
        padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([*([title] if title else []), line(columns), rule, *map(line, cells)])


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Print `format_table(rows, title)` to stderr."""
    say(format_table(rows, title))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def emit(obj: Any) -> None:
    """Write `obj` to stdout as one JSON document (non-finite numbers become null: JSON has none)."""
    print(to_json(obj), flush=True)


def to_json(obj: Any, *, indent: int | None = 2) -> str:
    """`obj` as strict JSON: dataclasses, paths, sets and `to_dict()` objects become plain, NaN and infinities null."""
    return json.dumps(_plain(obj), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(obj: Any) -> Any:
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    if isinstance(obj, PurePath):
        return str(obj)
    if isinstance(obj, Mapping):
        return {str(key): _plain(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_plain(value) for value in obj]
    if isinstance(obj, set | frozenset):
        return sorted(_plain(value) for value in obj)
    if to_dict := getattr(obj, "to_dict", None):
        return _plain(to_dict())
    if is_dataclass(obj) and not isinstance(obj, type):
        return _plain(asdict(obj))
    if item := getattr(obj, "item", None):  # a zero-dimensional tensor or a NumPy scalar
        return _plain(item())
    return str(obj)
