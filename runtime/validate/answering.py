"""Put many prompts to an engine, a bounded number at once, and keep the answers as they come."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fp4pipe import console
from fp4pipe.errors import Fp4pipeError, UsageError
from fp4pipe.runtime.engine import Engine, SamplingParams
from fp4pipe.runtime.validate.gsm8k import Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote after one prompt."""

    key: str
    """Digest of the model, the sampling parameters and the prompt: what the answer depends on."""
    index: int
    text: str
    finish_reason: str
    tokens: int

    @property
    def truncated(self) -> bool:
        """It stopped at the length limit."""
        return self.finish_reason == "length"


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    model_id: str,
    in_flight: int = 64,
    store: Path | None = None,
    desc: str = "answering",
) -> dict[int, Answer]:
    """Answers by `Prompt.index`.

    Args:
        engine: Who answers; nothing else may run on it meanwhile.
        prompts: Texts, encoded as the tokenizer encodes any text (with a BOS token where it adds one).
        params: How to sample, the same for all.
        model_id: What tells this model and its numerics from others, for `store`.
        in_flight: Most prompts in the engine at once.
        store: JSON lines file that answers are appended to as they come; answers already there are not asked again.
        desc: Label of the progress bar.

    Raises:
        Fp4pipeError: The engine failed on a prompt; an error is never counted as a wrong answer.
        UsageError: A line of `store` other than a torn last one is not an answer.
    """
    keys = {prompt.index: _key(model_id, params, prompt.text) for prompt in prompts}
    known = _stored(store)
    done = {index: known[key] for index, key in keys.items() if key in known}
    todo = [prompt for prompt in prompts if prompt.index not in done]
    with console.progress(len(prompts), desc, "question") as bar:
        bar.update(len(done))
        for index, text, reason, tokens in _complete(engine, todo, params, in_flight):
            done[index] = Answer(keys[index], index, text, reason, tokens)
            if store is not None:
                with store.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(done[index])) + "\n")
            bar.update(1)
    return done


def _complete(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, in_flight: int
) -> Iterator[tuple[int, str, str, int]]:
    waiting = iter(prompts)
    running: dict[str, int] = {}
    texts: dict[str, list[str]] = {}
    try:
        while True:
            while len(running) < in_flight and (prompt := next(waiting, None)) is not None:
                request = engine.add(engine.tokenizer(prompt.text)["input_ids"], params)
                running[request.id], texts[request.id] = prompt.index, []
            if not running:
                return
            for output in engine.step():
                texts[output.request_id].append(output.text)
                if output.finish_reason is None:
                    continue
                index, text = running.pop(output.request_id), "".join(texts.pop(output.request_id))
                if output.finish_reason not in ("stop", "length"):
                    raise Fp4pipeError(
                        f"question {index} was not answered", because=output.error or output.finish_reason
                    )
                yield index, text, output.finish_reason, output.completion_tokens
    finally:
        for request_id in running:
            engine.abort(request_id)


def _key(model_id: str, params: SamplingParams, prompt: str) -> str:
    fields = json.dumps([model_id, asdict(params), prompt], sort_keys=True, default=str)
    return hashlib.sha256(fields.encode()).hexdigest()[:32]


def _stored(path: Path | None) -> Mapping[str, Answer]:
    if path is None:
        return {}
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:  # a run was killed while it wrote: drop the half line, so that the next answer starts its own
        os.truncate(path, len(whole))
    answers = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            stored = Answer(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} line {number} is not a stored answer", fix="remove the file") from error
        answers[stored.key] = stored
    return answers
