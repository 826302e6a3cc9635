"""Choosing the next token of each row, on the logits' device.

A row's choice depends on its own logits and request only, never on what else is in the batch: random choices add
Gumbel noise to the logits (the argmax is then a sample of their softmax), and that noise is a hash of seed, position
and token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4pipe.runtime.engine.request import Request, TokenLogprob

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome for one row."""

    token_id: int
    logprob: TokenLogprob | None
    finite: bool
    """False when the row's logits hold a NaN or +inf: the token means nothing."""


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Sampled]:
    """Choose one token a row.

    Args:
        logits: float32 [R, V], left as they are.
        requests: R requests; row r holds the logits after all of its tokens.
    """
    adjusted = adjust(logits, requests)
    tokens = adjusted.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if drawn:
        tokens[drawn] = draw(adjusted[drawn], [requests[row] for row in drawn])
    finite = torch.isfinite(logits.amax(dim=-1)).tolist()
    ids = tokens.tolist()
    wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    counts = [requests[row].params.logprobs or 0 for row in wanted]
    reports = dict(zip(wanted, logprobs_of(logits[wanted], tokens[wanted], counts), strict=True)) if wanted else {}
    return [Sampled(token, reports.get(row), ok) for row, (token, ok) in enumerate(zip(ids, finite, strict=True))]


def adjust(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Logits after penalties, bias, and the ban on early ends: a copy, or `logits` itself where no row asks for any."""
    rows = [row for row, request in enumerate(requests) if request.params.adjusts_logits]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        request, x = requests[row], logits[row]
        params = request.params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(request.tokens, device=x.device).unique()
            values = x[seen]
            x[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if request.num_output and (params.frequency_penalty or params.presence_penalty):
            output = torch.tensor(request.tokens[request.num_prompt :], device=x.device)
            ids, times = output.unique(return_counts=True)
            x[ids] -= params.frequency_penalty * times + params.presence_penalty
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=x.device)
            x[ids] += torch.tensor(list(params.logit_bias.values()), dtype=x.dtype, device=x.device)
        if request.num_output < params.min_tokens:
            x[torch.tensor(sorted(request.stop_ids), dtype=torch.int64, device=x.device)] = NEVER
    return logits


def draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """int64 [R]: a random token from each row's tempered and filtered distribution."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device).unsqueeze(1)

    params = [request.params for request in requests]
    scores = logits / column([p.temperature for p in params])
    sorted_rows = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if sorted_rows:
        scores[sorted_rows] = keep_top(
            scores[sorted_rows],
            column([params[row].top_k if params[row].top_k > 0 else scores.shape[1] for row in sorted_rows]),
            column([params[row].top_p for row in sorted_rows]),
        )
    if any(p.min_p for p in params):
        # In log space: p < min_p * p_max.  log(0) = -inf keeps every token of a row that asks for nothing.
        floor = scores.amax(dim=-1, keepdim=True) + column([p.min_p for p in params]).log()
        scores = scores.masked_fill(scores < floor, NEVER)
    noise = gumbel([request.seed for request in requests], [len(request.tokens) for request in requests], logits)
    return (scores + noise).argmax(dim=-1)


def keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scores with all but each row's `top_k` likeliest, and of those the fewest that reach `top_p`, at minus infinity.

    Args:
        scores: float [R, V].
        top_k, top_p: [R, 1].
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[1], device=scores.device)
    ordered = ordered.masked_fill(ranks >= top_k, NEVER)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill(before >= top_p, NEVER)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def gumbel(seeds: Sequence[int], positions: Sequence[int], like: Tensor) -> Tensor:
    """Standard Gumbel noise [R, V] with the dtype and device of `like`, a pure function of seed, position and token."""
    keys = torch.tensor(
        [_mix64(_mix64(seed) ^ position) for seed, position in zip(seeds, positions, strict=True)],
        dtype=torch.uint64,
    ).view(torch.int64)
    low = (keys & 0xFFFFFFFF).to(like.device).unsqueeze(1)
    high = ((keys >> 32) & 0xFFFFFFFF).to(like.device).unsqueeze(1)
    tokens = torch.arange(like.shape[1], device=like.device)
    bits = _mix32(_mix32(tokens ^ low) ^ high)
    uniform = (bits.double() + 0.5) / 2.0**32
    return -(-uniform.log()).log().to(like.dtype)


def _mix64(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea & Flood 2014): a bijection of 64-bit integers without visible structure."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _mix32(x: Tensor) -> Tensor:
    """MurmurHash3's finalizer (Appleby 2011) on int64 tensors of values below 2^32."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF  # the product may wrap, its low 32 bits are right all the same
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def logprobs_of(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
    """Log probabilities of one token a row and of the row's likeliest.

    Args:
        logits: float32 [R, V].
        tokens: int64 [R].
        counts: Alternatives to report, a row each.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.to(logprobs.device).unsqueeze(1)).squeeze(1).tolist()
    most = min(max(counts, default=0), logits.shape[1])
    top_values, top_ids = (t.tolist() for t in logprobs.topk(most, dim=-1))
    return [
        TokenLogprob(token, value, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, value, ids, values, count in zip(tokens.tolist(), chosen, top_ids, top_values, counts, strict=True)
    ]
