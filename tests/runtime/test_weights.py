"""Reading weights: threads that really read, bytes equal to safetensors' own, and a manifest that lets nothing pass."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.errors import CheckpointError
from fp4pipe.runtime.weights import Expected, Manifest, WeightReader, expected_of_linear, host, load_tensors
from fp4pipe.runtime.weights import device as pinned
from fp4pipe.runtime.weights.ranges import split
from fp4pipe.safetensors_file import TensorInfo, read_header
from tests.fp4pipe.bad_checkpoints import BAD_SCALES
from tests.fp4pipe.checkpoints import SHARD1, Q, poke, raw_file, write_checkpoint

CHUNK = 4096


def expectations(checkpoint: Checkpoint) -> dict[str, Expected]:
    """What a model made of exactly this checkpoint would expect."""
    expected = {name: Expected((info.dtype,), info.shape, name) for name, info in checkpoint.tensors.items()}
    for linear in checkpoint.linears.values():
        expected |= expected_of_linear(linear, activations=linear.input_scale is not None)
    return expected


def reference(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("weights") / "c", kv=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[tuple[str, str, int]]]:
    """Record (how, thread, bytes) of every read; the first `together` populate calls wait for each other."""

    def record(together: int) -> list[tuple[str, str, int]]:
        seen: list[tuple[str, str, int]] = []
        barrier = threading.Barrier(together, timeout=20)
        populate, preadv = host.populate, os.preadv

        def counting_populate(address: int, length: int) -> int:
            seen.append(("populate", threading.current_thread().name, length))
            if len(seen) <= together:
                barrier.wait()
            return populate(address, length)

        def counting_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
            count = preadv(fd, buffers, offset)
            seen.append(("pread", threading.current_thread().name, count))
            return count

        monkeypatch.setattr(host, "populate", counting_populate)
        monkeypatch.setattr(os, "preadv", counting_preadv)
        return seen

    return record


# ---- ranges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 100, CHUNK, 1 << 30])
def test_ranges_cover_each_byte_once(chunk: int) -> None:
    sizes = [3, 0, 250, 1, 1, 4000]
    infos, position = [], 100
    for number, size in enumerate(sizes):
        infos.append(TensorInfo(f"t{number}", "U8", (size,), Path("a"), position, position + size))
        position += size
    infos.append(TensorInfo("other", "U8", (9,), Path("b"), 50, 59))
    ranges = split(infos, chunk)
    covered = [(part.file, offset) for part in ranges for offset in range(part.start, part.end)]
    assert covered == [(Path("a"), n) for n in range(100, position)] + [(Path("b"), n) for n in range(50, 59)]
    for part in ranges:
        assert part.nbytes <= chunk
        inside = [
            i.name for i in infos if i.file == part.file and i.start < part.end and i.end > part.start and i.nbytes
        ]
        assert [info.name for info in part.tensors] == inside


def test_ranges_leave_out_what_is_not_asked_for() -> None:
    infos = [TensorInfo(f"t{n}", "U8", (10,), Path("a"), n * 10, n * 10 + 10) for n in range(3)]
    assert [(part.start, part.end) for part in split([infos[0], infos[2]])] == [(0, 10), (20, 30)]


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_bytes_equal_safetensors(checkpoint: Checkpoint, threads: int) -> None:
    with WeightReader(checkpoint.tensors.values(), threads=threads, chunk=CHUNK) as reads:
        assert_same({name: reads[name] for name in reads}, reference(checkpoint.path))
        report = reads.report
    assert report is not None
    assert (report.threads, report.files, report.copied, report.method) == (threads, 2, 0, "populate")
    assert report.bytes == sum(info.nbytes for info in checkpoint.tensors.values())
    assert report.to_dict()["gb_per_s"] == pytest.approx(report.bytes / report.seconds / 1e9)


def test_threads_populate_at_the_same_time(tmp_path: Path, calls: Callable[[int], list[tuple[str, str, int]]]) -> None:
    # One file, so it is the byte ranges that are spread. Each of the four first calls returns only once all are in.
    one = Checkpoint.open(write_checkpoint(tmp_path / "c", sharded=False))
    seen = calls(4)
    with WeightReader(one.tensors.values(), threads=4, chunk=CHUNK) as reads:
        assert reads.report is not None
        assert len(seen) == reads.report.ranges
        assert sum(length for _, _, length in seen) >= reads.report.bytes
    assert len({thread for _, thread, _ in seen}) == 4
    assert {how for how, _, _ in seen} == {"populate"}


def test_without_populate_pages_are_read_and_touched(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, calls: Callable[[int], list[tuple[str, str, int]]]
) -> None:
    seen = calls(1)
    monkeypatch.setattr(host, "populate", lambda address, length: errno.EINVAL)
    with WeightReader(checkpoint.tensors.values(), threads=2, chunk=CHUNK) as reads:
        assert_same({name: reads[name] for name in reads}, reference(checkpoint.path))
        assert reads.report is not None
        assert reads.report.method == "touch"
        assert sum(count for how, _, count in seen if how == "pread") == reads.report.bytes


@pytest.mark.parametrize("populates", [True, False])
def test_a_file_cut_short_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, populates: bool) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100_000), "b": torch.zeros(100_000)}, file)
    infos = read_header(file)[0]
    pages = host.HostPages({file})
    os.truncate(file, 500_000)
    if not populates:
        monkeypatch.setattr(host, "populate", lambda address, length: errno.EINVAL)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: short read at offset 500000: tensor b ends at 800"):
        list(pages.make_resident(split(infos.values(), 1 << 16), threads=2))


def test_a_misaligned_tensor_is_copied_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    value = torch.tensor([0.5, 4.0])
    file.write_bytes(raw_file(header, b"abc" + value.numpy().tobytes()))
    with WeightReader(read_header(file)[0].values(), threads=1) as reads:
        assert reads["x"].equal(value)
        assert reads.report is not None
        assert reads.report.copied == 1


def test_nothing_to_read() -> None:
    with WeightReader([], threads=4) as reads:
        assert len(reads) == 0


# ---- the accelerator's way, on the host ------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_the_ring_fills_every_target(
    checkpoint: Checkpoint, threads: int, calls: Callable[[int], list[tuple[str, str, int]]]
) -> None:
    infos = list(checkpoint.tensors.values())
    cpu = torch.device("cpu")
    targets = pinned.allocate(infos, cpu)
    for target in targets.values():
        target.view(torch.uint8).fill_(0xEE) if target.ndim else target.fill_(-1)
    seen = calls(1)
    counts = list(pinned.fill(targets, split(infos, CHUNK), threads, cpu))
    assert_same(targets, reference(checkpoint.path))
    assert sum(counts) == sum(count for _, _, count in seen) == sum(info.nbytes for info in infos)
    assert {how for how, _, _ in seen} == {"pread"}


def test_the_ring_reports_a_short_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100_000)}, file)
    infos = list(read_header(file)[0].values())
    os.truncate(file, 200_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: short read at offset 200000: tensor a"):
        list(pinned.fill(pinned.allocate(infos, torch.device("cpu")), split(infos, CHUNK), 2, torch.device("cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [1, 8])
def test_on_a_gpu_every_byte_arrives(checkpoint: Checkpoint, threads: int) -> None:
    with WeightReader(checkpoint.tensors.values(), device="cuda", threads=threads, chunk=CHUNK) as reads:
        assert_same({name: reads[name].cpu() for name in reads}, reference(checkpoint.path))
        assert reads.report is not None
        assert (reads.report.method, reads.report.threads) == ("pinned", threads)


@pytest.mark.gpu
def test_on_a_gpu_bad_scales_are_found(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    poke(path, f"{Q}.weight_scale", float("nan"), 5)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale holds the scale nan .*\(element 5\)"):
        load_tensors(checkpoint, expectations(checkpoint), device="cuda", progress=False)


# ---- manifest -------------------------------------------------------------------------------------------------------


def test_load_claim_finish(checkpoint: Checkpoint) -> None:
    loaded = load_tensors(checkpoint, expectations(checkpoint), threads=2, progress=False)
    assert_same(dict(loaded), reference(checkpoint.path))
    for name in list(loaded):
        loaded.claim(name)
    loaded.finish()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is claimed twice"):
        loaded.claim("lm_head.weight")
    with pytest.raises(CheckpointError, match="nothing is not loaded"):
        loaded.claim("nothing")


def test_a_tensor_nobody_claims_is_named(checkpoint: Checkpoint) -> None:
    loaded = load_tensors(checkpoint, expectations(checkpoint), threads=2, progress=False)
    for name in [name for name in loaded if name != "model.norm.weight"]:
        loaded.claim(name)
    with pytest.raises(
        CheckpointError, match=r"tensor model\.norm\.weight was loaded for model\.norm\.weight and never"
    ):
        loaded.finish()


def test_one_element_scales_come_as_scalars(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "c", method="compressed-tensors"))
    loaded = load_tensors(checkpoint, expectations(checkpoint), threads=1, progress=False)
    assert loaded[f"{Q}.weight_global_scale"].shape == ()


def test_a_tensor_wanted_twice() -> None:
    manifest = Manifest()
    manifest.expect("a.weight", ["U8"], (2, 2), "a")
    with pytest.raises(CheckpointError, match=r"tensor a\.weight is wanted twice, by a and b"):
        manifest.expect("a.weight", ["U8"], (2, 2), "b")


Change = Callable[[dict[str, Expected]], object]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda e: e.update({"model.ghost.weight": Expected(("BF16",), (4,), "model.ghost")}),
            "tensor model.ghost.weight is missing: model.ghost needs it",
        ),
        (lambda e: e.pop("model.norm.weight"), "tensor model.norm.weight at offset"),
        (lambda e: e.pop("model.norm.weight"), "is left over: nothing uses it"),
        (
            lambda e: e.update({"lm_head.weight": Expected(("F32", "F16"), (128, 64), "lm_head")}),
            "is BF16, lm_head needs F32 or F16",
        ),
        (
            lambda e: e.update({"lm_head.weight": Expected(("BF16",), (128, 32), "lm_head")}),
            "has shape [128, 64], lm_head needs [128, 32]",
        ),
        (lambda e: [e.pop(name) for name in list(e)[:3]], "(and 2 more such)"),
    ],
)
def test_headers_that_do_not_fit(checkpoint: Checkpoint, change: Change, says: str) -> None:
    expected = expectations(checkpoint)
    change(expected)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(checkpoint, expected, progress=False)
    assert says in str(caught.value)


def test_what_may_be_left_over(checkpoint: Checkpoint) -> None:
    expected = expectations(checkpoint)
    expected.pop("model.norm.weight")
    assert "model.norm.weight" not in load_tensors(checkpoint, expected, ignore=[r"norm\.weight$"], progress=False)


@pytest.mark.parametrize(("name", "value", "element"), BAD_SCALES)
def test_bad_scales_are_found(tmp_path: Path, name: str, value: float, element: int) -> None:
    path = write_checkpoint(tmp_path / "c")
    poke(path, name, value, element)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(checkpoint, expectations(checkpoint), progress=False)
    info = checkpoint.tensors[name]
    offset = info.start + element * info.torch_dtype.itemsize
    assert str(path / SHARD1) in str(caught.value)
    assert f"tensor {name} holds the scale {value:g} at offset {offset} (element {element})" in str(caught.value)
    assert "1 of" in str(caught.value)


def test_the_extreme_good_scales_pass(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    poke(path, f"{Q}.weight_scale", 2.0**-9, 0)
    poke(path, f"{Q}.weight_scale", 448.0, 1)
    poke(path, f"{Q}.weight_scale_2", 1e-40)
    checkpoint = Checkpoint.open(path)
    load_tensors(checkpoint, expectations(checkpoint), progress=False)


def test_w4a4_needs_an_input_scale(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "c", activations=False))
    linear = checkpoint.linears[Q]
    assert len(expected_of_linear(linear, activations=False)) == 3
    with pytest.raises(CheckpointError, match=r"q_proj has no input_scale, and W4A4 needs one"):
        expected_of_linear(linear, activations=True)
