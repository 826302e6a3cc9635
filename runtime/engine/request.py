"""A request on its way through the engine, and what comes out of it."""

import time
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fp4pipe.errors import UsageError
from fp4pipe.runtime.engine.pages import Lease
from fp4pipe.runtime.engine.params import SamplingParams
from fp4pipe.runtime.engine.text import TextStream


class ContextExceeded(UsageError):
    """A prompt and what is to be generated do not fit the context."""


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's natural-log probability under the model, before penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens as (id, log probability), likeliest first."""


@dataclass(slots=True)
class Output:
    """What one step added to one request."""

    request_id: str
    token_ids: list[int]
    text: str
    """New text; it may lag behind the tokens (half a character, the start of a stop string), never at the end."""
    logprobs: list[TokenLogprob] | None
    """One for each of `token_ids`, when asked for."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The token id or the string that stopped it."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache."""
    completion_tokens: int
    """Tokens generated so far."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """With the first output, when asked for: one for each prompt token, None for the first."""
    queue_seconds: float = 0.0
    """Time from arrival to the first step."""
    error: str | None = None
    """What went wrong, when the finish reason is "error"."""


@dataclass(slots=True)
class Completion:
    """A finished request, whole."""

    token_ids: list[int]
    """Generated tokens, the end-of-sequence token included."""
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    """What went wrong, when the finish reason is "error"."""


class Collector:
    """Puts a request's outputs together."""

    def __init__(self) -> None:
        self._completion: Completion | None = None

    def add(self, output: Output) -> bool:
        """Take the next output; returns whether it was the last."""
        if self._completion is None:
            self._completion = Completion([], "", "abort", None, output.prompt_tokens, output.cached_tokens)
        done = self._completion
        done.token_ids += output.token_ids
        done.text += output.text
        if output.logprobs is not None:
            done.logprobs = [*(done.logprobs or []), *output.logprobs]
        done.prompt_logprobs = done.prompt_logprobs or output.prompt_logprobs
        if output.finish_reason is None:
            return False
        done.finish_reason, done.stop_reason, done.error = output.finish_reason, output.stop_reason, output.error
        return True

    def completion(self) -> Completion:
        """The whole; its finish reason is "abort" when the last output never came."""
        assert self._completion is not None
        return self._completion


@dataclass(slots=True, eq=False)
class Request:
    """One sequence, whose `computed` tokens catch up with its `tokens`."""

    id: str
    tokens: list[int]
    """Prompt and output."""
    num_prompt: int
    params: SamplingParams
    seed: int
    max_len: int
    """Length of `tokens` at which it ends."""
    stop_ids: frozenset[int]
    text: TextStream
    keep_logits: bool = False
    """Keep the logits of every prompt position (`Engine.prompt_logits`)."""

    lease: Lease | None = None
    """Its pages, while it runs."""
    computed: int = 0
    """Tokens whose keys and values are in its pages."""
    cached_tokens: int = 0
    prompt_logits: list[Tensor] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def needs_whole_prompt(self) -> bool:
        """Every prompt position must still go through the model, cached or not."""
        return self.num_output == 0 and (self.keep_logits or self.params.prompt_logprobs is not None)

    @property
    def queue_seconds(self) -> float:
        return (self.started or time.monotonic()) - self.arrived
