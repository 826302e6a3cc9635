"""One full graph of the model's body, with a symbolic token count, kept to be called without guards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor, fx
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses import FakeTensorMode

from fp4pipe.errors import Unavailable, first_line
from fp4pipe.runtime.model import Model

TOKENS, INPUT_IDS, POSITION_IDS = "tokens", "input_ids", "position_ids"
"""Placeholders of the token count and of the two inputs; every other placeholder is a weight."""
_EXAMPLE_TOKENS = 256
"""What Inductor takes as the likely size when it decides which loops to run in parallel."""


@dataclass
class Traced:
    """A graph from `TOKENS`, `INPUT_IDS`, `POSITION_IDS` and weights to hidden states.

    Every node carries a fake tensor in ``meta["example_value"]``; sizes that follow the token count are symbolic.
    """

    graph: fx.Graph
    weights: dict[str, Tensor]
    """Placeholder name to the tensor it stands for."""
    fake_mode: FakeTensorMode


class _Captured(Exception):
    """Ends the traced call: its result is of no interest."""


def trace(model: Model) -> Traced:
    """Trace `model.body` once.

    Raises:
        Unavailable: The model does not trace to one graph; says where it breaks.
    """
    captured: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def keep(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        captured.append((module, examples))

        def stop(*_: Any) -> None:
            raise _Captured

        return stop

    ids = torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_EXAMPLE_TOKENS, device=model.device).unsqueeze(0)
    for tokens in (ids, positions):
        torch._dynamo.mark_dynamic(tokens, 1)
    try:
        with torch.no_grad(), _settings():
            torch.compile(_fresh(model.body), fullgraph=True, backend=keep)(ids, positions)
    except _Captured:
        pass
    except TorchDynamoException as error:
        raise Unavailable(
            f"{model.config.model_type} does not trace to one graph",
            because=first_line(error),
            fix="--graphs segmented, which does not trace",
        ) from error
    module, examples = captured[0]
    return _named(module.graph, examples, ids, positions)


def any_size() -> AbstractContextManager[None]:
    """While tracing and compiling, let nothing be concluded from the token count not being 0 or 1."""
    return torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


@contextmanager
def _settings() -> Iterator[None]:
    """One symbol, the token count, which may be any number, 1 included; whatever earlier traces saw is forgotten."""
    with (
        torch._dynamo.config.patch(automatic_dynamic_shapes=False, specialize_float=True),
        any_size(),
    ):
        yield


def _fresh(body: Callable[..., Any]) -> Callable[..., Any]:
    """`body` under a code object of its own, so that nothing compiled before or after shares its cache."""
    function: FunctionType = body.__func__  # type: ignore[attr-defined]
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return copy.__get__(body.__self__)  # type: ignore[attr-defined]


def _named(graph: fx.Graph, examples: Sequence[Any], ids: Tensor, positions: Tensor) -> Traced:
    """Tell the placeholders apart, and leave one of them for the token count."""
    weights: dict[str, Tensor] = {}
    tokens: fx.Node | None = None
    fake_mode: FakeTensorMode | None = None
    for node, example in zip(graph.find_nodes(op="placeholder"), examples, strict=True):
        if isinstance(example, torch.SymInt):
            if tokens is None:
                tokens = node
                _rename(node, TOKENS)
            else:
                node.replace_all_uses_with(tokens)
                graph.erase_node(node)
        elif example is ids:
            _rename(node, INPUT_IDS)
            fake_mode = node.meta["example_value"].fake_mode
        elif example is positions:
            _rename(node, POSITION_IDS)
        else:
            weights[node.name] = example
    assert fake_mode is not None
    return Traced(graph, weights, fake_mode)


def _rename(node: fx.Node, name: str) -> None:
    node.name = node.target = name
