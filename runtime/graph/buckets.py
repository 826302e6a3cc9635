"""Token counts that a step is padded to."""

from bisect import bisect_left
from collections.abc import Sequence

_RANGES = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
_STEP_ABOVE = 512
MAX_PADDING = 2
"""A step runs in a bucket of at most this many times its tokens."""


def token_buckets(limit: int) -> list[int]:
    """Buckets up to `limit`, the most tokens a step can have (the smaller of chunk size and context); it is the last.

    Steps grow with size, so that padding costs at most a quarter from 16 tokens on.

    Raises:
        ValueError: `limit` is not positive.
    """
    if limit < 1:
        raise ValueError(f"a step has at least one token, got a limit of {limit}")
    sizes = [size for first, last, step in _RANGES for size in range(first, last + 1, step)]
    sizes += range(_RANGES[-1][1] + _STEP_ABOVE, limit, _STEP_ABOVE)
    return [size for size in sizes if size < limit] + [limit]


def bucket_of(tokens: int, buckets: Sequence[int]) -> int | None:
    """The smallest of ascending `buckets` that holds `tokens`; None when none does without padding too much."""
    place = bisect_left(buckets, tokens)
    if place == len(buckets) or buckets[place] > MAX_PADDING * tokens:
        return None
    return buckets[place]
