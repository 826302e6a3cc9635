"""Messages go to stderr, one JSON document goes to stdout."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp4pipe import console


def test_messages_go_to_stderr_only(capsys):
    console.say("one")
    console.warn("two")
    console.table([{"a": 1}], "three")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[:3] == ["one", "warning: two", "three"]


def test_emit_is_strict_json_for_everything_reports_hold(capsys):
    @dataclass
    class Figure:
        value: float
        path: Path

    class Report:
        def to_dict(self):
            return {"figure": Figure(float("inf"), Path("out")), "names": {"b", "a"}, "pair": (1, None)}

    console.emit({"report": Report(), "nan": float("nan"), 3: True})
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out, parse_constant=pytest.fail) == {
        "report": {"figure": {"value": None, "path": "out"}, "names": ["a", "b"], "pair": [1, None]},
        "nan": None,
        "3": True,
    }


def test_emit_reduces_tensors_and_arrays_of_one(capsys):
    import torch

    console.emit({"sqnr": torch.tensor(20.5)})
    assert json.loads(capsys.readouterr().out) == {"sqnr": 20.5}


def test_table_aligns_numbers_right_and_names_left():
    text = console.format_table([{"name": "gate", "MiB": 1.5}, {"name": "q", "MiB": 20, "note": "kept"}], "sizes")
    assert text == "sizes\nname  MiB  note\n----  ---  ----\ngate  1.5\nq      20  kept"


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_are_written_in_binary_units(n, text):
    assert console.format_bytes(n) == text


def test_progress_in_a_log_is_one_line_every_ten_seconds(capsys, monkeypatch):
    clock = iter([0.0, 4.0, 9.9, 10.1, 11.0, 30.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress(5 << 20, "reading", bytes=True) as bar:
        for _ in range(5):
            bar.update(1 << 20)
    assert capsys.readouterr().err.splitlines() == ["reading: 3.0 MiB of 5.0 MiB", "reading: 5.0 MiB of 5.0 MiB"]
