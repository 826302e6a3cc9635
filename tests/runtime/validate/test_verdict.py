"""Paired verdicts against values worked out by hand or taken from the literature."""

import pytest

from fp4pipe.runtime.validate.verdict import verdict


def answers(both: int, lost: int, won: int, neither: int) -> tuple[list[bool], list[bool]]:
    """Baseline and candidate with the given numbers of agreements and disagreements."""
    baseline = [True] * both + [True] * lost + [False] * won + [False] * neither
    candidate = [True] * both + [False] * lost + [True] * won + [False] * neither
    return baseline, candidate


def test_mcnemar_exact_values() -> None:
    # P(X <= 2 or X >= 8), X ~ Binomial(10, 1/2) = 2 * 56 / 1024
    assert verdict(*answers(80, 8, 2, 10)).p_value == pytest.approx(112 / 1024)
    # Fagerland, Lydersen and Laake 2013, table 1 (bone marrow, 1 against 7): exact conditional p = 0.0703
    assert verdict(*answers(1, 7, 1, 12)).p_value == pytest.approx(0.0703, abs=5e-5)
    assert verdict(*answers(10, 0, 0, 0)).p_value == 1.0


def test_figures() -> None:
    result = verdict(*answers(900, 60, 40, 319))
    assert (result.questions, result.lost, result.won) == (1319, 60, 40)
    assert result.baseline_accuracy == pytest.approx(960 / 1319)
    assert result.candidate_accuracy == pytest.approx(940 / 1319)
    assert result.difference == pytest.approx(-20 / 1319)
    # Normal approximation of the adjusted interval: d +- 1.96 sqrt((p + q - (p - q)^2) / n)
    assert result.low == pytest.approx(-0.0302, abs=2e-3)
    assert result.high == pytest.approx(-0.0001, abs=2e-3)


def test_a_model_against_itself_passes_once_there_are_enough_questions() -> None:
    assert verdict(*answers(958, 0, 0, 361)).outcome == "pass"
    few = verdict(*answers(15, 0, 0, 5))
    assert few.outcome == "inconclusive"
    needed = few.questions_needed
    assert needed is not None
    assert 100 < needed < 250
    assert verdict(*answers(needed, 0, 0, 0)).outcome == "pass"


def test_a_damaged_model_regresses() -> None:
    assert verdict(*answers(500, 458, 5, 356)).outcome == "regress"
    assert verdict(*answers(10, 30, 0, 10)).outcome == "regress"


def test_a_real_but_tolerable_loss_passes() -> None:
    result = verdict(*answers(1200, 14, 2, 103), margin=0.03)
    assert result.p_value < 0.05
    assert result.outcome == "pass"


def test_noise_is_inconclusive_and_says_what_would_decide() -> None:
    result = verdict(*answers(120, 13, 10, 57))
    assert result.outcome == "inconclusive"
    needed = result.questions_needed
    assert needed is not None
    assert needed > result.questions
    scale = 1.05 * needed / result.questions
    decided = verdict(*answers(*(round(scale * part) for part in (120, 13, 10, 57))))
    assert decided.outcome != "inconclusive"
    assert str(needed) in result.summary


def test_a_difference_on_the_margin_still_returns() -> None:
    result = verdict(*answers(950, 35, 15, 0), margin=0.02)
    assert result.outcome in ("inconclusive", "regress")


def test_seeded() -> None:
    pair = answers(150, 12, 9, 29)
    assert verdict(*pair, seed=3) == verdict(*pair, seed=3)


@pytest.mark.parametrize("pair", [([], []), ([True], [True, False])])
def test_unpaired_answers_are_refused(pair: tuple[list[bool], list[bool]]) -> None:
    with pytest.raises(ValueError, match="paired"):
        verdict(*pair)


def test_margin_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="margin"):
        verdict([True], [True], margin=1.5)
