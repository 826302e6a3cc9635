"""What to compute next: one token budget a step, first come first served.

There is no prefill phase and no decode phase. Each running request has `tokens` and a `computed` count that catches up
with them; a step gives each what it lacks, within the budget. Long prompts are thereby computed in chunks beside
decoding requests, a prefix hit is a request that starts with some tokens computed, and a preempted one starts again.
"""

from collections import deque
from dataclasses import dataclass

from fp4pipe.runtime.engine.pages import Pages
from fp4pipe.runtime.engine.request import Request


@dataclass(slots=True)
class Work:
    """Tokens ``start .. start + count`` of a request, to be computed in this step."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """The step reaches the end of the request's tokens, so it yields its next one."""
        return self.end == len(self.request.tokens)


class Scheduler:
    """Chooses each step's work and owns the requests' pages.

    A request that alone would outgrow the cache must be refused before `add`; every other one gets through: when pages
    run out, the latest admitted is preempted, and the earliest can always take the whole cache.
    """

    def __init__(self, pages: Pages, *, max_running: int, chunk_tokens: int) -> None:
        self.pages = pages
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of admission."""
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue `request`."""
        self.waiting.append(request)

    def schedule(self) -> list[Work]:
        """The next step's work, pages already leased for it; empty when there is nothing to do."""
        budget = self.chunk_tokens
        preempted = self.num_preemptions
        step: list[Work] = []
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(len(request.tokens) - request.computed, budget)
            if not self._make_room(request, request.computed + count):
                break  # it was the latest itself and went back to the queue
            step.append(Work(request, request.computed, count))
            budget -= count
            index += 1
        if self.num_preemptions == preempted:  # else the pages just freed belong to those that still run
            step.extend(self._admit(budget))
        return step

    def commit(self, step: list[Work]) -> None:
        """Record that `step` was computed."""
        for work in step:
            request = work.request
            assert request.lease is not None
            request.computed = work.end
            self.pages.commit(request.lease, request.tokens, request.computed)

    def remove(self, request: Request) -> None:
        """Take a request out, finished or not, and give its pages back."""
        if request.lease is not None:
            self.pages.release(request.lease)
            request.lease = None
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def _admit(self, budget: int) -> list[Work]:
        step: list[Work] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            request = self.waiting[0]
            length = len(request.tokens)
            # The last token is always computed: its logits choose the next one.
            reusable = 0 if request.needs_whole_prompt else length - 1
            lease = self.pages.lease(request.tokens, reusable)
            # All it has to compute must fit beside one more page for each that runs, or it would soon be preempted.
            lacking = self.pages.pages_for(length) - len(lease.pages)
            if self.running and lacking + len(self.running) > self.pages.available:
                self.pages.release(lease)
                break
            start = len(lease.pages) * self.pages.page_size
            count = min(length - start, budget)
            if not self.pages.grow(lease, start + count):
                self.pages.release(lease)
                break
            self.waiting.popleft()
            self.running.append(request)
            request.lease, request.computed = lease, start
            if request.num_output == 0:
                request.cached_tokens = start
            step.append(Work(request, start, count))
            budget -= count
        return step

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Lease pages for `num_tokens`, preempting from the latest; False when `request` itself had to go."""
        assert request.lease is not None
        while not self.pages.grow(request.lease, num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; what it had computed stays in the prefix cache as long as there is room."""
        assert request.lease is not None
        self.pages.release(request.lease)
        request.lease, request.computed = None, 0
        request.prompt_logits.clear()
        request.prompt_logprobs = None
        self.waiting.appendleft(request)
        self.num_preemptions += 1
