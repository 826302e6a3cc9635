"""The first step of every size, before requests come: kernels are built, tuned and loaded then, not under a request."""

from fp4pipe.runtime.batch import Batch, Segment
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.ops import tuning

_LONGEST = 256
"""Tokens of a made-up sequence: products see all tokens of a step alike, so short ones do."""


def warm(runner: Runner, page_size: int) -> None:
    """Run made-up steps of the sizes that products tell apart, on a GPU whose kernels are tuned.

    Call it while the cache is empty: all sequences write to its first pages.
    """
    sizes = _sizes(runner.buckets)
    pages = min(runner.cache.num_pages, -(-_LONGEST // page_size))
    longest = min(pages * page_size, runner.model.max_context)
    with tuning.tuning(runner.model.device):
        for size in sizes:
            lengths = [longest] * (size // longest) + ([size % longest] if size % longest else [])
            segments = [Segment([0] * length, 0, range(pages)) for length in lengths]
            runner.forward(Batch.pack(segments, page_size))


def _sizes(buckets: list[int]) -> list[int]:
    """The largest bucket up to each power of two."""
    return sorted({1 << (bucket - 1).bit_length(): bucket for bucket in sorted(buckets)}.values())
