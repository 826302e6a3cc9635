"""Writing a command's document where a person or a later step finds it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4pipe import console
from fp4pipe.errors import UsageError


def write_report(directory: Path, document: Mapping[str, Any]) -> Path:
    """Write `report.json` into `directory`.

    Raises:
        UsageError: It cannot be written there.
    """
    path = directory / "report.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(console.to_json(document), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written", because=error.strerror) from None
    return path
