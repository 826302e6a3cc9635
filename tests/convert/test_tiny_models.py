"""The tiny checkpoints other tests stand on are ordinary Hugging Face directories."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_models import FAMILIES, SENTENCES, make_tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_runs_and_tokenizes(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path / family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) <= model.config.vocab_size
    assert model.dtype == torch.bfloat16
    for sentence in SENTENCES:
        ids = tokenizer(sentence, return_tensors="pt").input_ids
        assert tokenizer.decode(ids[0]) == sentence
    with torch.no_grad():
        assert model(ids, use_cache=False).logits.float().std() > 0.1


def test_sharded(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "m", max_shard_size="100KB")
    assert (path / "model.safetensors.index.json").exists()
    assert len(list(path.glob("*.safetensors"))) > 1
