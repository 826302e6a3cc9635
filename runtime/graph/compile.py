"""One callable a distinct piece: by Inductor, kept on disk by content, or plain PyTorch."""

import hashlib
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import standalone_compile
from torch._inductor.standalone_compile import CompiledArtifact
from torch._subclasses import FakeTensorMode

from fp4pipe.runtime.graph.trace import any_size

Compiled = Callable[..., Any]
"""Called with a piece's arguments in order: tensors, and an int for the token count."""


def cache_directory() -> Path:
    """Where compiled pieces are kept: ``$FP4PIPE_CACHE`` or ``~/.cache/fp4pipe``, in ``pieces``."""
    root = os.environ.get("FP4PIPE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "fp4pipe") / "pieces"


@dataclass
class Compiler:
    """Compiles pieces, each canonical form once.

    Attributes:
        kind: ``inductor`` or ``eager``.
        directory: Where Inductor's artifacts are kept; only its owner may write there, since they hold code.
        from_disk: How many pieces were read instead of compiled.
    """

    kind: str
    fake_mode: FakeTensorMode
    directory: Path = field(default_factory=cache_directory)
    from_disk: int = 0
    _done: dict[str, Compiled] = field(default_factory=dict)

    @property
    def distinct(self) -> int:
        """Canonical forms seen."""
        return len(self._done)

    def compile(self, graph: fx.Graph, form: str) -> Compiled:
        """The callable for `graph`, whose canonical form is `form`."""
        if form not in self._done:
            module = fx.GraphModule({}, graph)
            self._done[form] = module.forward if self.kind == "eager" else self._inductor(module, form)
        return self._done[form]

    def _inductor(self, module: fx.GraphModule, form: str) -> Compiled:
        path = self.directory / f"{_key(form)}.bin"
        if path.is_file():
            # An artifact that does not load (half-written, other libraries) is compiled anew.
            with suppress(Exception):
                artifact = CompiledArtifact.load(path=str(path))
                self.from_disk += 1
                return artifact
        examples = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        with tracing(TracingContext(self.fake_mode)), any_size():
            artifact = standalone_compile(module, examples, dynamic_shapes="from_tracing_context")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        artifact.save(path=str(path))
        return artifact


def _key(form: str) -> str:
    """Everything the code that comes out depends on."""
    processor = torch.cuda.get_device_capability() if torch.cuda.is_available() else platform.processor()
    facts = (form, torch.__version__, torch.backends.cpu.get_cpu_capability(), processor, torch.get_num_threads())
    return hashlib.sha256(repr(facts).encode()).hexdigest()
