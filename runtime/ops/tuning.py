"""Plans for shapes that the shipped table lacks: timed once, when a model is loaded, and kept beside the kernels.

The file's name holds the device and the digest of the kernels, so plans of another GPU or version are never used.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4pipe.runtime.ops import build, plans
from fp4pipe.runtime.ops.backend import capability, has_native_fp4
from fp4pipe.runtime.ops.timing import replay_us

_TRIED = 8
"""Candidates timed, best estimate first."""
_ROTATE_BYTES, _MOST_COPIES = 128 << 20, 64
"""Copies of a weight that calls take in turn, so that it comes from memory, as in a model."""
_tuning = [False]

Run = Callable[[Tensor, plans.Plan], Tensor]
"""Computes the product with a copy of the weight and a plan."""


def plans_file(device: torch.device) -> Path:
    """Where the plans measured on `device` with these kernels are kept."""
    name = re.sub(r"\W+", "-", torch.cuda.get_device_name(device)).strip("-").lower()
    return build.cache_directory() / f"plans-{name}-{build.compile_library().stem}.json"


def load_plans(device: torch.device) -> None:
    """Use the plans kept from earlier loads. A file that cannot be read is as good as none."""
    with suppress(KeyError, TypeError, ValueError):
        plans.learn(_stored(plans_file(device)))


def _stored(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


@contextmanager
def tuning(device: torch.device) -> Iterator[None]:
    """While entered, a product of a shape that is not known yet is timed, and the fastest kernel or plan kept.

    On Blackwell that is FlashInfer's own tuning, of this process; on Hopper plans, kept on disk.
    """
    if has_native_fp4(device):
        from fp4pipe.runtime.ops import blackwell

        context = blackwell.autotune()
    else:
        context = nullcontext()
    _tuning[0] = capability(device) == (9, 0)
    try:
        with context:
            yield
    finally:
        _tuning[0] = False


def wanted(tokens: int, rows: int, columns: int) -> bool:
    """Whether a product of this shape is to be timed now."""
    unknown = _tuning[0] and not plans.known(tokens, rows, columns)
    return unknown and not torch.cuda.is_current_stream_capturing()


def tune(w: Tensor, run: Run, tokens: int, rows: int, columns: int, processors: int) -> None:
    """Time the likeliest plans of a shape on `w`, and keep the fastest."""
    copies = [w.clone() for _ in range(max(2, min(_MOST_COPIES, -(-_ROTATE_BYTES // w.nbytes))))]
    torch.cuda.synchronize(w.device)
    times = {
        plan: replay_us([partial(run, copy, plan) for copy in copies], replays=5, warm_ms=0.5)
        for plan in plans.candidates(tokens, rows, columns, processors)[:_TRIED]
    }
    keep(plans_file(w.device), plans.key(tokens, rows, columns), min(times, key=lambda plan: times[plan]))


def keep(path: Path, key: str, plan: plans.Plan) -> None:
    """Use `plan` from now on, and add it to the file at `path`, whole or not at all."""
    plans.learn({key: plans.entry(plan)})
    stored = _stored(path)
    with suppress(OSError):  # a cache that cannot be written costs the next load its timings, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({**stored, key: plans.entry(plan)}, file)
        os.replace(file.name, path)
