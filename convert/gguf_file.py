"""Reading a GGUF file: metadata, the directory of tensors, and rows of a tensor as float32.

Layout (versions 2 and 3, little endian): magic `GGUF`, u32 version, u64 number of tensors, u64 number of metadata
entries, the entries, the tensor infos (name, dimensions innermost first, type, offset), padding to `general.alignment`,
the data. Every length is checked against the file before it is used, so a truncated file is named as one.
"""

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fp4pipe.errors import SourceError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as stored: `shape` outermost first, as PyTorch has it; `start` is an absolute offset in `file`."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    file: Path
    start: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Product of all dimensions but the innermost; quantized blocks never cross a row."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a number, block scales included."""
        return 8 * self.row_bytes / self.shape[-1]


class GGUFFile:
    """A GGUF model, in one file or in parts `NAME-00001-of-0000N.gguf`.

    Attributes:
        path: The file opened (of a split model, its first part).
        metadata: Key to value; arrays of numbers are NumPy arrays, arrays of strings are lists.
        tensors: Tensors of all parts by GGUF name.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` and read all but the tensor data.

        Raises:
            SourceError: not a GGUF file, truncated, damaged, or a part is missing.
        """
        self.path = path
        self.metadata, self.tensors, data = _read(path)
        self._data = {path: data}
        for part in self._further_parts():
            _, tensors, self._data[part] = _read(part)
            if twice := self.tensors.keys() & tensors.keys():
                _fail(part, f"tensor {min(twice)} is also in another part")
            self.tensors |= tensors

    @property
    def files(self) -> list[Path]:
        """The file, or all parts of a split model in order."""
        return list(self._data)

    def rows(self, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of a tensor (leading dimensions flattened), as float32 `[stop - start, K]`."""
        from gguf import GGMLQuantizationType, quants

        begin = tensor.start + start * tensor.row_bytes
        raw = np.frombuffer(self._data[tensor.file], np.uint8, (stop - start) * tensor.row_bytes, begin)
        kind = GGMLQuantizationType[tensor.type_name]
        try:
            return quants.dequantize(raw.reshape(stop - start, tensor.row_bytes), kind).astype(np.float32, copy=False)
        except NotImplementedError as error:
            _fail(tensor.file, f"tensor {tensor.name} is stored as {tensor.type_name}, which cannot be read", error)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key stands for the architecture."""
        return self.metadata.get(key.format(arch=self.architecture), default)

    def require(self, key: str) -> Any:
        """A metadata value that must be there."""
        value = self.get(key)
        if value is None:
            _fail(self.path, f"metadata {key.format(arch=self.architecture)} is missing")
        return value

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        if "general.architecture" not in self.metadata:
            _fail(self.path, "metadata general.architecture is missing: not a model")
        return self.metadata["general.architecture"]

    def _further_parts(self) -> list[Path]:
        count = int(self.metadata.get("split.count", 1))
        if count < 2:
            return []
        match = _PART.fullmatch(self.path.name)
        if match is None or int(match[2]) != 1:
            _fail(self.path, f"one of {count} parts; open the first, named like MODEL-00001-of-{count:05d}.gguf")
        parts = [self.path.with_name(f"{match[1]}-{part:05d}-of-{count:05d}.gguf") for part in range(2, count + 1)]
        for part in parts:
            if not part.exists():
                _fail(self.path, f"part {part.name} is missing")
        return parts


def _fail(path: Path, what: str, cause: Exception | None = None) -> NoReturn:
    raise SourceError(f"{path.name}: {what}") from cause


class _Cursor:
    """A position in the file; every read is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, count: int, what: str) -> int:
        at, size = self.at, len(self.data)
        if count > size - at:
            _fail(self.path, f"truncated: {what} at byte {at} needs {count} bytes and the file ends at {size}")
        self.at += count
        return at

    def scalar(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str) -> str:
        length = self.scalar("<Q", f"length of {what}")
        at = self.take(length, what)
        try:
            return self.data[at : at + length].decode("utf-8")
        except UnicodeDecodeError as error:
            _fail(self.path, f"{what} at byte {at} is not UTF-8", error)

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _FLOAT32:  # the shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06
            return float(str(np.float32(self.scalar("<f", what))))
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind != _ARRAY:
            _fail(self.path, f"{what} has unknown type {kind}")
        inner = self.scalar("<I", f"element type of {what}")
        count = self.scalar("<Q", f"length of {what}")
        if inner in _SCALARS:
            dtype = np.dtype(np.bool_) if inner == 7 else np.dtype(_SCALARS[inner])
            return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize, what)).copy()
        if inner != _STRING:
            _fail(self.path, f"{what} is an array of unsupported type {inner}")
        if count * 8 > len(self.data) - self.at:
            self.take(count * 8, what)
        read: Callable[[str], str] = self.string
        return [read(f"element {index} of {what}") for index in range(count)]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor], mmap.mmap]:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
            if magic != MAGIC:
                _fail(path, f"not a GGUF file: it begins with {magic!r}" if magic else "an empty file, not a GGUF file")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SourceError(f"GGUF file {path} cannot be read", because=str(error)) from error
    cursor = _Cursor(path, data)
    cursor.take(4, "magic")
    version = cursor.scalar("<I", "version")
    if version not in (2, 3):
        big = " (a big-endian file)" if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3) else ""
        _fail(path, f"GGUF version {version}{big} is not supported; versions 2 and 3, little endian, are")
    num_tensors = cursor.scalar("<Q", "tensor count")
    metadata: dict[str, Any] = {}
    for index in range(cursor.scalar("<Q", "metadata count")):
        key = cursor.string(f"key {index} of the metadata")
        if key in metadata:
            _fail(path, f"metadata {key} appears twice")
        metadata[key] = cursor.value(cursor.scalar("<I", f"type of {key}"), f"metadata {key}")
    return metadata, _read_tensors(cursor, num_tensors, int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))), data


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    infos = []
    for index in range(count):
        name = cursor.string(f"name of tensor {index}")
        num_dims = cursor.scalar("<I", f"rank of {name}")
        if not 1 <= num_dims <= 4:
            _fail(cursor.path, f"tensor {name} has {num_dims} dimensions; 1 to 4 are possible")
        shape = tuple(cursor.scalar("<Q", f"shape of {name}") for _ in range(num_dims))[::-1]
        kind = cursor.scalar("<I", f"type of {name}")
        infos.append((name, shape, kind, cursor.scalar("<Q", f"offset of {name}")))
    if alignment < 1:
        _fail(cursor.path, f"general.alignment is {alignment}")
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            _fail(cursor.path, f"tensor {name} appears twice")
        tensors[name] = _locate(cursor.path, len(cursor.data), name, shape, kind, base + offset)
    return tensors


def _locate(path: Path, size: int, name: str, shape: tuple[int, ...], kind: int, start: int) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
    except ValueError as error:
        _fail(path, f"tensor {name} has unknown type {kind}", error)
    block, block_bytes = GGML_QUANT_SIZES[known]
    if 0 in shape or shape[-1] % block:
        _fail(path, f"tensor {name} of shape {list(shape)} cannot be {known.name}, whose blocks hold {block} numbers")
    tensor = GGUFTensor(name, shape, known.name, path, start, shape[-1] // block * block_bytes)
    end = start + tensor.num_rows * tensor.row_bytes
    if end > size:
        _fail(path, f"truncated: tensor {name} ends at byte {end} and the file at {size}")
    return tensor
