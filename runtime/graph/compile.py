"""One callable a distinct piece: by Inductor, whose results are kept on disk by content, or plain PyTorch."""

import fcntl
import os
import struct
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import standalone_compile
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
from torch._subclasses import FakeTensorMode

from fp4pipe import __version__, console
from fp4pipe.runtime.graph.trace import any_size

Compiled = Callable[..., Any]
"""Called with a piece's arguments in order: tensors, and an int for the token count."""


def cache_directory() -> Path:
    """Where compiled pieces are kept: below ``$FP4PIPE_CACHE`` or ``~/.cache/fp4pipe``, apart for each version."""
    root = os.environ.get("FP4PIPE_CACHE")
    base = Path(root) if root else Path.home() / ".cache" / "fp4pipe"
    return base / "pieces" / f"{__version__}-torch{torch.__version__}"


def available(compiler: str) -> str:
    """`compiler`, or ``eager`` with a warning when Inductor lacks the C++ compiler or Python headers it needs."""
    if compiler == "inductor" and (missing := _missing()):
        console.warn(f"{missing}: running pieces uncompiled, as with --compiler eager")
        return "eager"
    return compiler


def _missing() -> str | None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler found (g++)"
    include = sysconfig.get_path("include")
    return None if Path(include, "Python.h").is_file() else f"no Python.h in {include} (python3-dev)"


def drop_unfinished(directory: Path) -> list[Path]:
    """Delete the libraries below `directory` that a killed compilation left unfinished, and return them.

    The linker writes in place and Inductor takes any file that is there for whole: one left empty would fail every
    later run, or, being the test for vector instructions, leave it without them. One that is being written now stays.
    """
    dropped = []
    for path in sorted(directory.rglob("*.so")):
        lock = directory / "locks" / f"{path.name.partition('.')[0]}.lock"
        try:
            if not _is_whole(path):
                lock.parent.mkdir(exist_ok=True)
                with lock.open("a") as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Inductor's own, held while it builds
                    if not _is_whole(path):
                        path.unlink()
                        dropped.append(path)
        except (BlockingIOError, FileNotFoundError):
            continue
    return dropped


def _is_whole(path: Path) -> bool:
    """Whether an ELF file reaches the end of its section table, which is written last."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    (offset,), (size, count) = struct.unpack_from("=Q", header, 40), struct.unpack_from("=HH", header, 58)
    return offset > 0 and offset + size * count <= path.stat().st_size


class Compiler:
    """Compiles pieces, each canonical form once.

    Args:
        kind: ``inductor`` or ``eager``.
        fake_mode: The one the pieces were traced under.
        directory: Where Inductor keeps its code; made readable by its owner alone.

    Attributes:
        from_disk: How many pieces needed no compilation, because an earlier run had compiled them.
    """

    def __init__(self, kind: str, fake_mode: FakeTensorMode, directory: Path | None = None) -> None:
        self.kind = kind
        self.directory = directory or cache_directory()
        self.from_disk = 0
        if kind == "inductor":
            drop_unfinished(self.directory)
        self._fake_mode = fake_mode
        self._done: dict[str, Compiled] = {}

    @property
    def distinct(self) -> int:
        """Canonical forms seen."""
        return len(self._done)

    def compile(self, graph: fx.Graph, form: str) -> Compiled:
        """The callable for `graph`, whose canonical form is `form`."""
        if form not in self._done:
            module = fx.GraphModule({}, graph)
            self._done[form] = module.forward if self.kind == "eager" else self._inductor(module)
        return self._done[form]

    def _inductor(self, module: fx.GraphModule) -> Compiled:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        examples = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        with temporary_cache_dir(str(self.directory)), tracing(TracingContext(self._fake_mode)), any_size():
            artifact = standalone_compile(module, examples, dynamic_shapes="from_tracing_context")
        self.from_disk += counters["aot_autograd"]["autograd_cache_hit"] - hits
        return artifact
