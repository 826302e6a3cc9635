"""The plan: decisions, their reasons, and everything refused before a weight is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fp4pipe.convert.model import unsupported_architecture
from fp4pipe.convert.options import CalibrationOptions, QuantizeOptions
from fp4pipe.convert.plan import make_plan
from fp4pipe.convert.quantize import quantize
from fp4pipe.convert.scheme import resolve_scheme, supported_presets
from fp4pipe.convert.source import Source, resolve_source
from fp4pipe.errors import SourceError, UsageError
from tests.convert.conftest import options
from tests.tiny_models import make_tiny


def test_rows_say_what_and_why(tiny: Callable[[str], Source]) -> None:
    plan = make_plan(tiny("qwen2"), options(exclude=("model.layers.0.mlp.up_proj",)))
    rows = {row.name: row for row in plan.rows}
    quantized = rows["model.layers.1.self_attn.q_proj"]
    assert (quantized.decision, quantized.shape, quantized.dtype, quantized.kind) == (
        "NVFP4",
        (64, 64),
        "BF16",
        "Linear",
    )
    assert quantized.reason == "weights and activations, by rule *weight_quantizer of nvfp4"
    assert quantized.bytes_before == 2 * (64 * 64 + 64)
    assert quantized.bytes_after == 64 * 32 + 64 * 4 + 4 + 4 + 2 * 64
    assert rows["model.layers.0.mlp.up_proj"].reason == "excluded by you: model.layers.0.mlp.up_proj"
    assert rows["model.embed_tokens"].reason == "embeddings are looked up, not multiplied"
    assert rows["lm_head"].reason == "shares the embedding's weight"
    assert (rows["lm_head"].bytes_before, rows["lm_head"].bytes_after) == (0, 0)
    assert rows["model.norm"].reason == "not a linear layer"
    assert plan.warnings == (
        "model.layers.0.mlp: gate_proj, up_proj are not treated alike; servers that fuse them will refuse that",
    )
    assert plan.calibration_tokens == 4 * 48
    assert not plan.problems
    assert json.loads(json.dumps(plan.to_dict()))["rows"][0]["name"] == "model.embed_tokens"


def test_an_untied_head_is_kept_by_a_rule_of_the_preset(tiny: Callable[[str], Source]) -> None:
    rows = {row.name: row for row in make_plan(tiny("llama"), options()).rows}
    assert rows["lm_head"].reason == "rule *lm_head* of nvfp4 keeps it"
    mlp_only = {row.name: row for row in make_plan(tiny("llama"), options(scheme="nvfp4_mlp_only")).rows}
    assert mlp_only["model.layers.0.self_attn.q_proj"].reason == "no rule of nvfp4_mlp_only includes it"


def test_weight_only_needs_no_calibration(tiny: Callable[[str], Source]) -> None:
    plan = make_plan(tiny("llama"), options(scheme="w4a16_nvfp4"))
    assert (plan.algo, plan.calibration_tokens) == ("W4A16_NVFP4", 0)
    assert make_plan(tiny("llama"), options(scheme="w4a16_nvfp4", kv_cache="fp8")).calibration_tokens == 4 * 48


def test_columns_that_are_no_multiple_of_16(tmp_path: Path) -> None:
    source = resolve_source(make_tiny("llama", tmp_path / "m", intermediate_size=72))
    plan = make_plan(source, options())
    assert len(plan.problems) == 2
    assert plan.problems[0] == (
        "model.layers.0.mlp.down_proj has 72 columns, which is no multiple of 16, the size of an NVFP4 block: "
        "exclude model.layers.0.mlp.down_proj"
    )
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.down_proj has 72 columns"):
        quantize(source, tmp_path / "out", options())
    assert not (tmp_path / "out").exists()
    assert quantize(source, tmp_path / "out", options(exclude=("*.down_proj",))).audit.ok


@pytest.mark.parametrize("size", ["banana", "-5GB", "0GB", "5", "5 GB", ""])
def test_shard_sizes_that_are_none(size: str) -> None:
    with pytest.raises(UsageError, match="is no size; try: 5GB"):
        options(max_shard_size=size)


def test_calibration_texts_longer_than_the_context(tiny: Callable[[str], Source]) -> None:
    long = CalibrationOptions(samples=2, seq_len=513)
    plan = make_plan(tiny("llama"), options(calibration=long))
    assert plan.problems == ("calibration texts of 513 tokens are longer than the model's 512 positions",)
    assert not make_plan(tiny("llama"), options(calibration=long, scheme="w4a16_nvfp4")).problems


def test_nothing_to_quantize(tiny: Callable[[str], Source], tmp_path: Path) -> None:
    plan = make_plan(tiny("llama"), options(scheme="nvfp4_experts_only"))
    assert plan.problems == (
        "nothing would be quantized: no rule of nvfp4_experts_only fits a linear layer of this model",
    )


def test_an_exclusion_that_means_nothing_is_a_mistake(tiny: Callable[[str], Source]) -> None:
    plan = make_plan(tiny("llama"), options(exclude=("model.layers.9.*", "lm_head")))
    assert plan.problems == ("exclude 'model.layers.9.*' matches no module",)


def test_recipes_of_ones_own(tiny: Callable[[str], Source], tmp_path: Path) -> None:
    """A recipe that quantizes the head is planned on an untied model, refused on a tied one and for a mixture."""
    recipe = tmp_path / "head.yaml"
    nvfp4 = "{num_bits: e2m1, block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}}"
    recipe.write_text(
        "metadata: {recipe_type: ptq, description: everything}\n"
        "quantize:\n  algorithm: max\n  quant_cfg:\n"
        '    - {quantizer_name: "*", enable: false}\n'
        f'    - {{quantizer_name: "*weight_quantizer", cfg: {nvfp4}}}\n'
        f'    - {{quantizer_name: "*_proj.input_quantizer", cfg: {nvfp4}}}\n'
        '    - {parent_class: nn.Embedding, quantizer_name: "*", enable: false}\n'
    )
    untied = make_plan(tiny("llama"), options(scheme=str(recipe)))
    assert untied.problems == (
        "lm_head would be NVFP4 in its weights only and model.layers.0.self_attn.q_proj in its activations too",
    )
    tied = make_plan(tiny("qwen2"), options(scheme=str(recipe)))
    assert "lm_head shares its weight with the embedding, which stays as it is: exclude lm_head" in tied.problems
    assert not make_plan(tiny("llama"), options(scheme=str(recipe), exclude=("lm_head",))).problems


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "nvfp44"}, "unknown scheme 'nvfp44'; try: nvfp4"),
        ({"scheme": "fp8"}, r"scheme fp8 is not supported; because its rule for \*weight_quantizer"),
        ({"scheme": "nvfp4_awq_lite"}, "not supported; because its algorithm is awq_lite"),
        ({"scheme": "nvfp4_svdquant"}, "not supported; because its algorithm is {'method': 'svdquant'|svdquant"),
        ({"scheme": "nvfp4_mlp_weight_only"}, "not supported; because its rule for .*32"),
        ({"scheme": "w4a8_nvfp4_fp8"}, "not supported"),
        ({"scheme": "nvfp4_fp8_mha"}, r"not supported; because it quantizes \*\[qkv\]_bmm_quantizer"),
        ({"scheme": "nvfp4_default-kv_none-gptq"}, "because its algorithm is gptq"),
        ({"scheme": "nvfp4_experts_only_input_scale1-kv_fp8_cast"}, "not supported"),
        ({"scheme": "nowhere/recipe.yaml"}, "nowhere/recipe.yaml: no such file"),
        ({"algorithm": "gptq"}, "algorithm 'gptq' is not supported; try: one of: max"),
        ({"kv_cache": "nvfp4"}, "KV cache format 'nvfp4' is not supported; try: one of: none, fp8, fp8_cast"),
    ],
)
def test_schemes_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_scheme(QuantizeOptions(**fields))


def test_supported_presets() -> None:
    assert {"nvfp4", "nvfp4_mlp_only", "nvfp4_omlp_only", "w4a16_nvfp4"} <= set(supported_presets())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "encoder-decoder"),
        ("whisper", "encoder-decoder"),
        ("mixtral", "mixture of experts"),
        ("qwen3_moe", "mixture of experts"),
        ("deepseek_v3", "mixture of experts"),
        ("gemma3", "has a vision part"),
        ("qwen2_5_vl", "has a vision part"),
        ("vit", "no causal language model"),
    ],
)
def test_architectures_that_are_refused(model_type: str, reason: str) -> None:
    assert reason in (unsupported_architecture(AutoConfig.for_model(model_type)) or "")


def test_weights_of_another_class_are_refused() -> None:
    """BERT's config is in transformers' list of causal models: what the weights are is said by `architectures`."""
    for model_type, name in [("bert", "BertForMaskedLM"), ("qwen2", "Qwen2ForSequenceClassification")]:
        config = AutoConfig.for_model(model_type, architectures=[name])
        assert unsupported_architecture(config) == f"its weights are those of {name}, not of a causal language model"


@pytest.mark.parametrize("model_type", ["llama", "granite", "olmo2", "smollm3", "stablelm", "glm4", "cohere"])
def test_architectures_that_are_not(model_type: str) -> None:
    assert unsupported_architecture(AutoConfig.for_model(model_type)) is None


def test_a_refused_architecture_names_what_is_supported(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "m")
    AutoConfig.for_model("mixtral").save_pretrained(path)
    with pytest.raises(SourceError, match=r"mixture of experts, which is not supported yet; try: .*Llama"):
        make_plan(resolve_source(path), options())
