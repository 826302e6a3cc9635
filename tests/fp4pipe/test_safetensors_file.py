"""The header reader: right on sound files, and nothing but `CheckpointError` on anything else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fp4pipe.errors import CheckpointError
from fp4pipe.safetensors_file import DTYPES, read_header, read_tensor
from tests.fp4pipe.checkpoints import raw_file


def entry(dtype: Any = "U8", shape: Any = (4,), start: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "é.weight": torch.randn(3, 5, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scales": torch.randn(2, 3).to(torch.float8_e4m3fn),
        "ids": torch.arange(7),
    }
    save_file(tensors, file, metadata={"format": "pt", "note": "x"})
    infos, metadata = read_header(file)
    assert metadata == {"format": "pt", "note": "x"}
    assert set(infos) == set(tensors)
    for name, expected in load_file(file).items():
        info, tensor = infos[name], read_tensor(infos[name])
        assert (info.torch_dtype, info.shape, info.nbytes, info.numel) == (
            expected.dtype,
            tuple(expected.shape),
            expected.nbytes,
            expected.numel(),
        )
        assert tensor.dtype == expected.dtype
        assert tensor.reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8))


def test_every_dtype_has_safetensors_own_spelling(tmp_path: Path) -> None:
    for spelling, dtype in DTYPES.items():
        file = tmp_path / f"{spelling}.safetensors"
        save_file({"x": torch.zeros(2).to(dtype)}, file)
        assert read_header(file)[0]["x"].dtype == spelling


def test_a_tensor_is_a_private_view_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(4)}, file)
    info = read_header(file)[0]["x"]
    read_tensor(info).zero_()
    assert read_tensor(info).tolist() == [1, 1, 1, 1]


def test_a_misaligned_tensor_is_copied(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    value = torch.tensor([1.5, -2.0])
    header = {"odd": entry("U8", [1], 0, 1), "x": entry("F32", [2], 1, 9)}
    file.write_bytes(raw_file(header, b"\x07" + value.numpy().tobytes()))
    assert read_tensor(read_header(file)[0]["x"]).equal(value)


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: 0 bytes"),
    "short prefix": (b"\x01\x02", "truncated: 2 bytes"),
    "no header": (raw_file(b"", length=50), "header of 50 bytes is longer than the file (8 bytes)"),
    "huge header": (raw_file(b"{}", length=2**63), "longer than the file"),
    "not JSON": (raw_file(b"{'a': 1}"), "not valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not valid JSON"),
    "too deep": (raw_file(b"[" * 100_000), "not valid JSON"),
    "a list": (raw_file([]), "JSON list, not an object"),
    "name twice": (raw_file(b'{"a": {}, "a": {}}'), "a is given twice"),
    "bad metadata": (raw_file({"__metadata__": {"format": 1}}), "__metadata__"),
    "entry not an object": (raw_file({"a": 3}), "tensor a: entry"),
    "entry without dtype": (raw_file({"a": {"shape": [], "data_offsets": [0, 0]}}), "tensor a: entry"),
    "unknown dtype": (raw_file({"a": entry("F4_MX")}, bytes(4)), "tensor a: unknown dtype F4_MX"),
    "dtype not a string": (raw_file({"a": entry(["U8"])}, bytes(4)), "tensor a: unknown dtype ['U8']"),
    "negative size": (raw_file({"a": entry(shape=[-4])}, bytes(4)), "tensor a: shape [-4]"),
    "fractional size": (raw_file({"a": entry(shape=[4.0])}, bytes(4)), "tensor a: shape [4.0]"),
    "boolean size": (raw_file({"a": entry("U8", [True], 0, 1)}, bytes(1)), "tensor a: shape [True]"),
    "offsets reversed": (raw_file({"a": entry(start=4, end=0)}, bytes(4)), "tensor a: data_offsets [4, 0]"),
    "three offsets": (
        raw_file({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}}, bytes(4)),
        "tensor a: data_offsets [0, 4, 8]",
    ),
    "wrong size": (raw_file({"a": entry("F32")}, bytes(4)), "tensor a: F32 [4] needs 16 bytes, the header gives 4"),
    "gap": (raw_file({"a": entry(), "b": entry(start=6, end=10)}, bytes(10)), "gap of 2 bytes at offset"),
    "gap at the front": (raw_file({"a": entry(start=1, end=5)}, bytes(5)), "gap of 1 bytes at offset"),
    "overlap": (raw_file({"a": entry(), "b": entry(start=2, end=6)}, bytes(6)), "tensor b at offset"),
    "truncated data": (raw_file({"a": entry(), "b": entry(start=4, end=8)}, bytes(6)), "truncated: tensor b"),
    "bytes left over": (raw_file({"a": entry()}, bytes(9)), "5 bytes at offset"),
    "line break in a name": (raw_file({"a\nb": entry("Q4")}, bytes(4)), "tensor 'a\\nb': unknown dtype"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, says = MALFORMED[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert says in message
    assert "\n" not in message


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path)


def test_a_file_that_shrinks_before_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(4)}, file)
    info = read_header(file)[0]["x"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated while reading: tensor x"):
        read_tensor(info)


# ---- properties -----------------------------------------------------------------------------------------------------

SOUND = raw_file(
    {"__metadata__": {"format": "pt"}, "a": entry("F32", [2], 0, 8), "b.scale": entry("F8_E4M3", [2, 2], 8, 12)},
    bytes(range(12)),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(list(DTYPES)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
sizes = st.integers(-2, 40) | st.integers()
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(DTYPES)) | json_values,
        "shape": st.lists(sizes, max_size=3) | json_values,
        "data_offsets": st.tuples(sizes, sizes) | json_values,
    }
)


def only_checkpoint_errors(file: Path, content: bytes) -> None:
    """`content` is either refused in one line that names the file, or every tensor it promises can be read."""
    file.write_bytes(content)
    try:
        infos, _ = read_header(file)
    except CheckpointError as error:
        message = str(error)
    else:
        message = f"{file}: sound"
        assert all(read_tensor(info).nbytes == info.nbytes for info in infos.values())
    assert message.startswith(str(file))
    assert len(message.splitlines()) == 1
    message.encode()  # no lone surrogate from a hostile name


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corrupt") / "model.safetensors"


@given(content=st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_random_bytes(scratch: Path, content: bytes) -> None:
    only_checkpoint_errors(scratch, content)


@given(
    edits=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=4), cut=st.integers(0, 20)
)
@settings(max_examples=300, deadline=None)
def test_flipped_and_cut_bytes(scratch: Path, edits: list[tuple[int, int]], cut: int) -> None:
    content = bytearray(SOUND)
    for position, value in edits:
        content[position] = value
    only_checkpoint_errors(scratch, bytes(content[: len(content) - cut]))


@given(header=st.dictionaries(st.text(max_size=8), entries | json_values, max_size=3), data=st.binary(max_size=48))
@settings(max_examples=300, deadline=None)
def test_random_headers(scratch: Path, header: dict[str, Any], data: bytes) -> None:
    only_checkpoint_errors(scratch, raw_file(json.dumps(header).encode(), data))


@given(shapes=st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=3)), max_size=5))
@settings(max_examples=100, deadline=None)
def test_sound_headers_are_accepted(scratch: Path, shapes: list[tuple[str, list[int]]]) -> None:
    header, position = {}, 0
    for number, (dtype, shape) in enumerate(shapes):
        end = position + int(torch.Size(shape).numel()) * DTYPES[dtype].itemsize
        header[f"t{number}"] = entry(dtype, shape, position, end)
        position = end
    scratch.write_bytes(raw_file(header, bytes(position)))
    infos, _ = read_header(scratch)
    assert [(infos[f"t{n}"].dtype, list(infos[f"t{n}"].shape)) for n in range(len(shapes))] == shapes
