"""Perplexity, and agreement with the unquantized source, in one pass over the same windows of text."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fp4pipe import console
from fp4pipe.runtime.validate.scores import Divergence, Likelihood


class Scorer(Protocol):
    """What can give the logits of a prompt: an `Engine`."""

    def prompt_logits(self, prompts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """float32 ``[T, V]`` for each prompt, in order, computed as it is asked for."""
        ...


def perplexity(engine: Scorer, windows: Sequence[list[int]]) -> dict[str, Any]:
    """Perplexity of `windows` (see `text.windows`): ``{"perplexity", "nll", "tokens", "seconds"}``."""
    started = time.perf_counter()
    likelihoods, _ = score({"model": engine}, windows)
    return perplexity_figures(likelihoods["model"]) | {"seconds": time.perf_counter() - started}


def agreement(engine: Scorer, baseline: Scorer, windows: Sequence[list[int]]) -> dict[str, Any]:
    """KL(baseline || engine) of the next-token distributions and share of equal top-1 tokens, over all positions."""
    _, divergences = score({"model": engine}, windows, baseline)
    return agreement_figures(divergences["model"])


def score(
    engines: Mapping[str, Scorer],
    windows: Sequence[list[int]],
    baseline: Scorer | None = None,
    *,
    compared: int | None = None,
) -> tuple[dict[str, Likelihood], dict[str, Divergence]]:
    """Run every engine over the windows side by side, one window at a time, keeping sums only.

    Args:
        engines: Models to score, by name.
        windows: Token ids.
        baseline: Model to score too, under the name ``baseline``, and to compare the others with.
        compared: Positions to compare with the baseline, from the first; all when absent.

    Returns:
        Likelihood of the text under each model, and each model's distance from the baseline.
    """
    everyone = {**engines} if baseline is None else {"baseline": baseline, **engines}
    likelihoods = {name: Likelihood() for name in everyone}
    divergences = {name: Divergence() for name in engines if baseline is not None}
    streams = {name: iter(engine.prompt_logits(windows)) for name, engine in everyone.items()}
    with console.progress(sum(map(len, windows)), "scoring text", "tok") as bar:
        for ids in windows:
            logits = {name: next(stream) for name, stream in streams.items()}
            for name, likelihood in likelihoods.items():
                likelihood.add(logits[name], ids)
            for name, divergence in divergences.items():
                left = len(ids) if compared is None else min(len(ids), compared - divergence.positions)
                if left > 0:
                    divergence.add(logits["baseline"][:left], logits[name][:left])
            bar.update(len(ids))
    return likelihoods, divergences


def perplexity_figures(likelihood: Likelihood) -> dict[str, Any]:
    """Perplexity, nats a token, and how many tokens they are over."""
    return {"perplexity": likelihood.perplexity, "nll": likelihood.nll, "tokens": likelihood.tokens}


def agreement_figures(divergence: Divergence) -> dict[str, Any]:
    """KL and top-1 figures, and how many positions they are over."""
    return divergence.kl_figures() | {"top1": divergence.top1, "positions": divergence.positions}
