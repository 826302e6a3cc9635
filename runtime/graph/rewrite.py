"""Passes over the traced graph: each takes a `Traced`, changes it in place and says how many nodes it took away."""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fp4pipe.runtime.graph.trace import Traced
from fp4pipe.runtime.ops import PreparedWeight, fuse_rows

_ATTENTION = "fp4pipe::paged_attention"
_QUANTIZE = "fp4pipe::fp4_quantize"
_PURE_METHODS = ("reshape", "view", "to", "float")
# Operator: how many leading arguments are the activations; weight, scales, alpha follow, then as many more forms of the
# weight with one row for each of its rows, the number of rows, options, and the bias last.
_GEMMS = {"fp4pipe::fp4_gemm": (2, 0), "fp4pipe::fp4_gemm_w4a16": (1, 0), "fp4pipe::fp8_prefill_gemm": (1, 2)}


def rewrite(traced: Traced, further: Sequence[Callable[[Traced], int]] = ()) -> dict[str, int]:
    """Run every pass in order, `further` ones after those that every device gets.

    Returns:
        What each pass counts, nodes taken away or fused, by the pass's name.
    """
    passes: tuple[Callable[[Traced], int], ...] = (
        *(drop_dead, drop_casts, share_equal, fuse_siblings),
        *further,
        drop_dead,
    )
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
    groups: dict[Hashable, list[_Product]] = {}
    for node in traced.graph.nodes:
        if operator_name(node) in _GEMMS:
            product = _Product.of(node, traced)
            kind = (node.target, *product.activations, *product.options, product.bias is None)
            groups.setdefault(kind, []).append(product)
    return sum(_fuse(traced, products) for products in groups.values() if len(products) > 1)


class _Product(NamedTuple):
    """An NVFP4 product's node, taken apart."""

    node: fx.Node
    activations: tuple[fx.Node, ...]
    weight_node: fx.Node
    weight: PreparedWeight
    forms: tuple[Tensor, ...]
    options: tuple[Any, ...]
    bias: Tensor | None

    @classmethod
    def of(cls, node: fx.Node, traced: Traced) -> "_Product":
        target: Any = node.target
        schema = (target.default if isinstance(target, torch._ops.OpOverloadPacket) else target)._schema
        given: dict[str, Any] = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
        arguments: tuple[Any, ...] = tuple(given.get(a.name, a.default_value) for a in schema.arguments)
        count, more = _GEMMS[operator_name(node) or ""]
        w, w_scales, alpha, *rest = arguments[count:]
        rows, *options, bias = rest[more:]
        weights = traced.weights
        shard = PreparedWeight(weights[w.name], weights[w_scales.name], weights[alpha.name], rows)
        forms = tuple(weights[form.name] for form in rest[:more])
        bias = None if bias is None else weights[bias.name]
        return cls(node, arguments[:count], w, shard, forms, tuple(options), bias)


def _fuse(traced: Traced, products: list[_Product]) -> int:
    """Replace `products` by one and a slice of its columns for each; 0 when their weights do not stack."""
    stacked = fuse_rows([product.weight for product in products])
    if stacked is None:
        return 0
    node, activations, place, _, _, options, _ = products[0]
    w = _stack_in_place([product.weight.w for product in products], stacked.w)
    w_scales = _stack_in_place([product.weight.w_scales for product in products], stacked.w_scales)
    forms = [_stack_in_place(list(shards), _rows(shards)) for shards in zip(*(p.forms for p in products), strict=True)]
    biases = [product.bias for product in products if product.bias is not None]

    def placeholder(leaf: str, weight: Tensor) -> fx.Node:
        return _placeholder(traced, place, f"{place.name}_x{len(products)}_{leaf}", weight)

    weight = (placeholder("w", w), placeholder("w_scales", w_scales), placeholder("alpha", stacked.alpha))
    others = tuple(placeholder(f"form{number}", form) for number, form in enumerate(forms))
    bias = placeholder("bias", torch.cat(biases)) if biases else None
    with traced.graph.inserting_before(node):
        whole = call(traced, node.target, (*activations, *weight, *others, stacked.out_features, *options, bias))
        start = 0
        for product in products:
            columns = (slice(None), slice(start, start + product.weight.out_features))
            product.node.replace_all_uses_with(call(traced, operator.getitem, (whole, columns)))
            start += product.weight.out_features
    for product in products:
        traced.graph.erase_node(product.node)
    return len(products) - 1


def _rows(shards: tuple[Tensor, ...]) -> Tensor:
    """`shards` one below the other; as bytes when they are e4m3, which PyTorch does not concatenate everywhere."""
    if shards[0].dtype != torch.float8_e4m3fn:
        return torch.cat(shards)
    return torch.cat([shard.view(torch.uint8) for shard in shards]).view(torch.float8_e4m3fn)


def _stack_in_place(shards: list[Tensor], stacked: Tensor) -> Tensor:
    """Let each shard be a view of its rows in `stacked`, so that the model's own modules hold no second copy.

    Returns:
        `stacked`, or the tensor that the shards are views of already, from another trace of the model.
    """
    ends = [shard.data_ptr() + shard.nbytes for shard in shards]
    one_storage = len({shard.untyped_storage().data_ptr() for shard in shards}) == 1
    if one_storage and all(end == shard.data_ptr() for end, shard in zip(ends, shards[1:], strict=False)):
        return shards[0].as_strided(stacked.shape, stacked.stride())
    for shard, rows in zip(shards, stacked.split([shard.shape[0] for shard in shards]), strict=True):
        shard.data = rows
    return stacked


def _placeholder(traced: Traced, before: fx.Node, name: str, weight: Tensor) -> fx.Node:
    with traced.graph.inserting_before(before):
        node = traced.graph.placeholder(name)
    node.meta["example_value"] = traced.fake_mode.from_tensor(weight, static_shapes=True)
    traced.weights[node.name] = weight
    return node


def call(traced: Traced, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A call of `target` put where the graph inserts, with the fake value it has."""
    node = traced.graph.call_function(target, args)
    with traced.fake_mode:
        node.meta["example_value"] = target(*fx.map_arg(args, lambda n: n.meta["example_value"]))
    return node
