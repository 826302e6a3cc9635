"""Prompts, grading, data files, and asking an engine with resume."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp4pipe.errors import Fp4pipeError, UsageError
from fp4pipe.runtime.engine import SamplingParams
from fp4pipe.runtime.validate.answering import answer
from fp4pipe.runtime.validate.gsm8k import Item, Prompt, grade, load_gsm8k, make_prompts, tally

DATA = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs GSM8K in {DATA}")

TRAIN = [Item(f"train {i}?", f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}") for i in range(20)]
TEST = [Item(f"test {i}?", f"It is <<{i}={i}>>{i}.\n#### {i}") for i in range(12)]


def test_our_prompts_take_examples_from_train_only() -> None:
    prompts = make_prompts(TRAIN, TEST, shots=3, seed=1)
    assert sorted(p.index for p in prompts) == list(range(12))
    for prompt in prompts:
        assert prompt.text.count("Question: train") == 3
        assert prompt.text.endswith(f"\n\nQuestion: test {prompt.index}?\nAnswer:")
        assert prompt.text.count("Question: test") == 1
        assert "<<" not in prompt.text
        assert "\n#### " in prompt.text
    preambles = {p.text.partition("Question: test")[0] for p in prompts}
    assert len(preambles) == 1  # one prefix, so the prefix cache serves all


def test_a_longer_run_contains_the_shorter_one() -> None:
    short, long = (make_prompts(TRAIN, TEST, questions=n, seed=5) for n in (4, 9))
    assert long[:4] == short
    assert make_prompts(TRAIN, TEST, questions=4, seed=6) != short


def test_sglang_prompts_are_its_own() -> None:
    prompts = make_prompts(TRAIN, TEST, style="sglang", questions=7)
    preamble = "".join(f"Question: {i.question}\nAnswer: {i.answer}\n\n" for i in TEST[:5])
    assert [p.text for p in prompts] == [f"{preamble}Question: {i.question}\nAnswer:" for i in TEST[:7]]
    assert make_prompts(TRAIN, TEST, style="sglang", questions=1, shots=0)[0].text == "Question: test 0?\nAnswer:"


@pytest.mark.parametrize(("kwargs", "flag"), [({"questions": 13}, "--questions 13"), ({"shots": 21}, "--shots 21")])
def test_too_many(kwargs: dict[str, int], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        make_prompts(TRAIN, TEST, **kwargs)


def test_grades() -> None:
    truth = "so 1,000\n#### 1,000"
    assert grade("ours", truth, "x\n#### 1000.00\n", truncated=False) == "right"
    assert grade("ours", truth, "x\n#### 100", truncated=False) == "wrong"
    assert grade("ours", truth, "the answer is 1000", truncated=False) == "invalid"
    assert grade("ours", truth, "the answer is 1000", truncated=True) == "truncated"
    assert grade("ours", truth, "#### 100", truncated=True) == "truncated"
    assert grade("ours", truth, "#### 1000\n\nFurthermore", truncated=True) == "right"
    assert grade("sglang", truth, "the answer is 1000", truncated=True) == "right"
    assert grade("sglang", truth, "no idea", truncated=False) == "invalid"
    assert grade("sglang", "#### -3", "it is 3", truncated=False) == "right"  # SGLang's parser drops signs
    counts = tally(["right", "wrong", "right", "invalid", "truncated"])
    assert counts == {"right": 2, "wrong": 1, "invalid": 1, "truncated": 1, "questions": 5, "accuracy": 0.4}


@needs_data
def test_the_data_set() -> None:
    train, test = load_gsm8k(DATA)
    assert (len(train), len(test)) == (7473, 1319)
    assert load_gsm8k(DATA / "test.jsonl") == (train, test)
    prompts = make_prompts(train, test, questions=3)
    assert all(p.text.count("Question: ") >= 9 for p in prompts)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2 is no GSM8K item"), ('{"question": "q"}', "line 2 is no"), ("[]", "line 2 is no")],
)
def test_bad_data_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = json.dumps({"question": "q", "answer": "#### 1"})
    (tmp_path / "train.jsonl").write_text(good + "\n" + line + "\n")
    (tmp_path / "test.jsonl").write_text(good + "\n")
    with pytest.raises(UsageError, match=message):
        load_gsm8k(tmp_path)


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.jsonl cannot be read"):
        load_gsm8k(tmp_path)


def test_a_label_without_a_number_is_refused(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps({"question": "q", "answer": "seven"}) + "\n")
    with pytest.raises(UsageError, match="without a number"):
        load_gsm8k(tmp_path)


class ScriptedEngine:
    """Answers two pieces a request, the request that has waited longest last; records how many ran at once."""

    def __init__(self, fail_on: int | None = None) -> None:
        self.open: list[tuple[str, int, int]] = []
        self.asked: list[int] = []
        self.most = 0
        self.fail_on = fail_on

    def tokenizer(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(text)]}

    def add(self, prompt_ids: list[int], params: SamplingParams) -> Any:
        self.asked.append(prompt_ids[0])
        self.open.append((f"r{len(self.asked)}", prompt_ids[0], 0))
        self.most = max(self.most, len(self.open))
        return SimpleNamespace(id=self.open[-1][0])

    def abort(self, request_id: str) -> None:
        self.open = [entry for entry in self.open if entry[0] != request_id]

    def step(self) -> list[Any]:
        request, number, pieces = self.open.pop()
        last = pieces == 1
        if not last:
            self.open.append((request, number, 1))
        reason = None if not last else "error" if number == self.fail_on else "length" if number % 2 else "stop"
        text = f"####\u2028{number}" if last else "so "
        return [
            SimpleNamespace(
                request_id=request, text=text, finish_reason=reason, completion_tokens=2, error="out of ink"
            )
        ]


PROMPTS = [Prompt(i, str(i), f"#### {i}") for i in (3, 1, 4, 2, 9)]
PARAMS = SamplingParams(max_tokens=8)


def test_answers_are_complete_and_bounded() -> None:
    engine = ScriptedEngine()
    answers = answer(engine, PROMPTS, PARAMS, model_id="m", in_flight=2)  # type: ignore[arg-type]
    assert engine.most == 2
    assert {i: a.text for i, a in answers.items()} == {p.index: f"so ####\u2028{p.index}" for p in PROMPTS}
    assert answers[3].truncated
    assert not answers[2].truncated


def test_resume_asks_only_what_is_missing(tmp_path: Path) -> None:
    store = tmp_path / "answers" / "m.jsonl"
    first = answer(ScriptedEngine(), PROMPTS[:3], PARAMS, model_id="m", store=store)  # type: ignore[arg-type]
    with store.open("a") as file:
        file.write('{"key": "torn')  # as kill -9 leaves it
    engine = ScriptedEngine()
    answers = answer(engine, PROMPTS, PARAMS, model_id="m", store=store)  # type: ignore[arg-type]
    assert sorted(engine.asked) == [2, 9]
    assert {i: answers[i] for i in first} == first
    assert len(store.read_text().splitlines()) == 5
    for changed in ({"model_id": "other"}, {"params": SamplingParams(max_tokens=9)}):
        engine = ScriptedEngine()
        answer(engine, PROMPTS, **({"params": PARAMS, "model_id": "m"} | changed), store=store)  # type: ignore[arg-type]
        assert len(engine.asked) == len(PROMPTS)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "notes.jsonl"
    store.write_text('{"hello": 1}\n')
    with pytest.raises(UsageError, match="line 1 is not a stored answer"):
        answer(ScriptedEngine(), PROMPTS, PARAMS, model_id="m", store=store)  # type: ignore[arg-type]


def test_an_error_is_not_a_wrong_answer() -> None:
    engine = ScriptedEngine(fail_on=4)
    with pytest.raises(Fp4pipeError, match=r"question 4 was not answered.*out of ink"):
        answer(engine, PROMPTS, PARAMS, model_id="m")  # type: ignore[arg-type]
    assert engine.open == []  # nothing of the run is left in the engine
