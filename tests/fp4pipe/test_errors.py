"""What other libraries say, made fit for one line."""

import pytest

from fp4pipe.errors import first_line


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", "ValueError"),
        ("\n  one\ntwo", "one"),
        ("field 'hidden_size':\n    expected int\n  more", "field 'hidden_size': expected int"),
        ("one of:\n", "one of:"),
    ],
)
def test_first_line(said: str, line: str) -> None:
    assert first_line(ValueError(said)) == line
