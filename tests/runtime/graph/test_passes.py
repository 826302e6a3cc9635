"""Rewrite passes on small graphs made by hand: what they take away, and that the values stay."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fp4pipe import nvfp4
from fp4pipe.runtime.graph.rewrite import drop_casts, drop_dead, fuse_siblings, operator_name, share_equal
from fp4pipe.runtime.graph.trace import Traced
from fp4pipe.runtime.ops import PreparedWeight, fp8, prepare_weight

K = 32


class Written:
    """A graph over ``x [5, K]`` and weights, written call by call with fake values as tracing leaves them."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.traced = Traced(fx.Graph(), {}, self.mode)
        self.values: dict[str, Tensor] = {}
        self.x = self.placeholder("x", torch.randn(5, K))

    def placeholder(self, name: str, value: Tensor) -> fx.Node:
        node = self.traced.graph.placeholder(name)
        node.meta["example_value"] = self.mode.from_tensor(value)
        self.values[name] = value
        return node

    def weight(self, name: str, value: Tensor) -> fx.Node:
        node = self.placeholder(name, value)
        self.traced.weights[name] = value
        return node

    def quantized(self, name: str, rows: int, form: str) -> tuple[fx.Node, fx.Node, fx.Node, int]:
        codes, scales, global_scale = nvfp4.quantize_weight(torch.randn(rows, K))
        weight = PreparedWeight(codes, scales, global_scale.reshape(1), rows)
        if form == "folded":
            weight = prepare_weight(weight, "cpu")
        nodes = [self.weight(f"{name}_{i}", tensor) for i, tensor in enumerate(weight[:3])]
        return nodes[0], nodes[1], nodes[2], rows

    def call(self, target: Callable[..., object] | str, *args: object, **kwargs: object) -> fx.Node:
        graph = self.traced.graph
        make = graph.call_method if isinstance(target, str) else graph.call_function
        node = make(target, args, kwargs)  # type: ignore[arg-type]
        with self.mode:
            fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
            function = getattr(torch.Tensor, target) if isinstance(target, str) else target
            node.meta["example_value"] = function(*fake_args, **fake_kwargs)
        return node

    def output(self, *nodes: fx.Node) -> None:
        self.traced.graph.output(nodes)

    def run(self) -> tuple[Tensor, ...]:
        self.traced.graph.lint()
        names = [node.name for node in self.traced.graph.find_nodes(op="placeholder")]
        given = self.values | self.traced.weights
        return fx.GraphModule({}, self.traced.graph)(*(given[name] for name in names))

    def count(self, name: str) -> int:
        return sum(operator_name(node) == name or node.target == name for node in self.traced.graph.nodes)


def test_drop_dead_keeps_what_is_read_and_what_attends():
    graph = Written()
    graph.call("neg", graph.x)
    q = graph.call("view", graph.x, 5, 1, K)
    out = graph.call(torch.empty_like, q)
    graph.call(torch.ops.fp4pipe.paged_attention.default, q, q, q, out, 0, 1.0, 0)
    graph.output(out)
    assert drop_dead(graph.traced) == 1
    assert graph.count("fp4pipe::paged_attention") == 1


def test_drop_casts_takes_only_those_that_change_nothing():
    graph = Written()
    same = graph.call("to", graph.x, torch.float32)
    same = graph.call("float", same)
    same = graph.call("to", same, device=torch.device("cpu"))
    narrow = graph.call("to", same, torch.bfloat16)
    copied = graph.call("to", same, torch.float32, copy=True)
    graph.output(same, narrow, copied)
    before = graph.run()
    assert drop_casts(graph.traced) == 3
    assert graph.count("to") == 2
    torch.testing.assert_close(graph.run(), before, atol=0, rtol=0)


def test_equal_quantizations_are_shared_and_unequal_are_not():
    graph = Written()
    scales = [graph.weight(f"scale{i}", torch.tensor(value)) for i, value in enumerate((0.01, 0.01, 0.02))]
    results = []
    for scale in scales:
        rows = graph.call("reshape", graph.x, -1, K)
        pair = graph.call(torch.ops.fp4pipe.fp4_quantize.default, rows, scale)
        results += [graph.call(operator.getitem, pair, 0), graph.call(operator.getitem, pair, 1)]
    graph.output(*results)
    before = graph.run()
    # two reshapes, one quantization and its two results
    assert share_equal(graph.traced) == 5
    assert graph.count("fp4pipe::fp4_quantize") == 2
    for got, expected in zip(graph.run(), before, strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("form", ["stored", "folded"])
@pytest.mark.parametrize("bias", [False, True])
def test_siblings_become_one_product(form: str, bias: bool):
    graph = Written()
    gemm, rows = torch.ops.fp4pipe.fp4_gemm_w4a16.default, (16, 48, 16)
    products = []
    for number, count in enumerate(rows):
        added = (graph.weight(f"bias{number}", torch.randn(count)),) if bias else ()
        products.append(graph.call(gemm, graph.x, *graph.quantized(f"w{number}", count, form), *added))
    other = graph.call("neg", graph.x)
    products.append(graph.call(gemm, other, *graph.quantized("other", 16, form)))
    graph.output(*products)
    before = graph.run()
    assert fuse_siblings(graph.traced) == 2
    assert graph.count("fp4pipe::fp4_gemm_w4a16") == 2
    torch.testing.assert_close(graph.run(), before, atol=1e-5, rtol=1e-5)
    fused = next(weight for name, weight in graph.traced.weights.items() if name.endswith("_x3_w"))
    shards = [graph.values[f"w{number}_0"] for number in range(3)]
    assert {shard.untyped_storage().data_ptr() for shard in shards} == {fused.untyped_storage().data_ptr()}
    assert torch.equal(torch.cat(shards), fused)
    alpha = next(weight for name, weight in graph.traced.weights.items() if name.endswith("_x3_alpha"))
    assert alpha.tolist() == [graph.values[f"w{n}_2"].item() for n, count in enumerate(rows) for _ in range(count)]


@pytest.mark.parametrize("tokens", [5, fp8.MIN_TOKENS])
def test_fp8_siblings_become_one_product(tokens: int):
    graph = Written()
    gemm = torch.ops.fp4pipe.fp8_prefill_gemm.default
    products, folded = [], []
    x = graph.weight("rows", torch.randn(tokens, K))
    for number, count in enumerate((16, 48)):
        w, scales, alpha, _ = graph.quantized(f"w{number}", count, "stored")
        forms = fp8.fold_weight(*(graph.values[node.name] for node in (w, scales, alpha)))
        folded.append(forms)
        nodes = [graph.weight(f"w{number}_f{i}", form) for i, form in enumerate(forms)]
        products.append(graph.call(gemm, x, w, scales, alpha, *nodes, count))
    graph.output(*products)
    before = graph.run()
    assert fuse_siblings(graph.traced) == 1
    assert graph.count("fp4pipe::fp8_prefill_gemm") == 1
    torch.testing.assert_close(graph.run(), before, atol=1e-5, rtol=1e-5)
    assert len({forms[0].untyped_storage().data_ptr() for forms in folded}) == 1


def test_fusing_again_reuses_the_stack():
    first = Written()
    gemm = torch.ops.fp4pipe.fp4_gemm_w4a16.default
    weights = [first.quantized(f"w{number}", 16, "folded") for number in range(2)]
    first.output(*(first.call(gemm, first.x, *weight) for weight in weights))
    fuse_siblings(first.traced)
    second = Written()
    again = [(*(second.weight(node.name, first.values[node.name]) for node in weight[:3]), 16) for weight in weights]
    second.output(*(second.call(gemm, second.x, *weight) for weight in again))
    assert fuse_siblings(second.traced) == 1
    (one, two) = (
        next(w for name, w in each.traced.weights.items() if name.endswith("_x2_w")) for each in (first, second)
    )
    assert one.data_ptr() == two.data_ptr()
    assert torch.equal(one, two)


def test_w4a4_siblings_need_one_quantization():
    graph = Written()
    products = []
    for number, value in enumerate((0.01, 0.01, 0.02)):
        scale = graph.weight(f"scale{number}", torch.tensor(value))
        pair = graph.call(torch.ops.fp4pipe.fp4_quantize.default, graph.x, scale)
        activations = (graph.call(operator.getitem, pair, 0), graph.call(operator.getitem, pair, 1))
        weight = graph.quantized(f"w{number}", 16, "folded")
        products.append(graph.call(torch.ops.fp4pipe.fp4_gemm.default, *activations, *weight, torch.float32))
    graph.output(*products)
    before = graph.run()
    share_equal(graph.traced)
    assert fuse_siblings(graph.traced) == 1
    assert graph.count("fp4pipe::fp4_gemm") == 2
    torch.testing.assert_close(graph.run(), before, atol=1e-5, rtol=1e-5)
