"""Each rule against a checkpoint made to break it, and sound checkpoints that break none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.lint import RULES, Finding, lint, summary
from fp4pipe.lint.run import MAX_PER_RULE
from tests.fp4pipe.bad_checkpoints import BAD_SCALES, DAMAGES, Damage
from tests.fp4pipe.checkpoints import (
    CONFIG,
    LAYERS,
    LINEARS,
    SHARD1,
    edit_json,
    poke,
    random_weights,
    save_shards,
    write_checkpoint,
    write_json,
)


def of(rule: str, findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.rule.id == rule]


@pytest.mark.parametrize("kv", [True, False])
@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
def test_sound_checkpoints_have_no_findings(tmp_path: Path, method: str, activations: bool, kv: bool) -> None:
    path = write_checkpoint(tmp_path / "c", method=method, activations=activations, kv=kv, sharded=kv)
    assert lint(path) == []


def test_an_ordinary_model_has_no_findings(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", sharded=False, configs=())
    save_shards(path, random_weights(), sharded=False)
    assert lint(path) == []


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_structural_damage_becomes_findings(tmp_path: Path, damage: Damage) -> None:
    path = write_checkpoint(tmp_path / "c")
    damage.apply(path)
    findings = lint(path)
    found = of(damage.rule, findings)
    assert found
    assert all(finding.rule.severity == "error" for finding in found)
    assert findings[0].rule.severity == "error"
    for finding in findings:
        assert "\n" not in finding.where + finding.detail
        assert RULES[finding.rule.id] is finding.rule


def test_no_directory_is_a_finding() -> None:
    assert [finding.rule.id for finding in lint("nowhere")] == ["directory-missing"]


@pytest.mark.parametrize(("name", "value", "element"), BAD_SCALES)
def test_bad_scales(tmp_path: Path, name: str, value: float, element: int) -> None:
    path = write_checkpoint(tmp_path / "c")
    poke(path, name, value, element)
    found = of("scale-invalid", lint(path))
    assert [finding.where for finding in found] == [name]
    assert SHARD1 in found[0].detail
    assert "at offset" in found[0].detail
    assert of("scale-invalid", lint(path, scan_values=False)) == []


def test_many_findings_of_one_rule_are_counted(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    save_shards(path, random_weights(), sharded=True)
    found = of("unquantized-not-excluded", lint(path))
    assert len(found) == MAX_PER_RULE + 1
    assert found[-1].detail == f"and {LAYERS * len(LINEARS) - MAX_PER_RULE} more like these"


def test_rules_read_as_sentences() -> None:
    for rule in RULES.values():
        assert rule.sentence.endswith(".")
        assert rule.fix
        assert not rule.fix.endswith(".")
        assert rule.severity in ("error", "warning", "info")


READ_BY_RULES = {"architectures", "num_hidden_layers", "tie_word_embeddings"}
HOSTILE: tuple[Any, ...] = (None, True, -3, 0.5, "x", "re:(", [], [3], {}, {"x": [None]}, {"x": {"y": 3}})


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every part of a JSON document sits."""
    if prefix:
        yield prefix
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_of(inner, (*prefix, key))


@pytest.mark.parametrize(
    ("method", "file"),
    [
        ("modelopt", "config.json"),
        ("modelopt", "hf_quant_config.json"),
        ("modelopt", "model.safetensors.index.json"),
        ("compressed-tensors", "config.json"),
    ],
)
def test_hostile_json_only_gives_findings(tmp_path: Path, method: str, file: str) -> None:
    path = write_checkpoint(tmp_path / "c", method=method, kv=True)
    extras = {"architectures": ["A"], "auto_map": {"AutoConfig": "a.B"}, "text_config": {"tie_word_embeddings": True}}
    edit_json(path / "config.json", lambda config: config.update(extras))
    sound = (path / file).read_text()
    # Of the model's settings only those a rule reads, of the index's many tensors a few.
    places = [place for place in paths_of(json.loads(sound)) if place[0] not in CONFIG.keys() - READ_BY_RULES]
    for place in places[:: max(1, len(places) // 30)]:
        for value in HOSTILE:
            document = parent = json.loads(sound)
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = value
            write_json(path / file, document)
            for finding in lint(path, scan_values=False):
                assert "\n" not in finding.detail
    for value in HOSTILE:
        write_json(path / file, value)
        lint(path)


def test_summary(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "c"))
    report = json.loads(json.dumps(summary(checkpoint)))
    weights = random_weights()
    nvfp4 = sum(t.numel() for name, t in weights.items() if name.endswith("_proj.weight"))
    total = sum(t.numel() for t in weights.values())
    assert report["parameters"] == {"total": total, "nvfp4": nvfp4, "unquantized": total - nvfp4}
    assert report["bytes"]["codes"] == nvfp4 // 2
    assert report["bytes"]["block_scales"] == nvfp4 // 16
    assert report["bytes"]["other_scales"] == LAYERS * len(LINEARS) * 8
    assert report["bytes"]["unquantized"] == (total - nvfp4) * 2
    assert report["bytes"]["total"] == sum(report["bytes"][key] for key in report["bytes"] if key != "total")
    assert 4.5 < report["bits_per_parameter"]["nvfp4"] < 4.53
    assert report["bits_per_parameter"]["unquantized"] == 16
    assert report["modules"]["gate_proj"] == "2 of NVFP4 96 x 64"
    assert report["quantization"]["algo"] == "NVFP4"
