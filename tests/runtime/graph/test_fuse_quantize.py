"""Norms and gates fused with their quantizers: which are, which are not, and that every code stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from fp4pipe.runtime.graph.fuse_quantize import fuse_quantize
from fp4pipe.runtime.graph.rewrite import drop_dead, operator_name, rewrite
from fp4pipe.runtime.graph.trace import INPUT_IDS, POSITION_IDS, TOKENS, Traced, trace
from fp4pipe.runtime.model import Model

OUTPUTS = ("fp4pipe::silu_mul_fp4_quantize", "fp4pipe::rmsnorm_fp4_quantize", "fp4pipe::fp4_quantize")


def quantized(traced: Traced) -> list[torch.Tensor]:
    """Codes and scales of every quantizer, in order, of a run on made-up ids with attention that returns zeros."""
    seen: list[torch.Tensor] = []

    class Run(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if getattr(target, "_schema", None) is not None and "paged_attention" in str(target):
                args[3].copy_(args[0])
                return None
            result = super().call_function(target, args, kwargs)
            if any(name.removeprefix("fp4pipe::") in str(target) for name in OUTPUTS):
                seen.extend(each.view(torch.uint8) for each in result)
            return result

    given = traced.weights | {TOKENS: 7, INPUT_IDS: torch.arange(7)[None] + 9, POSITION_IDS: torch.arange(7)[None]}
    module = fx.GraphModule({}, traced.graph)
    Run(module).run(*(given[node.name] for node in traced.graph.find_nodes(op="placeholder")))
    return seen


def count(traced: Traced) -> list[int]:
    names = [operator_name(node) for node in traced.graph.nodes]
    return [names.count(name) for name in OUTPUTS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "expected"), [("llama", [3, 6, 3]), ("gemma3_text", [0, 0, 12])])
def test_every_code_stays(tiny, family: str, expected: list[int], dtype: str) -> None:
    path: Path = tiny(family, "modelopt")
    model = Model.load(path, mode="w4a4", dtype=dtype, progress=False)
    traced = trace(model)
    rewrite(traced)
    before = quantized(traced)
    fused = fuse_quantize(traced)
    drop_dead(traced)
    traced.graph.lint()
    assert count(traced) == expected
    assert fused == expected[0] + expected[1]
    after = quantized(traced)
    assert len(before) == len(after) == 2 * sum(expected)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_compiled_pieces_run_with_it(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced on, through the engine: the same tokens."""
    from fp4pipe.runtime.engine import Engine
    from fp4pipe.runtime.graph import bodies

    def logits() -> torch.Tensor:
        options: dict[str, Any] = {"graphs": "compiled", "compiler": "eager", "kv_tokens": 512, "mode": "w4a4"}
        engine = Engine.load(tiny("llama", "modelopt"), progress=False, **options)
        rewritten.append(engine.runner.stats["rewritten"].get("fuse_quantize"))
        return next(iter(engine.prompt_logits([list(range(5, 45))])))

    rewritten: list[int | None] = []
    plain = logits()
    monkeypatch.setattr(bodies, "has_native_fp4", lambda device: True)
    assert torch.equal(logits(), plain)
    assert rewritten == [None, 9]
