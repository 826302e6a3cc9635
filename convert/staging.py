"""A directory that appears whole or not at all, whenever the process dies.

    with staged(out, overwrite=False) as staging:
        ... write files into `staging` ...

Files go to the hidden sibling ``.NAME.partial-PID``. Its first file is ``INCOMPLETE``, which `Checkpoint.open` refuses.
A new name keeps that file until after the rename. An existing checkpoint changes places with the new one in one step,
just before which the new one loses the file: at every moment one of the two, whole, has the name.
A lock on ``.NAME.lock`` is held meanwhile: whoever holds it may sweep away all other partial siblings, because their
writers are dead.
"""

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp4pipe.checkpoint import INCOMPLETE
from fp4pipe.errors import Fp4pipeError, UsageError

_DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staged(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a directory to fill; when the block ends without an error it becomes `out`.

    Args:
        out: Final directory. Its parent is created.
        overwrite: Replace an existing `out`. It stays as it is until the new one is complete, then they change places.

    Raises:
        UsageError: `out` exists and `overwrite` is false, another process is writing it, or the place is read-only.
        Fp4pipeError: The disk is full.
    """
    out = Path(os.path.abspath(out))
    check_output(out, overwrite=overwrite)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out.parent} cannot be created", because=error.strerror) from error
    with _locked(out):
        replaced = out.parent / f".{out.name}.replaced"
        if replaced.is_dir() and not out.exists():  # killed between the two renames of `_exchange`
            os.rename(replaced, out)
        for stale in (replaced, *out.parent.glob(_escape(f".{out.name}.partial-") + "*")):
            remove(stale)
        if (out / INCOMPLETE).exists():  # killed between the rename and the removal of the marker
            remove(out)
        staging = out.parent / f".{out.name}.partial-{os.getpid()}"
        staging.mkdir()
        try:
            (staging / INCOMPLETE).write_text("This directory is being written; it is no checkpoint yet.\n")
            _sync(staging / INCOMPLETE)
            _sync(staging)
            yield staging
            _publish(staging, out)
        except Exception as error:
            if (because := disk_trouble(error)) is None:
                raise
            what = f"{out} cannot be written"
            raise Fp4pipeError(what, because=because, fix="free space there, or another --out") from error
        finally:
            remove(staging)


def check_output(out: Path, *, overwrite: bool) -> None:
    """Refuse an output that exists, unless it may be replaced, is an empty directory, or was never finished.

    Raises:
        UsageError: It may not be written.
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir() or out.is_symlink():
        raise UsageError(f"{out} exists and is no directory")
    if (out / INCOMPLETE).exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{out} already exists", fix="another --out, remove it, or quantize with --overwrite")
    if not (out / "config.json").exists():
        raise UsageError(f"{out} holds no model, so it is not replaced", fix="another --out, or remove it yourself")
    if not _says_quantized(out):
        raise UsageError(
            f"{out} holds a model that is not quantized, so it is not replaced",
            fix="another --out, or remove it yourself",
        )


def _says_quantized(directory: Path) -> bool:
    """Whether the configs, damaged or not, are those of a quantized checkpoint: something that can be made again."""
    if (directory / "hf_quant_config.json").exists():
        return True
    with suppress(OSError):
        return b'"quantization_config"' in (directory / "config.json").read_bytes()
    return False


def check_keeps(out: Path, source: Path) -> None:
    """Refuse an output that would take the place of what it is made from.

    Raises:
        UsageError: `source` is `out` or lies in it.
    """
    if source.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out} cannot be written: the source {source} lies there", fix="another --out")


def remove(directory: Path) -> None:
    """Delete a directory so that it never looks like a checkpoint on the way: a marker is put first, and goes last."""
    if not directory.is_dir():
        return
    with suppress(OSError):
        (directory / INCOMPLETE).touch()
    for child in directory.iterdir():
        if child.name == INCOMPLETE:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink(missing_ok=True)
    (directory / INCOMPLETE).unlink(missing_ok=True)
    directory.rmdir()


def disk_trouble(error: Exception) -> str | None:
    """What the operating system said, if `error` is about a full disk; safetensors wraps it in a class of its own."""
    if isinstance(error, Fp4pipeError):
        return None
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return os.strerror(error.errno)
    return next((os.strerror(code) for code in _DISK_FULL if os.strerror(code) in str(error)), None)


def _publish(staging: Path, out: Path) -> None:
    for path in sorted(staging.rglob("*")):
        _sync(path)
    _sync(staging)
    if out.is_dir() and any(out.iterdir()):
        (staging / INCOMPLETE).unlink()
        _sync(staging)
        _exchange(staging, out)
    else:
        os.rename(staging, out)
        _sync(out.parent)
        (out / INCOMPLETE).unlink()
        _sync(out)
    _sync(out.parent)


def _exchange(staging: Path, out: Path) -> None:
    """Let the two directories change names in one step; where the filesystem cannot, in two."""
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is not None:
        done = renameat2(_AT_FDCWD, os.fsencode(staging), _AT_FDCWD, os.fsencode(out), _RENAME_EXCHANGE)
        if done == 0:
            return
        if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code), str(out))
    replaced = out.parent / f".{out.name}.replaced"
    os.rename(out, replaced)
    os.rename(staging, out)
    os.rename(replaced, staging)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    lock = out.parent / f".{out.name}.lock"
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UsageError(f"nothing can be written in {out.parent}", because=error.strerror) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise UsageError(
                f"{out} is being written by another process", fix="wait for it, or another --out"
            ) from None
        # The previous holder unlinks the file when it is done; a lock on an unlinked file excludes nobody.
        with suppress(FileNotFoundError):
            if os.stat(lock).st_ino == os.fstat(handle).st_ino:
                break
        os.close(handle)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _escape(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
