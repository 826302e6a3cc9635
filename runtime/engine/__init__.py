"""Continuous batching over a model: requests in, tokens and text out."""

from fp4pipe.runtime.engine.engine import Engine
from fp4pipe.runtime.engine.params import SamplingParams
from fp4pipe.runtime.engine.request import Completion, Output, TokenLogprob

__all__ = ["Completion", "Engine", "Output", "SamplingParams", "TokenLogprob"]
