"""Which model a command means: several sources in a recipe, or the one a checkpoint names."""

import json

import pytest

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.cli.sources import first_reachable, source_of
from fp4pipe.convert.random_model import write_random_model
from fp4pipe.convert.source import resolve_source
from fp4pipe.errors import SourceError, UsageError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_random_model("llama", path)
    return path


def test_the_first_source_that_can_be_reached_is_used(model, tmp_path, capsys):
    found = first_reachable([str(tmp_path / "gone.gguf"), str(model)], revision=None, trust_remote_code=False)
    assert found.path == model
    assert "gone.gguf" in capsys.readouterr().err


def test_when_none_can_be_reached_every_reason_is_given(tmp_path):
    with pytest.raises(SourceError) as error:
        first_reachable([str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")], revision=None, trust_remote_code=False)
    assert "a.gguf" in str(error.value)
    assert "b.gguf" in str(error.value)


def named(model, fingerprint=None, spec=None):
    """`model` as a checkpoint whose provenance names a source."""
    source = resolve_source(model)
    recorded = {"spec": spec or str(model), "kind": "directory", "revision": None}
    recorded["fingerprint"] = fingerprint or source.fingerprint
    return {"source": recorded}


@pytest.fixture
def checkpoint(model, tmp_path):
    """A copy of the model, without provenance.json."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_source_is_the_one_in_provenance(model, checkpoint):
    (checkpoint / "provenance.json").write_text(json.dumps(named(model)))
    found = source_of(Checkpoint.open(checkpoint), None, required=True)
    assert found is not None
    assert found.path == model


def test_a_source_that_has_changed_is_refused_unless_named(model, checkpoint, capsys):
    (checkpoint / "provenance.json").write_text(json.dumps(named(model, fingerprint="0" * 64)))
    with pytest.raises(SourceError, match=r"is not the model .* was made from; because its files have changed"):
        source_of(Checkpoint.open(checkpoint), None, required=False)
    found = source_of(Checkpoint.open(checkpoint), str(model), required=True)
    assert found is not None
    assert "its fingerprint differs" in capsys.readouterr().err


def test_a_source_that_is_gone_is_left_out_with_a_warning_or_required(model, checkpoint, capsys):
    (checkpoint / "provenance.json").write_text(json.dumps(named(model, spec="gone.gguf")))
    assert source_of(Checkpoint.open(checkpoint), None, required=False) is None
    assert "comparisons with the source are left out" in capsys.readouterr().err
    with pytest.raises(SourceError, match=r"gone\.gguf"):
        source_of(Checkpoint.open(checkpoint), None, required=True)


@pytest.mark.parametrize("content", [None, "{", "{}", '{"source": 3}'])
def test_without_a_named_source(checkpoint, content):
    if content is not None:
        (checkpoint / "provenance.json").write_text(content)
    assert source_of(Checkpoint.open(checkpoint), None, required=False) is None
    with pytest.raises(UsageError, match="does not say which model it was made from"):
        source_of(Checkpoint.open(checkpoint), None, required=True)
