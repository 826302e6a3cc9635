"""Each lint rule against a checkpoint made to break it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp4pipe.lint import RULES, Finding, lint
from tests.fp4pipe.bad_checkpoints import DAMAGES
from tests.fp4pipe.checkpoints import (
    SHARD1,
    SHARD2,
    Q,
    edit_index,
    edit_json,
    edit_tensors,
    write_checkpoint,
)


def of(rule: str, findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.rule.id == rule]


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Edit the tensors of `file` and bring the index up to date."""

    def apply(path: Path) -> None:
        edit_tensors(path / file, change)
        names = {name: f.name for f in path.glob("*.safetensors") for name in load_file(f)}
        edit_index(path, lambda weight_map: (weight_map.clear(), weight_map.update(names)))
        total = sum(t.nbytes for f in path.glob("*.safetensors") for t in load_file(f).values())
        edit_json(path / "model.safetensors.index.json", lambda index: index["metadata"].update(total_size=total))

    return apply


def add(file: str, **new: torch.Tensor) -> Callable[[Path], None]:
    return tensors(file, lambda t: t.update({name.replace("__", "."): tensor for name, tensor in new.items()}))


def config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "config.json", change)


def without_hf(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (path / "hf_quant_config.json").unlink()
        config(lambda c: change(c["quantization_config"]))(path)

    return apply


def delete(*names: str) -> Callable[[Path], None]:
    return lambda path: [(path / name).unlink() for name in names] and None


def both(*changes: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda path: [change(path) for change in changes] and None


def share_of(pattern: int) -> Callable[[Path], None]:
    def fill(t: dict[str, torch.Tensor]) -> None:
        t[f"{Q}.weight_scale"].view(torch.uint8)[:4] = pattern

    return tensors(SHARD1, fill)


def _quantized_router(path: Path) -> None:
    new = {name.replace("self_attn.q_proj", "mlp.gate"): t for name, t in load_file(path / SHARD1).items() if Q in name}
    tensors(SHARD1, lambda t: t.update(new))(path)


def _ones(path: Path) -> None:
    for file in (SHARD1, SHARD2):
        tensors(file, lambda t: t.update({n: torch.tensor(1.0) for n in t if n.endswith(("k_scale", "v_scale"))}))(path)


def _misplaced(t: dict[str, torch.Tensor]) -> None:
    for name in [name for name in t if ".self_attn.k_proj.weight" in name or ".k_proj.input_scale" in name]:
        del t[name]


BREAKS: tuple[tuple[str, Callable[[Path], Any], str, str], ...] = (
    (
        "scale-stray",
        add(SHARD1, lm_head__input_scale=torch.tensor(1.0)),
        "lm_head.input_scale",
        "lm_head.weight is BF16",
    ),
    ("scale-stray", add(SHARD1, ghost__weight_scale=torch.ones(2)), "ghost.weight_scale", "has no weight"),
    (
        "quantizer-state-leaked",
        add(SHARD1, a__weight_quantizer___amax=torch.ones(1)),
        "a.weight_quantizer._amax",
        "quantizer",
    ),
    ("sensitive-quantized", _quantized_router, "model.layers.0.mlp.gate", "NVFP4 [64, 64]"),
    ("exclusion-unused", without_hf(lambda q: q["ignore"].append("*.router")), "*.router", "no unquantized module"),
    ("config-json-silent", config(lambda c: c.pop("quantization_config")), "config.json", "hf_quant_config.json"),
    ("group-size-unstated", without_hf(lambda q: q.pop("config_groups")), "config.json", "no group_size"),
    (
        "pre-quant-scale-unstated",
        tensors(SHARD1, lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(64)})),
        f"{Q}.pre_quant_scale",
        "NVFP4",
    ),
    (
        "head-tied",
        both(config(lambda c: c.update(tie_word_embeddings=True)), add(SHARD1, lm_head__weight=torch.ones(8, 64))),
        "lm_head.weight",
        "F32 [8, 64]",
    ),
    ("head-missing", tensors(SHARD1, lambda t: t.pop("lm_head.weight")), "lm_head.weight", "no head"),
    (
        "columns-not-quantizable",
        both(
            add(SHARD1, odd__weight=torch.ones(4, 20).bfloat16()),
            without_hf(lambda q: q["ignore"].append("odd")),
        ),
        "odd",
        "4 x 20 in BF16",
    ),
    (
        "weight-not-finite",
        tensors(SHARD2, lambda t: t["model.norm.weight"].fill_(float("nan"))),
        "model.norm.weight",
        "nan",
    ),
    ("scales-saturated", share_of(0x7E), Q, "6.2% of its block scales are 448"),
    ("scales-floored", share_of(0x01), Q, "6.2% of its block scales are 2^-9"),
    (
        "sibling-global-scales",
        tensors(SHARD1, lambda t: t[f"{Q}.weight_scale_2"].mul_(2)),
        "model.layers.0.self_attn.qkv_proj",
        "q_proj 0.000446429, v_proj 0.000223214",
    ),
    (
        "sibling-input-scales",
        tensors(SHARD1, lambda t: t[f"{Q}.input_scale"].mul_(2)),
        "model.layers.0.self_attn.qkv_proj",
        "k_proj 0.004, q_proj 0.008",
    ),
    ("kv-scales-unstated", without_hf(lambda q: q.pop("kv_cache_scheme")), "model.layers.0.self_attn", "2 layers"),
    (
        "kv-scales-default",
        both(
            tensors(SHARD1, lambda t: [t.pop(n) for n in list(t) if n.endswith(("k_scale", "v_scale"))]),
            tensors(SHARD2, lambda t: [t.pop(n) for n in list(t) if n.endswith(("k_scale", "v_scale"))]),
        ),
        "config.json",
        "fp8",
    ),
    (
        "kv-scales-partial",
        tensors(SHARD1, lambda t: t.pop("model.layers.0.self_attn.k_proj.k_scale")),
        "model.layers.0.self_attn",
        "has no k_scale",
    ),
    ("kv-scales-partial", config(lambda c: c.update(num_hidden_layers=3)), "config.json", "3 layers, 2"),
    (
        "layers-missing",
        config(lambda c: c.update(num_hidden_layers=3)),
        "config.json",
        "3 layers, and no tensor of layer 2",
    ),
    (
        "layers-left-over",
        config(lambda c: c.update(num_hidden_layers=1)),
        "config.json",
        "1 layers, and tensors of layer 1",
    ),
    (
        "embedding-shape",
        config(lambda c: c.update(vocab_size=130)),
        "model.embed_tokens.weight",
        "128 x 64, and config.json",
    ),
    ("kv-scales-misplaced", tensors(SHARD1, _misplaced), "model.layers.0.self_attn.k_proj.k_scale", "does not exist"),
    ("kv-scales-one", _ones, "model.layers.0.self_attn.k_proj.k_scale", "all 4 KV scales are 1.0"),
    ("metadata-format", lambda p: save_file(load_file(p / SHARD1), p / SHARD1), SHARD1, "{}"),
    (
        "index-total-size",
        lambda p: edit_json(p / "model.safetensors.index.json", lambda i: i["metadata"].update(total_size=7)),
        "model.safetensors.index.json",
        "total_size is 7",
    ),
    ("tokenizer-absent", delete("tokenizer.json"), "c", "tokenizer.model"),
    ("chat-template-absent", delete("tokenizer_config.json"), "c", "no chat template"),
    ("generation-config-absent", delete("generation_config.json"), "c", "no generation_config.json"),
    ("companion-invalid", lambda p: (p / "tokenizer.json").write_text("{"), "tokenizer.json", "not valid JSON"),
    (
        "auto-map-target",
        config(lambda c: c.update(auto_map={"AutoConfig": "own.Config", "AutoModel": "a/b--other.Model"})),
        "config.json",
        "own.Config, and there is no own.py",
    ),
)


@pytest.mark.parametrize(("rule", "apply", "where", "detail"), BREAKS, ids=[f"{b[0]} {b[2]}" for b in BREAKS])
def test_rules(tmp_path: Path, rule: str, apply: Callable[[Path], Any], where: str, detail: str) -> None:
    path = write_checkpoint(tmp_path / "c", kv=True)
    apply(path)
    found = of(rule, lint(path))
    assert [finding.where for finding in found] == [where]
    assert detail in found[0].detail
    assert found[0].to_dict()["id"] == rule


def test_dimensions_are_noted(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    new = {
        n.replace("q_proj", "x_proj"): t[:48] if t.ndim else t for n, t in load_file(path / SHARD1).items() if Q in n
    }
    tensors(SHARD1, lambda t: t.update(new))(path)
    assert [(f.where, f.detail) for f in of("dimensions-odd", lint(path))] == [
        ("model.layers.0.self_attn.x_proj", "is 48 x 64")
    ]


def test_every_rule_is_exercised_here() -> None:
    covered = {damage.rule for damage in DAMAGES} | {rule for rule, *_ in BREAKS}
    # Broken by tests of their own here and in test_checkpoint.py, or only by a file that shrinks under the reader.
    covered |= {"scale-invalid", "dimensions-odd", "directory-missing", "tensor-unreadable"}
    covered |= {"fused-partly-excluded", "linear-shape", "nothing-quantized"}
    assert covered == set(RULES)


def test_fused_partly_excluded(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", sharded=False, configs=("config.json",))
    edit_tensors(path / "model.safetensors", lambda t: t.update({"m.qkv_proj.weight": torch.ones(4, 16).bfloat16()}))
    edit_json(path / "config.json", lambda c: c["quantization_config"].update(ignore=["lm_head", "m.q_proj"]))
    assert [f.where for f in of("fused-partly-excluded", lint(path))] == ["m.qkv_proj"]


def test_linear_shape_and_nothing_quantized(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", sharded=False)
    edit_tensors(path / "model.safetensors", lambda t: t.update({f"{Q}.weight": torch.ones(4, 5).to(torch.uint8)}))
    assert [f.where for f in of("linear-shape", lint(path))] == [f"{Q}.weight"]
    save_file({"model.embed_tokens.weight": torch.ones(4, 16)}, path / "model.safetensors", metadata={"format": "pt"})
    assert [f.where for f in of("nothing-quantized", lint(path))] == [str(path / "config.json")]
