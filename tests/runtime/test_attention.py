"""Paged attention against dense attention, sequence by sequence."""

import random
import threading

import pytest
import torch
from torch import Tensor

from fp4pipe.runtime.attention import Step, attending
from fp4pipe.runtime.attention_plan import plan_groups
from fp4pipe.runtime.cache import KVCache, LayerKV
from tests.runtime.steps import PAGE, Sequences

KV_HEADS, HEAD_DIM, SCALE = 2, 16, 0.3
LENGTHS = (1, 2, 9, 33, 40, 41, 64)
PAGES = 80


def dense(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of one whole sequence: ``[T, heads, head_dim]``, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    distance = torch.arange(len(q)).unsqueeze(1) - torch.arange(len(q))
    seen = (distance >= 0) & (distance < window if window else True)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).float()


class Attended:
    """Random q, k and v for whole sequences, computed in steps."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, heads: int = 6, window: int = 0, dtype=torch.float32):
        self.sequences = Sequences(lengths, PAGES)
        self.window = window
        self.q = [torch.randn(n, heads, HEAD_DIM) for n in lengths]
        self.k = [torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype).float() for n in lengths]
        self.v = [torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype).float() for n in lengths]
        self.cache = KVCache([LayerKV(KV_HEADS, HEAD_DIM)], PAGES, PAGE, dtype, "cpu")
        for tensor in (*self.cache.k, *self.cache.v):
            tensor.fill_(torch.nan)  # what was never written must never be read

    def step(self, counts: list[int], padding: int = 0) -> list[Tensor]:
        """Run one step; the new rows of each sequence that takes part."""
        starts = list(self.sequences.done)
        batch = self.sequences.step(counts)
        rows = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]

        def packed(whole: list[Tensor]) -> Tensor:
            real = torch.cat([each[row] for each, row in zip(whole, rows, strict=True)])
            return torch.cat([real, torch.full((padding, *real.shape[1:]), torch.nan)])

        q = packed(self.q)
        out = torch.full_like(q, torch.nan)
        with attending(Step(batch, self.cache)):
            torch.ops.fp4pipe.paged_attention(q, packed(self.k), packed(self.v), out, 0, SCALE, self.window)
        assert out[len(out) - padding :].eq(0).all()
        return list(out[: len(out) - padding].split([count for count in counts if count]))

    def expected(self) -> list[Tensor]:
        return [dense(*qkv, self.window) for qkv in zip(self.q, self.k, self.v, strict=True)]


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("window", [0, 1, 7, 40])
def test_one_step_equals_dense(heads: int, window: int):
    attended = Attended(heads=heads, window=window)
    got = attended.step(list(LENGTHS), padding=3)
    torch.testing.assert_close(got, attended.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_decode_steps_equal_dense(window: int, seed: int):
    """Any way of cutting the sequences into steps, prefill and decode mixed, gives what one step gives."""
    attended, chance = Attended(window=window), random.Random(seed)
    parts: list[list[Tensor]] = [[] for _ in LENGTHS]
    while attended.sequences.done != list(LENGTHS):
        left = [length - done for length, done in zip(LENGTHS, attended.sequences.done, strict=True)]
        counts = [min(rest, chance.choice([0, 1, 1, 5, 23])) for rest in left]
        if not any(counts):
            continue
        results = iter(attended.step(counts, padding=chance.randrange(3)))
        for number, count in enumerate(counts):
            if count:
                parts[number].append(next(results))
    torch.testing.assert_close([torch.cat(p) for p in parts], attended.expected(), atol=2e-6, rtol=1e-5)


def test_keys_and_values_are_kept_in_the_caches_dtype():
    attended = Attended(dtype=torch.bfloat16)
    first = attended.step([1, 1, 8, 32, 39, 40, 63])
    last = attended.step([0, 1, 1, 1, 1, 1, 1])
    expected = attended.expected()
    torch.testing.assert_close(first, [e[: len(f)] for e, f in zip(expected, first, strict=True)], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(last, [e[-1:] for e in expected[1:]], atol=2e-6, rtol=1e-5)


def test_like_lengths_share_a_call_and_unlike_do_not():
    sequences = Sequences([150] * 6 + [20] * 6, num_pages=1000)
    batch = sequences.whole()
    assert len(plan_groups(batch, PAGE, 0, torch.device("cpu"))) == 2


def test_threads_attend_to_their_own_caches():
    """Two engines in two threads, interleaved step by step."""
    pair = [Attended(lengths=(12, 12)), Attended(lengths=(9, 12, 3))]
    barrier = threading.Barrier(2, timeout=20)
    results: list[list[Tensor]] = [[], []]

    def run(which: int) -> None:
        for _ in range(3):
            barrier.wait()
            counts = [len(ids) // 3 for ids in pair[which].sequences.ids]
            results[which] += pair[which].step(counts)

    threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for attended, got in zip(pair, results, strict=True):
        count = len(attended.q)
        whole = [torch.cat(got[number::count]) for number in range(count)]
        torch.testing.assert_close(whole, attended.expected(), atol=2e-6, rtol=1e-5)


def test_outside_a_step_it_refuses():
    q = torch.zeros(1, KV_HEADS, HEAD_DIM)
    with pytest.raises(LookupError):
        torch.ops.fp4pipe.paged_attention(q, q, q, q.clone(), 0, SCALE, 0)


def test_opcheck():
    sequences = Sequences([5, 9], PAGES)
    cache = KVCache([LayerKV(KV_HEADS, HEAD_DIM)], PAGES, PAGE, torch.float32, "cpu")
    q, k = torch.randn(16, 6, HEAD_DIM), torch.randn(16, KV_HEADS, HEAD_DIM)
    with attending(Step(sequences.whole(), cache)):
        torch.library.opcheck(
            torch.ops.fp4pipe.paged_attention.default, (q, k, k.clone(), torch.empty_like(q), 0, SCALE, 0)
        )
