"""Reading records from the bundled passages, local files and Hugging Face datasets."""

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from fp4pipe.calib_data.records import Record, pick_column, record_of
from fp4pipe.errors import UsageError, first_line

BUNDLED = "bundled"
SUFFIXES = (".jsonl", ".txt", ".parquet")
# A .txt file is cut at blank lines into blocks of at least this many characters: long enough for a whole sample each,
# short enough that a seeded choice of blocks reaches all over the file.
TXT_BLOCK = 8_000


def is_path(dataset: str) -> bool:
    """Whether `dataset` means a local file rather than the name of a Hugging Face dataset."""
    path = Path(dataset)
    return path.suffix.lower() in SUFFIXES or dataset.startswith((".", "/", "~")) or path.exists()


def bundled_records() -> list[Record]:
    """The passages written for this project, in the order of their files."""
    folder = resources.files("fp4pipe.calib_data")
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".jsonl")), key=lambda entry: entry.name)
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [record_of(row, "messages" if "messages" in row else "text", row["id"]) for row in rows]


def file_records(path: Path, column: str | None) -> list[Record]:
    """Every record of a .jsonl, .txt or .parquet file; the whole file is read, so that damage anywhere is found.

    Raises:
        UsageError: the file is missing, not of these three kinds, unreadable, or malformed (with the line).
    """
    path = path.expanduser()
    if not path.exists():
        raise UsageError(f"calibration file {path} does not exist")
    readers = {".jsonl": _jsonl, ".txt": _txt, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if path.is_dir() or reader is None:
        what = "is a directory" if path.is_dir() else f"is not one of {', '.join(SUFFIXES)}"
        raise UsageError(f"calibration set {path} {what}", fix=f"give a {', '.join(SUFFIXES)} file or a dataset name")
    return list(reader(path, column))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"calibration file {path} is not UTF-8 text",
            because=f"byte {error.start} is 0x{error.object[error.start]:02x}",
        ) from error
    except OSError as error:
        raise UsageError(f"calibration file {path} cannot be read", because=str(error)) from error


def _jsonl(path: Path, column: str | None) -> Iterator[Record]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{where}: not JSON", because=f"{error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}: a JSON object is expected, not {type(row).__name__}")
        yield record_of(row, pick_column(row, column, where), where)


def _txt(path: Path, column: str | None) -> Iterator[Record]:
    if column is not None:
        raise UsageError(f"{path} is plain text and has no column {column!r}")
    block = ""
    for paragraph in _read_text(path).replace("\r\n", "\n").split("\n\n"):
        block = f"{block}\n\n{paragraph}" if block else paragraph
        if len(block) >= TXT_BLOCK:
            yield Record(text=block)
            block = ""
    yield Record(text=block)


def _parquet(path: Path, column: str | None) -> Iterator[Record]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            name = pick_column(file.schema_arrow.names, column, str(path))
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield record_of(row, name, f"{path}, row {number}")
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"calibration file {path} is not a readable parquet file", because=str(error)) from error


def hub_records(dataset: str, column: str | None, *, split: str | None, seed: int) -> Iterator[Record]:
    """Stream a Hugging Face dataset in a seeded order; `dataset` is `NAME` or `NAME:CONFIG`.

    Without `split` it is `train`, or the first the dataset has. Nothing is downloaded beyond the rows used (and a
    shuffle buffer of 1,000).

    Raises:
        UsageError: the dataset or split does not exist or cannot be reached, or no column holds text.
    """
    rows = _open_hub(dataset, split).shuffle(seed=seed, buffer_size=1_000)
    name = None
    try:
        for number, row in enumerate(rows):
            name = name or pick_column(row, column, f"dataset {dataset}")
            yield record_of(row, name, f"dataset {dataset}, row {number}")
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"calibration dataset {dataset} broke off while streaming", because=first_line(error)
        ) from error


def _open_hub(dataset: str, split: str | None) -> Any:
    import datasets

    name, _, config = dataset.partition(":")
    try:
        splits: Any = datasets.load_dataset(name, config or None, streaming=True)
    except Exception as error:  # the library raises anything from ValueError to the HTTP client's own errors
        raise UsageError(
            f"calibration dataset {dataset} cannot be opened",
            because=first_line(error),
            fix="check the name (NAME[:CONFIG]) and the network, or use `bundled` or a .jsonl, .txt or .parquet file",
        ) from error
    names = [str(key) for key in splits]
    chosen = split or ("train" if "train" in names else names[0])
    if chosen not in names:
        raise UsageError(f"dataset {dataset} has no split {chosen!r}", because=f"its splits are: {', '.join(names)}")
    return splits[chosen]
