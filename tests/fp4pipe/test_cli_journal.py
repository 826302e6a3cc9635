"""A run's journal: a step is kept only for exactly the inputs it was computed from."""

import pytest

from fp4pipe.cli.journal import Journal


def test_a_step_is_computed_once_for_equal_inputs(tmp_path, capsys):
    path = tmp_path / "run" / "run.json"
    first = Journal(path)
    assert first.step("quantize", {"bits": 4, "names": ("a",)}, lambda: {"size": float("nan"), "of": (1, 2)}) == {
        "size": None,
        "of": [1, 2],
    }
    again = Journal(path)
    kept = again.step("quantize", {"bits": 4, "names": ["a"]}, lambda: pytest.fail("computed again"))
    assert kept == {"size": None, "of": [1, 2]}
    assert again.kept == {"quantize"}
    assert again.seconds == first.seconds
    assert "quantize: kept" in capsys.readouterr().err


@pytest.mark.parametrize("valid", [True, False])
def test_other_inputs_or_a_lost_result_compute_it_again(tmp_path, valid):
    path = tmp_path / "run.json"
    Journal(path).step("quantize", {"bits": 4}, lambda: 1)
    journal = Journal(path)
    assert journal.step("quantize", {"bits": 3 if valid else 4}, lambda: 2, valid=valid) == 2
    assert journal.kept == set()
    assert Journal(path).step("quantize", {"bits": 3 if valid else 4}, lambda: 3) == 2


def test_a_step_that_fails_leaves_the_steps_before_it(tmp_path):
    path = tmp_path / "run.json"
    journal = Journal(path)
    journal.step("quantize", 1, lambda: "done")

    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        journal.step("validate", 1, fail)
    assert Journal(path).step("quantize", 1, lambda: pytest.fail("computed again")) == "done"


@pytest.mark.parametrize("content", ["", "{", "[1]", "[[1, 2]]", "null", '{"quantize": {}}', '{"quantize": 5}'])
def test_a_damaged_journal_is_an_empty_one(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_text(content)
    assert Journal(path).step("quantize", 1, lambda: "computed") == "computed"
