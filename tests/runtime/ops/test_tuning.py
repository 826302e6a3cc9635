"""Plans measured at load: kept whole, read again, used only where the table has none and they still fit."""

import json
from pathlib import Path

import pytest
import torch

from fp4pipe.runtime.ops import build, plans, tuning

SHAPE = (5, 1000, 1040)
COUNT = 132


@pytest.fixture(autouse=True)
def _own_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(plans, "_LEARNT", {})
    monkeypatch.setenv("FP4PIPE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compile_library", lambda: Path("sm90a-abc.so"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200 (141GB)")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plans.plan_for.cache_clear()
    yield
    plans.plan_for.cache_clear()


def test_the_fastest_is_kept_and_found_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = plans.candidates(*SHAPE, COUNT)[:8]
    wanted = tried[5]
    assert plans.plan_for(*SHAPE, COUNT) == tried[0]
    timed = []

    def replay(calls, replays, warm_ms):
        timed.append(calls[0]())
        return 1.0 if timed[-1] == wanted else 2.0

    monkeypatch.setattr(tuning, "replay_us", replay)
    device = torch.device("cpu")
    tuning.tune(torch.zeros(8, dtype=torch.int32), lambda copy, plan: plan, *SHAPE, COUNT)  # type: ignore[arg-type,return-value]
    assert timed == tried
    assert plans.plan_for(*SHAPE, COUNT) == wanted
    path = tuning.plans_file(device)
    assert path.name == "plans-nvidia-h200-141gb-sm90a-abc.json"
    assert json.loads(path.read_text()) == {plans.key(*SHAPE): plans.entry(wanted)}
    assert [file.name for file in path.parent.iterdir()] == [path.name]

    plans._LEARNT.clear()
    plans.plan_for.cache_clear()
    assert plans.plan_for(*SHAPE, COUNT) == tried[0]
    tuning.load_plans(device)
    assert plans.plan_for(*SHAPE, COUNT) == wanted


def test_only_unknown_shapes_are_timed_and_only_while_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tuning.wanted(*SHAPE)
    monkeypatch.setattr(tuning, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tuning, "has_native_fp4", lambda device: False)
    with tuning.tuning(torch.device("cuda")):
        assert tuning.wanted(*SHAPE)
        assert not tuning.wanted(1, 6144, 4096)  # shipped
        plans.learn({plans.key(*SHAPE): plans.entry(plans.candidates(*SHAPE, COUNT)[1])})
        assert not tuning.wanted(*SHAPE)
    assert not tuning.wanted(7, 80, 96)


@pytest.mark.parametrize("text", ["", "[", "[]", '{"a": 3}', '{"a": ["other", 1]}', '{"a": ["decode", 1]}'])
def test_a_damaged_file_is_as_good_as_none(text: str) -> None:
    path = tuning.plans_file(torch.device("cpu"))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    tuning.load_plans(torch.device("cpu"))
    plan = plans.plan_for(*SHAPE, COUNT)
    assert plan == plans.candidates(*SHAPE, COUNT)[0]
    tuning.keep(path, plans.key(*SHAPE), plan)
    assert plans.key(*SHAPE) in json.loads(path.read_text())


def test_a_plan_that_does_not_fit_is_not_used() -> None:
    plans.learn({plans.key(*SHAPE): ["decode", 9, 9, 9, 9, 9]})
    assert plans.plan_for(*SHAPE, COUNT) == plans.candidates(*SHAPE, COUNT)[0]
