"""Compiles the CUDA C++ kernels once and keeps the library: plain C entry points, called through ctypes.

The library's name is a digest of its sources, the compiler's version and its flags, so a stale one is never loaded.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from fp4pipe.errors import Unavailable

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler",
    "-fPIC",
    "-shared",
    "--threads",
    "0",
)


def find_nvcc() -> str | None:
    """Path of the CUDA compiler: `CUDA_HOME`, then `PATH`, then the usual place."""
    candidates = [Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"] if "CUDA_HOME" in os.environ else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((str(path) for path in candidates if path.is_file()), None)


def cache_directory() -> Path:
    """Where compiled kernels are kept: `FP4PIPE_CACHE`, else `~/.cache/fp4pipe`."""
    return Path(os.environ.get("FP4PIPE_CACHE", Path.home() / ".cache" / "fp4pipe")) / "kernels"


def compile_library() -> Path:
    """Path of the compiled library, building it if this version is not there yet.

    Raises:
        Unavailable: No CUDA compiler, or it refuses the sources.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise Unavailable(
            "the Hopper kernels cannot be built",
            because="there is no nvcc in CUDA_HOME, PATH or /usr/local/cuda",
            fix="install the CUDA toolkit; until then the slower Triton kernels run",
        )
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    sources = sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cu", ".cuh"))
    digest = hashlib.sha256("\0".join((version, *_FLAGS)).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    library = cache_directory() / f"sm90a-{digest.hexdigest()[:24]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        partial = Path(scratch) / library.name
        command = [nvcc, *_FLAGS, "-o", str(partial), *(str(s) for s in sources if s.suffix == ".cu")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable("nvcc refused the Hopper kernels", because=done.stderr.strip()[-2000:])
        partial.replace(library)
    return library


@cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels, with their argument types declared. Built on first use, loaded once a process."""
    library = ctypes.CDLL(str(compile_library()))
    pointer, count = ctypes.c_void_p, ctypes.c_int
    library.fp4pipe_decode.argtypes = [*[pointer] * 5, *[count] * 10, pointer]
    library.fp4pipe_prefill.argtypes = [*[pointer] * 7, *[count] * 10, pointer]
    for function in (library.fp4pipe_decode, library.fp4pipe_prefill):
        function.restype = count
    return library
