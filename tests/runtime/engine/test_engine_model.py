"""The engine over real (tiny) models in float32: the schedule must not change a token."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp4pipe.errors import CheckpointError, UsageError
from fp4pipe.runtime.engine import Engine, SamplingParams
from tests.tiny_models import make_tiny

PROMPTS = [
    "The quick brown fox",
    "If Anna has 12 apples and gives 5 of them to Tom, she keeps",
    "If Anna has 12 apples and gives 5 of them to Tom, she keeps 12 - 5",
    "def add(left, right):\n    return",
    "Le petit chat dort sur la chaise près de la fenêtre; der kleine Hund läuft durch den Garten. " * 2,
]
COUNT = 24


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def path(request, tmp_path_factory):
    return make_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def alone(path):
    engine = Engine.load(path, graphs="off", progress=False, kv_tokens=512)
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, logprobs=0)
    done = [engine.generate([p], params)[0] for p in PROMPTS]
    engine.pages.check()
    return done


def test_one_request_is_what_transformers_generates(path, alone) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = Engine.load(path, graphs="off", progress=False, kv_tokens=512)
    for prompt, ours in zip(PROMPTS[:3], alone, strict=False):
        ids = torch.tensor([engine.tokenizer.encode(prompt)])
        theirs = model.generate(ids, max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False)[0, ids.shape[1] :]
        if ours.token_ids != theirs.tolist():  # they ban eos until then, we let it pass
            first = next(i for i, (a, b) in enumerate(zip(ours.token_ids, theirs.tolist(), strict=True)) if a != b)
            assert ours.token_ids[first] in engine.eos_ids
        (logits,) = engine.prompt_logits([ids[0].tolist()])
        with torch.no_grad():
            assert torch.allclose(logits, model(ids).logits[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"chunk_tokens": 16, "max_running": 3},
        {"kv_tokens": 256, "page_size": 8, "chunk_tokens": 32},
        {"prefix_cache": False, "page_size": 1, "kv_tokens": 300},
        {"graphs": "compiled", "compiler": "eager", "chunk_tokens": 32, "kv_tokens": 512},
    ],
)
def test_the_schedule_does_not_change_a_token(path, alone, setup) -> None:
    if setup.get("graphs") == "compiled" and path.name != "llama":
        pytest.skip("tracing takes seconds; one family will do")
    engine = Engine.load(path, progress=False, **{"graphs": "off", "kv_tokens": 2048, **setup})
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, logprobs=0)
    for _ in range(2):
        done = engine.generate(PROMPTS, params)
        for one, other in zip(done, alone, strict=True):
            assert one.token_ids == other.token_ids
            assert one.text == other.text
            assert [r.logprob for r in one.logprobs] == pytest.approx([r.logprob for r in other.logprobs], abs=1e-3)
        engine.pages.check()
        assert engine.pages.available == engine.pages.num_pages
    if setup.get("kv_tokens") == 256:
        assert engine.stats()["preemptions"] > 0
    if setup.get("prefix_cache", True) and not engine.stats()["preemptions"]:
        assert sum(c.cached_tokens for c in done) > 0
    assert engine.flush_cache() >= 0
    assert engine.pages.num_free == engine.pages.num_pages


def test_a_small_cache_is_said_and_refuses_what_outgrows_it(path, capsys) -> None:
    engine = Engine.load(path, graphs="off", progress=False, kv_tokens=70)
    assert "the KV cache holds 64 tokens, fewer than the model's context of 512" in capsys.readouterr().err
    with pytest.raises(UsageError, match="exceed the KV cache of 64 tokens"):
        engine.generate([[1] * 60], SamplingParams(max_tokens=5))
    assert len(engine.generate([[1] * 60], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


@pytest.mark.parametrize("bad", [{"kv_tokens": 3}, {"max_running": 0}, {"chunk_tokens": -1}, {"page_size": 0}])
def test_bad_options_are_named(path, bad) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        Engine.load(path, graphs="off", progress=False, **bad)


def test_eos_and_defaults_come_from_the_checkpoint(path) -> None:
    file = path / "generation_config.json"
    before = file.read_text() if file.exists() else None
    try:
        file.write_text('{"eos_token_id": [4, 2], "temperature": 0.6, "top_p": 0.9, "max_length": 20}')
        engine = Engine.load(path, graphs="off", progress=False, kv_tokens=512)
        assert engine.eos_ids == (4, 2)
        assert engine.sampling_defaults == {"temperature": 0.6, "top_p": 0.9}
        file.unlink()
        assert Engine.load(path, graphs="off", progress=False, kv_tokens=512).eos_ids == (2,)
        file.write_text("[")
        with pytest.raises(CheckpointError, match=r"generation_config\.json is not JSON"):
            Engine.load(path, graphs="off", progress=False, kv_tokens=512)
    finally:
        if before is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(before)


def test_the_cache_is_sized_from_free_memory_by_default(path) -> None:
    engine = Engine.load(path, graphs="off", progress=False, max_running=2)
    assert engine.pages.num_pages * 16 == 2 * (512 + 16)
    assert engine.max_context == 512


def test_a_cache_beyond_all_memory_is_refused(path) -> None:
    with pytest.raises(UsageError, match="no memory for a KV cache of 100000000000000 tokens"):
        Engine.load(path, graphs="off", progress=False, kv_tokens=10**14)


def test_a_checkpoint_without_tokenizer_is_refused(path, tmp_path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(path / name)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        Engine.load(tmp_path, graphs="off", progress=False)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer of .* cannot be read"):
        Engine.load(tmp_path, graphs="off", progress=False)
