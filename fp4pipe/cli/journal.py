"""Results of a run's finished steps, kept on disk so that an interrupted run goes on where it stopped."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp4pipe import console


class Journal:
    """One JSON file; each step's result is valid for the inputs it was computed from, and for no others.

    Args:
        path: The file; a missing or damaged one is an empty journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = {}
        """Wall time of each step of this run, in order; of a step that was kept, the time it once took."""
        self.kept: set[str] = set()
        """Steps whose results are of an earlier run."""
        try:
            saved: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
            self._saved = {name: step for name, step in saved.items() if step.keys() >= {"key", "seconds", "result"}}
        except (OSError, ValueError, TypeError, AttributeError):
            self._saved = {}

    def step(self, name: str, inputs: Any, compute: Callable[[], Any], *, valid: bool = True) -> Any:
        """The result of `compute`, or of an earlier run's with equal `inputs`.

        Args:
            name: Name of the step.
            inputs: Everything the result depends on, as `console.to_json` writes it.
            compute: Makes the result.
            valid: False when what the step left elsewhere on disk is gone, whatever its inputs.

        Returns:
            The result as JSON gives it back, computed or kept alike.
        """
        key = hashlib.sha256(console.to_json(inputs, indent=None).encode()).hexdigest()
        saved = self._saved.get(name, {})
        if valid and saved.get("key") == key:
            console.say(f"== {name}: kept, nothing it depends on has changed")
            self.kept.add(name)
        else:
            console.say(f"== {name}")
            start = time.monotonic()
            result = json.loads(console.to_json(compute()))
            saved = {"key": key, "seconds": round(time.monotonic() - start, 2), "result": result}
            self._saved[name] = saved
            self._save()
        self.seconds[name] = saved["seconds"]
        return saved["result"]

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        partial.write_text(console.to_json(self._saved), encoding="utf-8")
        partial.replace(self.path)
