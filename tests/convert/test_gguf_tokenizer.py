"""Tokenizers built from GGUF metadata split, merge and decode as the models' own do."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from fp4pipe.convert.gguf import gguf_to_hf
from fp4pipe.convert.gguf_file import GGUFFile
from fp4pipe.convert.gguf_pretokenizers import RULES, build_pre_tokenizer
from fp4pipe.convert.gguf_tokenizer import GGUFTokenizer, build_tokenizer
from fp4pipe.errors import SourceError
from tests.convert.gguf_writing import CONTROL, make_model, replace, write_gguf, write_tokenizer
from tests.tiny_models import SENTENCES, make_tokenizer

TEXTS = [
    *SENTENCES,
    "",
    " ",
    "  two  spaces\t\ttabs\r\n\r\n   and lines  \n\n\n",
    "1234567 3.14 1,000,000 ½ ٣٤٥ 12ab34",
    "DON'T can't I'LL it's we'Re",
    "naïve café Straße Привет мир 你好，世界 こんにちは 안녕하세요 مرحبا नमस्ते",
    "🙂👩‍👩‍👧 ₿ \u00a0\u2003 \x00\x01\x7f",
    "camelCase HTTPServer snake_case $x += y->z[0]; // comment",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def open_with(path: Path, metadata, *, arch: str = "llama") -> GGUFTokenizer:
    """A GGUF of metadata alone, and the tokenizer built from it."""
    writer = GGUFWriter(path / "t.gguf", arch)
    metadata(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return build_tokenizer(GGUFFile(path / "t.gguf"))


def bpe(rule: str, **changes):
    """Metadata of the tiny byte-level BPE, split by `rule`, with `tokenizer.ggml` keys changed (None removes one)."""

    def write(writer: GGUFWriter) -> None:
        write_tokenizer(writer, make_tokenizer().backend_tokenizer, rule)
        for key, value in changes.items():
            replace(writer, f"tokenizer.ggml.{key}", value)

    return write


@pytest.mark.parametrize("pre", sorted(RULES))
def test_round_trip_of_every_rule(pre: str, tmp_path: Path) -> None:
    backend = open_with(tmp_path, bpe(pre)).backend
    again = Tokenizer.from_str(backend.to_str())
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert backend.decode(ids, skip_special_tokens=False) == text
        assert again.encode(text).ids == ids


def pieces(pre: str, text: str) -> list[str]:
    """What `pre` splits `text` into."""
    _, splitter = build_pre_tokenizer(RULES[pre])
    return [text[start:stop] for _, (start, stop) in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I've 1234 x  y", ["I", "'ve", " 1234", " x", " ", " y"]),
        ("smollm", "in 1234 x", ["in", " ", "1", "2", "3", "4", " x"]),
        ("qwen2", "in 1234 X'LL\n\n  y", ["in", " ", "1", "2", "3", "4", " X", "'LL", "\n\n", " ", " y"]),
        ("llama-bpe", "in 1234567 (x)\n", ["in", " ", "123", "456", "7", " (", "x", ")\n"]),
        ("falcon", "a,b 12345!!", ["a", ",", "b", " ", "123", "45", "!!"]),
        ("tekken", "HTTPServer 42", ["HTTPServer", " ", "4", "2"]),
        ("gpt-4o", "camelCase don't 12345", ["camel", "Case", " don't", " ", "123", "45"]),
        ("deepseek-v3", "x=12345 你好b", ["x", "=", "123", "45", " ", "你好", "b"]),
        ("deepseek-coder", "x = 42;\ny", ["x", " = ", "4", "2", ";", "\n", "y"]),
        ("deepseek-llm", "x 42 ж!\n", ["x", " ", "4", "2", " ж", "!", "\n"]),
    ],
)
def test_splits(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(pre, text) == expected


def test_qwen2_composes(tmp_path: Path) -> None:
    backend = open_with(tmp_path, bpe("qwen2")).backend
    assert backend.encode("e\u0301").ids == backend.encode("é").ids
    assert open_with(tmp_path, bpe("smollm")).backend.decode(backend.encode("e\u0301").ids) == "é"


def test_special_tokens(tmp_path: Path) -> None:
    built = open_with(tmp_path, bpe("gpt-2"))
    assert built.special == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    assert built.ids == {"bos_token_id": 1, "eos_token_id": 4, "pad_token_id": 0}
    assert built.end_ids == [4, 2]
    ids = built.backend.encode("<|im_start|>a<|im_end|>").ids
    assert (ids[0], ids[-1]) == (3, 4)
    assert built.backend.decode(ids) == "a"


def test_padding_rows_are_no_tokens(tmp_path: Path) -> None:
    types = [3] * 5 + [1] * 500 + [5] * 7
    backend = open_with(tmp_path, bpe("gpt-2", token_type=types, merges=["h e", "r e"])).backend
    assert backend.get_vocab_size() == 505


def test_bos_as_the_file_or_the_rule_says(tmp_path: Path) -> None:
    def starts_with_bos(pre: str, **changes) -> bool:
        return open_with(tmp_path, bpe(pre, **changes)).backend.encode("a").ids[0] == 1

    assert not starts_with_bos("llama-bpe")
    assert starts_with_bos("llama-bpe", add_bos_token=None)
    assert starts_with_bos("gpt-2", add_bos_token=True)
    assert not starts_with_bos("gpt-2", add_bos_token=None)
    assert "bos_token" not in open_with(tmp_path, bpe("qwen2")).special
    assert "bos_token" in open_with(tmp_path, bpe("qwen2", add_bos_token=True)).special
    pair = open_with(tmp_path, bpe("gpt-2", add_bos_token=True)).backend.encode("a", "b")
    assert pair.ids.count(1) == 2


def test_eos_is_appended_when_the_file_says_so(tmp_path: Path) -> None:
    def write(writer: GGUFWriter) -> None:
        bpe("gpt-2")(writer)
        writer.add_add_eos_token(True)

    assert open_with(tmp_path, write).backend.encode("a").ids[-1] == 4


def test_user_defined_tokens_stay_in_the_text(tmp_path: Path) -> None:
    types = [3, 3, 3, 4, 3] + [1] * 507
    built = open_with(tmp_path, bpe("gpt-2", token_type=types))
    ids = built.backend.encode("a<|im_start|>b").ids
    assert 3 in ids
    assert built.backend.decode(ids, skip_special_tokens=True) == "a<|im_start|>b"


def test_additional_chat_templates(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")

    gguf_to_hf(write_gguf(tmp_path / "m.gguf", make_model("qwen2"), metadata=add), tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template["tool_use"] == "{{ tools }}"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3"])
@pytest.mark.parametrize("bos", [True, False])
def test_loaded_by_transformers_encodes_alike(family: str, bos: bool, tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        make_model(family),
        metadata=lambda writer: bpe("qwen2", add_bos_token=bos)(writer),
    )
    gguf_to_hf(path, tmp_path / "hf")
    loaded, built = AutoTokenizer.from_pretrained(tmp_path / "hf"), build_tokenizer(GGUFFile(path))
    for text in TEXTS:
        assert loaded(text).input_ids == built.backend.encode(text).ids
        assert loaded.decode(loaded(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pre": None}, "no pre-tokenizer"),
        ({"pre": "klingon"}, "unknown pre-tokenizer 'klingon'"),
        ({"model": "rwkv"}, "tokenizer 'rwkv' cannot be built"),
        ({"model": None}, "metadata tokenizer.ggml.model is missing"),
        ({"tokens": None}, "metadata tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "metadata tokenizer.ggml.merges is missing"),
        ({"merges": ["t h", "th ẞ"]}, "merge 1 'th ẞ' does not join"),
        ({"merges": ["th"]}, "merge 0 'th' does not join"),
        ({"token_type": [1, 1, 1]}, "512 tokens but 3 token types"),
        ({"eos_token_id": 600}, "eos_token_id is 600, outside"),
    ],
)
def test_bad_metadata(changes, error: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=error) as caught:
        open_with(tmp_path, bpe("gpt-2", **changes))
    assert "t.gguf" in str(caught.value)


def test_duplicate_token(tmp_path: Path) -> None:
    def write(writer: GGUFWriter) -> None:
        bpe("gpt-2")(writer)
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[7] = "!"
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[8] = "!"

    with pytest.raises(SourceError, match="token '!' appears twice"):
        open_with(tmp_path, write)


def spm(prefix: bool = True, arch_bos: bool | None = None):
    """Metadata of a small SentencePiece BPE: control and byte tokens, then trained pieces, scored by merge order."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=220, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    letters = sorted(piece for piece in model["vocab"] if len(piece) == 1)
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *merged, *letters, "<|im_end|>"]
    count = len(merged) + len(letters)
    scores = [0.0] * 259 + [-float(rank) for rank in range(count)] + [0.0]

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * count + [3])
        writer.add_add_space_prefix(prefix)
        if arch_bos is not None:
            writer.add_add_bos_token(arch_bos)

    return write, dict(zip(tokens, scores, strict=True))


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own rule: again and again join the neighbours whose union has the best score, leftmost first."""
    parts = list(text)
    while True:
        best = max(
            ((scores[a + b], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores),
            default=None,
        )
        if best is None:
            return parts
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_sentencepiece_merges_like_sentencepiece(tmp_path: Path) -> None:
    write, scores = spm(prefix=False, arch_bos=False)
    backend = open_with(tmp_path, write).backend
    rng = random.Random(0)
    words = " ".join(SENTENCES).split(" ")
    for _ in range(200):
        text = " ".join(rng.choice(words)[: rng.randint(1, 9)] for _ in range(6))
        assert backend.encode(text).tokens == sentencepiece(text.replace(" ", "▁"), scores)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_round_trip(prefix: bool, tmp_path: Path) -> None:
    write, _ = spm(prefix)
    built = open_with(tmp_path, write)
    assert built.special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert built.end_ids == [2, built.backend.token_to_id("<|im_end|>")]
    for text in TEXTS:
        if "<|im_start|>" in text:
            continue
        encoded = built.backend.encode(text)
        assert encoded.ids[0] == 1  # bos, SentencePiece models' default
        assert 0 not in encoded.ids  # bytes stand in for what has no piece
        assert built.backend.decode(encoded.ids) == text
    assert built.backend.encode("the").tokens[1].startswith("▁" if prefix else "t")


def test_phi3_markers_swallow_whitespace(tmp_path: Path) -> None:
    write, _ = spm()
    backend = open_with(tmp_path, write, arch="phi3").backend
    assert backend.encode("<|im_end|>\n the").ids == backend.encode("<|im_end|>the").ids


def test_control_tokens_of_the_tiny_vocabulary_come_first() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.convert_tokens_to_ids(list(CONTROL)) == list(range(len(CONTROL)))
