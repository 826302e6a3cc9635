"""Strict reading of one safetensors file: what its header promises, checked against the bytes that are there.

A file is ``u64 little-endian N``, ``N`` bytes of JSON, then the tensors' bytes. The JSON maps each tensor name to
``{"dtype", "shape", "data_offsets": [start, end]}``, offsets counting from the end of the header, and the tensors must
tile the rest of the file without a gap or an overlap (https://github.com/huggingface/safetensors, "Format").

Nothing here ever unpickles, and whatever the bytes are, the only error raised is `CheckpointError`.
"""

import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4pipe.errors import CheckpointError, first_line

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Safetensors' spelling of each dtype that has whole bytes."""
MAX_HEADER = 100_000_000
"""The format's own limit on a header, in bytes."""
_FETCH_AGAIN = "copy or download the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: dtype in safetensors' spelling, and absolute byte offsets ``start <= end`` in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as PyTorch names it."""
        return DTYPES[self.dtype]


def shown(name: object) -> str:
    """`name` fit for a one-line message: quoted when it holds anything that does not print, cut when long."""
    text = name if isinstance(name, str) and name and name.isprintable() else ascii(name)
    return text if len(text) <= 200 else text[:197] + "..."


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read and check the header of the safetensors file `path`.

    Returns:
        The tensors by name in file order, and the file's metadata (``__metadata__``, empty when absent).

    Raises:
        CheckpointError: The file is unreadable, truncated or damaged: header longer than the file, not JSON, a tensor
            with an unknown dtype, a size that its shape does not give, an overlap, a gap, or bytes left over.
    """
    header, base, size = _read_json(path)
    metadata = _metadata(path, header.pop("__metadata__", {}))
    tensors = [_tensor(path, name, entry, base) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.start, t.end))
    position, previous = base, None
    for info in tensors:
        if info.start != position:
            _misplaced(info, position, previous)
        if info.end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {shown(info.name)} is at bytes {info.start}..{info.end}, "
                f"the file ends at {size}",
                fix=_FETCH_AGAIN,
            )
        position, previous = info.end, info
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes at offset {position} belong to no tensor")
    return {info.name: info for info in tensors}, metadata


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header's object, the offset of the first tensor byte, and the file's size."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        size = status.st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                raise CheckpointError(f"{path}: a Git LFS pointer, not the weights", fix="run `git lfs pull` there")
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: truncated: {len(prefix)} bytes, no header", fix=_FETCH_AGAIN)
            if length > size - 8:
                raise CheckpointError(
                    f"{path}: header of {length} bytes is longer than the file ({size} bytes)", fix=_FETCH_AGAIN
                )
            if length > MAX_HEADER:
                raise CheckpointError(f"{path}: header of {length} bytes is above the format's limit of {MAX_HEADER}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read", because=error.strerror or str(error)) from error
    if len(text) < length:
        raise CheckpointError(f"{path}: truncated: header ends after {len(text)} of {length} bytes", fix=_FETCH_AGAIN)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: header is not valid JSON", because=first_line(error), fix=_FETCH_AGAIN
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is a JSON {type(header).__name__}, not an object")
    return header, 8 + length, size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, refusing a key given twice (json would silently keep the last)."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{shown(key)} is given twice")
        result[key] = value
    return result


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ does not map strings to strings")
    return metadata


def _tensor(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    """One header entry as a `TensorInfo`, with everything checked that needs no other tensor."""
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: entry is not {{dtype, shape, data_offsets}}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {shown(dtype)}")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where}: shape {shown(shape)} is not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {shown(offsets)} are not [start, end]")
    info = TensorInfo(name, dtype, tuple(shape), path, base + offsets[0], base + offsets[1])
    needed = info.numel * info.torch_dtype.itemsize
    if needed != info.nbytes:
        raise CheckpointError(
            f"{where}: {dtype} {shape} needs {needed} bytes, the header gives {info.nbytes} at offset {info.start}"
        )
    return info


def _is_sizes(value: Any) -> bool:
    # The caps keep hostile integers and shapes of thousands of digits out of arithmetic and messages.
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _misplaced(info: TensorInfo, position: int, previous: TensorInfo | None) -> None:
    if info.start > position:
        raise CheckpointError(
            f"{info.file}: gap of {info.start - position} bytes at offset {position} before tensor {shown(info.name)}"
        )
    before = shown(previous.name) if previous else "the header"
    raise CheckpointError(
        f"{info.file}: tensor {shown(info.name)} at offset {info.start} overlaps {before}, which ends at {position}"
    )


def map_file(path: Path) -> Tensor:
    """Map the whole file copy-on-write as uint8 ``[size]``: no bytes are read until they are touched.

    Raises:
        CheckpointError: The file cannot be opened or mapped.
    """
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be mapped", because=first_line(error)) from error


def view(mapped: Tensor, info: TensorInfo) -> Tensor:
    """The tensor `info` inside `mapped` (uint8, the whole file): a view, or a copy where the offset is misaligned.

    Raises:
        CheckpointError: The file has become shorter than its header said.
    """
    if info.end > mapped.numel():
        raise CheckpointError(
            f"{info.file}: truncated while reading: tensor {shown(info.name)} ends at {info.end}, "
            f"the file at {mapped.numel()}",
            fix=_FETCH_AGAIN,
        )
    raw = mapped[info.start : info.end]
    if info.start % info.torch_dtype.itemsize:
        # Only `save_file` sorts tensors by item size; other writers leave odd offsets that no typed view may have.
        raw = raw.clone()
    return raw.view(info.torch_dtype).view(info.shape)


def read_tensor(info: TensorInfo) -> Tensor:
    """The tensor `info` as a copy-on-write view of its file, or a copy where its offset is misaligned."""
    return view(map_file(info.file), info)
