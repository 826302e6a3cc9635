"""A tiny Llama, its NVFP4 checkpoint, and both loaded once a session."""

from pathlib import Path

import pytest

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.model import Model
from tests.runtime.nvfp4_checkpoint import quantize_tiny
from tests.tiny_models import make_tiny


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("validate") / "source")


@pytest.fixture(scope="session")
def quantized(source: Path) -> Path:
    return quantize_tiny(source, source.with_name("nvfp4"))


@pytest.fixture(scope="session")
def checkpoint(quantized: Path) -> Checkpoint:
    return Checkpoint.open(quantized)


@pytest.fixture
def model(quantized: Path) -> Model:
    """In w4a16, its own for each test: some break it."""
    return Model.load(quantized, mode="w4a16", progress=False)


def make_runner(model: Model, graphs: str = "segmented", max_tokens: int = 128) -> Runner:
    return Runner(model, model.new_cache(64, 16), graphs=graphs, compiler="eager", max_tokens=max_tokens)
