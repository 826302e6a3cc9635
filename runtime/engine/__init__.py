"""Continuous batching over a model: requests in, tokens and text out."""

from fp4pipe.runtime.engine.async_engine import AsyncEngine, EngineStopped
from fp4pipe.runtime.engine.engine import Engine
from fp4pipe.runtime.engine.params import SamplingParams
from fp4pipe.runtime.engine.request import Completion, Output, TokenLogprob

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineStopped",
    "Output",
    "SamplingParams",
    "TokenLogprob",
]
