"""A tiny NVFP4 checkpoint through the engine on a GPU: warmed, with each choice of kernels."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fp4pipe.runtime.engine import Engine
from tests.runtime.nvfp4_checkpoint import quantize_tiny
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
PROMPT = list(range(5, 305))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return quantize_tiny(make_tiny("llama", root / "llama"), root / "llama-nvfp4")


def logits(path: Path, **choices: str) -> torch.Tensor:
    options = {"device": "cuda", "mode": "w4a16", "graphs": "off", **choices}
    engine = Engine.load(path, progress=False, kv_tokens=2048, chunk_tokens=512, **options)  # type: ignore[arg-type]
    return next(iter(engine.prompt_logits([PROMPT]))).double().cpu()


@pytest.mark.parametrize(
    ("choices", "bound"),
    [
        ({}, 0.05),
        ({"graphs": "compiled", "compiler": "eager"}, 0.05),
        ({"prefill": "fp8"}, 0.3),
        ({"prefill": "fp8", "graphs": "compiled", "compiler": "eager"}, 0.3),
        ({"lm_head": "fp8"}, 0.15),
        ({"lm_head": "nvfp4"}, 0.3),
    ],
    ids=str,
)
def test_close_to_the_cpu(checkpoint: Path, choices: dict[str, str], bound: float) -> None:
    if "prefill" in choices and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 prefill is for SM90")
    want = logits(checkpoint, device="cpu")
    got = logits(checkpoint, **choices)
    error = float((got - want).norm() / want.norm())
    print(f"{choices}: {error:.2e}")
    assert error < bound
