"""The official client against the server: what it gets is what the engine gives."""

import asyncio

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from fp4pipe.runtime.engine import Engine, SamplingParams

PROMPTS = ["The quick brown fox", "Le petit chat dort sur la chaise près", "def add(left, right):", "12 - 5 ="]
MESSAGES = [{"role": "user", "content": "Where are you going?"}]
IDS = {"return_token_ids": True}


def chat_ids(engine: Engine, messages=MESSAGES) -> list[int]:
    text = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return engine.tokenizer.encode(text, add_special_tokens=False)


def test_a_completion_is_the_offline_one(client: OpenAI, offline: Engine) -> None:
    (want,) = offline.generate(PROMPTS[:1], SamplingParams(max_tokens=30))
    got = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=30, temperature=0, extra_body=IDS)
    choice = got.choices[0]
    assert (choice.text, choice.token_ids, choice.finish_reason) == (want.text, want.token_ids, want.finish_reason)
    assert (got.object, got.model) == ("text_completion", "tiny")
    assert got.id.startswith("cmpl-")
    assert got.usage.prompt_tokens == want.prompt_tokens
    assert got.usage.completion_tokens == len(want.token_ids)
    assert got.usage.total_tokens == want.prompt_tokens + len(want.token_ids)


def test_a_streamed_completion_is_the_same_in_pieces(client: OpenAI, offline: Engine) -> None:
    (want,) = offline.generate(PROMPTS[:1], SamplingParams(max_tokens=30))
    chunks = list(
        client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=30, temperature=0, stream=True, extra_body=IDS
        )
    )
    assert "".join(c.choices[0].text for c in chunks) == want.text
    assert [t for c in chunks for t in c.choices[0].token_ids] == want.token_ids
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [want.finish_reason]
    assert all(c.usage is None for c in chunks)
    assert len({c.id for c in chunks}) == 1


def test_usage_comes_last_when_asked_for(client: OpenAI, offline: Engine) -> None:
    for create, body in [
        (client.completions.create, {"prompt": PROMPTS[0]}),
        (client.chat.completions.create, {"messages": MESSAGES}),
    ]:
        chunks = list(
            create(
                model="tiny", max_tokens=5, temperature=0, stream=True, stream_options={"include_usage": True}, **body
            )
        )
        assert all(c.usage is None and c.choices for c in chunks[:-1])
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 5


def test_a_chat_is_the_offline_one(client: OpenAI, offline: Engine) -> None:
    prompt = chat_ids(offline)
    (want,) = offline.generate([prompt], SamplingParams(max_tokens=30))
    got = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=30, temperature=0, extra_body=IDS
    )
    choice = got.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert choice.token_ids == want.token_ids
    assert (got.object, got.usage.prompt_tokens) == ("chat.completion", len(prompt))
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Where are "}, {"type": "text", "text": "you going?"}]}
    ]
    same = client.chat.completions.create(model="tiny", messages=parts, max_tokens=30, temperature=0)
    assert same.choices[0].message.content == want.text


def test_a_streamed_chat_says_the_role_first_and_the_reason_last(client: OpenAI, offline: Engine) -> None:
    (want,) = offline.generate([chat_ids(offline)], SamplingParams(max_tokens=30))
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=30, temperature=0, stream=True, extra_body=IDS
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want.text
    assert [t for c in chunks for t in getattr(c.choices[0], "token_ids", None) or []] == want.token_ids
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [want.finish_reason]
    assert chunks[0].object == "chat.completion.chunk"


def test_an_unlimited_chat_fills_the_context(client: OpenAI) -> None:
    got = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert got.usage.total_tokens == 512
    assert got.choices[0].finish_reason == "length"


def test_many_at_once_streaming_or_not_each_get_their_own(url: str, offline: Engine) -> None:
    jobs = [
        (
            prompt,
            {"max_tokens": 10 + 3 * i, "temperature": 1.0 if i % 3 == 2 else 0.0, "seed": i, "stream": bool(i % 2)},
        )
        for i, prompt in enumerate(PROMPTS * 6)
    ]
    want = [
        offline.generate([p], SamplingParams(max_tokens=o["max_tokens"], temperature=o["temperature"], seed=o["seed"]))[
            0
        ]
        for p, o in jobs
    ]

    async def run() -> list[tuple[str, list[int]]]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one(prompt: str, options: dict) -> tuple[str, list[int]]:
                got = await client.completions.create(model="tiny", prompt=prompt, extra_body=IDS, **options)
                if not options["stream"]:
                    return got.choices[0].text, got.choices[0].token_ids
                text, ids = "", []
                async for chunk in got:
                    text += chunk.choices[0].text
                    ids += chunk.choices[0].token_ids
                return text, ids

            return await asyncio.gather(*(one(p, o) for p, o in jobs))

    assert asyncio.run(run()) == [(c.text, c.token_ids) for c in want]


def test_all_forms_of_prompt(client: OpenAI, offline: Engine) -> None:
    want = [c.text for c in offline.generate(PROMPTS[:2], SamplingParams(max_tokens=8))]
    ids = [offline.tokenizer.encode(p) for p in PROMPTS[:2]]
    for prompt, texts in [(PROMPTS[0], want[:1]), (PROMPTS[:2], want), (ids[0], want[:1]), (ids, want)]:
        got = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
        assert [c.text for c in got.choices] == texts
        assert [c.index for c in got.choices] == list(range(len(texts)))


def test_n_choices_of_each_prompt_are_seeded_apart(client: OpenAI, offline: Engine) -> None:
    got = client.completions.create(model="tiny", prompt=PROMPTS[:2], n=3, max_tokens=8, temperature=1, seed=7)
    want = [
        offline.generate([p], SamplingParams(max_tokens=8, temperature=1, seed=7 + i))[0]
        for p in PROMPTS[:2]
        for i in range(3)
    ]
    assert [c.text for c in got.choices] == [c.text for c in want]
    assert got.usage.prompt_tokens == want[0].prompt_tokens + want[3].prompt_tokens
    chunks = list(
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, max_tokens=4, stream=True, temperature=0)
    )
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i) for i in (0, 1)]
    assert texts[0] == texts[1]


def test_stop_strings_are_cut_off_and_never_streamed(client: OpenAI, offline: Engine) -> None:
    (full,) = offline.generate(PROMPTS[:1], SamplingParams(max_tokens=30))
    stop = full.text[6:9]
    want = full.text[: full.text.index(stop)]
    for stops in (stop, ["never there", stop]):
        got = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=30, temperature=0, stop=stops)
        assert (got.choices[0].text, got.choices[0].finish_reason) == (want, "stop")
        assert got.choices[0].stop_reason == stop
    chunks = list(
        client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=30, temperature=0, stop=stop, stream=True)
    )
    assert "".join(c.choices[0].text for c in chunks) == want


def test_echo_and_logprobs_score_a_prompt(client: OpenAI, offline: Engine) -> None:
    ids = offline.tokenizer.encode(PROMPTS[1])
    (logits,) = offline.prompt_logits([ids])
    want = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()
    for stream in (False, True):
        got = client.completions.create(
            model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=2, temperature=0, stream=stream
        )
        if stream:
            (got,) = list(got)
        report = got.choices[0].logprobs
        assert got.choices[0].text == PROMPTS[1]
        assert report.token_logprobs[0] is None
        assert report.token_logprobs[1:] == pytest.approx(want, abs=1e-4)
        assert len(report.tokens) == len(report.top_logprobs) == len(report.text_offset) == len(ids)
        assert report.text_offset[:2] == [0, len(report.tokens[0])]
        assert got.choices[0].finish_reason == "length"
    got = client.completions.create(model="tiny", prompt=PROMPTS[1], max_tokens=3, echo=True, temperature=0)
    (more,) = offline.generate([ids], SamplingParams(max_tokens=3))
    assert got.choices[0].text == PROMPTS[1] + more.text


def test_chat_logprobs_name_tokens_and_bytes(client: OpenAI, offline: Engine) -> None:
    (want,) = offline.generate([chat_ids(offline)], SamplingParams(max_tokens=6, logprobs=3))
    got = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = got.choices[0].logprobs.content
    assert [c.logprob for c in content] == pytest.approx([r.logprob for r in want.logprobs], abs=1e-4)
    assert [len(c.top_logprobs) for c in content] == [3] * 6
    text = b"".join(bytes(c.bytes) for c in content).decode("utf-8", "replace")
    assert text == want.text or want.finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=True
        )
    )
    streamed = [c for chunk in chunks if chunk.choices[0].logprobs for c in chunk.choices[0].logprobs.content]
    assert [c.token for c in streamed] == [c.token for c in content]


def test_extensions_reach_the_sampler(client: OpenAI, offline: Engine) -> None:
    extra = {
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "min_tokens": 5,
        "ignore_eos": True,
        "stop_token_ids": [77],
        "skip_special_tokens": False,
    }
    params = SamplingParams(
        max_tokens=12,
        temperature=0.9,
        top_p=0.95,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={40: 3.0},
        **{**extra, "stop_token_ids": (77,)},
    )
    (want,) = offline.generate(PROMPTS[:1], params)
    got = client.completions.create(
        model="tiny",
        prompt=PROMPTS[0],
        max_tokens=12,
        temperature=0.9,
        top_p=0.95,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={"40": 3.0},
        extra_body=extra,
    )
    assert got.choices[0].text == want.text


def test_models_are_listed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "fp4pipe")
    assert model.max_model_len == 512
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")
    with pytest.raises(NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_what_does_not_fit_the_context_is_said_with_lengths(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as error:
        client.completions.create(model="tiny", prompt=[5] * 500, max_tokens=13)
    assert "500 prompt tokens and 13 to generate exceed the context of 512" in error.value.body["message"]
    assert error.value.body["code"] == "context_length_exceeded"
    with pytest.raises(BadRequestError, match="prompt tokens and at least 1 to generate exceed the context of 512"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 2000}])
