"""Likelihood and divergence against values computed the long way."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fp4pipe.runtime.validate import agreement, parity, perplexity
from fp4pipe.runtime.validate.likelihood import score
from fp4pipe.runtime.validate.scores import Divergence, Likelihood


class Table:
    """Logits looked up by token: a bigram model."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def prompt_logits(self, prompts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        for ids in prompts:
            yield self.table[torch.tensor(ids)]


def random_table(seed: int, size: int = 20) -> Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * 2


WINDOWS = [[1, 2, 3, 4, 5], [6, 7, 8], list(range(20)) * 20]


def test_perplexity_is_the_exponential_of_the_mean_nll() -> None:
    table = random_table(0).double()
    nll = [-table[a].log_softmax(-1)[b] for ids in WINDOWS for a, b in pairwise(ids)]
    expected = torch.stack(nll).mean()
    figures = perplexity(Table(table.float()), WINDOWS)
    assert figures["tokens"] == len(nll)
    assert figures["nll"] == pytest.approx(float(expected), rel=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)


def test_a_uniform_model_has_the_vocabularys_perplexity() -> None:
    assert perplexity(Table(torch.zeros(20, 20)), WINDOWS)["perplexity"] == pytest.approx(20)


def test_an_impossible_token_is_infinite_not_an_error() -> None:
    table = torch.zeros(20, 20)
    table[:, 3] = -torch.inf
    figures = perplexity(Table(table), WINDOWS)
    assert figures["nll"] == math.inf
    assert figures["perplexity"] == math.inf


def test_agreement_with_itself() -> None:
    figures = agreement(Table(random_table(1)), Table(random_table(1)), WINDOWS)
    assert figures["top1"] == 1
    assert figures["positions"] == sum(map(len, WINDOWS))
    assert figures["kl_max"] == pytest.approx(0, abs=1e-6)


def test_kl_and_top1() -> None:
    a, b = random_table(2), random_table(3)
    rows = torch.tensor([i for ids in WINDOWS for i in ids])
    p, q = a[rows].double().log_softmax(-1), b[rows].double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    figures = agreement(Table(b), Table(a), WINDOWS)  # KL(baseline a || model b)
    assert figures["kl"] == pytest.approx(float(kl.mean()), rel=1e-5)
    assert figures["kl_p99"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-5)
    assert figures["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_divergence_in_pieces_is_divergence_at_once() -> None:
    a, b = (torch.randn(600, 30, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    whole, parts = Divergence(), Divergence()
    whole.add(a, b)
    for i in range(0, 600, 77):
        parts.add(a[i : i + 77], b[i : i + 77])
    assert parts.rel_error == pytest.approx(whole.rel_error)
    assert parts.kl_figures() == pytest.approx(whole.kl_figures())
    assert (parts.top1, parts.worst) == (whole.top1, pytest.approx(whole.worst))
    assert whole.rel_error == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-6)


def test_nan_is_never_lost() -> None:
    a = torch.randn(5, 8)
    b = a.clone()
    b[3, 2] = torch.nan
    divergence, likelihood = Divergence(), Likelihood()
    divergence.add(a, b)
    likelihood.add(b, [0, 1, 2, 3, 4])
    assert math.isnan(divergence.rel_error)
    assert math.isnan(divergence.worst)
    assert math.isnan(likelihood.nll)


def test_different_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="against a reference"):
        Divergence().add(torch.zeros(2, 8), torch.zeros(2, 9))


def test_one_pass_scores_everyone_and_compares_as_much_as_asked() -> None:
    tables = {name: Table(random_table(seed)) for name, seed in (("w4a4", 4), ("w4a16", 5))}
    likelihoods, divergences = score(tables, WINDOWS, Table(random_table(6)), compared=7)
    assert set(likelihoods) == {"baseline", "w4a4", "w4a16"}
    assert all(found.tokens == sum(map(len, WINDOWS)) - len(WINDOWS) for found in likelihoods.values())
    assert [found.positions for found in divergences.values()] == [7, 7]
    assert score(tables, WINDOWS, compared=7)[1] == {}


def test_parity_bounds() -> None:
    table = random_table(7)

    def off_by(error: float) -> Table:
        return Table(table + error * random_table(8) * table.norm() / random_table(8).norm())

    def reference(ids: Tensor) -> Tensor:
        return table[ids[0]]

    near, far = parity(off_by(1e-3), reference, WINDOWS), parity(off_by(3e-2), reference, WINDOWS)
    assert near.ok
    assert near.figures["rel_error"] == pytest.approx(1e-3, rel=0.5)
    assert far.ok is False
    assert parity(Table(table * torch.nan), reference, WINDOWS).ok is False
    assert "bound" in near.summary
