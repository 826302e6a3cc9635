"""`Engine.load` with the kernels of its choice: refused before weights are read, and a quantized head in its place."""

from typing import Any

import pytest
import torch

from fp4pipe.errors import Unavailable, UsageError
from fp4pipe.runtime.engine import Engine
from fp4pipe.runtime.engine.warm import _sizes, warm

PROMPT = list(range(5, 45))
OPTIONS: dict[str, Any] = {"graphs": "off", "progress": False, "kv_tokens": 512}


def logits(engine: Engine) -> torch.Tensor:
    return next(iter(engine.prompt_logits([PROMPT])))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_quantized_head(tiny, family: str, kind: str) -> None:
    path = tiny(family, "modelopt")
    plain, quantized = (Engine.load(path, **OPTIONS, lm_head=head) for head in ("bf16", kind))
    want, got = logits(plain), logits(quantized)
    assert got.shape == want.shape
    assert 0.005 < float((got - want).norm() / want.norm()) < (0.08 if kind == "fp8" else 0.2)
    assert quantized.model.load_report["kernels"]["lm_head"] == kind
    # A tied embedding stays as it was: hidden states are the same, only the head differs.
    embeddings = [engine.model.decoder.get_parameter("embed_tokens.weight") for engine in (plain, quantized)]
    assert torch.equal(*embeddings)


@pytest.mark.parametrize(
    ("choice", "error", "words"),
    [
        ({"prefill": "fp8"}, Unavailable, "--prefill fp8 is not possible on the CPU"),
        ({"prefill": "fp8", "mode": "w4a4"}, UsageError, "the mode is w4a4"),
        ({"prefill": "fast"}, UsageError, "--prefill fast is unknown"),
        ({"fp4_gemm_backend": "cutlass"}, Unavailable, "Blackwell"),
        ({"lm_head": "int8"}, UsageError, "--lm-head int8 is unknown"),
    ],
)
def test_refused(tiny, choice: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Engine.load(tiny("llama", "modelopt"), **OPTIONS, **choice)


def test_warming_changes_nothing(tiny) -> None:
    engine = Engine.load(tiny("llama", "modelopt"), **OPTIONS, chunk_tokens=300)
    before = logits(engine)
    engine.flush_cache()
    warm(engine.runner, 16)
    assert torch.equal(logits(engine), before)
    assert _sizes([4, 8, 12, 16, 20, 300]) == [4, 8, 16, 20, 300]
