"""Steps to try a runner on: fresh prompts, chunks of prompts begun earlier, and decoding sequences, in one batch."""

import random

from fp4pipe.runtime.batch import Batch, Segment
from fp4pipe.runtime.cache import KVCache
from fp4pipe.runtime.graph.runner import Runner
from fp4pipe.runtime.model import Model

_HISTORY = (29, 13, 40, 5, 33, 17, 21, 1)
"""Tokens that the decoding sequences have in the cache; some exceed the sliding windows of the test models."""
_BEGUN = 13
"""Tokens in the cache of a prompt whose next chunk is computed: it ends within a page."""


class Traffic:
    """Seeded steps over one cache. Token ids are never 0, which runners pad with.

    What a step finds in the cache is computed here once, eagerly, in pages that no step writes over.

    Args:
        model: Whose vocabulary and context bound the steps.
        cache: Where sequences live.
        seed: Of the token ids.
    """

    def __init__(self, model: Model, cache: KVCache, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = model.vocab_size
        self._page_size = cache.page_size
        self.longest = model.max_context
        """Tokens of one sequence at most."""
        free = list(range(cache.num_pages))
        self._begun = self.token_ids(min(_BEGUN, self.longest // 2))
        self._begun_pages = self._take(len(self._begun), free)
        self._decoding: list[tuple[list[int], list[int]]] = []
        for length in _HISTORY:
            history = self.token_ids(min(length, self.longest - 1))
            if 2 * self._pages_for(len(history) + 1) > len(free):
                break
            self._decoding.append((history, self._take(len(history) + 1, free)))
        self._free = free
        # Each prompt may leave a page half empty.
        prompts = 2 + len(free) * cache.page_size // self.longest
        self.capacity = max(0, (len(free) - prompts) * cache.page_size)
        """Tokens of a `mixed` step at most."""
        segments = [Segment(ids, 0, pages) for ids, pages in [(self._begun, self._begun_pages), *self._decoding]]
        runner = Runner(model, cache, graphs="off", max_tokens=sum(len(segment.token_ids) for segment in segments))
        runner.forward(Batch.pack(segments, self._page_size))

    def token_ids(self, count: int) -> list[int]:
        """Random ids, none of them 0."""
        return [self._random.randrange(1, self._vocabulary) for _ in range(count)]

    def fresh(self, ids: list[int]) -> Batch:
        """A step that computes one prompt whole."""
        return Batch.pack([Segment(ids, 0, self._take(len(ids), [*self._free]))], self._page_size)

    def mixed(self, tokens: int) -> Batch:
        """A step of `tokens`: up to a third are decoding sequences, the rest prompts, one of them begun earlier."""
        return Batch.pack(self._segments(tokens), self._page_size)

    def mixed_and_single(self, tokens: int) -> tuple[Batch, list[Batch]]:
        """The same, and each of its sequences as a step of its own."""
        segments = self._segments(tokens)
        return Batch.pack(segments, self._page_size), [Batch.pack([s], self._page_size) for s in segments]

    def _segments(self, tokens: int) -> list[Segment]:
        decoding = self._decoding[: tokens // 3]
        segments = [Segment(self.token_ids(1), len(ids), pages) for ids, pages in decoding]
        left = tokens - len(segments)
        free = [*self._free]
        if left >= 8:
            start = len(self._begun)
            chunk = min(left // 2, self.longest - start)
            more = self._pages_for(start + chunk) - len(self._begun_pages)
            pages = self._begun_pages + self._take(more * self._page_size, free)
            segments.append(Segment(self.token_ids(chunk), start, pages))
            left -= chunk
        while left:
            length = min(left, self.longest)
            segments.append(Segment(self.token_ids(length), 0, self._take(length, free)))
            left -= length
        return segments

    def _take(self, tokens: int, free: list[int]) -> list[int]:
        need = self._pages_for(tokens)
        pages = free[:need]
        del free[:need]
        return pages

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
