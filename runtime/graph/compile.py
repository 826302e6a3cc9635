"""One callable a distinct piece: by Inductor, whose results are kept on disk by content, or plain PyTorch."""

import os
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
