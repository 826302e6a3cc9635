"""Tiny models on disk, made once a session, and the steps that tests run through them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.runtime.nvfp4_checkpoint import quantize_tiny
from tests.tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(family, layout)``: directory of a three-layer model, plain or as an NVFP4 checkpoint in `layout`."""
    root = tmp_path_factory.mktemp("tiny")

    @cache
    def directory(family: str, layout: str = "plain") -> Path:
        path = root / f"{family}-{layout}"
        if layout == "plain":
            return make_tiny(family, path, layers=3)
        return quantize_tiny(directory(family), path, layout=layout)

    return directory


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
