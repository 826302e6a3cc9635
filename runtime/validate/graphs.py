"""Do the captured pieces compute what the model computes? Every bucket, with poisoned padding, in any order.

The runner under test is the one that serves. It is compared with two others over the same cache that capture nothing
(``off`` and ``segmented``), and with Hugging Face's own attention. Where the same code runs on the same shapes the
results must be the same bits; where shapes or kernels differ, within what rounding alone does to this model (`Noise`).
"""

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4pipe import console
from fp4pipe.errors import UsageError
from fp4pipe.runtime.graph.buckets import bucket_of
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.validate.check import Check
from fp4pipe.runtime.validate.stepping import Error, Noise, measure_noise, run, run_poisoned
from fp4pipe.runtime.validate.traffic import Traffic


def check_graphs(runner: Runner, *, buckets: int | None = None, seed: int = 0) -> list[Check]:
    """Prove the runner's graphs.

    Args:
        runner: Idle; its cache is overwritten.
        buckets: How many buckets to try, evenly spread with the smallest and the largest among them; all when absent.
        seed: Of the token ids and of the order.

    Returns:
        ``graphs.capture``, ``graphs.eager``, ``graphs.buckets``, ``graphs.padding``, ``graphs.order``, ``graphs.batch``
        and ``graphs.recompiles``.

    Raises:
        UsageError: The cache is too small for a step of any bucket beside the sequences that decode.
    """
    frames = runner.stats["recompiles"]
    traffic = Traffic(runner.model, runner.cache, seed)
    plain = Runner(runner.model, runner.cache, graphs="off", max_tokens=runner.max_tokens)
    chosen = _spread(_reachable(runner, traffic), buckets)
    if not chosen:
        raise UsageError(
            f"a KV cache of {runner.cache.num_tokens} tokens is too small to check graphs in", fix="--kv-tokens 2048"
        )
    # As many tokens as the steps judged by it: the more values are rounded to FP4, the likelier one of them flips.
    sizes = [_fewest(bucket, runner.buckets) for bucket in _spread(chosen, 2)]
    noise = measure_noise(plain, [traffic.mixed(size) for size in sizes], seed)
    checks = [check_capture(runner), check_eager(plain, traffic, noise)]
    checks += check_buckets(runner, plain, traffic, chosen, noise)
    checks.append(check_order(runner, traffic, _spread(chosen, 3), seed))
    checks.append(check_batch(runner, traffic, noise))
    recompiles = runner.stats["recompiles"] - frames
    checks.append(
        Check(
            "graphs.recompiles",
            recompiles == 0,
            f"{recompiles} compilations while running",
            {"count": recompiles, "replays": sum(runner.stats["replays"].values())},
            {"replays": runner.stats["replays"], "eager": runner.stats["eager"]},
        )
    )
    return checks


def check_capture(runner: Runner) -> Check:
    """What was captured: pieces, distinct pieces, graph breaks, seconds, bytes."""
    stats = runner.stats
    if runner.graphs != "compiled":
        return Check("graphs.capture", None, f"graphs are {runner.graphs}: nothing is captured", {}, stats)
    keys = (
        "graph_breaks",
        "pieces",
        "distinct_pieces",
        "trace_seconds",
        "compile_seconds",
        "buffer_bytes",
        "from_disk",
    )
    figures = {key: stats[key] for key in keys}
    summary = (
        f"{stats['graph_breaks']} graph breaks, {stats['pieces']} pieces of which {stats['distinct_pieces']} distinct,"
        f" traced in {stats['trace_seconds']:.1f} s, compiled in {stats['compile_seconds']:.1f} s"
    )
    return Check("graphs.capture", stats["graph_breaks"] == 0, summary, figures, stats)


def check_eager(plain: Runner, traffic: Traffic, noise: Noise) -> Check:
    """The model with paged attention against the same model with Hugging Face's own eager attention."""
    ids = traffic.token_ids(min(64, traffic.longest, plain.max_tokens))
    batch = traffic.fresh(ids)
    ours = run(plain, batch)
    config: Any = plain.model.config.get_text_config()
    implementation = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        tokens = torch.tensor([ids], device=plain.model.device)
        positions = torch.arange(len(ids), device=plain.model.device)[None]
        with torch.no_grad():
            theirs = plain.model.body(tokens, positions)[0]
    finally:
        config._attn_implementation = implementation
    error = Error.between(ours, theirs, batch)
    summary = f"paged attention against transformers' eager attention: {noise.judge(error)}"
    return Check("graphs.eager", noise.explains(error), summary, {"rel_error": error.total}, {"tokens": len(ids)})


def check_buckets(runner: Runner, plain: Runner, traffic: Traffic, buckets: Sequence[int], noise: Noise) -> list[Check]:
    """Each bucket at its fewest tokens, so with the most padding: against eager, then with the padding poisoned."""
    segmented = Runner(
        runner.model, runner.cache, graphs="segmented", max_tokens=runner.max_tokens, buckets=runner.buckets
    )
    rows: list[dict[str, Any]] = []
    with console.progress(len(buckets), "buckets", "bucket") as bar:
        for bucket in buckets:
            tokens = _fewest(bucket, runner.buckets)
            batch = traffic.mixed(tokens)
            reference = run(plain, batch)
            started = time.perf_counter()
            replayed = run(runner, batch)
            seconds = time.perf_counter() - started
            poisoned, reached = run_poisoned(runner, batch, bucket)
            error = Error.between(replayed, reference, batch)
            without = Error.between(run(segmented, batch), reference, batch)
            rows.append(
                {
                    "bucket": bucket,
                    "tokens": tokens,
                    "rel_error": error.total,
                    "median_row_error": error.median,
                    "segmented_rel_error": without.total,
                    "ok": noise.explains(error) and noise.explains(without),
                    "bitwise": torch.equal(replayed, reference),
                    "padding_inert": torch.equal(poisoned, replayed),
                    "poison_reached": reached or bucket == tokens or runner.graphs == "off",
                    "seconds": seconds,
                }
            )
            bar.update(1)
    wrong = [r["bucket"] for r in rows if not r["ok"]]
    worst = Error(*(max((r[key] for r in rows), default=0.0) for key in ("rel_error", "median_row_error")))
    leaking = [r["bucket"] for r in rows if not r["padding_inert"]]
    missed = [r["bucket"] for r in rows if not r["poison_reached"]]
    padding = f"{len(rows)} buckets with NaN in every padded row and stale buffer: "
    padding += f"it reaches real rows in buckets {leaking}" if leaking else "real rows keep their bits"
    if missed:
        padding += f"; padded rows of buckets {missed} could not be poisoned"
    equal = f"{len(rows)} of {len(runner.buckets)} buckets, eager = segmented = {runner.graphs}: {noise.judge(worst)}"
    equal += f"; wrong in buckets {wrong}" if wrong else ""
    return [
        Check(
            "graphs.buckets",
            not wrong,
            equal,
            {"rel_error": worst.total, "buckets": len(rows), "wrong": len(wrong)},
            {"bound": noise.bound.total, "median_bound": noise.bound.median, "rows": rows},
        ),
        Check(
            "graphs.padding",
            not leaking and not missed,
            padding,
            {"leaking": len(leaking), "unpoisoned": len(missed)},
            {"leaking": leaking, "unpoisoned": missed},
        ),
    ]


def check_order(runner: Runner, traffic: Traffic, buckets: Sequence[int], seed: int) -> Check:
    """Buckets from large to small, back to large, then shuffled, memory churned between: the same bits every time."""
    batches = {bucket: traffic.mixed(_fewest(bucket, runner.buckets)) for bucket in buckets}
    falling = sorted(batches, reverse=True)
    shuffled = random.Random(seed).sample(falling, len(falling))
    first: dict[int, Tensor] = {}
    changed: set[int] = set()
    churn = _Churn(runner.model.device, seed)
    for bucket in [*falling, *reversed(falling), *shuffled]:
        churn()
        hidden = run(runner, batches[bucket])
        if not torch.equal(hidden, first.setdefault(bucket, hidden)) or hidden.isnan().any():
            changed.add(bucket)
    summary = f"buckets {falling} down, up and shuffled with memory churned between: "
    summary += f"results changed in buckets {sorted(changed)}" if changed else "the same bits every time"
    return Check("graphs.order", not changed, summary, {"changed": len(changed)}, {"changed": sorted(changed)})


def check_batch(runner: Runner, traffic: Traffic, noise: Noise) -> Check:
    """The sequences of a mixed step against the same tokens in a step for each sequence."""
    batch, singles = traffic.mixed_and_single(min(48, runner.max_tokens))
    together = run(runner, batch)
    error = Error.between(torch.cat([run(runner, single) for single in singles]), together, batch)
    summary = f"{len(singles)} sequences in one step against alone: {noise.judge(error)}"
    return Check("graphs.batch", noise.explains(error), summary, {"rel_error": error.total}, {"rows": len(together)})


class _Churn:
    """Allocates and frees blocks of many sizes, so that freed memory a graph still reads would hold something else."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._random = random.Random(seed)
        self._held: list[Tensor] = []

    def __call__(self) -> None:
        for _ in range(8):
            self._held.append(torch.full((self._random.randint(1, 1 << 18),), torch.nan, device=self._device))
        self._random.shuffle(self._held)
        del self._held[8:]


# ---- choosing buckets -----------------------------------------------------------------------------------------------


def _reachable(runner: Runner, traffic: Traffic) -> list[int]:
    """Buckets that some step falls into and for which the cache has room."""
    fits = (b for b in runner.buckets if _fewest(b, runner.buckets) <= traffic.capacity)
    return [b for b in fits if bucket_of(_fewest(b, runner.buckets), runner.buckets) == b]


def _fewest(bucket: int, buckets: Sequence[int]) -> int:
    """The fewest tokens that are padded to `bucket`."""
    below = max((b for b in buckets if b < bucket), default=0)
    return max(below + 1, -(-bucket // 2))


def _spread(buckets: Sequence[int], count: int | None) -> list[int]:
    """`count` of `buckets` evenly, the ends included."""
    if count is None or count >= len(buckets):
        return list(buckets)
    if count == 1:
        return [buckets[-1]]
    return [buckets[round(i * (len(buckets) - 1) / (count - 1))] for i in range(count)]
