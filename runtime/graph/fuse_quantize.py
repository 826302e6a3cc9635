"""A pass for devices with the kernels: RMS norm and quantizer, SiLU times gate and quantizer, become one operator."""

from typing import Any

import torch
from torch import Tensor, fx

from fp4pipe.runtime.graph.rewrite import call, operator_name
from fp4pipe.runtime.graph.trace import Traced

_RESHAPES = ("reshape", "view", "contiguous")


def fuse_quantize(traced: Traced) -> int:
    """Fuse each quantizer with the norm or gate before it, where nothing else reads what lies between.

    Run it after `fuse_siblings`, which puts gate and up side by side.

    Returns:
        Quantizers fused.
    """
    return sum(
        _fuse(traced, node) for node in list(traced.graph.nodes) if operator_name(node) == "fp4pipe::fp4_quantize"
    )


def _fuse(traced: Traced, node: fx.Node) -> bool:
    rows, scale, *swizzled = node.args
    if not isinstance(rows, fx.Node) or len(rows.users) > 1:
        return False
    product = _unshaped(rows)
    if product is None or _name(product) != "mul" or product.kwargs:
        return False
    found = _gated(product, _value(rows).shape[-1]) or _normed(product, traced)
    if found is None:
        return False
    source, target, extra = found
    columns = _value(source).shape[-1]
    with traced.graph.inserting_before(node):
        flat = source if _value(source).dim() == 2 else call(traced, torch.reshape, (source, (-1, columns)))
        fused = call(traced, target, (flat, *extra, scale, *swizzled))
    node.replace_all_uses_with(fused)
    return True


_Found = tuple[fx.Node, Any, tuple[Any, ...]]
"""What the fused operator reads, the operator, and its arguments before the input scale."""


def _gated(product: fx.Node, columns: int) -> _Found | None:
    """``silu(x[:, :K]) * x[:, K:]``."""
    activated, up = (_unshaped(argument) for argument in product.args)
    if activated is None or up is None or _name(activated) != "silu" or len(activated.users) > 1:
        return None
    gate = _unshaped(activated.args[0])
    if gate is None or {_name(gate), _name(up)} != {"getitem"} or gate.args[0] is not up.args[0]:
        return None
    whole = gate.args[0]
    halves = [(slice(None), slice(0, columns)), (slice(None), slice(columns, 2 * columns))]
    if not isinstance(whole, fx.Node) or [gate.args[1], up.args[1]] != halves:
        return None
    if _value(whole).dim() != 2 or _value(whole).shape[1] != 2 * columns:
        return None
    return whole, torch.ops.fp4pipe.silu_mul_fp4_quantize.default, ()


def _normed(product: fx.Node, traced: Traced) -> _Found | None:
    """``weight * (x * rsqrt(mean(x ** 2) + eps))``, with `x` widened and the normed value rounded back."""
    weight, rounded = product.args
    if not (isinstance(weight, fx.Node) and weight.name in traced.weights and isinstance(rounded, fx.Node)):
        return None
    normed = _uncast(rounded)
    if _name(normed) != "mul":
        return None
    wide, inverse = normed.args
    if not (isinstance(wide, fx.Node) and isinstance(inverse, fx.Node) and _name(inverse) == "rsqrt"):
        return None
    shifted = inverse.args[0]
    if not isinstance(shifted, fx.Node) or _name(shifted) != "add" or not isinstance(shifted.args[1], float):
        return None
    mean = shifted.args[0]
    if not isinstance(mean, fx.Node) or (_name(mean), mean.args[1:], mean.kwargs) != ("mean", (-1,), {"keepdim": True}):
        return None
    square = mean.args[0]
    if not isinstance(square, fx.Node) or (_name(square), square.args) != ("pow", (wide, 2)):
        return None
    source = _uncast(wide)
    types = {_value(each).dtype for each in (source, weight, product)}
    if len(types) != 1 or _value(wide).dtype != torch.float32 or traced.weights[weight.name].dim() != 1:
        return None
    return source, torch.ops.fp4pipe.rmsnorm_fp4_quantize.default, (weight, shifted.args[1])


def _unshaped(node: Any) -> fx.Node | None:
    """What `node` is a reshape of; None when something else reads what lies between."""
    if not isinstance(node, fx.Node):
        return None
    while node.op == "call_method" and node.target in _RESHAPES:
        node = node.args[0]
        if not isinstance(node, fx.Node) or len(node.users) > 1:
            return None
    return node


def _uncast(node: fx.Node) -> fx.Node:
    """`node`, or what it is a cast of."""
    source = node.args[0] if node.op == "call_method" and node.target in ("to", "float") else node
    return source if isinstance(source, fx.Node) else node


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]
