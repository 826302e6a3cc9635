"""The runner: every way of running gives the same hidden states, whatever is in the padding and whatever ran before."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp4pipe.errors import UsageError
from fp4pipe.runtime.graph.buckets import token_buckets
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.model import Model
from tests.runtime.steps import PAGE, Sequences, relative
from tests.tiny_models import FAMILIES

PAGES = 80
LENGTHS = (40, 7, 64, 1)


def load(path: Path, mode: str = "auto") -> Model:
    return Model.load(path, mode=mode, progress=False)


def runner_of(model: Model, graphs: str = "compiled", compiler: str = "eager", **options) -> Runner:
    cache = model.new_cache(PAGES, PAGE)
    return Runner(model, cache, graphs=graphs, compiler=compiler, **({"max_tokens": 160} | options))


def serve(runner: Runner, seed: int = 0, *, poison: bool = False) -> list[Tensor]:
    """Steps of mixed prefill and decode in mixed sizes, as an engine makes them; the hidden states of each."""
    chance, sequences, results = random.Random(seed), Sequences(LENGTHS, PAGES, seed=seed), []
    while sequences.done != list(LENGTHS):
        left = [length - done for length, done in zip(LENGTHS, sequences.done, strict=True)]
        counts = [min(rest, chance.choice([0, 1, 1, 6, 40])) for rest in left]
        if any(counts):
            if poison:
                runner.poison()
            results.append(runner.forward(sequences.step(counts)).clone())
    return results


@pytest.mark.parametrize(
    ("family", "layout"), [*((family, "modelopt") for family in FAMILIES), ("llama", "plain"), ("gemma3_text", "plain")]
)
def test_all_ways_give_the_same(family: str, layout: str, tiny: Callable[..., Path]):
    model = load(tiny(family, layout), "w4a4")
    expected = serve(runner_of(model, "off"))
    for got, wanted in zip(serve(runner_of(model, "segmented")), expected, strict=True):
        assert relative(got, wanted) < (2e-6 if layout == "plain" else 1e-2)
    compiled = runner_of(model)
    assert (compiled.stats["pieces"], compiled.stats["distinct_pieces"]) == (4, 3)
    for got, wanted in zip(serve(compiled, poison=True), expected, strict=True):
        # w4a4 rounds activations: a last bit that differs may move one of them by a whole step.
        assert relative(got, wanted) < (2e-6 if layout == "plain" else 1e-2)


@pytest.fixture(scope="module")
def inductor(tiny: Callable[..., Path]) -> tuple[Model, Runner]:
    model = load(tiny("llama", "modelopt"), "w4a16")
    return model, runner_of(model, compiler="inductor")


def test_inductor_gives_the_same(inductor: tuple[Model, Runner]):
    model, runner = inductor
    for seed in range(2):
        expected = serve(runner_of(model, "off"), seed)
        for got, wanted in zip(serve(runner, seed, poison=True), expected, strict=True):
            assert relative(got, wanted) < 2e-6


def test_inductor_reads_back_what_it_wrote(inductor: tuple[Model, Runner]):
    model, runner = inductor
    again = runner_of(model, compiler="inductor")
    assert runner.stats["from_disk"] == 0
    assert again.stats["from_disk"] == again.stats["distinct_pieces"] == 3
    for got, wanted in zip(serve(again), serve(runner), strict=True):
        assert torch.equal(got, wanted)


def test_nothing_compiles_while_serving(inductor: tuple[Model, Runner]):
    _, runner = inductor
    serve(runner)
    assert runner.stats["recompiles"] == 0


def test_buckets_in_mixed_order(tiny: Callable[..., Path]):
    """Large, small, large again, with allocations between: the same step gives the same bits."""
    runner = runner_of(load(tiny("llama", "modelopt")))
    results: dict[int, Tensor] = {}
    for tokens in (150, 3, 64, 150, 1, 17, 3, 64, 150):
        churn = [torch.full((size,), torch.nan) for size in (10, 1000, 100_000)]
        got = runner.forward(Sequences((tokens,), PAGES).whole()).clone()
        del churn
        assert torch.equal(got, results.setdefault(tokens, got))


def test_a_sequence_does_not_depend_on_its_batch(tiny: Callable[..., Path]):
    model = load(tiny("qwen3", "modelopt"))
    runner = runner_of(model)
    together = runner.forward(Sequences(LENGTHS, PAGES).whole()).clone()
    alone = []
    for number in range(len(LENGTHS)):
        counts = [length if index == number else 0 for index, length in enumerate(LENGTHS)]
        alone.append(runner.forward(Sequences(LENGTHS, PAGES).step(counts)).clone())
    assert relative(together, torch.cat(alone)) < 2e-6


def test_stats_count_what_ran(tiny: Callable[..., Path]):
    runner = runner_of(load(tiny("llama")), buckets=[8, 64])
    for tokens in (8, 5, 60, 3, 100):
        runner.forward(Sequences((tokens,), PAGES).whole())
    stats = runner.stats
    assert stats["replays"] == {8: 2, 64: 1}
    assert stats["eager"] == {"padding above 2x": 1, "beyond the largest bucket": 1}
    assert (stats["pieces"], stats["distinct_pieces"], stats["graph_breaks"], stats["recompiles"]) == (4, 3, 0, 0)
    assert stats["buckets"] == [8, 64]
    assert stats["buffer_bytes"] > 0
    assert runner_of(runner.model, "off").buckets == token_buckets(160)


def test_a_step_must_fit(tiny: Callable[..., Path]):
    runner = runner_of(load(tiny("llama")), "off", max_tokens=8)
    with pytest.raises(ValueError, match="9 tokens exceeds the runner's 8"):
        runner.forward(Sequences((9,), PAGES).whole())


def test_without_a_compiler_pieces_run_uncompiled(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("fp4pipe.runtime.graph.compile._missing", lambda: "no C++ compiler found (g++)")
    assert runner_of(load(tiny("llama")), compiler="inductor").stats["compiler"] == "eager"
    assert "no C++ compiler found" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"graphs": "some"}, {"compiler": "gcc"}])
def test_unknown_choices(options: dict[str, str], tiny: Callable[..., Path]):
    with pytest.raises(UsageError, match=f"--{next(iter(options))} "):
        runner_of(load(tiny("llama")), **options)
