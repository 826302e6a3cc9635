"""A model whose logits are a hash of all that came before: faults in pages, slots or scheduling show in its output."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fp4pipe.runtime.batch import Batch
from fp4pipe.runtime.engine.engine import Engine
from fp4pipe.runtime.engine.pages import Pages
from tests.tiny_models import make_tokenizer

EOS = 2


class HashModel:
    vocab_size = 512
    max_context = 200

    def __init__(self, likelier_eos: float = 0.0) -> None:
        self.likelier_eos = likelier_eos

    def logits(self, hidden: Tensor) -> Tensor:
        rows = []
        for digest in hidden[:, 0].tolist():
            row = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(digest))
            row[EOS] += self.likelier_eos
            rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    @staticmethod
    def digest(tokens: list[int]) -> int:
        return hash(tuple(tokens)) & 0x7FFFFFFF


class HashRunner:
    """Reads each token's context back through the page table from a cache that holds token ids."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.cache = torch.full((num_pages, page_size), -1)
        self.page_size = page_size
        self.stats: dict = {}
        self.largest = 0

    def forward(self, batch: Batch) -> Tensor:
        self.largest = max(self.largest, batch.num_tokens)
        self.cache.view(-1)[batch.slots] = batch.input_ids
        hidden = []
        for row in range(batch.num_sequences):
            context = self.cache[batch.page_table[row].long()].view(-1)[: int(batch.context_len[row])].tolist()
            first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
            for position in batch.position_ids[first:last].tolist():
                hidden.append([HashModel.digest(context[: position + 1])])
        return torch.tensor(hidden)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def make_engine(tokenizer):
    def make(
        *, num_pages=64, page_size=4, max_running=8, chunk_tokens=32, prefix_cache=True, likelier_eos=0.0
    ) -> Engine:
        return Engine(
            HashModel(likelier_eos),  # type: ignore[arg-type]
            HashRunner(num_pages, page_size),  # type: ignore[arg-type]
            tokenizer,
            Pages(num_pages, page_size, prefix_cache=prefix_cache),
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            eos_ids=[EOS],
        )

    return make


@pytest.fixture(scope="session")
def greedy():
    """Greedy continuation computed without an engine."""

    def continue_(prompt: list[int], count: int, likelier_eos: float = 0.0) -> list[int]:
        model, tokens = HashModel(likelier_eos), list(prompt)
        for _ in range(count):
            tokens.append(int(model.logits(torch.tensor([[model.digest(tokens)]])).argmax()))
            if tokens[-1] == EOS:
                break
        return tokens[len(prompt) :]

    return SimpleNamespace(continue_=continue_)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests in an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True
