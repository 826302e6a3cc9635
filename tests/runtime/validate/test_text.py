"""Windows over a text."""

from pathlib import Path

import pytest

from fp4pipe.errors import UsageError
from fp4pipe.runtime.validate.text import read_text, windows
from tests.tiny_models import make_tokenizer


class Bytes:
    """One token a byte, shifted past BOS."""

    bos_token_id = 1

    def __init__(self, adds_bos: bool) -> None:
        self.adds_bos = adds_bos

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        ids = [byte + 2 for byte in text.encode()]
        return {"input_ids": [1, *ids] if self.adds_bos and add_special_tokens else ids}


def test_without_bos_the_first_token_of_a_window_is_context() -> None:
    pieces = windows("abcdefghij", Bytes(False), tokens=7, length=4)
    assert pieces == [[99, 100, 101, 102], [103, 104, 105, 106], [107, 108]]
    assert sum(len(piece) - 1 for piece in pieces) == 7


def test_with_bos_every_token_is_scored() -> None:
    pieces = windows("abcdefghij", Bytes(True), tokens=7, length=4)
    assert pieces == [[1, 99, 100, 101], [1, 102, 103, 104], [1, 105]]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 6, 7])
def test_exactly_the_tokens_asked_for(adds_bos: bool, tokens: int) -> None:
    pieces = windows("abcdefghij", Bytes(adds_bos), tokens=tokens, length=4)
    assert sum(len(piece) - 1 for piece in pieces) == tokens
    assert all(2 <= len(piece) <= 4 for piece in pieces)


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(UsageError, match="gives 8 scored tokens, fewer than the 9"):
        windows("abcdefghij", Bytes(False), tokens=9, length=6)


def test_the_bundled_text() -> None:
    text = read_text()
    assert len(text.split()) > 2500
    assert "def order(jobs, needs):" in text
    assert len(windows(text, make_tokenizer(), tokens=4096)) == 9


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("żółw".encode())
    assert read_text(tmp_path / "a.txt") == "żółw"
    (tmp_path / "b.txt").write_bytes(b"ok \xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_text(tmp_path / "b.txt")
    with pytest.raises(UsageError, match=r"c\.txt cannot be read"):
        read_text(tmp_path / "c.txt")
