"""What a step's results do to a request."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4pipe.runtime.engine.request import FinishReason, Output, Request, TokenLogprob
from fp4pipe.runtime.engine.sampling import Sampled, logprobs_of

LOGIT_ROWS = 256
"""Prompt positions whose logits are computed at a time: 256 rows of 128k float32 are 128 MiB."""


def advance(request: Request, sampled: Sampled) -> Output:
    """Give `request` its next token, and end it if that was its last."""
    if not sampled.finite:
        return finish(request, "error", error="the model's logits are not finite")
    if len(request.tokens) >= request.max_len:  # it asked for no tokens at all
        return finish(request, "length")
    request.tokens.append(sampled.token_id)
    token_ids = [sampled.token_id]
    logprobs = None if sampled.logprob is None else [sampled.logprob]
    may_stop = request.num_output >= request.params.min_tokens
    if may_stop and sampled.token_id in request.stop_ids:
        return finish(request, "stop", sampled.token_id, token_ids=token_ids, logprobs=logprobs)
    text, stop = request.text.push(sampled.token_id, may_stop=may_stop)
    if stop is not None:
        return finish(request, "stop", stop, token_ids=token_ids, logprobs=logprobs, text=text)
    if len(request.tokens) >= request.max_len:
        return finish(request, "length", token_ids=token_ids, logprobs=logprobs, text=text)
    return _output(request, token_ids, logprobs, text)


def finish(
    request: Request,
    reason: FinishReason,
    stop_reason: int | str | None = None,
    *,
    token_ids: Sequence[int] = (),
    logprobs: list[TokenLogprob] | None = None,
    text: str = "",
    error: str | None = None,
) -> Output:
    """End `request`: its last output, with the text that was still held back."""
    if not isinstance(stop_reason, str):  # after a stop string there is no more text
        rest, stop = request.text.finish()
        text += rest
        if stop is not None and reason == "length":  # the last, incomplete character completed a stop string
            reason, stop_reason = "stop", stop
    request.finish_reason = reason
    output = _output(request, token_ids, logprobs, text)
    output.finish_reason, output.stop_reason, output.error = reason, stop_reason, error
    return output


def read_prompt(request: Request, start: int, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """Take what the request asked for from prompt positions `start` and on.

    Args:
        hidden: [T, H], rows of the model's body.
        head: Rows to float32 logits [T, V].
    """
    if request.keep_logits:
        request.prompt_logits.append(head(hidden))
        return
    if request.prompt_logprobs is None:
        request.prompt_logprobs = [None]
    for offset in range(0, len(hidden), LOGIT_ROWS):
        rows = hidden[offset : offset + LOGIT_ROWS]
        following = request.tokens[start + offset + 1 : start + offset + 1 + len(rows)]  # one less at the prompt's end
        if following:
            tokens = torch.tensor(following, dtype=torch.int64, device=hidden.device)
            counts = [request.params.prompt_logprobs or 0] * len(following)
            request.prompt_logprobs += logprobs_of(head(rows[: len(following)]), tokens, counts)


def _output(request: Request, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None, text: str) -> Output:
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    return Output(
        request_id=request.id,
        token_ids=list(token_ids),
        text=text,
        logprobs=logprobs,
        finish_reason=None,
        stop_reason=None,
        prompt_tokens=request.num_prompt,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.num_output,
        prompt_logprobs=prompt_logprobs,
        queue_seconds=request.queue_seconds,
    )
