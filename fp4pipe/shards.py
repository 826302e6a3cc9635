"""The safetensors files of a checkpoint directory, and the index that says which tensor lies in which.

Everything wrong is collected as a `Problem` instead of raised at once, so that loading can stop at the first one and
`fp4pipe inspect` can show them all.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fp4pipe.errors import CheckpointError
from fp4pipe.quant_config import read_json
from fp4pipe.safetensors_file import TensorInfo, read_header, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Problem(NamedTuple):
    """Something that makes a checkpoint unusable: the lint rule broken, the tensor or file, the error to raise."""

    rule: str
    where: str
    error: CheckpointError


def problem(rule: str, where: str | Path, what: str, *, because: str | None = None, fix: str | None = None) -> Problem:
    """A `Problem` with the error `CheckpointError(what, because=because, fix=fix)`."""
    return Problem(rule, str(where), CheckpointError(what, because=because, fix=fix))


@dataclass
class Shards:
    """What the files of a checkpoint hold.

    Attributes:
        tensors: Every tensor by name.
        metadata: ``__metadata__`` by file.
        index: The parsed index, or None for a single file.
    """

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    metadata: dict[Path, dict[str, str]] = field(default_factory=dict)
    index: dict[str, Any] | None = None


def read_shards(directory: Path) -> tuple[Shards, list[Problem]]:
    """Read the headers of all safetensors files of `directory` and hold them against the index.

    Returns:
        What could be read, and what is wrong: unreadable or damaged files, a missing shard, a shard or a tensor that
        the index does not know, a tensor in two files or in another file than the index says.
    """
    shards = Shards()
    problems: list[Problem] = []
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    weight_map: dict[str, str] = {}
    if (directory / INDEX).exists():
        try:
            shards.index, weight_map = _read_index(directory / INDEX)
        except CheckpointError as error:
            return shards, [Problem("index-invalid", INDEX, error)]
        files = sorted(set(weight_map.values()))
    elif SINGLE in present or len(present) == 1:
        files = [SINGLE] if SINGLE in present else present
    else:
        return shards, [_no_weights(directory, present)]
    problems += _unlisted(directory, present, files)
    for name in files:
        if name not in present:
            problems.append(_missing_file(directory, name, weight_map))
            continue
        try:
            tensors, shards.metadata[directory / name] = read_header(directory / name)
        except CheckpointError as error:
            problems.append(Problem("file-damaged", name, error))
            continue
        for tensor in tensors.values():
            problems += _place(shards, tensor, weight_map)
    readable = {path.name for path in shards.metadata}
    for name, file in weight_map.items():
        if name not in shards.tensors and file in readable:
            what = f"{directory / file}: tensor {shown(name)} is missing"
            problems.append(problem("tensor-missing", name, what, because=f"{INDEX} lists it there"))
    return shards, problems


def _read_index(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: tensor {shown(tensor)} is placed in {shown(file)}, not in a file beside it")
    return index, weight_map


def _place(shards: Shards, tensor: TensorInfo, weight_map: dict[str, str]) -> list[Problem]:
    """Enter `tensor` and say what is wrong with where it was found."""
    here = f"{tensor.file}: tensor {shown(tensor.name)} at offset {tensor.start}"
    if (other := shards.tensors.get(tensor.name)) is not None:
        return [problem("tensor-duplicate", tensor.name, f"{here} is also in {other.file.name}")]
    shards.tensors[tensor.name] = tensor
    if shards.index is None:
        return []
    expected = weight_map.get(tensor.name)
    if expected is None:
        return [problem("tensor-unlisted", tensor.name, f"{here} is not in {INDEX}")]
    if expected != tensor.file.name:
        return [problem("index-wrong-file", tensor.name, f"{here} is placed in {expected} by {INDEX}")]
    return []


def _unlisted(directory: Path, present: list[str], files: list[str]) -> list[Problem]:
    """Weight files that nothing refers to. Mistral's own `consolidated*` copies beside the others are expected."""
    fix = f"remove it, or list its tensors in {INDEX}"
    return [
        problem("file-unlisted", name, f"{directory / name}: no index names this file", fix=fix)
        for name in present
        if name not in files and not name.startswith("consolidated")
    ]


def _missing_file(directory: Path, name: str, weight_map: dict[str, str]) -> Problem:
    lost = [tensor for tensor, file in weight_map.items() if file == name]
    return problem(
        "file-missing",
        name,
        f"{directory / name}: missing, but {INDEX} places tensor {shown(lost[0])} and {len(lost) - 1} others there",
        fix="download or copy the whole checkpoint again",
    )


def _no_weights(directory: Path, present: list[str]) -> Problem:
    if present:
        what = f"{directory}: {len(present)} safetensors files ({present[0]}, ...) and no {INDEX}"
        return problem("index-invalid", INDEX, what, fix="copy the index from where the files came from")
    pickled = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in directory.glob(suffix))
    if not pickled:
        return problem("weights-absent", directory, f"{directory}: no safetensors file")
    return problem(
        "weights-absent",
        directory,
        f"{directory}: only pickled weights ({pickled[0]}), which can run code when opened and are never read here",
        fix="convert them with transformers' save_pretrained",
    )
