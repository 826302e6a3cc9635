"""Finding models, and telling two of them apart."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from fp4pipe.convert.source import Source, cache_root, file_digest, resolve_source
from fp4pipe.errors import Fp4pipeError, SourceError, UsageError


@pytest.fixture
def copy(tiny: Callable[[str], Source], tmp_path: Path) -> Path:
    """A model directory that a test may spoil."""
    return Path(shutil.copytree(tiny("llama").path, tmp_path / "model"))


def edit_config(path: Path, **fields: object) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    return path


def test_directory(copy: Path) -> None:
    source = resolve_source(str(copy))
    assert (source.kind, source.path, source.revision) == ("directory", copy, None)
    assert "model.norm.weight" in source.tensors


def test_fingerprint_follows_names_and_contents_of_model_files(copy: Path) -> None:
    first = resolve_source(copy).fingerprint
    (copy / "README.md").write_text("not part of the model")
    (copy / "pytorch_model.bin").write_bytes(b"never read")
    assert resolve_source(copy).fingerprint == first
    digest = hashlib.sha256()
    for path in sorted(p for p in copy.iterdir() if p.suffix in (".safetensors", ".json", ".jinja")):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    assert first == digest.hexdigest()
    edit_config(copy, rms_norm_eps=1e-5)
    assert resolve_source(copy).fingerprint != first


def test_digest_is_read_off_the_hubs_cache(tmp_path: Path) -> None:
    name = "ab" * 32
    blob = tmp_path / "blobs" / name
    blob.parent.mkdir()
    blob.write_bytes(b"content is not looked at")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert file_digest(link) == name
    assert file_digest(blob) == hashlib.sha256(b"content is not looked at").hexdigest()


def test_hub(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(spec: str, **arguments: object) -> str:
        asked.update(arguments, spec=spec)
        return str(copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_source("org/name", revision="v1")
    assert (source.kind, source.revision) == ("hub", copy.name)
    assert (asked["spec"], asked["revision"]) == ("org/name", "v1")
    assert "*.py" not in asked["allow_patterns"]  # type: ignore[operator]
    assert not any(str(p).startswith(("*.bin", "*.pt")) for p in asked["allow_patterns"])  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no route"), OSError("no route"), ConnectionError("x")])
def test_hub_out_of_reach(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(SourceError, match=r"org/name cannot be fetched: the hub is not reachable .* a local directory"):
        resolve_source("org/name")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./nowhere/at/all", "no such model directory"),
        ("./nowhere", "no such model directory"),
        ("../nowhere", "no such model directory"),
        ("-nowhere-", "no such model directory"),
        ("no--where", "neither a directory here nor a hub id"),
        ("missing.gguf", "missing.gguf: no such file"),
        ("pypi:package", "names no version"),
        ("random:dinosaur", "random:dinosaur cannot be made"),
    ],
)
def test_specs_that_lead_nowhere(spec: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        resolve_source(spec, cache_dir=tmp_path)


def test_random_model_is_made_once(tmp_path: Path) -> None:
    first = resolve_source("random:llama", cache_dir=tmp_path)
    stamp = (first.path / "model.safetensors").stat().st_mtime_ns
    again = resolve_source("random:llama", cache_dir=tmp_path)
    assert (again.path / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]


def test_an_empty_spec_is_not_this_directory() -> None:
    with pytest.raises(UsageError, match="the source is empty"):
        resolve_source("")


@pytest.mark.parametrize("cache", ["/proc/nowhere", "full"])
def test_a_cache_that_cannot_be_written(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(family: str, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")

    monkeypatch.setattr("fp4pipe.convert.random_model.write_random_model", fill_the_disk)
    with pytest.raises(Fp4pipeError, match=r"cannot be kept in .*; because .*; try: .*FP4PIPE_CACHE"):
        resolve_source("random:llama", cache_dir=tmp_path / cache)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_an_empty_cache_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4PIPE_CACHE", "")
    assert cache_root().is_absolute()


def test_pickled_weights_are_never_read(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(SourceError, match=r"only pickled weights \(pytorch_model\.bin\), which can run code"):
        resolve_source(copy)


def test_damaged_weights(copy: Path) -> None:
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(SourceError, match="truncated"):
        resolve_source(copy)


def test_no_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(SourceError, match="is no model directory"):
        resolve_source(copy)


def test_already_quantized(copy: Path) -> None:
    edit_config(copy, quantization_config={"quant_method": "fp8"})
    with pytest.raises(SourceError, match=r"is already quantized \(fp8\); try: start from the original"):
        resolve_source(copy)


def test_remote_code_only_when_asked(copy: Path) -> None:
    edit_config(copy, model_type="somebodys_own", auto_map={"AutoModelForCausalLM": "modeling.Own"})
    with pytest.raises(SourceError, match=r"needs its own Python code .*--trust-remote-code"):
        resolve_source(copy)
    assert resolve_source(copy, trust_remote_code=True).kind == "directory"


def test_a_directory_named_like_a_file(copy: Path) -> None:
    assert resolve_source(copy.rename(copy.with_name("model.gguf"))).kind == "directory"


def test_revision_of_a_directory(copy: Path) -> None:
    with pytest.raises(UsageError, match="revision 'main' was given"):
        resolve_source(copy, revision="main")
