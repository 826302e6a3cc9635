"""What a killed compilation leaves behind does not stop the next one."""

from pathlib import Path

import pytest
from torch.utils._filelock import FileLock

from fp4pipe.runtime.graph.compile import drop_unfinished

SECTIONS_AT, SECTIONS = 64, 2
WHOLE = b"\x7fELF" + bytes(36) + SECTIONS_AT.to_bytes(8, "little") + bytes(10)
WHOLE += (64).to_bytes(2, "little") + SECTIONS.to_bytes(2, "little") + bytes(2) + bytes(64 * SECTIONS)


def put(directory: Path, content: bytes) -> Path:
    library = directory / "ab" / "cabc.main.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(content)
    return library


@pytest.mark.parametrize("content", [b"", b"\x7fELF", WHOLE[:-1], b"no library, though long enough" * 4])
def test_unfinished_libraries_are_deleted(content: bytes, tmp_path: Path):
    library = put(tmp_path, content)
    assert drop_unfinished(tmp_path) == [library]
    assert not library.exists()


def test_whole_ones_stay(tmp_path: Path):
    library = put(tmp_path, WHOLE)
    assert drop_unfinished(tmp_path) == []
    assert library.exists()


def test_one_being_written_stays(tmp_path: Path):
    library = put(tmp_path, b"")
    (tmp_path / "locks").mkdir()
    with FileLock(tmp_path / "locks" / "cabc.lock", timeout=0):
        assert drop_unfinished(tmp_path) == []
    assert library.exists()


def test_nothing_there_yet(tmp_path: Path):
    assert drop_unfinished(tmp_path / "none") == []
