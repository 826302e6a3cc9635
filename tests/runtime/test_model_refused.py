"""Models that do not run are refused by name, with the reason, before a weight is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from fp4pipe.errors import CheckpointError, Unavailable
from fp4pipe.runtime import build
from fp4pipe.runtime.model import Model

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
REFUSED = {
    "qwen3_moe": ({"num_experts": 4}, "mixture of experts"),
    "mixtral": ({"num_local_experts": 4}, "mixture of experts"),
    "t5": ({}, "encoder-decoder"),
    "gemma3": ({}, "multimodal"),
    "bert": ({"is_decoder": False}, "is_causal=False"),
    "bloom": ({}, "does not go through"),
    "gemma2": ({"head_dim": 16}, "softcap"),
    "mamba": ({}, "attention"),
    "llama": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary embedding"),
}


def directory(path: Path, model_type: str, fields: dict[str, Any]) -> Path:
    """A model of which nothing but the configuration is there."""
    config = AutoConfig.for_model(model_type, **(SMALL | fields))
    config.save_pretrained(path)
    save_file({"none": torch.zeros(1)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type: str, tmp_path: Path):
    fields, reason = REFUSED[model_type]
    with pytest.raises(Unavailable, match=reason) as caught:
        Model.load(directory(tmp_path / "m", model_type, fields), progress=False)
    assert f"{model_type!r}" in str(caught.value)
    assert "Llama, Qwen2, Qwen3" in str(caught.value)


@pytest.mark.parametrize(
    "field",
    [
        {"hidden_act": "zork"},
        {"hidden_size": "big"},
        {"hidden_size": -32},
        {"num_attention_heads": 0},
        {"max_position_embeddings": 0},
        {"rope_parameters": {"rope_type": "banana"}},
    ],
    ids=str,
)
def test_wrong_fields(field: dict[str, Any], tmp_path: Path):
    path = directory(tmp_path / "m", "llama", {}) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | field))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Model.load(path.parent, progress=False)


def test_no_configuration(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Model.load(tmp_path)


def test_a_type_transformers_does_not_know(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(CheckpointError, match="nonesuch"):
        Model.load(tmp_path)


@pytest.mark.parametrize("algo", ["NVFP4_AWQ", "W4A8_NVFP4_FP8"])
def test_other_quantizations(algo: str, tiny: Callable[..., Path], tmp_path: Path):
    path = Path(shutil.copytree(tiny("llama", "modelopt"), tmp_path / "c"))
    config = path / "config.json"
    config.write_text(config.read_text().replace('"quant_algo": "NVFP4"', f'"quant_algo": "{algo}"'))
    with pytest.raises(Unavailable, match=rf"_proj is {algo}; try: .*NVFP4 or W4A16_NVFP4"):
        Model.load(path, progress=False)


def test_buffers_that_nobody_computes(monkeypatch: pytest.MonkeyPatch):
    config = AutoConfig.for_model("llama", **SMALL)
    model = build.build_on_meta(config, torch.float32)
    monkeypatch.setattr(type(model), "initialize_weights", lambda self: None)
    with pytest.raises(Unavailable, match="inv_freq"):
        build.recompute_buffers(model, torch.device("cpu"))
