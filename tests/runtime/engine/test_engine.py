"""The engine over a model that is a hash of its context: what must be exactly right whatever the schedule."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fp4pipe.errors import UsageError
from fp4pipe.runtime.engine.engine import Engine
from fp4pipe.runtime.engine.params import SamplingParams

PROMPTS = [[5] * 3, [7, 8, 9] * 9, [7, 8, 9] * 9 + [4], [11], list(range(20, 70))]


def idle(engine: Engine) -> None:
    engine.pages.check()
    assert engine.pages.available == engine.pages.num_pages
    assert not engine.has_work
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting


@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"prefix_cache": False},
        {"chunk_tokens": 8},
        {"max_running": 1},
        {"max_running": 2, "chunk_tokens": 2},
        {"num_pages": 20, "page_size": 4},
        {"num_pages": 80, "page_size": 1},
    ],
)
def test_greedy_output_is_the_same_under_any_schedule(make_engine, greedy, setup) -> None:
    engine = make_engine(**setup)
    for _ in range(2):  # the second time from the prefix cache
        done = engine.generate(PROMPTS, SamplingParams(max_tokens=20))
        assert [c.token_ids for c in done] == [greedy.continue_(p, 20) for p in PROMPTS]
        idle(engine)
    assert engine.runner.largest <= engine.scheduler.chunk_tokens
    if setup.get("num_pages") == 20:
        assert engine.stats()["preemptions"] > 0
    if setup.get("prefix_cache", True):
        assert [c.cached_tokens for c in done] == [
            (len(p) - 1) // engine.pages.page_size * engine.pages.page_size for p in PROMPTS
        ] or engine.stats()["preemptions"]
    else:
        assert all(c.cached_tokens == 0 for c in done)


def test_seeded_sampling_is_the_same_after_preemption(make_engine) -> None:
    params = [SamplingParams(max_tokens=30, temperature=1.0, seed=i) for i in range(5)]
    alone = [make_engine().generate([p], one)[0].token_ids for p, one in zip(PROMPTS, params, strict=True)]
    small = make_engine(num_pages=22)
    assert [c.token_ids for c in small.generate(PROMPTS, params)] == alone
    assert small.stats()["preemptions"] > 0
    again = make_engine().generate(PROMPTS, [SamplingParams(max_tokens=30, temperature=1.0)] * 5)
    assert [c.token_ids for c in again] != alone


def test_decoding_goes_on_while_a_long_prompt_is_computed(make_engine) -> None:
    engine = make_engine(chunk_tokens=8)
    short = engine.add([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.add(list(range(100, 180)), SamplingParams(max_tokens=1))
    for _ in range(5):
        before = short.num_output
        outputs = engine.step()
        assert short.num_output == before + 1
        assert [o.request_id for o in outputs] == [short.id]


def test_stop_tokens_eos_and_lengths(make_engine, greedy) -> None:
    engine = make_engine(likelier_eos=2.2)
    want = greedy.continue_([5] * 3, 100, 2.2)
    assert want[-1] == 2
    (done,) = engine.generate([[5] * 3], SamplingParams(max_tokens=100))
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (want, "stop", 2)
    assert done.text == engine.tokenizer.decode(want[:-1])
    (done,) = engine.generate([[5] * 3], SamplingParams(max_tokens=len(want) + 5, ignore_eos=True))
    assert (len(done.token_ids), done.finish_reason, done.stop_reason) == (len(want) + 5, "length", None)
    (done,) = engine.generate([[5] * 3], SamplingParams(max_tokens=100, min_tokens=len(want) + 3))
    assert len(done.token_ids) >= len(want) + 3
    assert 2 not in done.token_ids[: len(want) + 2]
    (done,) = engine.generate([[5] * 3], SamplingParams(max_tokens=100, stop_token_ids=(want[1],)))
    assert (done.token_ids, done.stop_reason) == (want[: want.index(want[1]) + 1], want[1])
    (done,) = engine.generate([[5] * 3], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(done.token_ids) == 197
    (done,) = engine.generate([[5] * 3], SamplingParams(max_tokens=0))
    assert (done.token_ids, done.text, done.finish_reason) == ([], "", "length")
    idle(engine)


def test_a_stop_string_ends_the_text_before_it(make_engine) -> None:
    engine = make_engine()
    (full,) = engine.generate([[5] * 3], SamplingParams(max_tokens=30))
    stop = full.text[4:7]
    (cut,) = engine.generate([[5] * 3], SamplingParams(max_tokens=30, stop=(stop,)))
    assert cut.text == full.text[: full.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    (late,) = engine.generate([[5] * 3], SamplingParams(max_tokens=30, stop=(stop,), min_tokens=29))
    assert late.text.startswith(full.text[:8])
    assert len(late.token_ids) >= 29
    idle(engine)


def test_a_request_waits_rather_than_be_preempted_at_once(make_engine) -> None:
    engine = make_engine(num_pages=12)
    done = engine.generate([[i] * 40 for i in (5, 6, 7)], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [len(c.token_ids) for c in done] == [6] * 3
    assert engine.stats()["preemptions"] == 0


def test_prompt_logits_are_those_of_every_position(make_engine) -> None:
    for engine in (make_engine(), make_engine(chunk_tokens=8), make_engine(num_pages=14)):
        engine.generate([PROMPTS[1]], SamplingParams(max_tokens=2))  # its pages must not be taken for computed logits
        for prompt, logits in zip(PROMPTS, engine.prompt_logits(PROMPTS), strict=True):
            digests = torch.tensor([[engine.model.digest(prompt[: i + 1])] for i in range(len(prompt))])
            assert torch.equal(logits, engine.model.logits(digests))
        idle(engine)


def test_prompt_logprobs_score_each_prompt_token(make_engine) -> None:
    engine = make_engine(chunk_tokens=8)
    prompt = PROMPTS[1]
    (logits,) = engine.prompt_logits([prompt])
    want = logits.log_softmax(-1)
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=0))
    assert done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == len(prompt)
    assert done.prompt_logprobs[0] is None
    for position, report in enumerate(done.prompt_logprobs[1:], start=1):
        assert report is not None
        assert report.token_id == prompt[position]
        assert report.logprob == pytest.approx(float(want[position - 1, prompt[position]]))
        assert len(report.top) == 2
    assert done.logprobs is not None
    assert [r.token_id for r in done.logprobs] == done.token_ids
    idle(engine)


def test_a_request_that_can_never_run_is_refused(make_engine) -> None:
    engine = make_engine()
    for prompt, params, match in [
        ([], {}, "empty"),
        ([600], {}, "prompt has token id 600, outside the vocabulary of 512"),
        ([-1], {}, "token id -1, outside"),
        ([1] * 200, {"max_tokens": None}, "200 prompt tokens and at least 1 to generate exceed the context of 200"),
        ([1] * 190, {"max_tokens": 11}, "190 prompt tokens and 11"),
        ([1], {"logit_bias": {512: 1.0}}, "logit_bias has token id 512"),
        ([1], {"stop_token_ids": (9999,)}, "stop_token_ids has token id 9999"),
    ]:
        with pytest.raises(UsageError, match=match):
            engine.add(prompt, SamplingParams(**params))
    with pytest.raises(UsageError, match="exceed the KV cache of 40 tokens"):
        make_engine(num_pages=10).add([1] * 30, SamplingParams(max_tokens=11))
    engine.add([1], SamplingParams(), "same")
    with pytest.raises(UsageError, match="'same' is in use"):
        engine.add([1], SamplingParams(), "same")
    engine.abort("same")
    idle(engine)


def test_generate_refuses_all_or_none(make_engine) -> None:
    engine = make_engine()
    with pytest.raises(UsageError):
        engine.generate([[1], []], SamplingParams())
    idle(engine)


def test_not_finite_logits_fail_their_request_only(make_engine) -> None:
    engine = make_engine()
    logits = engine.model.logits
    poisoned = engine.model.digest([7, 7])
    engine.model.logits = lambda hidden: torch.where(hidden == poisoned, float("nan"), logits(hidden))
    bad, good = engine.generate([[7, 7], [5]], SamplingParams(max_tokens=4))
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert bad.error is not None
    assert "not finite" in bad.error
    assert (good.finish_reason, len(good.token_ids)) == ("length", 4)
    idle(engine)


def test_a_failing_step_leaves_nothing_behind(make_engine) -> None:
    engine = make_engine()
    forward = engine.runner.forward
    engine.runner.forward = lambda batch: (_ for _ in ()).throw(RuntimeError("boom"))
    with pytest.raises(RuntimeError, match="boom"):
        engine.generate(PROMPTS, SamplingParams())
    idle(engine)
    engine.runner.forward = forward
    assert len(engine.generate(PROMPTS, SamplingParams())) == len(PROMPTS)


class EngineMachine(RuleBasedStateMachine):
    """Requests come and go in any order over a cache far too small for them: none starves, every token is right."""

    engine: Engine
    greedy: object

    def __init__(self) -> None:
        super().__init__()
        self.engine = type(self).build(num_pages=9, page_size=2, max_running=4, chunk_tokens=6)  # type: ignore[attr-defined]
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.got: dict[str, list[int]] = {}

    @precondition(lambda self: len(self.requests) < 8)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), count=st.integers(1, 6))
    def add(self, prompt: list[int], count: int) -> None:
        request = self.engine.add(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        self.requests[request.id] = (prompt, count)
        self.got[request.id] = []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.engine.abort(request_id) is not None
        del self.requests[request_id]

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step()

    @rule()
    def flush(self) -> None:
        self.engine.flush_cache()

    def _step(self) -> None:
        for output in self.engine.step():
            self.got[output.request_id] += output.token_ids
            if output.finish_reason:
                prompt, count = self.requests.pop(output.request_id)
                assert self.got[output.request_id] == type(self).greedy.continue_(prompt, count)  # type: ignore[attr-defined]

    @invariant()
    def pages_are_accounted_for(self) -> None:
        self.engine.pages.check(r.lease for r in self.engine.scheduler.running if r.lease)

    def teardown(self) -> None:
        for _ in range(400):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.requests, "a request starves"
        idle(self.engine)


def test_any_order_of_requests_aborts_and_steps(make_engine, greedy) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    cache: dict = {}

    class Greedy:
        @staticmethod
        def continue_(prompt, count):
            key = (*prompt, count)
            if key not in cache:
                cache[key] = greedy.continue_(prompt, count, -100.0)
            return cache[key]

    EngineMachine.build = staticmethod(lambda **kw: make_engine(likelier_eos=-100.0, **kw))  # type: ignore[attr-defined]
    EngineMachine.greedy = Greedy
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
