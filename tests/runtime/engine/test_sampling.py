from collections.abc import Callable

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fp4pipe.errors import UsageError
from fp4pipe.runtime.engine.params import SamplingParams
from fp4pipe.runtime.engine.request import Request
from fp4pipe.runtime.engine.sampling import adjust, draw, gumbel, keep_top, sample

VOCAB = 100


@pytest.fixture
def make(tokenizer) -> Callable[..., Request]:
    def request(prompt=(5, 6), output=(), seed=1, stop_ids=(), **params) -> Request:
        return Request(
            id="r",
            tokens=[*prompt, *output],
            num_prompt=len(prompt),
            params=SamplingParams(**params),
            seed=seed,
            max_len=1000,
            stop_ids=frozenset(stop_ids),
            text=None,  # type: ignore[arg-type]
        )

    return request


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_greedy_is_the_argmax_and_leaves_the_logits_alone(make, logits) -> None:
    before = logits.clone()
    requests = [make(repetition_penalty=2.0), *(make() for _ in range(5))]
    got = [s.token_id for s in sample(logits, requests)]
    assert got[1:] == logits.argmax(-1).tolist()[1:]
    assert torch.equal(before, logits)


def test_a_seeded_choice_does_not_depend_on_the_batch(make, logits) -> None:
    def tokens(rows: list[int]) -> list[int]:
        params = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 2.0, "top_p": 0.8}]
        requests = [make(seed=row, **params[row % 3]) for row in rows]
        return [s.token_id for s in sample(logits[rows], requests)]

    together = tokens([0, 1, 2, 3, 4, 5])
    assert [tokens([row])[0] for row in range(6)] == together
    assert tokens([5, 3, 1]) == [together[5], together[3], together[1]]


def test_positions_and_seeds_give_different_noise() -> None:
    like = torch.empty(1, VOCAB)
    noise = torch.cat([gumbel([seed], [position], like) for seed in (0, 1, 2**62) for position in (0, 1)])
    assert len({tuple(row) for row in noise.tolist()}) == 6
    assert abs(torch.corrcoef(noise) - torch.eye(6)).max() < 0.35


@pytest.mark.parametrize("seed_or_position", ["seed", "position"])
def test_draws_follow_the_distribution(make, seed_or_position) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    count = 20000
    if seed_or_position == "seed":
        requests = [make(temperature=1.0, seed=seed) for seed in range(count)]
    else:
        requests = [make(prompt=[0] * n, temperature=1.0) for n in range(1, 2000)]
    drawn = draw(probabilities.log().expand(len(requests), 5), requests)
    got = torch.bincount(drawn, minlength=5) / len(requests)
    assert (got - probabilities).abs().max() < 4 * (0.25 / len(requests)) ** 0.5


def test_gumbel_noise_has_the_right_shape() -> None:
    noise = gumbel(list(range(50)), [7] * 50, torch.empty(1, 4000)).double()
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(1.6449, abs=0.05)
    assert torch.isfinite(noise).all()


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (7, 1.0), (1000, 0.9), (50, 0.5), (10, 1e-9)])
def test_filters_keep_what_transformers_keeps(logits, top_k, top_p) -> None:
    rows = len(logits)
    got = keep_top(logits, torch.full((rows, 1), float(top_k)), torch.full((rows, 1), top_p))
    want = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits.clone()))  # type: ignore[arg-type]
    assert torch.equal(got, want)


def test_min_p_keeps_what_transformers_keeps(make, logits) -> None:
    kept = MinPLogitsWarper(0.2)(None, logits.clone()) > float("-inf")  # type: ignore[arg-type]
    for seed in range(300):
        drawn = draw(logits, [make(temperature=1.0, min_p=0.2, seed=seed)] * 6)
        assert kept[torch.arange(6), drawn].all()
    mixed = [make(temperature=5.0, seed=s, min_p=0.999 if s % 2 else 0.0) for s in range(6)]
    assert draw(logits, mixed)[1::2].tolist() == logits.argmax(-1)[1::2].tolist()


def test_repetition_penalty_is_transformers(make, logits) -> None:
    request = make(prompt=[1, 2, 3, 2], output=[4, 4, 5], repetition_penalty=1.3)
    got = adjust(logits[:1], [request])
    want = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([request.tokens]), logits[:1].clone())
    assert torch.allclose(got, want)


def test_frequency_and_presence_count_the_output_only(make, logits) -> None:
    request = make(prompt=[1, 1], output=[4, 4, 5], frequency_penalty=0.5, presence_penalty=0.25)
    change = adjust(logits[:1], [request])[0] - logits[0]
    want = torch.zeros(VOCAB)
    want[4], want[5] = -1.25, -0.75
    assert torch.allclose(change, want, atol=1e-6)


def test_logit_bias_and_min_tokens(make, logits) -> None:
    assert sample(logits[:1], [make(logit_bias={7: 100.0})])[0].token_id == 7
    best = int(logits[0].argmax())
    early = make(stop_ids=[best], min_tokens=2, output=[1])
    late = make(stop_ids=[best], min_tokens=2, output=[1, 1])
    assert sample(logits[:1], [early])[0].token_id != best
    assert sample(logits[:1], [late])[0].token_id == best


def test_logprobs_are_the_models_own(make, logits) -> None:
    want = logits.log_softmax(-1)
    requests = [make(logprobs=3, temperature=9.0, logit_bias={1: 50.0}), make(), make(logprobs=0), make(logprobs=1)]
    got = sample(logits[:4], requests)
    assert got[1].logprob is None
    assert got[0].token_id == 1
    for row in (0, 2, 3):
        report = got[row].logprob
        assert report is not None
        assert report.logprob == pytest.approx(float(want[row, report.token_id]))
        assert len(report.top) == requests[row].params.logprobs
        assert [i for i, _ in report.top] == want[row].topk(len(report.top)).indices.tolist()


def test_bad_logits_are_noticed(make, logits) -> None:
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    logits[3, 3] = float("-inf")
    assert [s.finite for s in sample(logits, [make()] * 6)] == [True, False, False, True, True, True]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"min_p": 2.0},
        {"max_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": ("",)},
        {"logprobs": 21},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"logit_bias": {1: float("inf")}},
    ],
)
def test_bad_parameters_are_named(bad) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)
