"""What a request asks of sampling and when it ends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fp4pipe.errors import UsageError

MAX_LOGPROBS = 20
"""Most alternatives reported per token, as in OpenAI's API."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Raises:
        UsageError: A value is out of its range; the message names the parameter.
    """

    max_tokens: int | None = 16
    """Tokens to generate at most; None: until the context is full; 0: only compute the prompt."""
    temperature: float = 0.0
    """0 is greedy: the exact argmax."""
    top_k: int = 0
    """Choose among the `top_k` likeliest tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Choose among the smallest set of likeliest tokens that has at least this probability."""
    min_p: float = 0.0
    """Choose among tokens at least this fraction as likely as the likeliest."""
    seed: int | None = None
    """With a seed the same request gives the same tokens whatever else is running."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are cut off it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Tokens before which nothing but `max_tokens` ends the request."""
    logprobs: int | None = None
    """Report each token's log probability and this many alternatives (0: none beside the chosen one)."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; the whole prompt is then computed, never taken from the prefix cache."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in prompt or output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            if not math.isfinite(getattr(self, name)):
                raise UsageError(f"{name} is {getattr(self, name)}", fix="give a finite number")
        self._require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0")
        self._require(self.min_tokens >= 0, "min_tokens", "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}", fix="lower min_tokens"
            )
        self._require(0.0 <= self.temperature <= 100.0, "temperature", "from 0 to 100")
        self._require(self.top_k >= -1, "top_k", "a count, or 0 or -1 for no limit")
        self._require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        self._require(0.0 <= self.min_p <= 1.0, "min_p", "from 0 to 1")
        self._require(self.repetition_penalty > 0.0, "repetition_penalty", "above 0")
        self._require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "from -2 to 2")
        self._require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "from -2 to 2")
        self._require(all(self.stop), "stop", "strings of at least one character")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"from 0 to {MAX_LOGPROBS}")
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise UsageError("logit_bias has a value that is not a finite number", fix="give values from -100 to 100")

    def _require(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            raise UsageError(f"{name} is {getattr(self, name)!r}", fix=f"{name} must be {allowed}")

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything is done to the logits before a token is chosen from them."""
        return bool(self.logit_bias) or self.min_tokens > 0 or any(getattr(self, n) != v for n, v in PENALTIES.items())


PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""The penalties, and the values at which they do nothing."""
