"""Finding the CUDA compiler and keeping what it makes."""

from pathlib import Path

import pytest
import torch

from fp4pipe.errors import Unavailable
from fp4pipe.runtime.ops import build, forms


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretended nvcc that writes its arguments as output and counts its runs."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo release 13.0; exit 0; fi\n'
        f"echo run >> {tmp_path}/runs\n"
        'if [ -e "$0.broken" ]; then echo "error: no such thing" >&2; exit 1; fi\n'
        'while [ "$1" != -o ]; do shift; done; echo "$@" > "$2"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FP4PIPE_CACHE", str(tmp_path / "cache"))
    return nvcc


def test_a_library_is_built_once(compiler: Path, tmp_path: Path) -> None:
    library = build.compile_library()
    assert library == build.compile_library()
    assert (tmp_path / "runs").read_text().count("run") == 1
    assert library.parent == tmp_path / "cache" / "kernels"
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    assert {"decode.cu", "prefill.cu"} <= {Path(word).name for word in library.read_text().split()}


def test_another_compiler_makes_another_library(compiler: Path) -> None:
    before = build.compile_library()
    compiler.write_text(compiler.read_text().replace("13.0", "13.1"))
    assert build.compile_library() != before


def test_a_refusal_is_reported_and_leaves_nothing(compiler: Path, tmp_path: Path) -> None:
    Path(f"{compiler}.broken").touch()
    with pytest.raises(Unavailable, match="no such thing"):
        build.compile_library()
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(Unavailable, match="no nvcc"):
        build.compile_library()
    build.load_library.cache_clear()
    forms.hopper_kernels.cache_clear()
    with pytest.warns(UserWarning, match="Triton kernels"):
        assert not forms.hopper_kernels(torch.device("cuda"))
    forms.hopper_kernels.cache_clear()
