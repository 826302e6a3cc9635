"""A directory that appears whole or not at all: every step of the way is a place to die."""

import ctypes
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fp4pipe.checkpoint import INCOMPLETE, Checkpoint
from fp4pipe.convert import staging
from fp4pipe.convert.quantize import QuantizeResult, quantize
from fp4pipe.convert.source import Source
from fp4pipe.convert.staging import staged
from fp4pipe.errors import CheckpointError, Fp4pipeError, UsageError
from tests.convert.conftest import options

KILLED = -signal.SIGKILL
Quantized = Callable[..., QuantizeResult]


def fork(work: Callable[[], object]) -> int:
    """Start `work` in a child process that ends with it; returns its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        torch.set_num_threads(1)  # the parent's pool of threads does not exist here
        work()
        code = 0
    finally:
        os._exit(code)


def outcome(pid: int) -> int:
    """Exit code of a child, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def opens(path: Path) -> bool:
    try:
        Checkpoint.open(path)
    except CheckpointError:
        return False
    return True


def content(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir() if p.name != "provenance.json"}


@pytest.fixture
def finished(quantized: Quantized) -> Path:
    """A checkpoint to copy files from."""
    return quantized("llama", "w4a16_nvfp4", "none").out


def essentials(model: Path, directory: Path) -> Path:
    """A copy of the files without which `model` would be no checkpoint."""
    directory.mkdir()
    for name in ("config.json", "hf_quant_config.json", "model.safetensors"):
        shutil.copy(model / name, directory)
    return directory


def fail_to_write(out: Path) -> None:
    """An attempt that ends with an error after the first file."""

    def attempt() -> None:
        with staged(out, overwrite=True) as directory:
            (directory / "config.json").write_text("{}")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        attempt()


def write(out: Path, model: Path, *, overwrite: bool = False) -> None:
    """A stand-in for `quantize`: fill the staging directory with a real checkpoint, file by file."""
    with staged(out, overwrite=overwrite) as directory:
        for path in sorted(model.iterdir()):
            shutil.copy(path, directory)


def test_appears_when_the_block_ends(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with staged(out) as directory:
        assert directory.parent == out.parent
        assert directory.name.startswith(".out.partial-")
        assert [path.name for path in directory.iterdir()] == [INCOMPLETE]
        shutil.copytree(finished, directory, dirs_exist_ok=True)
        assert not out.exists()
        assert not opens(directory)
    assert content(out) == content(finished)
    assert os.listdir(out.parent) == ["out"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    fail_to_write(tmp_path / "out")
    assert not os.listdir(tmp_path)


@contextmanager
def dying_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kill the process at the `step`-th call that changes the disk."""
    left = step

    def deadly(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "fsync", "open", "rmdir", "mkdir"):
            patch.setattr(os, name, deadly(getattr(os, name)))
        for name in ("unlink", "touch", "mkdir", "write_text", "rmdir"):
            patch.setattr(Path, name, deadly(getattr(Path, name)))
        patch.setattr(shutil, "copy", deadly(shutil.copy))
        patch.setattr(staging, "_exchange", deadly(staging._exchange))
        yield


@pytest.mark.parametrize("way", ["new", "overwrite", "overwrite in two renames"])
def test_dying_at_every_single_step(
    way: str, quantized: Quantized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwrite = way != "new"
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a killed process loses nothing that the system holds
    if way == "overwrite in two renames":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())  # a C library without renameat2
    finished = essentials(quantized("llama", "w4a16_nvfp4", "none").out, tmp_path / "finished")
    old = essentials(quantized("llama").out, tmp_path / "old")
    new_content, old_content = content(finished), content(old)
    for step in range(200):
        place = tmp_path / str(step)
        out = place / "out"
        if overwrite:
            shutil.copytree(old, out)

        def work(step: int = step, out: Path = out) -> None:
            with dying_at(step, monkeypatch):
                write(out, finished, overwrite=overwrite)

        code = outcome(fork(work))
        if code == 0:
            assert step > 15
            assert content(out) == new_content
            return
        assert code == KILLED
        for path in place.iterdir() if place.exists() else ():
            if path.is_dir() and opens(path):
                assert content(path) in (old_content, new_content)
                assert overwrite or path == out
        if way == "overwrite":
            assert opens(out)
        fail_to_write(out)
        assert opens(out) or not overwrite  # a failure loses no checkpoint
        write(out, finished, overwrite=True)  # and what was lying about holds nobody up
        assert content(out) == new_content
        assert os.listdir(place) == ["out"]
    pytest.fail("never finished")


def test_killing_quantize_at_random_moments(tiny: Callable[[str], Source], tmp_path: Path) -> None:
    """Twenty kill -9 between the first file and the last; what `inspect` and `serve` open is finished or absent."""
    source = tiny("llama")
    asked = options(scheme="w4a16_nvfp4", max_shard_size="40KB")
    reference = quantize(source, tmp_path / "reference", asked)  # imports whatever the children will need
    start = time.monotonic()
    quantize(source, tmp_path / "reference", asked, overwrite=True)
    duration = time.monotonic() - start
    moments = random.Random(0)
    finished = unfinished = 0
    for attempt in range(20):
        place = tmp_path / str(attempt)
        place.mkdir()
        out = place / "out"
        pid = fork(lambda out=out: quantize(source, out, asked))  # type: ignore[misc]
        time.sleep(moments.uniform(0.05, 1.1) * duration)
        os.kill(pid, signal.SIGKILL)
        outcome(pid)
        for path in filter(Path.is_dir, place.iterdir()):
            unfinished += (path / INCOMPLETE).exists()
            if opens(path):
                assert path == out
                assert content(out) == content(reference.out) | {"README.md": (out / "README.md").read_bytes()}
                finished += 1
    assert finished < 20
    assert unfinished > 3
    quantize(source, out, asked, overwrite=True)
    assert opens(out)
    assert os.listdir(place) == ["out"]


def test_two_writers(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged(out):
        assert outcome(fork(lambda: write(out, finished))) == 70
        with pytest.raises(UsageError, match="is being written by another process"), staged(out):
            pass
    write(tmp_path / "other", finished)


@pytest.mark.parametrize("overwrite", [False, True])
def test_outputs_that_are_not_touched(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is no directory"), staged(tmp_path / "file", overwrite=overwrite):
        pass
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    with (
        pytest.raises(UsageError, match=r"holds no model|already exists"),
        staged(tmp_path / "notes", overwrite=overwrite),
    ):
        pass
    assert (tmp_path / "notes" / "diary.txt").read_text() == "mine"


@pytest.mark.parametrize("place", ["", "..", "../.."])
def test_a_source_is_never_replaced(place: str, finished: Path, tiny: Callable[[str], Source], tmp_path: Path) -> None:
    """Neither a model that is not quantized, nor a checkpoint with the source inside."""
    model = tmp_path / "a" / "b" / "c"
    shutil.copytree(tiny("llama").path, model)
    for directory in (tmp_path / "a", tmp_path / "a" / "b"):
        shutil.copy(finished / "config.json", directory)
    before = content(model)
    with pytest.raises(UsageError, match=r"not quantized, so it is not replaced|the source .* lies there"):
        quantize(model, model / place, options(scheme="w4a16_nvfp4"), overwrite=True)
    assert content(model) == before


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(UsageError, match="cannot be created; because Not a directory"),
        staged(tmp_path / "file/in/out"),
    ):
        pass
    with pytest.raises(UsageError, match=r"nothing can be written in /proc"), staged(Path("/proc/out")):
        pass


def test_an_empty_directory_is_as_good_as_none(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", finished)
    assert opens(tmp_path / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE stands in for a full disk")
@pytest.mark.parametrize("limit", [300, 20_000, 100_000])
def test_disk_full(limit: int, tiny: Callable[[str], Source], tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(Fp4pipeError, match=r"out cannot be written; because File too large; try: free space"):
            quantize(tiny("llama"), tmp_path / "out", options(scheme="w4a16_nvfp4"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.listdir(tmp_path)
