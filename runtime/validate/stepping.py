"""Run a step so that nothing stale can help it, poison its padding, and say what rounding alone does to its result."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4pipe.runtime.batch import Batch
from fp4pipe.runtime.graph.runner import Runner

PAD_ID = 0
"""Token that the runner pads with; `run_poisoned` says whether it was."""
FLOOR = 1e-4
"""Relative error that is always allowed."""
FACTOR = 2.0
"""How much more than the perturbation another order of sums may do."""
W4A4_PERTURBATION = 1e-3
"""Relative change of the embeddings that moves some activation of every row to another code."""


@dataclass(frozen=True, slots=True)
class Error:
    """Relative error of hidden states: norm of the difference over norm."""

    total: float
    """Over all rows together."""
    median: float
    """Of the median row, in that sequence where it is largest; no single row moves it. Sequences of one row are taken
    together."""

    @classmethod
    def between(cls, got: Tensor, expected: Tensor, batch: Batch) -> "Error":
        """Of the rows of `batch`; NaN where they are not finite."""
        difference, wanted = (got.double() - expected.double()).norm(dim=1), expected.double().norm(dim=1)
        rows = (difference / wanted).split(batch.query_start.diff().tolist())
        groups = [part for part in rows if len(part) > 1] + [
            torch.cat([part for part in rows if len(part) == 1] or rows)
        ]
        return cls(float(difference.norm() / wanted.norm()), float(torch.stack([g.median() for g in groups]).amax()))


@dataclass(frozen=True, slots=True)
class Noise:
    """What rounding alone does to this model: eager steps are run twice, the second time with perturbed embeddings.

    Unquantized activations are changed in their last bit. With quantized ones a sum that differs in its last bit may
    round to the next of eight magnitudes, and the layers after it amplify that to the size of the quantization noise,
    in none, some or all rows as chance has it. So there the perturbation is large enough to reach every row, and what
    is measured is that size.
    """

    bound: Error

    def explains(self, error: Error) -> bool:
        """Whether `error` is within the bound; NaN never is."""
        return error.total <= self.bound.total and error.median <= self.bound.median

    def judge(self, error: Error) -> str:
        """`error` beside the bound, in words."""
        return (
            f"relative error {error.total:.1e} (bound {self.bound.total:.0e}), median row {error.median:.1e}"
            f" (bound {self.bound.median:.0e})"
        )


def measure_noise(plain: Runner, batches: Sequence[Batch], seed: int) -> Noise:
    """The bound that `batches` give, run by a runner that captures nothing."""
    generator = torch.Generator().manual_seed(seed)
    embedding = _embedding(plain)
    quantized = plain.model.quant is not None and plain.model.mode == "w4a4"
    perturbation = W4A4_PERTURBATION if quantized else torch.finfo(embedding.dtype).eps
    errors: list[Error] = []
    for batch in batches:
        exact = run(plain, batch)
        rows = batch.input_ids.unique().to(embedding.device)
        kept = embedding[rows].clone()
        signs = (torch.randint(0, 2, kept.shape, generator=generator) * 2 - 1).to(kept)
        try:
            embedding[rows] = kept * (1 + signs * perturbation)
            errors.append(Error.between(run(plain, batch), exact, batch))
        finally:
            embedding[rows] = kept
    worst = Error(max(error.total for error in errors), max(error.median for error in errors))
    return Noise(Error(FLOOR + FACTOR * worst.total, FLOOR + FACTOR * worst.median))


def run(runner: Runner, batch: Batch) -> Tensor:
    """Hidden states of one step. What the cache held at the step's slots is NaN when it starts."""
    _forget(runner, batch)
    return runner.forward(batch).clone()


def run_poisoned(runner: Runner, batch: Batch, bucket: int) -> tuple[Tensor, bool]:
    """Run `batch` with every padded row NaN from the first layer on, and every static buffer NaN before the step.

    The padding token's embedding is NaN meanwhile; `batch` must not use that token.

    Returns:
        The hidden states, and whether the padded rows that follow them in the runner's output did come out NaN.
    """
    embedding = _embedding(runner)
    kept = embedding[PAD_ID].clone()
    runner.poison()
    _forget(runner, batch)
    try:
        embedding[PAD_ID] = torch.nan
        hidden = runner.forward(batch)
    finally:
        embedding[PAD_ID] = kept
    rows = batch.num_tokens if runner.graphs == "off" else bucket
    whole = hidden.as_strided((rows, hidden.shape[1]), hidden.stride()).clone()
    return whole[: batch.num_tokens], bool(whole[batch.num_tokens :].isnan().any())


def _embedding(runner: Runner) -> Tensor:
    return runner.model.decoder.get_input_embeddings().weight.detach()  # type: ignore[operator,union-attr]


def _forget(runner: Runner, batch: Batch) -> None:
    for tensor in (*runner.cache.k, *runner.cache.v):
        tensor.flatten(0, 1)[batch.slots.to(tensor.device)] = torch.nan
