"""Loading calibration sets: sampling, packing, templates, formats and errors."""

import json
from pathlib import Path

import pytest
import torch

from fp4pipe.calib_data import CalibrationSet, load_calibration
from fp4pipe.errors import UsageError
from tests.tiny_models import SENTENCES, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def load(dataset, tokenizer, *, samples: int = 1000, seq_len: int = 64, seed: int = 0, **options) -> CalibrationSet:
    return load_calibration(str(dataset), tokenizer, samples=samples, seq_len=seq_len, seed=seed, **options)


def everything(calibration: CalibrationSet, tokenizer) -> str:
    return "".join(tokenizer.decode(sample) for sample in calibration.samples)


class TestBundled:
    def test_exact_shape(self, tokenizer) -> None:
        calibration = load("bundled", tokenizer, samples=16, seq_len=100)
        assert [sample.shape for sample in calibration.samples] == [(100,)] * 16
        assert {sample.dtype for sample in calibration.samples} == {torch.int64}
        assert calibration.num_tokens == 1600
        assert calibration.name == "bundled"

    def test_same_seed_same_ids(self, tokenizer) -> None:
        one, two, other = (load("bundled", tokenizer, samples=8, seed=seed) for seed in (3, 3, 4))
        assert one.digest == two.digest
        assert one.digest != other.digest

    def test_more_samples_only_append(self, tokenizer) -> None:
        few, many = (load("bundled", tokenizer, samples=count) for count in (4, 12))
        assert all(torch.equal(a, b) for a, b in zip(few.samples, many.samples[:4], strict=True))

    def test_never_padding(self, tokenizer) -> None:
        calibration = load("bundled", tokenizer, samples=10_000, seq_len=512)
        assert not any((sample == tokenizer.pad_token_id).any() for sample in calibration.samples)

    def test_any_prefix_has_every_kind(self, tokenizer) -> None:
        text = everything(load("bundled", tokenizer, samples=20, seq_len=512), tokenizer)
        assert "<|im_start|>user" in text
        assert "Answer:" in text
        assert any(mark in text for mark in ("return ", "SELECT", "import "))
        assert not text.isascii()

    def test_too_small_warns_and_never_repeats(self, tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
        calibration = load("bundled", tokenizer, samples=10_000, seq_len=512)
        said = capsys.readouterr().err
        assert f"{len(calibration.samples)} samples ({calibration.num_tokens} tokens) where 10000 x 512" in said
        assert len({sample.numpy().tobytes() for sample in calibration.samples}) == len(calibration.samples)

    def test_enough_for_the_usual_calibration(self, tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
        assert len(load("bundled", tokenizer, samples=128, seq_len=512).samples) == 128
        assert capsys.readouterr().err == ""


class TestPacking:
    def test_records_are_set_apart_by_a_blank_line(self, tokenizer, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": sentence} for sentence in SENTENCES])
        calibration = load(path, tokenizer, seq_len=4096)
        assert len(calibration.samples) == 1
        text = everything(calibration, tokenizer)
        assert len(text) == sum(map(len, SENTENCES)) + 2 * (len(SENTENCES) - 1)
        assert all(sentence in text for sentence in SENTENCES)

    def test_bos_sets_records_apart_where_the_tokenizer_has_one(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        tokenizer.add_bos_token = True
        assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one two"}, {"text": "three four"}])
        (sample,) = load(path, tokenizer, seq_len=100).samples
        assert (sample == tokenizer.bos_token_id).sum() == 2
        assert "\n" not in tokenizer.decode(sample)

    def test_what_is_cut_off_comes_after_all_had_their_turn(self, tokenizer, tmp_path: Path) -> None:
        long = " ".join(f"{number}" for number in range(100, 400))
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": long}, {"text": "z" * 40}])
        calibration = load(path, tokenizer, seq_len=40)
        text = [tokenizer.decode(sample) for sample in calibration.samples]
        assert any("zzz" in sample for sample in text[:3])
        assert sum(sample.count("399") for sample in text) == 1
        rest = load(path, tokenizer, seq_len=40, samples=2)
        assert [len(sample) for sample in rest.samples] == [40, 40]

    def test_cut_records_open_with_bos_again(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        tokenizer.add_bos_token = True
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": "word " * 300}])
        calibration = load(path, tokenizer, seq_len=50)
        assert all(sample[0] == tokenizer.bos_token_id for sample in calibration.samples)

    @pytest.mark.parametrize("seq_len", [1, 2, 3])
    def test_tiny_samples_end(self, seq_len: int, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        tokenizer.add_bos_token = True
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a b c d"}])
        calibration = load(path, tokenizer, samples=100_000, seq_len=seq_len)
        assert 0 < len(calibration.samples) < 20

    def test_batches_hold_equal_lengths(self) -> None:
        lengths = [5, 5, 3, 5, 3, 5, 5, 1]
        samples = [[7 * i + j for j in range(length)] for i, length in enumerate(lengths)]
        batches = list(CalibrationSet.from_ids("x", samples).batches(3))
        assert [tuple(batch.shape) for batch in batches] == [(3, 5), (2, 5), (2, 3), (1, 1)]
        assert sorted(row.tolist() for batch in batches for row in batch) == sorted(samples)
        with pytest.raises(ValueError, match="batch_size"):
            next(CalibrationSet.from_ids("x", samples).batches(0))

    def test_digest_tells_boundaries(self) -> None:
        sets = [[[1, 2, 3]], [[1, 2], [3]], [[1], [2, 3]], [[3, 2, 1]]]
        assert len({CalibrationSet.from_ids("x", samples).digest for samples in sets}) == 4


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
ANSWER = {"role": "assistant", "content": "Hello!"}


class TestDialogues:
    def test_through_the_template(self, tokenizer, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [*TURNS, ANSWER]}])
        text = everything(load(path, tokenizer), tokenizer)
        assert text == tokenizer.apply_chat_template([*TURNS, ANSWER], tokenize=False)
        (sample,) = load(path, tokenizer).samples
        assert tokenizer.convert_tokens_to_ids("<|im_start|>") in sample.tolist()

    def test_open_question_prompts_the_assistant(self, tokenizer, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
        assert everything(load(path, tokenizer), tokenizer).endswith("<|im_start|>assistant\n")

    @pytest.mark.parametrize("template", [None, "kept"])
    def test_plain_without_template_or_when_asked(self, template: str | None, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        if template is None:
            tokenizer.chat_template = None
        path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [*TURNS, ANSWER]}])
        text = everything(load(path, tokenizer, chat_template=template is None), tokenizer)
        assert text == "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello!"

    def test_template_without_system_role(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
            "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        )
        path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [*TURNS, ANSWER]}])
        text = everything(load(path, tokenizer), tokenizer)
        assert text == "[user] Be brief.\n\nHi\n[assistant] Hello!\n"

    def test_other_spellings(self, tokenizer, tmp_path: Path) -> None:
        share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWER]
        for row in ({"conversations": share}, {"messages": parts}, {"question": "Hi", "answer": "Hello!"}):
            path = write_jsonl(tmp_path / "a.jsonl", [row])
            text = everything(load(path, tokenizer), tokenizer)
            assert text == tokenizer.apply_chat_template([TURNS[1], ANSWER], tokenize=False)


class TestFiles:
    def test_columns_by_preference_or_by_name(self, tokenizer, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "a.jsonl", [{"note": "in the note", "text": "in the text", "prompt": "asked"}])
        assert everything(load(path, tokenizer), tokenizer) == "in the text"
        assert everything(load(path, tokenizer, text_column="note"), tokenizer) == "in the note"

    def test_txt(self, tokenizer, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        paragraphs = [f"Paragraph {number}: {SENTENCES[number % 8]}" for number in range(400)]
        path.write_bytes(("\ufeff" + "\r\n\r\n".join(paragraphs)).encode())
        text = everything(load(path, tokenizer, samples=100_000, seq_len=100), tokenizer)
        assert sum(f"Paragraph {number}:" in text for number in range(400)) > 350  # cuts may fall into a label
        assert "\ufeff" not in text
        first, second = (load(path, tokenizer, samples=3, seed=seed) for seed in (0, 1))
        assert first.digest != second.digest

    def test_parquet(self, tokenizer, tmp_path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        path = tmp_path / "a.parquet"
        rows = [{"messages": [TURNS[1], ANSWER], "score": 1.5}, {"messages": None, "score": 2.0}]
        parquet.write_table(pa.Table.from_pylist(rows), path)
        expected = tokenizer.apply_chat_template([TURNS[1], ANSWER], tokenize=False)
        assert everything(load(path, tokenizer), tokenizer) == expected
        with pytest.raises(UsageError, match="no column 'text'; because its columns are: messages, score"):
            load(path, tokenizer, text_column="text")

    def test_shared_data(self, tokenizer, shared_data: Path) -> None:
        gsm8k = load(shared_data / "gsm8k/train.jsonl", tokenizer, samples=8, seq_len=256)
        assert gsm8k.num_tokens == 8 * 256
        assert "<|im_start|>user" in everything(gsm8k, tokenizer)
        assert load(shared_data / "text/tinyshakespeare.txt", tokenizer, samples=8).num_tokens == 8 * 64


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "content", "error"),
        [
            ("a.jsonl", b"", "yields no sample"),
            ("a.jsonl", b'{"text": "  "}\n', "yields no sample"),
            (
                "a.jsonl",
                b'{"text": "ok"}\n\n{"text": oops}\n',
                r"a\.jsonl:3: not JSON; because Expecting value at column 10",
            ),
            ("a.jsonl", b'{"text": "ok"}\n[1, 2]\n', r"a\.jsonl:2: a JSON object is expected, not list"),
            ("a.jsonl", b'{"body": "x", "id": 1}\n', r"a\.jsonl:1 has no column known .* its columns are: body, id"),
            ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl:1: 'text' is int"),
            ("a.jsonl", b'{"messages": ["hi"]}\n', r"a\.jsonl:1: a message must be"),
            ("a.jsonl", b'{"text": "caf\xe9"}\n', "is not UTF-8 text; because byte 13 is 0xe9"),
            ("a.txt", b"\x80abc", "is not UTF-8 text; because byte 0 is 0x80"),
            ("a.txt", b"\n\n \n", "yields no sample"),
            ("a.parquet", b"PAR1 not really", "not a readable parquet file"),
            ("a.csv", b"text\nhello\n", r"is not one of \.jsonl, \.txt, \.parquet"),
        ],
    )
    def test_bad_files(self, name: str, content: bytes, error: str, tokenizer, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=error):
            load(tmp_path / name, tokenizer)

    def test_missing_file_and_directory(self, tokenizer, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"nowhere\.jsonl does not exist"):
            load(tmp_path / "nowhere.jsonl", tokenizer)
        with pytest.raises(UsageError, match="is a directory"):
            load(tmp_path, tokenizer)

    def test_split_of_a_file(self, tokenizer, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
        with pytest.raises(UsageError, match="has no splits"):
            load(path, tokenizer, split="train")
        (tmp_path / "a.txt").write_text("x")
        with pytest.raises(UsageError, match="is plain text and has no column"):
            load(tmp_path / "a.txt", tokenizer, text_column="text")

    def test_column_of_the_bundled_set(self, tokenizer) -> None:
        with pytest.raises(UsageError, match="bundled set has neither splits nor columns"):
            load("bundled", tokenizer, split="train")

    @pytest.mark.parametrize("bad", [{"samples": 0}, {"seq_len": 0}])
    def test_nonsense_sizes(self, bad: dict[str, int], tokenizer) -> None:
        with pytest.raises(UsageError, match="samples >= 1 and seq_len >= 1"):
            load("bundled", tokenizer, **bad)


class TestHub:
    def test_unreachable(self, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        def refuse(*args, **kwargs):
            raise ConnectionError("Couldn't reach the Hub\nand more")

        monkeypatch.setattr(datasets, "load_dataset", refuse)
        with pytest.raises(UsageError, match="dataset org/set cannot be opened; because Couldn't reach the Hub; try"):
            load("org/set", tokenizer)

    def test_streams_a_split(self, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        rows = datasets.Dataset.from_list([{"text": sentence, "n": i} for i, sentence in enumerate(SENTENCES)])
        asked = []

        def open_it(name, config, streaming):
            asked.append((name, config, streaming))
            return {"validation": rows.to_iterable_dataset(), "train": rows.to_iterable_dataset()}

        monkeypatch.setattr(datasets, "load_dataset", open_it)
        calibration = load("org/set:part", tokenizer, samples=2, seq_len=32)
        assert asked == [("org/set", "part", True)]
        assert calibration.num_tokens == 64
        assert calibration.name == "org/set:part"
        assert load("org/set", tokenizer, seed=1).digest != load("org/set", tokenizer, seed=2).digest
        with pytest.raises(UsageError, match="no split 'test'; because its splits are: validation, train"):
            load("org/set", tokenizer, split="test")
        with pytest.raises(UsageError, match="no column 'body'; because its columns are: text, n"):
            load("org/set", tokenizer, text_column="body")

    @pytest.mark.hub
    def test_real(self, tokenizer) -> None:
        assert load("openai/gsm8k:main", tokenizer, samples=2, seq_len=32).num_tokens == 64
