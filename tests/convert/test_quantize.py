"""What `quantize` leaves on disk, for every family."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp4pipe import nvfp4
from fp4pipe.calib_data import load_calibration
from fp4pipe.checkpoint import Checkpoint
from fp4pipe.convert.quantize import QuantizeResult, quantize
from fp4pipe.convert.source import Source, resolve_source
from fp4pipe.errors import SourceError, UsageError
from fp4pipe.quant_config import read_quant_config
from fp4pipe.safetensors_file import read_tensor
from tests.convert.conftest import options
from tests.tiny_models import FAMILIES, SENTENCES, make_tiny

Quantized = Callable[..., QuantizeResult]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal byte for byte."""
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("scheme", ["nvfp4", "w4a16_nvfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_what_our_quantizer_makes_of_the_source(family: str, scheme: str, quantized: Quantized) -> None:
    result = quantized(family, scheme)
    checkpoint = Checkpoint.open(result.out)
    source = result.source
    assert checkpoint.linears
    for module, linear in checkpoint.linears.items():
        ours = nvfp4.quantize_weight(read_tensor(source.tensors[f"{module}.weight"]), checkpoint.global_scale(module))
        assert same(checkpoint.tensor(linear.weight.name), ours.codes)
        assert same(checkpoint.tensor(linear.block_scale.name), ours.block_scale)
        assert (linear.input_scale is not None) == (scheme == "nvfp4")
    scales = {info.name for linear in checkpoint.linears.values() for info in (linear.weight, *linear.scales)}
    kept = [name for name in checkpoint.tensors if name not in scales and not name.endswith(("k_scale", "v_scale"))]
    assert kept
    for name in kept:
        assert same(checkpoint.tensor(name), read_tensor(source.tensors[name]))
    expected = set(source.tensors) | scales
    assert expected - {"lm_head.weight"} <= set(checkpoint.tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_and_export_agree(family: str, quantized: Quantized) -> None:
    result = quantized(family)
    checkpoint = Checkpoint.open(result.out)
    plan = result.plan
    assert {row.name for row in plan.quantized} == set(checkpoint.linears)
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == plan.bytes_after
    assert result.audit.ok
    assert not result.audit.findings
    assert all(row.plain for row in result.audit.rows)
    assert all(row.sqnr_db > 18 for row in result.audit.rows)
    for row in plan.rows:
        stored = sum(i.nbytes for n, i in checkpoint.tensors.items() if n.rpartition(".")[0] == row.name)
        kv = 4 * sum(n in (f"{row.name}.k_scale", f"{row.name}.v_scale") for n in checkpoint.tensors)
        assert stored - kv == row.bytes_after, row.name


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_scales_sit_where_loaders_look(family: str, quantized: Quantized) -> None:
    checkpoint = Checkpoint.open(quantized(family).out)
    assert set(checkpoint.kv_scales) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    for name in checkpoint.tensors:
        if name.endswith("k_scale"):
            assert f"{name.removesuffix('k_scale')}weight" in checkpoint.tensors
            assert float(checkpoint.tensor(name)) > 0


def test_fused_projections_share_their_scales(quantized: Quantized) -> None:
    checkpoint = Checkpoint.open(quantized("llama").out)
    for group in ("self_attn.{q,k,v}_proj", "mlp.{gate,up}_proj"):
        head, rest = group.split("{")
        members, tail = rest.split("}")
        modules = [f"model.layers.1.{head}{member}{tail}" for member in members.split(",")]
        assert len({float(checkpoint.global_scale(module)) for module in modules}) == 1
        assert len({float(checkpoint.input_scale(module)) for module in modules}) == 1  # type: ignore[arg-type]


def test_both_configs_agree_and_the_rest_is_the_sources(quantized: Quantized) -> None:
    for scheme, algo in (("nvfp4", "NVFP4"), ("w4a16_nvfp4", "W4A16_NVFP4")):
        result = quantized("qwen2", scheme)
        config = json.loads((result.out / "config.json").read_text())
        quant = read_quant_config(result.out, config)
        assert quant is not None
        assert (quant.algo, quant.group_size, quant.kv_cache) == (algo, 16, "fp8")
        assert (result.out / "hf_quant_config.json").exists()
        del config["quantization_config"]
        assert config == result.source.config


def test_everything_that_belongs_to_the_model_comes_along(quantized: Quantized) -> None:
    result = quantized("llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (result.out / name).read_bytes() == (result.source.path / name).read_bytes()
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (result.out, result.source.path))
    for sentence in SENTENCES:
        assert ours(sentence).input_ids == theirs(sentence).input_ids
    chat = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    with safe_open(result.out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert "nvfp4" in (result.out / "README.md").read_text()
    assert not list(result.out.parent.glob(f".{result.out.name}*"))


def test_provenance(quantized: Quantized) -> None:
    result = quantized("llama")
    record = json.loads((result.out / "provenance.json").read_text())
    assert record["source"]["fingerprint"] == result.source.fingerprint
    assert record["options"]["scheme"] == "nvfp4"
    assert record["calibration"]["tokens"] == 4 * 48
    assert len(record["calibration"]["digest"]) == 64
    assert record["versions"]["nvidia-modelopt"].startswith("0.47")
    assert record["result"]["quantized_matrices"] == 14
    weight_only = json.loads((quantized("llama", "w4a16_nvfp4", "none").out / "provenance.json").read_text())
    assert weight_only["calibration"] is None


def test_two_runs_give_the_same_bytes(tiny: Callable[[str], Source], quantized: Quantized, tmp_path: Path) -> None:
    again = quantize(tiny("llama"), tmp_path / "again", options(kv_cache="fp8"))
    first = quantized("llama").out / "model.safetensors"
    assert (again.out / "model.safetensors").read_bytes() == first.read_bytes()


def test_sharded_source_and_sharded_output(tmp_path: Path) -> None:
    source = make_tiny("phi3", tmp_path / "source", max_shard_size="60KB")
    result = quantize(source, tmp_path / "out", options(kv_cache="fp8", max_shard_size="40KB"))
    checkpoint = Checkpoint.open(result.out)
    assert len(checkpoint.metadata) > 2
    assert all(metadata == {"format": "pt"} for metadata in checkpoint.metadata.values())
    index = json.loads((result.out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in checkpoint.tensors.values())
    assert result.audit.ok


def test_tensors_the_model_would_cast_keep_their_dtype(tmp_path: Path) -> None:
    path = make_tiny("qwen2", tmp_path / "source")

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
            tensors[name] = tensors[name].float() + 1e-4

    result = quantize(edit_weights(path, widen), tmp_path / "out", options())
    checkpoint = Checkpoint.open(result.out)
    assert checkpoint.tensors["model.norm.weight"].dtype == "F32"
    assert checkpoint.tensors["model.layers.0.self_attn.q_proj.bias"].dtype == "F32"
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == result.plan.bytes_after
    assert not result.audit.findings


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_source_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source", dtype=dtype)
    result = quantize(source, tmp_path / "out", options())
    assert result.audit.ok
    assert Checkpoint.open(result.out).tensors["model.embed_tokens.weight"].torch_dtype == dtype
    assert all(row.plain for row in result.audit.rows)


def test_exclusions(tiny: Callable[[str], Source], tmp_path: Path) -> None:
    asked = options(exclude=("model.layers.0", "*.down_proj"), kv_cache="fp8_cast")
    result = quantize(tiny("llama"), tmp_path / "out", asked)
    checkpoint = Checkpoint.open(result.out)
    assert set(checkpoint.linears) == {
        f"model.layers.1.{name}"
        for name in (
            *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            *("mlp.gate_proj", "mlp.up_proj"),
        )
    }
    assert checkpoint.quant is not None
    assert checkpoint.quant.kv_cache == "fp8"
    assert not checkpoint.kv_scales


@pytest.mark.parametrize("scheme", ["nvfp4_mlp_only", "nvfp4_omlp_only", "nvfp4_mlp_only-kv_fp8"])
def test_other_presets_and_recipes(scheme: str, tiny: Callable[[str], Source], tmp_path: Path) -> None:
    result = quantize(tiny("qwen3"), tmp_path / "out", options(scheme=scheme))
    checkpoint = Checkpoint.open(result.out)
    leaves = {module.rpartition(".")[2] for module in checkpoint.linears}
    assert leaves == {"gate_proj", "up_proj", "down_proj"} | ({"o_proj"} if "omlp" in scheme else set())
    assert bool(checkpoint.kv_scales) == scheme.endswith("kv_fp8")
    assert result.audit.ok


def test_a_quantized_head_sees_every_token(tiny: Callable[[str], Source], tmp_path: Path) -> None:
    nvfp4 = "{num_bits: e2m1, block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}}"
    recipe = tmp_path / "head.yaml"
    recipe.write_text(
        "metadata: {recipe_type: ptq, description: the head too}\nquantize:\n  algorithm: max\n  quant_cfg:\n"
        '    - {quantizer_name: "*", enable: false}\n'
        f'    - {{quantizer_name: "*weight_quantizer", cfg: {nvfp4}}}\n'
        f'    - {{quantizer_name: "*input_quantizer", cfg: {nvfp4}}}\n'
        '    - {parent_class: nn.Embedding, quantizer_name: "*", enable: false}\n'
    )
    result = quantize(tiny("llama"), tmp_path / "out", options(scheme=str(recipe)))
    checkpoint = Checkpoint.open(result.out)
    assert "lm_head" in checkpoint.linears
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == result.plan.bytes_after
    # The last position alone, which is all that calibration otherwise asks logits of, would have a smaller maximum.
    tokenizer = AutoTokenizer.from_pretrained(result.source.path)
    text = load_calibration("bundled", tokenizer, samples=4, seq_len=48, seed=0)
    model = AutoModelForCausalLM.from_pretrained(result.source.path, dtype=torch.float32)
    with torch.no_grad():
        largest = max(float(model.model(sample[None]).last_hidden_state.abs().max()) for sample in text.samples)
    scale = checkpoint.input_scale("lm_head")
    assert scale is not None
    assert float(scale) == pytest.approx(largest / 2688, rel=0.02)


def test_tensors_that_the_class_has_no_use_for(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "source")
    edit_weights(path, lambda tensors: tensors.update({"model.mtp.weight": torch.ones(16)}))
    result = quantize(path, tmp_path / "out", options(scheme="w4a16_nvfp4"))
    assert result.plan.warnings == (
        "1 tensors of the source belong to no module of the model and are left out: model.mtp.weight ...",
    )
    assert result.audit.ok
    assert [finding.where for finding in result.audit.findings] == ["model.mtp.weight"]


def test_a_model_with_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    path = make_tiny("llama", tmp_path / "source")
    (path / "own_code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_model'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((path / "config.json").read_text())
    config["model_type"] = "own_model"
    config["architectures"] = ["OwnForCausalLM"]
    config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="needs its own Python code"):
        quantize(path, tmp_path / "out", options(scheme="w4a16_nvfp4"))
    result = quantize(path, tmp_path / "out", options(scheme="w4a16_nvfp4", trust_remote_code=True))
    assert result.audit.ok
    assert (result.out / "own_code.py").read_bytes() == (path / "own_code.py").read_bytes()
    assert json.loads((result.out / "config.json").read_text())["auto_map"] == config["auto_map"]


def test_an_all_zero_matrix_is_stored_as_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny("llama", tmp_path / "source")
    dead = ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    edit_weights(path, lambda tensors: [tensors[name].zero_() for name in dead])
    result = quantize(path, tmp_path / "out", options())
    assert result.audit.ok
    checkpoint = Checkpoint.open(result.out)
    for name in dead:
        module = name.removesuffix(".weight")
        linear = checkpoint.linears[module]
        assert not checkpoint.tensor(linear.weight.name).any()
        assert (checkpoint.tensor(linear.block_scale.name).float() == 1).all()
        assert float(checkpoint.global_scale(module)) > 0
        assert not checkpoint.dequantize(module).any()
    assert float(checkpoint.global_scale("model.layers.0.self_attn.o_proj")) == 1
    said = capsys.readouterr()
    assert "warning: model.layers.0.self_attn.o_proj is all zero" in said.err
    assert not said.out


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_source_with_a_bad_number_is_refused(value: float, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 5] = value

    edit_weights(path, spoil)
    with pytest.raises(SourceError, match=rf"model\.safetensors: tensor {name} holds 1 numbers that are NaN or inf"):
        quantize(path, tmp_path / "out", options())
    assert [child.name for child in tmp_path.iterdir()] == ["source"]


def test_an_input_that_is_always_zero_is_refused_by_name(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "source")
    edit_weights(path, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].zero_())
    with pytest.raises(SourceError, match=r"model\.layers\.0\.mlp\.down_proj: its input was zero"):
        quantize(path, tmp_path / "out", options())
    assert not (tmp_path / "out").exists()


def test_missing_tensor_is_refused(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "source")
    edit_weights(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing in the weights"):
        quantize(path, tmp_path / "out", options())


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(path, lambda tensors: tensors.update({name: torch.ones(16, 64, dtype=torch.bfloat16)}))
    with pytest.raises(SourceError, match=rf"{name} is 16 x 64 in the weights; because config.json promises 128 x 64"):
        quantize(path, tmp_path / "out", options())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_weights_of_other_types_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(SourceError, match=rf"{name} is [FI]\d.*, and weights are quantized from BF16, F16, F32"):
        quantize(path, tmp_path / "out", options())


def test_no_text_to_calibrate_on(tiny: Callable[[str], Source], tmp_path: Path) -> None:
    from fp4pipe.convert.options import CalibrationOptions

    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UsageError, match=r"empty\.txt"):
        quantize(
            tiny("llama"),
            tmp_path / "out",
            options(calibration=CalibrationOptions(dataset=str(tmp_path / "empty.txt"))),
        )
    assert not (tmp_path / "out").exists()


def test_no_tokenizer(tiny: Callable[[str], Source], tmp_path: Path) -> None:
    shutil.copytree(tiny("llama").path, tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "source" / name).unlink()
    with pytest.raises(SourceError, match=r"no usable tokenizer.*; try: a copy"):
        quantize(tmp_path / "source", tmp_path / "out", options())
    weight_only = quantize(tmp_path / "source", tmp_path / "out", options(scheme="w4a16_nvfp4"))
    assert weight_only.audit.ok


def test_existing_output(tiny: Callable[[str], Source], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = quantize(tiny("llama"), out, options())
    with pytest.raises(UsageError, match="already exists"):
        quantize(tiny("llama"), out, options(scheme="w4a16_nvfp4"))
    assert Checkpoint.open(out).quant.algo == "NVFP4"  # type: ignore[union-attr]
    assert first.seconds.keys() >= {"plan", "load", "calibrate", "export", "audit"}
    quantize(tiny("llama"), out, options(scheme="w4a16_nvfp4"), overwrite=True)
    assert Checkpoint.open(out).quant.algo == "W4A16_NVFP4"  # type: ignore[union-attr]
    assert [child.name for child in tmp_path.iterdir()] == ["out"]


def test_source_is_resolved_from_its_path(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "m")
    result = quantize(str(path), tmp_path / "out", options(scheme="w4a16_nvfp4"))
    assert result.source.fingerprint == resolve_source(path).fingerprint
    assert json.loads(json.dumps(result.to_dict()))["audit"]["ok"]
