"""`Checkpoint`: sound checkpoints of both exporters read alike, every damage refused in one line that names it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp4pipe import nvfp4
from fp4pipe.checkpoint import Checkpoint, survey
from fp4pipe.errors import CheckpointError
from tests.fp4pipe.bad_checkpoints import DAMAGES, Damage
from tests.fp4pipe.checkpoints import (
    LAYERS,
    LINEARS,
    SHARD1,
    Q,
    edit_json,
    edit_tensors,
    random_weights,
    save_shards,
    write_checkpoint,
    write_json,
)


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("sharded", [True, False])
def test_both_exporters_read_alike(tmp_path: Path, method: str, sharded: bool) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "c", method=method, sharded=sharded, kv=True))
    assert checkpoint.quant is not None
    assert (checkpoint.quant.method, checkpoint.quant.algo, checkpoint.quant.kv_cache) == (method, "NVFP4", "fp8")
    assert set(checkpoint.linears) == {f"model.layers.{n}.{name}" for n in range(LAYERS) for name in LINEARS}
    weights = random_weights()
    for module, linear in checkpoint.linears.items():
        assert (linear.out_features, linear.in_features) == tuple(weights[f"{module}.weight"].shape)
        scale = checkpoint.global_scale(module)
        assert (scale.shape, scale.dtype) == ((), torch.float32)
        torch.testing.assert_close(scale, nvfp4.global_scale_of(torch.tensor(0.6)))
        torch.testing.assert_close(checkpoint.input_scale(module), torch.tensor(0.004))
        restored = checkpoint.dequantize(module)
        original = weights[f"{module}.weight"].float()
        assert (restored - original).norm() / original.norm() < 0.12
    assert checkpoint.kv_scale("model.layers.0.self_attn") == pytest.approx((0.02, 0.02))
    assert checkpoint.kv_scale("model.layers.9.self_attn") == (1.0, 1.0)
    assert set(map(str, checkpoint.metadata.values())) == {"{'format': 'pt'}"}


def test_weight_only_has_no_input_scale(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "c", activations=False))
    assert checkpoint.quant is not None
    assert checkpoint.quant.algo == "W4A16_NVFP4"
    assert checkpoint.input_scale(Q) is None


def test_hf_quant_config_alone_is_enough(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "c", configs=("hf_quant_config.json",)))
    assert checkpoint.quant is not None
    assert checkpoint.quant.source == "hf_quant_config.json"
    assert len(checkpoint.linears) == LAYERS * len(LINEARS)


def test_an_ordinary_model_opens(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    save_shards(tmp_path, random_weights(), sharded=True)
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.quant, checkpoint.linears) == (None, {})
    assert checkpoint.tensor("model.norm.weight").equal(random_weights()["model.norm.weight"])


def test_tensors_are_those_of_safetensors(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    checkpoint = Checkpoint.open(path)
    expected = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.tensor(name).reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_every_damage_is_refused_in_one_line(tmp_path: Path, damage: Damage) -> None:
    path = write_checkpoint(tmp_path / "c")
    Checkpoint.open(path)
    damage.apply(path)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in damage.says:
        assert fragment in message
    assert damage.rule in [problem.rule for problem in survey(path)[1]]


def test_survey_goes_on_after_the_first_problem(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    edit_tensors(path / SHARD1, lambda tensors: tensors.update(extra=torch.zeros(1)))
    edit_json(path / "config.json", lambda config: config["quantization_config"].update(ignore=[]))
    edit_json(path / "hf_quant_config.json", lambda config: config["quantization"].update(exclude_modules=[]))
    checkpoint, problems = survey(path)
    assert checkpoint is not None
    assert len(checkpoint.linears) == LAYERS * len(LINEARS)
    assert [problem.rule for problem in problems] == ["tensor-unlisted", "unquantized-not-excluded"]


def test_a_quantized_module_may_not_be_half_excluded_by_a_fused_name(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    edit_json(path / "config.json", lambda c: c["quantization_config"].update(ignore=["lm_head", "*qkv_proj"]))
    (path / "hf_quant_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"[qkv]_proj.weight .*excludes its module"):
        Checkpoint.open(path)


def test_consolidated_copies_are_not_shards(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    (path / "consolidated.safetensors").write_bytes(b"")
    assert len(Checkpoint.open(path).linears) == LAYERS * len(LINEARS)


def test_no_directory() -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        Checkpoint.open("nowhere")


def test_unknown_names(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.tensor("nothing")
    with pytest.raises(CheckpointError, match="lm_head is not an NVFP4 linear"):
        checkpoint.dequantize("lm_head")


def test_config_that_is_no_object(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    (path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"config\.json: holds a JSON list"):
        Checkpoint.open(path)
