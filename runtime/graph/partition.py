"""The graph cut at its attention calls, into pieces that read and write named buffers and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp4pipe.runtime.graph.rewrite import operator_name
from fp4pipe.runtime.graph.trace import INPUT_IDS, POSITION_IDS, TOKENS, Traced

ATTENTION = "fp4pipe::paged_attention"


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that one piece writes and another reads, contiguous."""

    shape: tuple[int | None, ...]
    """None is the token count, which occurs at most once."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """A graph between two attention calls. It returns nothing: its results go into buffers that it is given."""

    graph: fx.Graph
    arguments: tuple[str, ...]
    """For each placeholder: `trace.TOKENS`, a crossing tensor's name or a weight's name."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the paged attention on crossing tensors."""

    q: str
    k: str
    v: str
    out: str
    layer: int
    scale: float
    window: int

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.q, self.k, self.v)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True)
class Program:
    """Pieces and attention calls in order; the inputs are crossing tensors too."""

    steps: tuple[Piece | AttentionCall, ...]
    crossings: dict[str, Crossing]
    output: str


def partition(traced: Traced) -> Program:
    """Cut `traced` at every attention call, keeping the order of its nodes."""
    graph = traced.graph
    (output,) = graph.output_node().all_input_nodes
    segments, calls = _cut(graph)
    home = {node: index for index, nodes in enumerate(segments) for node in nodes}
    blanks = {out for call in calls if isinstance(out := call.args[3], fx.Node)}
    for index, call in enumerate(calls):
        home[call] = index  # read together with the piece before it, which must write what it reads

    def crosses(node: fx.Node) -> bool:
        return node is output or any(user in calls or home.get(user) != home[node] for user in node.users)

    crossing = {node for node in home if node not in calls and node not in blanks and crosses(node)}
    steps: list[Piece | AttentionCall] = []
    for index, nodes in enumerate(segments):
        steps.append(_piece(traced, [n for n in nodes if n not in blanks], crossing))
        if index < len(calls):
            steps.append(_attention_call(calls[index]))
    inputs = [n for n in graph.find_nodes(op="placeholder") if n.name in (INPUT_IDS, POSITION_IDS)]
    tokens = _token_symbol(inputs[0])
    named = {n.name: _crossing(n, tokens) for n in (*inputs, *crossing, *blanks)}
    return Program(tuple(steps), named, output.name)


def _cut(graph: fx.Graph) -> tuple[list[list[fx.Node]], list[fx.Node]]:
    segments: list[list[fx.Node]] = [[]]
    calls: list[fx.Node] = []
    for node in graph.nodes:
        if operator_name(node) == ATTENTION:
            calls.append(node)
            segments.append([])
        elif node.op not in ("placeholder", "output"):
            segments[-1].append(node)
    return segments, calls


def _attention_call(node: fx.Node) -> AttentionCall:
    arguments: list[Any] = [a.name if isinstance(a, fx.Node) else a for a in node.args]
    return AttentionCall(*arguments)


def _piece(traced: Traced, nodes: list[fx.Node], crossing: set[fx.Node]) -> Piece:
    """A graph of `nodes` alone; placeholders in order of first use, then one for each result."""
    inside = set(nodes)
    outside = list(dict.fromkeys(source for n in nodes for source in n.all_input_nodes if source not in inside))
    results = [node for node in nodes if node in crossing]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in outside:
        copies[source] = graph.placeholder(source.name)
        is_weight = source.name in traced.weights or source.name == TOKENS
        value = source.meta["example_value"]
        copies[source].meta["example_value"] = value if is_weight else _contiguous(traced, value)
    targets = [graph.placeholder(f"into_{node.name}") for node in results]
    for target, node in zip(targets, results, strict=True):
        target.meta["example_value"] = _contiguous(traced, node.meta["example_value"])
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for target, node in zip(targets, results, strict=True):
        graph.call_method("copy_", (target, copies[node]))
    graph.output(())
    writes = tuple(node.name for node in results)
    reads = tuple(s.name for s in outside if s.name not in traced.weights and s.name != TOKENS)
    return Piece(graph, (*(source.name for source in outside), *writes), reads, writes)


def _contiguous(traced: Traced, value: Tensor) -> Tensor:
    with traced.fake_mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _token_symbol(input_ids: fx.Node) -> Any:
    return input_ids.meta["example_value"].shape[1].node.expr


def _crossing(node: fx.Node, tokens: Any) -> Crossing:
    value = node.meta["example_value"]
    shape = tuple(None if _is_tokens(size, tokens) else int(size) for size in value.shape)
    assert shape.count(None) <= 1, f"{node.name}: {tuple(value.shape)} follows the token count twice"
    return Crossing(shape, value.dtype)


def _is_tokens(size: Any, tokens: Any) -> bool:
    return isinstance(size, torch.SymInt) and size.node.expr == tokens


def shape_for(crossing: Crossing, tokens: int) -> Sequence[int]:
    """The shape of `crossing` in a step of `tokens`."""
    return [tokens if size is None else size for size in crossing.shape]
