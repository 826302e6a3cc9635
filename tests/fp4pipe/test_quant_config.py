"""Quantization configs in all three spellings, and exclude patterns in every form exporters write."""

from pathlib import Path
from typing import Any

import pytest

from fp4pipe.errors import CheckpointError
from fp4pipe.exclusions import is_excluded
from fp4pipe.quant_config import QuantConfig, parse_section, read_quant_config
from tests.fp4pipe.checkpoints import quant_section, write_json

LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("module", "pattern", "excluded"),
    [
        # exact names and parents
        ("lm_head", "lm_head", True),
        ("lm_head2", "lm_head", False),
        ("vision_tower.encoder.fc1", "vision_tower", True),
        ("vision_tower2.encoder.fc1", "vision_tower", False),
        # prefix globs, as ModelOpt summarises them
        (f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn*", True),
        ("model.layers.31.self_attn.q_proj", f"{LAYER}.self_attn*", False),
        (f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate", True),
        (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.gate", False),
        (f"{LAYER}.mlp.experts.0.up_proj", "*.mlp.experts.*", True),
        ("mtp.layers.0.fc", "mtp.layers.0*", True),
        # one component of the path
        ("model.language_model.lm_head", "lm_head", True),
        (f"{LAYER}.block_sparse_moe.router.weight_proj", "router", True),
        (f"{LAYER}.block_sparse_moe.router_2", "*router*", True),
        ("model.layers.0.mlp.down_proj", "model", True),
        # wrapping prefixes, on either side
        ("model.language_model.layers.3.mlp.up_proj", f"{LAYER}.mlp*", True),
        ("language_model.model.layers.3.mlp.up_proj", f"{LAYER}.mlp.up_proj", True),
        (f"{LAYER}.mlp.up_proj", "language_model.model.layers.3.mlp.up_proj", True),
        ("model.visual.blocks.0.fc", "visual*", True),
        ("lm_head", "language_model.*", False),
        ("lm_head", "model.*", False),
        # compressed-tensors regular expressions match from the start
        (f"{LAYER}.mlp.gate", "re:.*mlp.gate$", True),
        (f"{LAYER}.mlp.gate_proj", "re:.*mlp.gate$", False),
        (f"{LAYER}.mlp.gate", "re:mlp.gate", False),
        ("visual.blocks.0.fc", "re:(?i)VISUAL.*", True),
        # fused names on either side
        (f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.qkv_proj", True),
        (f"{LAYER}.self_attn.o_proj", f"{LAYER}.self_attn.qkv_proj", False),
        (f"{LAYER}.mlp.up_proj", "*gate_up_proj", True),
        (f"{LAYER}.mlp.down_proj", "*gate_up_proj", False),
    ],
)
def test_patterns(module: str, pattern: str, excluded: bool) -> None:
    assert is_excluded(module, ("something.else", pattern)) is excluded


def test_a_fused_module_is_excluded_as_a_whole_or_not_at_all() -> None:
    shards = tuple(f"{LAYER}.self_attn.{letter}_proj" for letter in "qkv")
    assert is_excluded(f"{LAYER}.self_attn.qkv_proj", shards)
    with pytest.raises(CheckpointError, match=r"only part of this fused module.*q_proj of"):
        is_excluded(f"{LAYER}.self_attn.qkv_proj", shards[:1])


def test_an_invalid_regular_expression_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"re:\(lm_head is no regular expression"):
        is_excluded("lm_head", ("re:(lm_head",))


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json", "both", "flat"])
def test_modelopt_spellings(tmp_path: Path, where: str) -> None:
    section = quant_section("modelopt", activations=True, kv=True)
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
        "kv_cache_quant_algo": "FP8",
    }
    if where != "config.json":
        write_json(
            tmp_path / "hf_quant_config.json", quantization if where == "flat" else {"quantization": quantization}
        )
    quant = read_quant_config(tmp_path, {"quantization_config": section} if where in ("config.json", "both") else {})
    assert quant is not None
    assert (quant.method, quant.algo, quant.group_size) == ("modelopt", "NVFP4", 16)
    assert (quant.ignore, quant.kv_cache) == (("lm_head",), "fp8")
    assert quant.algo_of(f"{LAYER}.mlp.up_proj") == "NVFP4"
    assert quant.algo_of("lm_head") is None


@pytest.mark.parametrize(("activations", "algo"), [(True, "NVFP4"), (False, "W4A16_NVFP4")])
def test_compressed_tensors(activations: bool, algo: str) -> None:
    quant = parse_section(quant_section("compressed-tensors", activations, kv=True))
    assert (quant.method, quant.algo, quant.group_size, quant.kv_cache) == ("compressed-tensors", algo, 16, "fp8")
    assert quant.layers == {}
    assert quant.algo_of(f"{LAYER}.mlp.up_proj") == algo


def test_compressed_tensors_groups_by_target() -> None:
    four: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16}
    eight: dict[str, Any] = {"num_bits": 8, "type": "float"}
    quant = parse_section(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": four, "input_activations": four},
                "group_1": {"targets": ["re:.*self_attn.*"], "weights": eight, "input_activations": eight},
                "group_2": {"targets": [f"{LAYER}.mlp.down_proj"], "weights": four},
            },
            "ignore": ["re:.*lm_head"],
        }
    )
    assert quant.algo == "MIXED_PRECISION"
    assert quant.algo_of(f"{LAYER}.self_attn.q_proj") == "FP8"
    assert quant.algo_of(f"{LAYER}.mlp.down_proj") == "W4A16_NVFP4"
    assert quant.algo_of(f"language_model.{LAYER}.mlp.down_proj") == "W4A16_NVFP4"
    assert quant.algo_of(f"{LAYER}.mlp.up_proj") == "NVFP4"
    assert quant.algo_of("lm_head") is None


@pytest.mark.parametrize(
    ("weights", "inputs", "algo"),
    [
        ({"num_bits": 4, "type": "float", "group_size": 32}, {}, "FLOAT4"),
        ({"num_bits": 4, "type": "int", "group_size": 128}, {}, "INT4"),
        ({"num_bits": 4, "type": "float", "group_size": 16}, {"num_bits": 8}, "W4A8_NVFP4_FP8"),
    ],
)
def test_compressed_tensors_other_schemes(weights: dict[str, Any], inputs: dict[str, Any], algo: str) -> None:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    assert parse_section({"quant_method": "compressed-tensors", "config_groups": {"g": group}}).algo == algo


def test_mixed_precision_by_layer() -> None:
    nvfp4, fp8 = {"quant_algo": "NVFP4", "group_size": 16}, {"quant_algo": "FP8"}
    layers = {f"{LAYER}.mlp.{name}_proj": nvfp4 for name in ("gate", "up")}
    layers |= {f"{LAYER}.self_attn.q_proj": fp8, f"{LAYER}.self_attn.k_proj": nvfp4, f"{LAYER}.self_attn.v_proj": nvfp4}
    quant = parse_section({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert quant.group_size == 16
    assert quant.algo_of(f"{LAYER}.mlp.up_proj") == "NVFP4"
    assert quant.algo_of(f"{LAYER}.mlp.gate_up_proj") == "NVFP4"
    assert quant.algo_of(f"{LAYER}.mlp.down_proj") is None
    assert quant.algo_of("lm_head") is None
    with pytest.raises(CheckpointError, match="qkv_proj have different algorithms"):
        quant.algo_of(f"{LAYER}.self_attn.qkv_proj")


def test_awq_needs_no_group_size() -> None:
    quant = parse_section({"quant_algo": "NVFP4_AWQ", "ignore": ["lm_head"], "quant_method": "modelopt"})
    assert (quant.algo, quant.group_size) == ("NVFP4_AWQ", None)


def test_kv_cache_only(tmp_path: Path) -> None:
    write_json(tmp_path / "hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    quant = read_quant_config(tmp_path, {})
    assert quant is not None
    assert quant.kv_cache == "fp8"
    assert quant.algo_of(f"{LAYER}.mlp.up_proj") is None


def test_an_ordinary_model_has_none(tmp_path: Path) -> None:
    assert read_quant_config(tmp_path, {"model_type": "llama"}) is None
    write_json(tmp_path / "hf_quant_config.json", {"quantization": {"quant_algo": None}})
    assert read_quant_config(tmp_path, {}) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quant_algo": "FP8"}, "quant_algo 'NVFP4' in config.json, 'FP8' in hf_quant_config.json"),
        ({"kv_cache_quant_algo": "FP8"}, "kv cache None in config.json, 'fp8' in hf_quant_config.json"),
        ({"group_size": 32}, "group_size 16 in config.json, 32 in hf_quant_config.json"),
        ({"exclude_modules": ["lm_head", "a", "b"]}, "a is only in hf_quant_config.json, with 1 more"),
        ({"exclude_modules": []}, "lm_head is only in config.json"),
        ({"quantized_layers": {"m": {"quant_algo": "FP8"}}}, "m = FP8 is only in hf_quant_config.json"),
    ],
)
def test_two_configs_that_disagree(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]} | change
    write_json(tmp_path / "hf_quant_config.json", {"quantization": quantization})
    with pytest.raises(CheckpointError, match=r"config\.json and hf_quant_config\.json disagree") as caught:
        read_quant_config(tmp_path, {"quantization_config": quant_section("modelopt", True, False)})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not read here"),
        ({"quant_method": "modelopt"}, "no quant_algo"),
        ({"quant_algo": ["NVFP4"]}, "no quant_algo"),
        ({"quant_algo": "MIXED_PRECISION"}, "without quantized_layers"),
        ({"quant_algo": "NVFP4", "ignore": "lm_head"}, "ignore is not a list of strings"),
        ({"quant_algo": "NVFP4", "config_groups": []}, None),
        ({"quant_algo": "NVFP4", "config_groups": {"g": {"weights": 3}}}, "g.weights is a JSON int"),
        ({"quant_algo": "NVFP4", "group_size": "16"}, "group_size is stated as 16"),
        (
            {"quant_algo": "NVFP4", "group_size": 16, "config_groups": {"g": {"weights": {"group_size": 32}}}},
            "group_size is stated as 16, 32",
        ),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 3}}, "quantized_layers.a is a JSON int"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]}}},
            "g.weights is a JSON",
        ),
    ],
)
def test_malformed_sections(section: dict[str, Any], says: str | None) -> None:
    if says is None:
        assert isinstance(parse_section(section), QuantConfig)
        return
    with pytest.raises(CheckpointError) as caught:
        parse_section(section)
    assert says in str(caught.value)
