"""Running sums over logits: likelihood of the text, and distance between two models. Logits are never kept."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

_ROWS = 256
"""Positions worked on at a time: bounds the float32 copies to a few hundred MiB for the largest vocabularies."""


@dataclass(slots=True)
class Likelihood:
    """Negative log-likelihood of the tokens that follow."""

    total: float = 0.0
    tokens: int = 0

    def add(self, logits: Tensor, ids: list[int]) -> None:
        """Score ``ids[1:]`` by the rows before them.

        Args:
            logits: ``[T, V]`` floating, row t predicting token t + 1.
            ids: The T tokens of the window.
        """
        targets = torch.tensor(ids[1:], device=logits.device)
        for rows, wanted in zip(logits[:-1].split(_ROWS), targets.split(_ROWS), strict=True):
            nll = torch.nn.functional.cross_entropy(rows.float(), wanted, reduction="none")
            self.total += float(nll.double().sum())
        self.tokens += len(ids) - 1

    @property
    def nll(self) -> float:
        """Mean, in nats a token."""
        return self.total / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp of `nll`; infinite where that overflows."""
        return math.exp(self.nll) if not self.nll > 700 else math.inf


@dataclass(slots=True)
class Divergence:
    """How far a model's logits lie from a reference's, position by position."""

    positions: int = 0
    same_top1: int = 0
    difference: float = 0.0
    """Sum of squares of the difference, float64."""
    reference: float = 0.0
    """Sum of squares of the reference, float64."""
    worst: float = 0.0
    """Largest relative error of one position."""
    kl: list[Tensor] = field(default_factory=list)
    """float32 ``[T]`` pieces: KL(reference || model) in nats of each position."""

    def add(self, reference: Tensor, logits: Tensor) -> None:
        """Compare two ``[T, V]`` logits of the same positions.

        Raises:
            ValueError: The shapes differ.
        """
        if reference.shape != logits.shape:
            raise ValueError(f"logits {tuple(logits.shape)} against a reference of {tuple(reference.shape)}")
        for wanted, got in zip(reference.split(_ROWS), logits.split(_ROWS), strict=True):
            wanted, got = wanted.float(), got.to(wanted.device).float()
            self.same_top1 += int((wanted.argmax(-1) == got.argmax(-1)).sum())
            squares = (got - wanted).double().square().sum(-1)
            norms = wanted.double().square().sum(-1)
            self.difference += float(squares.sum())
            self.reference += float(norms.sum())
            # max() would drop a NaN that amax() keeps
            worst = float((squares / norms).sqrt().amax())
            self.worst = worst if math.isnan(worst) else max(self.worst, worst)
            log_wanted, log_got = wanted.log_softmax(-1), got.log_softmax(-1)
            kl = torch.nn.functional.kl_div(log_got, log_wanted, reduction="none", log_target=True).sum(-1)
            self.kl.append(kl.cpu())
        self.positions += reference.shape[0]

    @property
    def top1(self) -> float:
        """Share of positions whose most likely token is the same."""
        return self.same_top1 / self.positions if self.positions else math.nan

    @property
    def rel_error(self) -> float:
        """Norm of all differences over norm of all reference logits."""
        return math.sqrt(self.difference / self.reference) if self.reference else math.nan

    def kl_figures(self) -> dict[str, float]:
        """Mean, median, 99th percentile and maximum of the KL divergence, nats."""
        kl = torch.cat(self.kl).double()
        median, p99 = kl.quantile(torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
        return {"kl": float(kl.mean()), "kl_median": median, "kl_p99": p99, "kl_max": float(kl.max())}
