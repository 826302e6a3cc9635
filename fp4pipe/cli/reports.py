"""Writing a command's document where a person or a later step finds it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4pipe import console
from fp4pipe.errors import UsageError
from fp4pipe.report import render


def write_report(directory: Path, document: Mapping[str, Any]) -> Path:
    """Write `report.json` into `directory`, and the same as a page for people, `report.html`.

    Returns:
        The JSON file.

    Raises:
        UsageError: They cannot be written there.
    """
    path = directory / "report.json"
    text = console.to_json(document)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.with_suffix(".html").write_text(render(json.loads(text)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written", because=error.strerror) from None
    return path
