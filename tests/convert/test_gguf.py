"""GGUF in, Hugging Face out: weights, config and errors, on tiny files written here."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fp4pipe.convert import gguf_weights
from fp4pipe.convert.gguf import gguf_to_hf
from fp4pipe.convert.gguf_config import FAMILIES
from fp4pipe.convert.source import resolve_source
from fp4pipe.errors import SourceError, UsageError
from tests.convert.gguf_writing import ARCHITECTURES, SPECIFIC, make_model, replace, write_gguf
from tests.tiny_models import CHAT_TEMPLATE, SENTENCES, make_tokenizer


def test_every_architecture_is_tested() -> None:
    assert {ARCHITECTURES.get(family, family) for family in SPECIFIC} == set(FAMILIES)


@pytest.mark.parametrize("family", SPECIFIC)
def test_model_comes_back(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    out = tmp_path / "hf"
    gguf_to_hf(write_gguf(tmp_path / "m.gguf", model), out)
    again = AutoModelForCausalLM.from_pretrained(out, dtype="auto", attn_implementation="eager").eval()
    assert again.dtype == torch.bfloat16
    state, expected = again.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    ids = torch.arange(5, 45)[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_directory_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    gguf_to_hf(write_gguf(tmp_path / "m.gguf", make_model("llama")), out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.gguf"]
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [4, 2], 0)
    tokenizer, original = AutoTokenizer.from_pretrained(out), make_tokenizer()
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|bos|>", "<|im_end|>", "<|pad|>")
    for sentence in SENTENCES:
        assert tokenizer(sentence).input_ids == original(sentence).input_ids


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantized_weights_are_rounded_once(kind: str, tmp_path: Path) -> None:
    model = make_model("qwen2")
    gguf_to_hf(write_gguf(tmp_path / "m.gguf", model, kinds=lambda name: kind), tmp_path / "hf")
    name = "model.layers.1.mlp.down_proj.weight"
    stored = quants.quantize(model.state_dict()[name].float().numpy(), GGMLQuantizationType[kind])
    expected = torch.from_numpy(quants.dequantize(stored, GGMLQuantizationType[kind])).to(torch.bfloat16)
    assert torch.equal(load_file(tmp_path / "hf/model.safetensors")[name], expected)


def test_shards_and_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "SHARD_BYTES", 60_000)
    monkeypatch.setattr(gguf_weights, "CHUNK_NUMBERS", 1_000)
    model = make_model("llama")
    out = tmp_path / "hf"
    gguf_to_hf(write_gguf(tmp_path / "m.gguf", model), out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(2 * value.numel() for value in model.state_dict().values())
    again = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_model_in_parts(tmp_path: Path) -> None:
    model = make_model("qwen2")
    write_gguf(tmp_path / "m.gguf", model, split=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    gguf_to_hf(parts[0], tmp_path / "hf")
    again = load_file(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(again[name], model.state_dict()[name]) for name in again)
    with pytest.raises(SourceError, match="open the first"):
        gguf_to_hf(parts[1], tmp_path / "second")
    parts[-1].unlink()
    with pytest.raises(SourceError, match=f"part {parts[-1].name} is missing"):
        gguf_to_hf(parts[0], tmp_path / "third")


def test_every_part_counts_in_the_source(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_model("qwen2"), split=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    before = resolve_source(parts[0], cache_dir=tmp_path / "cache")
    content = bytearray(parts[-1].read_bytes())
    content[-1] ^= 1  # the same first part, another weight in the last
    parts[-1].write_bytes(content)
    after = resolve_source(parts[0], cache_dir=tmp_path / "cache")
    assert after.path != before.path
    assert after.fingerprint != before.fingerprint


def test_tied_head_stored_twice(tmp_path: Path) -> None:
    model = make_model("qwen2")
    head = model.state_dict()["model.embed_tokens.weight"].float().numpy()
    path = write_gguf(
        tmp_path / "m.gguf",
        model,
        extra={"output.weight": head},
        kinds=lambda name: {"output.weight": "Q8_0", "token_embd.weight": "Q4_0"}.get(name, "F32"),
    )
    gguf_to_hf(path, tmp_path / "hf")
    assert AutoConfig.from_pretrained(tmp_path / "hf").tie_word_embeddings
    state = load_file(tmp_path / "hf/model.safetensors")
    assert "lm_head.weight" not in state
    better = quants.dequantize(quants.quantize(head, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert torch.equal(state["model.embed_tokens.weight"], torch.from_numpy(better).to(torch.bfloat16))


def test_llama3_rope_scaling_is_recovered(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = make_model("llama", rope_parameters=scaling, head_dim=64, max_position_embeddings=131_072)
    plain = 500_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    divisors = (plain / model.model.rotary_emb.inv_freq.double()).float().numpy()
    assert divisors.min() == pytest.approx(1)
    assert divisors.max() == pytest.approx(32)
    gguf_to_hf(write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors}), tmp_path / "hf")
    assert AutoConfig.from_pretrained(tmp_path / "hf").rope_parameters == scaling
    other = write_gguf(tmp_path / "o.gguf", model, extra={"rope_freqs.weight": np.linspace(1, 9, 32)})
    with pytest.raises(SourceError, match="follows no known rope scaling"):
        gguf_to_hf(other, tmp_path / "other")


def test_phi3_long_rope(tmp_path: Path) -> None:
    long, short = [float(2 + i) for i in range(8)], [1.0 + i / 8 for i in range(8)]
    scaling = {"rope_type": "longrope", "rope_theta": 10_000.0, "long_factor": long, "short_factor": short}
    model = make_model(
        "phi3", rope_parameters=scaling, max_position_embeddings=1024, original_max_position_embeddings=256
    )
    factors = {
        "rope_factors_long.weight": np.array(long, np.float32),
        "rope_factors_short.weight": np.array(short, np.float32),
    }
    path = write_gguf(
        tmp_path / "m.gguf", model, extra=factors, metadata=lambda writer: writer.add_rope_scaling_orig_ctx_len(256)
    )
    gguf_to_hf(path, tmp_path / "hf")
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert config.original_max_position_embeddings == 256
    assert config.rope_parameters["long_factor"] == long
    assert config.rope_parameters["short_factor"] == short
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert again.model.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling


def test_gemma3_linear_scaling_is_for_global_layers(tmp_path: Path) -> None:
    def scale(writer) -> None:
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    gguf_to_hf(write_gguf(tmp_path / "m.gguf", make_model("gemma3_text"), metadata=scale), tmp_path / "hf")
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]


def test_advised_sampling_is_kept(tmp_path: Path) -> None:
    def advise(writer) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    gguf_to_hf(write_gguf(tmp_path / "m.gguf", make_model("qwen2"), metadata=advise), tmp_path / "hf")
    generation = GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (generation.do_sample, generation.temperature, generation.top_k) == (True, 0.5, 20)


def _refused(path: Path, match: str) -> None:
    out = path.parent / "refused"
    with pytest.raises(SourceError, match=match) as caught:
        gguf_to_hf(path, out)
    assert path.name in str(caught.value)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name]


def test_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(SourceError, match="no such file"):
        gguf_to_hf(path, tmp_path / "hf")
    path.write_bytes(b"")
    _refused(path, "an empty file")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    _refused(path, "not a GGUF file: it begins with b'PK")
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    _refused(path, "version 1 is not supported")
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    _refused(path, "big-endian")


def test_truncated_anywhere(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = write_gguf(tmp_path / "whole/m.gguf", make_model("qwen2")).read_bytes()
    (tmp_path / "cut").mkdir()
    path = tmp_path / "cut/m.gguf"
    rng = np.random.default_rng(0)
    for length in [5, 12, 23, 24, 31, *rng.integers(32, len(whole), 60).tolist(), len(whole) - 1000]:
        path.write_bytes(whole[:length])
        _refused(path, "truncated")


def test_damaged_metadata_never_escapes_as_another_error(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf", make_model("qwen2")).read_bytes())
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(1)
    for position in rng.integers(8, 2_000, 150):
        damaged = whole.copy()
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with suppress(SourceError):
            gguf_to_hf(path, tmp_path / f"out{position}")


def test_unsupported_architectures(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = make_model("llama")
    write_gguf(path, model, metadata=lambda writer: replace(writer, "general.architecture", "mamba"))
    _refused(path, "architecture 'mamba' cannot be converted from GGUF")
    write_gguf(path, model, metadata=lambda writer: writer.add_expert_count(8))
    _refused(path, "mixture-of-experts")
    write_gguf(path, model, metadata=lambda writer: writer.add_rope_dimension_count(8))
    _refused(path, "rotary positions on 8 of 16 dimensions")
    write_gguf(path, model, metadata=lambda writer: replace(writer, "llama.block_count", None))
    _refused(path, "metadata llama.block_count is missing")


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = make_model("llama")
    write_gguf(path, model, drop=("blk.0.attn_k.weight", "blk.1.ffn_up.weight"))
    _refused(path, "2 tensors missing: blk.0.attn_k.weight, blk.1.ffn_up.weight")
    write_gguf(path, model, drop=("token_embd.weight",))
    _refused(path, "token_embd.weight is missing")
    write_gguf(path, model, extra={"blk.0.surprise.weight": np.zeros((4, 32))})
    _refused(path, "1 tensor without a place: blk.0.surprise.weight")
    write_gguf(path, model, extra={"blk.0.ffn_up.weight": np.zeros((96, 32))})
    _refused(path, r"blk.0.ffn_up.weight has shape \[96, 32\]")
    write_gguf(path, model, extra={"blk.1.attn_norm.weight": np.full(64, np.nan)})
    _refused(path, "blk.1.attn_norm.weight holds values that are not finite")


def test_output_is_not_overwritten(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("qwen2"))
    out = tmp_path / "hf"
    out.mkdir()
    gguf_to_hf(path, out)
    with pytest.raises(UsageError, match="already exists"):
        gguf_to_hf(path, out)
