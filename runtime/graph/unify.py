"""Pieces that compute the same, whatever weights and buffers they are given: one compilation serves them all."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from fp4pipe.runtime.graph.rewrite import operator_name


def canonical(graph: fx.Graph) -> str:
    """A text that is equal for two graphs exactly when they do the same to their placeholders, in order.

    Names are replaced by places; placeholders are described by dtype, device, shape and stride.
    """
    places: dict[fx.Node, str] = {}
    lines: list[str] = []
    for place, node in enumerate(graph.nodes):
        places[node] = f"%{place}"
        if node.op == "placeholder":
            lines.append(f"{places[node]} = {_describe(node.meta['example_value'])}")
        else:
            arguments = fx.map_arg((node.args, node.kwargs), lambda n: _Name(places[n]))
            lines.append(f"{places[node]} = {node.op} {_target(node)} {arguments!r}")
    return "\n".join(lines)


class _Name(str):
    """A place in an argument list, shown without quotes so that it never looks like a string argument."""

    def __repr__(self) -> str:
        return str(self)


def _describe(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    assert isinstance(value, torch.SymInt), value
    return f"int {value}"


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    return operator_name(node) or f"{target.__module__}.{target.__qualname__}"
