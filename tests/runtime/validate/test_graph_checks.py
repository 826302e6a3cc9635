"""The graph checks pass on a sound runner and catch each way of being broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp4pipe.errors import UsageError
from fp4pipe.runtime.batch import Batch
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.model import Model
from fp4pipe.runtime.validate import Check, check_graphs
from fp4pipe.runtime.validate.graphs import check_order
from fp4pipe.runtime.validate.traffic import Traffic
from tests.runtime.nvfp4_checkpoint import quantize_tiny
from tests.runtime.validate.conftest import make_runner
from tests.tiny_models import make_tiny

NAMES = ["capture", "eager", "buckets", "padding", "order", "batch", "recompiles"]


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name.removeprefix("graphs."): check for check in checks}


def failed(checks: list[Check]) -> set[str]:
    return {name for name, check in by_name(checks).items() if check.ok is False}


def test_compiled_pieces_hold_in_w4a4(quantized: Path) -> None:
    runner = make_runner(Model.load(quantized, mode="w4a4", progress=False), "compiled")
    checks = by_name(check_graphs(runner))
    assert list(checks) == NAMES
    assert [check.summary for check in checks.values() if not check.ok] == []
    assert checks["capture"].figures["pieces"] == 3
    assert checks["capture"].figures["graph_breaks"] == 0
    rows = checks["buckets"].details["rows"]
    assert [row["bucket"] for row in rows] == runner.buckets
    assert all(row["padding_inert"] and row["poison_reached"] for row in rows)
    assert all(row["tokens"] < row["bucket"] for row in rows)
    assert checks["recompiles"].figures["replays"] > len(runner.buckets)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_families_with_sliding_windows_hold(family: str, tmp_path: Path) -> None:
    path = quantize_tiny(make_tiny(family, tmp_path / "source"), tmp_path / "nvfp4")
    checks = check_graphs(make_runner(Model.load(path, mode="w4a16", progress=False), "compiled"), buckets=4)
    assert failed(checks) == set()


@pytest.mark.parametrize("graphs", ["segmented", "off"])
def test_runners_that_capture_nothing_hold(model: Model, graphs: str) -> None:
    checks = check_graphs(make_runner(model, graphs), buckets=3)
    assert failed(checks) == set()
    assert by_name(checks)["capture"].ok is None
    assert by_name(checks)["buckets"].figures["buckets"] == 3


class Leaky(nn.Module):
    """A norm that lets a thousandth of every row into every other."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.norm(hidden)
        return out + 1e-3 * out.mean(dim=1, keepdim=True)


def test_padding_that_reaches_real_rows_is_caught(model: Model) -> None:
    model.decoder.norm = Leaky(model.decoder.norm)  # type: ignore[arg-type]
    checks = check_graphs(make_runner(model, "compiled"), buckets=4)
    assert "padding" in failed(checks)
    padding = by_name(checks)["padding"]
    assert padding.details["leaking"] == [4, 20, 64, 128]
    assert "reaches real rows in buckets [4, 20, 64, 128]" in padding.summary


def test_a_step_that_reads_what_an_earlier_one_left_is_caught(model: Model) -> None:
    runner = make_runner(model)
    left = torch.zeros(1)
    broken(runner, lambda hidden, _: hidden + 0 * left)
    runner.poison = lambda: left.fill_(torch.nan)  # type: ignore[method-assign,assignment]
    assert "padding" in failed(check_graphs(runner, buckets=2))


def broken(runner: Runner, damage: Callable[[Tensor, Batch], Tensor]) -> Runner:
    """`runner` with `damage` done to every result, in place."""
    sound = runner.forward

    def forward(batch: Batch) -> Tensor:
        hidden = sound(batch)
        hidden.copy_(damage(hidden, batch))
        return hidden

    runner.forward = forward  # type: ignore[method-assign]
    return runner


def test_a_wrong_bucket_is_named(model: Model) -> None:
    def damage(hidden: Tensor, batch: Batch) -> Tensor:
        return hidden * 1.01 if 16 < batch.num_tokens <= 20 else hidden

    checks = check_graphs(broken(make_runner(model), damage))
    assert "buckets" in failed(checks)
    buckets = by_name(checks)["buckets"]
    assert "wrong in buckets [20]" in buckets.summary
    assert [row["bucket"] for row in buckets.details["rows"] if not row["ok"]] == [20]


def test_wrong_decoding_rows_are_caught_among_many_right_ones(quantized: Path) -> None:
    """In w4a4 the bound on all rows is loose: some rows may differ by the quantization noise."""

    def damage(hidden: Tensor, batch: Batch) -> Tensor:
        single = batch.query_start[:-1][batch.query_start.diff() == 1].long()
        wrong = hidden.clone()
        wrong[single] = hidden[single].flip(-1)
        return wrong

    runner = make_runner(Model.load(quantized, mode="w4a4", progress=False))
    assert "buckets" in failed(check_graphs(broken(runner, damage), buckets=3))


def test_one_wrong_row_is_caught(model: Model) -> None:
    def damage(hidden: Tensor, batch: Batch) -> Tensor:
        wrong = hidden.clone()
        wrong[-1] *= 1.01
        return wrong

    assert "buckets" in failed(check_graphs(broken(make_runner(model), damage), buckets=3))


def test_sequences_that_see_each_other_are_caught(model: Model) -> None:
    def damage(hidden: Tensor, batch: Batch) -> Tensor:
        return hidden * (1 + 1e-3 * (batch.num_sequences - 1))

    checks = check_graphs(broken(make_runner(model), damage), buckets=2)
    assert "batch" in failed(checks)


def test_a_result_that_depends_on_the_step_before_is_caught(model: Model) -> None:
    runner = make_runner(model)
    last = [0]

    def damage(hidden: Tensor, batch: Batch) -> Tensor:
        previous, last[0] = last[0], batch.num_tokens
        return hidden + 1e-6 if previous > batch.num_tokens else hidden

    broken(runner, damage)
    check = check_order(runner, Traffic(model, runner.cache, 0), [8, 32, 128], seed=0)
    assert check.ok is False
    assert check.details["changed"]


def test_a_nan_is_not_equal_to_anything(model: Model) -> None:
    def damage(hidden: Tensor, batch: Batch) -> Tensor:
        return torch.full_like(hidden, torch.nan)

    assert failed(check_graphs(broken(make_runner(model), damage), buckets=2)) >= {
        "buckets",
        "padding",
        "order",
        "batch",
    }


def test_compiling_while_running_is_caught(model: Model) -> None:
    runner = make_runner(model)
    sound = runner.model.body

    def compiles(*arguments: Any) -> Tensor:
        return torch.compile(lambda x: x + 0, backend="eager")(sound(*arguments))

    runner.model.body = compiles  # type: ignore[method-assign]
    assert "recompiles" in failed(check_graphs(runner, buckets=2))


def test_wrong_attention_is_caught(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' own attention: an error that every runner shares."""
    from fp4pipe.runtime import attention_plan

    sound = attention_plan.Group.run

    def wrong_scale(
        self: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float
    ) -> None:
        sound(self, q, k, v, keys, values, out, scale * 1.1)

    monkeypatch.setattr(attention_plan.Group, "run", wrong_scale)
    assert "eager" in failed(check_graphs(make_runner(model), buckets=2))


def test_a_cache_without_room_is_refused(model: Model) -> None:
    runner = Runner(model, model.new_cache(2, 16), graphs="off", max_tokens=64)
    with pytest.raises(UsageError, match="KV cache of 32 tokens is too small"):
        check_graphs(runner)


def test_a_cache_with_little_room_bounds_the_buckets(model: Model) -> None:
    runner = Runner(model, model.new_cache(12, 16), graphs="segmented", max_tokens=128)
    checks = by_name(check_graphs(runner))
    assert failed(list(checks.values())) == set()
    assert 0 < checks["buckets"].figures["buckets"] < len(runner.buckets)  # type: ignore[operator]
