"""Passes over the traced graph: each takes a `Traced`, changes it in place and says how many nodes it took away."""

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, fx

from fp4pipe.runtime.graph.trace import Traced
from fp4pipe.runtime.ops import PreparedWeight, fuse_rows

_ATTENTION = "fp4pipe::paged_attention"
_QUANTIZE = "fp4pipe::fp4_quantize"
_PURE_METHODS = ("reshape", "view", "to", "float")
# Operator: how many leading arguments are the activations; weight, scales, alpha, rows follow, and the bias is last.
_GEMMS = {"fp4pipe::fp4_gemm": 2, "fp4pipe::fp4_gemm_w4a16": 1}


def rewrite(traced: Traced) -> dict[str, int]:
    """Run every pass in order.

    Returns:
        Nodes that each pass took away, by the pass's name.
    """
    passes: tuple[Callable[[Traced], int], ...] = (drop_dead, drop_casts, share_equal, fuse_siblings, drop_dead)
    counts: dict[str, int] = {}
    for each in passes:
        counts[each.__name__] = counts.get(each.__name__, 0) + each(traced)
    traced.graph.lint()
    return counts


def operator_name(node: fx.Node) -> str | None:
    """``namespace::name`` of the PyTorch operator that `node` calls."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    return target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else None


def drop_dead(traced: Traced) -> int:
    """Take away what nothing reads. Attention is the only node that works by what it writes."""
    before = len(traced.graph.nodes)
    traced.graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output") or operator_name(node) == _ATTENTION
    )
    return before - len(traced.graph.nodes)


def drop_casts(traced: Traced) -> int:
    """Take away casts to the dtype and device that the tensor has already."""
    dropped = 0
    for node in traced.graph.nodes:
        if node.op != "call_method" or node.target not in ("to", "float"):
            continue
        source = node.args[0]
        options = (*node.args[1:], *node.kwargs.values())
        plain = all(isinstance(option, torch.dtype | torch.device | str) for option in options)
        was, becomes = source.meta.get("example_value"), node.meta.get("example_value")
        if plain and isinstance(was, Tensor) and (was.dtype, was.device) == (becomes.dtype, becomes.device):
            node.replace_all_uses_with(source)
            traced.graph.erase_node(node)
            dropped += 1
    return dropped


def share_equal(traced: Traced) -> int:
    """Compute equal reshapes, casts and quantizations of one tensor once.

    Two quantizations are equal when their input scales have the same value, though each layer holds its own.
    """
    scalars = {name: _value(weight) for name, weight in traced.weights.items() if weight.numel() == 1}
    seen: dict[Hashable, fx.Node] = {}
    dropped = 0
    for node in traced.graph.nodes:
        if not _is_pure(node):
            continue

        def key_of(argument: Any) -> Hashable:
            if isinstance(argument, fx.Node):
                return scalars.get(argument.name, argument)
            return tuple(map(key_of, argument)) if isinstance(argument, tuple | list) else argument

        key = (node.target, key_of(node.args), tuple((k, key_of(v)) for k, v in node.kwargs.items()))
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # an argument that does not hash, such as a slice
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            traced.graph.erase_node(node)
            dropped += 1
    return dropped


def _value(scalar: Tensor) -> Hashable:
    return scalar.dtype, scalar.device, scalar.item()


def _is_pure(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _PURE_METHODS
    return node.op == "call_function" and (node.target is operator.getitem or operator_name(node) == _QUANTIZE)


def fuse_siblings(traced: Traced) -> int:
    """Make NVFP4 products that share their activations (q/k/v, gate/up) one product over stacked rows."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        count = _GEMMS.get(operator_name(node) or "")
        if count is not None:
            arguments = _positional(node)
            others = arguments[count + 4 : -1]
            groups.setdefault((node.target, *arguments[:count], *others, arguments[-1] is None), []).append(node)
    return sum(_fuse(traced, nodes) for nodes in groups.values() if len(nodes) > 1)


def _positional(node: fx.Node) -> tuple[Any, ...]:
    """All arguments of an operator's node in schema order, defaults filled in."""
    target: Any = node.target
    schema = (target.default if isinstance(target, torch._ops.OpOverloadPacket) else target)._schema
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    return tuple(given.get(a.name, a.default_value) for a in schema.arguments)


def _fuse(traced: Traced, nodes: list[fx.Node]) -> int:
    """Replace `nodes` by one product and a slice of its columns for each; 0 when their weights do not stack."""
    graph, weights = traced.graph, traced.weights
    count = _GEMMS[operator_name(nodes[0]) or ""]
    arguments = [_positional(node) for node in nodes]
    shards = [PreparedWeight(*(weights[a.name] for a in args[count:][:3]), args[count + 3]) for args in arguments]
    fused = fuse_rows(shards)
    if fused is None:
        return 0
    biases = None if arguments[0][-1] is None else [weights[args[-1].name] for args in arguments]
    for part in range(2):
        _point_into(fused[part], [shard[part] for shard in shards])
    first = arguments[0]
    place = first[count]
    new_weights = [_placeholder(traced, place, f"{place.name}_x{len(nodes)}_{i}", fused[i]) for i in range(3)]
    bias = None
    if biases is not None:
        bias = _placeholder(traced, place, f"{place.name}_x{len(nodes)}_bias", torch.cat(biases))
    call = (*first[:count], *new_weights, fused.out_features, *first[count + 4 : -1], bias)
    with graph.inserting_before(nodes[0]):
        product = _call(traced, nodes[0].target, call)
        start = 0
        for node, shard in zip(nodes, shards, strict=True):
            columns = (slice(None), slice(start, start + shard.out_features))
            node.replace_all_uses_with(_call(traced, operator.getitem, (product, columns)))
            graph.erase_node(node)
            start += shard.out_features
    return len(nodes) - 1


def _point_into(fused: Tensor, shards: list[Tensor]) -> None:
    """Let each shard be a view of its rows in `fused`, so that the model's own modules hold no second copy."""
    start = 0
    for shard in shards:
        rows = shard.shape[0]
        if shard.numel():
            shard.data = fused[start : start + rows]
        start += rows


def _placeholder(traced: Traced, before: fx.Node, name: str, weight: Tensor) -> fx.Node:
    with traced.graph.inserting_before(before):
        node = traced.graph.placeholder(name)
    node.meta["example_value"] = traced.fake_mode.from_tensor(weight, static_shapes=True)
    traced.weights[node.name] = weight
    return node


def _call(traced: Traced, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = traced.graph.call_function(target, args)
    with traced.fake_mode:
        node.meta["example_value"] = target(*fx.map_arg(args, lambda n: n.meta["example_value"]))
    return node
