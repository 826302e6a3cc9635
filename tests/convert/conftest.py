"""Tiny sources and their checkpoints, each made once for all tests."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fp4pipe.convert.options import CalibrationOptions, QuantizeOptions
from fp4pipe.convert.quantize import QuantizeResult, quantize
from fp4pipe.convert.source import Source, resolve_source
from tests.tiny_models import make_tiny

CALIBRATION = CalibrationOptions(samples=4, seq_len=48, batch_size=2)


def options(**fields: Any) -> QuantizeOptions:
    """Options with a calibration that takes no time."""
    return QuantizeOptions(**{"calibration": CALIBRATION} | fields)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    """`tiny(family)`: a source, read only."""

    @cache
    def make(family: str) -> Source:
        return resolve_source(make_tiny(family, tmp_path_factory.mktemp(family) / family))

    return make


@pytest.fixture(scope="session")
def quantized(tiny: Callable[[str], Source], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., QuantizeResult]:
    """`quantized(family, scheme=, kv_cache=)`: a checkpoint, read only."""

    @cache
    def make(family: str, scheme: str = "nvfp4", kv_cache: str = "fp8") -> QuantizeResult:
        out: Path = tmp_path_factory.mktemp("checkpoints") / f"{family}-{scheme}"
        return quantize(tiny(family), out, options(scheme=scheme, kv_cache=kv_cache))

    return make
