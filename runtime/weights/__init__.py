"""A checkpoint's bytes into tensors: threads that really read, and a manifest that proves each tensor used once."""

from fp4pipe.runtime.weights.load import Loaded, load_tensors
from fp4pipe.runtime.weights.manifest import Expected, Manifest, expected_of_linear
from fp4pipe.runtime.weights.reader import ReadReport, WeightReader

__all__ = [
    "Expected",
    "Loaded",
    "Manifest",
    "ReadReport",
    "WeightReader",
    "expected_of_linear",
    "load_tensors",
]
