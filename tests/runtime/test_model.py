"""Models against Hugging Face's own forward: plain, and NVFP4 against dequantized weights and fake-quantized inputs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp4pipe import nvfp4
from fp4pipe.checkpoint import Checkpoint
from fp4pipe.errors import CheckpointError, UsageError
from fp4pipe.runtime.attention import Step, attending
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.model import Model
from tests.runtime.nvfp4_checkpoint import quantize_tiny
from tests.runtime.steps import PAGE, Sequences, each_alone, relative
from tests.tiny_models import FAMILIES, make_tiny

LENGTHS = (40, 7, 64, 1)
PAGES = 40


def load(path: Path, **options) -> Model:
    return Model.load(path, progress=False, **options)


def logits(model: Model, sequences: Sequences) -> Tensor:
    runner = Runner(model, model.new_cache(PAGES, PAGE), graphs="off", max_tokens=256)
    return model.logits(runner.forward(sequences.whole()))


def hugging_face(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def dequantized(plain: Path, quantized: Path, *, activations: bool) -> PreTrainedModel:
    """The plain model with the weights that `quantized` stands for, and with its inputs rounded as it rounds them."""
    checkpoint = Checkpoint.open(quantized)
    model = hugging_face(plain)
    for name in checkpoint.linears:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        linear.weight.data = checkpoint.dequantize(name)
        if activations:
            scale = checkpoint.input_scale(name)
            linear.register_forward_pre_hook(lambda _, x, scale=scale: nvfp4.fake_quantize_activation(x[0], scale))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_equals_hugging_face(family: str, tiny: Callable[..., Path]):
    path, sequences = tiny(family), Sequences(LENGTHS, PAGES)
    model = load(path)
    assert model.quant is None
    assert relative(logits(model, sequences), each_alone(sequences, lambda x: hugging_face(path)(x).logits)) < 2e-6


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nvfp4_equals_dequantized(family: str, mode: str, layout: str, tiny: Callable[..., Path]):
    path, sequences = tiny(family, layout), Sequences(LENGTHS, PAGES)
    reference = dequantized(tiny(family), path, activations=mode == "w4a4")
    model = load(path, mode=mode)
    assert model.mode == mode
    expected = each_alone(sequences, lambda x: reference(x).logits)
    # A sum that lands on the other side of a rounding boundary moves one activation by one E2M1 step.
    assert relative(logits(model, sequences), expected) < (2e-6 if mode == "w4a16" else 2e-2)


def test_a_quantized_head(tiny: Callable[..., Path], tmp_path: Path):
    path, sequences = quantize_tiny(tiny("llama"), tmp_path / "head", head=True), Sequences(LENGTHS, PAGES)
    reference = dequantized(tiny("llama"), path, activations=False)
    model = load(path, mode="w4a16")
    assert model.load_report["quantized_linears"] == 22
    assert relative(logits(model, sequences), each_alone(sequences, lambda x: reference(x).logits)) < 2e-6


def test_one_token_at_a_time_equals_all_at_once(tiny: Callable[..., Path]):
    model = load(tiny("gemma3_text"))
    runner = Runner(model, model.new_cache(PAGES, PAGE), graphs="off", max_tokens=256)
    sequences = Sequences((40, 33), PAGES)
    rows = [runner.forward(sequences.step([1 if at < 40 else 0, 1 if at < 33 else 0])).clone() for at in range(40)]
    step_by_step = [torch.cat([r[:1] for r in rows]), torch.cat([r[1:] for r in rows])]
    whole = runner.forward(Sequences((40, 33), PAGES).whole())
    assert relative(torch.cat(step_by_step), whole) < 2e-6


def test_kv_layers_are_what_the_layers_ask_for(tiny: Callable[..., Path]):
    model = load(tiny("gemma3_text"))
    assert [layer.sliding_window for layer in model.kv_layers] == [24, None, 24]
    assert {(layer.num_kv_heads, layer.head_dim) for layer in model.kv_layers} == {(2, 16)}
    assert (model.vocab_size, model.max_context) == (512, 512)


def test_head_is_the_models_own(tmp_path: Path):
    """Final softcap and all: nothing of the head is written anew here."""
    path = make_tiny("gemma3_text", tmp_path / "capped", final_logit_softcapping=2.0)
    sequences = Sequences((30,), PAGES)
    got = logits(load(path), sequences)
    assert got.dtype == torch.float32
    assert got.abs().max() < 2.0
    assert relative(got, each_alone(sequences, lambda x: hugging_face(path)(x).logits)) < 2e-6


def test_activations_dtype_can_be_asked_for(tiny: Callable[..., Path]):
    model = load(tiny("llama", "modelopt"), dtype="bfloat16")
    exact = logits(load(tiny("llama", "modelopt")), Sequences((30,), PAGES))
    assert model.dtype == model.new_cache(1, 1).dtype == torch.bfloat16
    assert relative(logits(model, Sequences((30,), PAGES)), exact) < 3e-2
    with pytest.raises(UsageError, match="--dtype int8"):
        load(tiny("llama"), dtype="int8")


def test_load_report(tiny: Callable[..., Path]):
    path = tiny("llama", "modelopt")
    report = load(path).load_report
    assert report["quantized_linears"] == 21
    assert report["read"]["bytes"] == sum(info.nbytes for info in Checkpoint.open(path).tensors.values())
    assert report["seconds"] > 0


def edited(source: Path, out: Path, edit: Callable[[dict[str, Tensor]], None], **config: object) -> Path:
    """A copy of `source` with its tensors and its config changed."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    edit(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((out / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps(values))
    return out


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: (tensors.pop(name), None)[1]


def test_a_missing_tensor_is_named(tiny: Callable[..., Path], tmp_path: Path):
    path = edited(tiny("qwen2", "modelopt"), tmp_path / "c", drop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.bias is missing"):
        load(path)


def test_a_left_over_tensor_is_named(tiny: Callable[..., Path], tmp_path: Path):
    path = edited(tiny("llama"), tmp_path / "c", lambda t: t.update(extra=torch.ones(2)))
    with pytest.raises(CheckpointError, match=r"extra .*left over"):
        load(path)


def test_a_missing_head_is_named(tiny: Callable[..., Path], tmp_path: Path):
    path = edited(tiny("llama"), tmp_path / "c", drop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load(path)


def test_quantized_layer_that_the_model_lacks_is_named(tiny: Callable[..., Path], tmp_path: Path):
    path = edited(tiny("llama", "modelopt"), tmp_path / "c", lambda _: None, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* the model has no such module"):
        load(path)


def test_w4a4_needs_input_scales(tiny: Callable[..., Path], tmp_path: Path):
    def without_inputs(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("input_scale")]:
            del tensors[name]

    config = json.loads((tiny("llama", "modelopt") / "config.json").read_text())["quantization_config"]
    weights_only = config | {"quant_algo": "W4A16_NVFP4"}
    path = edited(tiny("llama", "modelopt"), tmp_path / "c", without_inputs, quantization_config=weights_only)
    assert load(path).mode == "w4a16"
    with pytest.raises(CheckpointError, match="W4A4 needs one"):
        load(path, mode="w4a4")


def test_a_tied_head_may_be_saved_twice_but_not_differently(tiny: Callable[..., Path], tmp_path: Path):
    plain, embedding = tiny("qwen2"), "model.embed_tokens.weight"
    twice = edited(plain, tmp_path / "same", lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    sequences = Sequences((20,), PAGES)
    assert torch.equal(logits(load(twice), sequences), logits(load(plain), Sequences((20,), PAGES)))
    differing = edited(plain, tmp_path / "other", lambda t: t.update({"lm_head.weight": t[embedding] * 2}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.* differ.*tie_word_embeddings"):
        load(differing)


def test_saved_rotary_frequencies_are_ignored(tiny: Callable[..., Path], tmp_path: Path):
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    load(edited(tiny("llama"), tmp_path / "c", lambda t: t.update(old)))


def test_body_needs_a_step(tiny: Callable[..., Path]):
    model = load(tiny("llama"))
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(LookupError):
        model.body(ids, ids)
    with attending(Step(Sequences((3,), PAGES).whole(), model.new_cache(PAGES, PAGE))):
        assert model.body(ids, ids).shape == (1, 3, 64)
