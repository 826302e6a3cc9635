"""Trace, partition, unify and buffers on real tiny models."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from fp4pipe.errors import Unavailable
from fp4pipe.runtime.graph.buffers import Buffers
from fp4pipe.runtime.graph.partition import AttentionCall, Piece, Program, partition
from fp4pipe.runtime.graph.rewrite import operator_name, rewrite
from fp4pipe.runtime.graph.trace import INPUT_IDS, POSITION_IDS, TOKENS, Traced, trace
from fp4pipe.runtime.graph.unify import canonical
from fp4pipe.runtime.model import Model
from tests.tiny_models import make_tiny


def traced(path: Path, mode: str = "w4a4") -> Traced:
    return trace(Model.load(path, mode=mode, progress=False))


@cache
def program_of(path: Path, mode: str = "w4a4") -> Program:
    graph = traced(path, mode)
    rewrite(graph)
    return partition(graph)


def pieces_of(program: Program) -> list[Piece]:
    return [step for step in program.steps if isinstance(step, Piece)]


def test_trace_takes_one_token_count_and_the_models_own_tensors(tiny: Callable[..., Path]):
    model = Model.load(tiny("qwen2", "modelopt"), progress=False)
    graph = trace(model)
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    assert {TOKENS, INPUT_IDS, POSITION_IDS} == set(names) - set(graph.weights)
    own = {id(t) for t in (*model.decoder.parameters(), *model.decoder.buffers())}
    assert {id(weight) for weight in graph.weights.values()} <= own
    (symbol,) = (n.meta["example_value"] for n in graph.graph.nodes if n.name == TOKENS)
    assert graph.fake_mode.shape_env.bound_sympy(symbol.node.expr).lower <= 1  # one token is not special


def test_trace_says_why_a_model_does_not_trace(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    model = Model.load(tiny("llama"), progress=False)
    forward = type(model.decoder).forward

    def data_dependent(self, input_ids, **given):
        return forward(self, input_ids=input_ids + int(input_ids.sum().item() > 3), **given)

    monkeypatch.setattr(type(model.decoder), "forward", data_dependent)
    with pytest.raises(Unavailable, match=r"llama does not trace to one graph; .*--graphs segmented"):
        trace(model)


def test_models_of_other_sizes_leave_no_mark_on_each_other(tmp_path: Path):
    """Numbers that differ between two traces must not turn into symbols in the second."""
    small = make_tiny("qwen3", tmp_path / "small", layers=1)
    large = make_tiny("qwen3", tmp_path / "large", layers=1, head_dim=64, rms_norm_eps=1e-5, num_key_value_heads=1)
    alone, _, again = (program_of.__wrapped__(path, "w4a16") for path in (small, large, small))
    for one, other in zip(pieces_of(alone), pieces_of(again), strict=True):
        assert canonical(one.graph) == canonical(other.graph)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_pieces_between_attention_calls(family: str, tiny: Callable[..., Path]):
    """N layers are N + 1 pieces of 3 kinds, and every tensor is written before it is read."""
    program = program_of(tiny(family, "modelopt"))
    assert [type(step) for step in program.steps] == [Piece, AttentionCall] * 3 + [Piece]
    assert [step.layer for step in program.steps if isinstance(step, AttentionCall)] == [0, 1, 2]
    forms = [canonical(piece.graph) for piece in pieces_of(program)]
    assert len(set(forms)) == 3
    assert forms[1] == forms[2]
    written = {INPUT_IDS, POSITION_IDS}
    for step in program.steps:
        assert set(step.reads) <= written
        written |= set(step.writes)
    assert program.output in written
    assert written == set(program.crossings)


def test_layers_are_stacked_and_quantized_once(tiny: Callable[..., Path]):
    middle = pieces_of(program_of(tiny("llama", "modelopt")))[1].graph
    calls = [operator_name(node) for node in middle.nodes]
    assert calls.count("fp4pipe::fp4_gemm") == 4  # o, gate + up, down, q + k + v
    assert calls.count("fp4pipe::fp4_quantize") == 4


def test_canonical_form_tells_pieces_apart(tiny: Callable[..., Path], tmp_path: Path):
    base = make_tiny("llama", tmp_path / "base", layers=1)
    wider = make_tiny("llama", tmp_path / "wider", layers=1, intermediate_size=96)
    other = make_tiny("llama", tmp_path / "other", layers=1, rms_norm_eps=1e-4)
    forms = [canonical(pieces_of(program_of(path, "w4a16"))[-1].graph) for path in (base, wider, other)]
    assert len(set(forms)) == 3


def test_buffers_share_storage_only_when_dead(tiny: Callable[..., Path]):
    program = program_of(tiny("gemma3_text", "modelopt"))
    buffers = Buffers(program, 32, torch.device("cpu"))
    address = {name: buffers.view(name, 32).data_ptr() for name in program.crossings}
    owner: dict[int, str] = {address[name]: name for name in (INPUT_IDS, POSITION_IDS)}
    for step in program.steps:
        assert all(owner[address[name]] == name for name in step.reads)  # not overwritten since
        assert not {address[name] for name in step.reads} & {address[name] for name in step.writes}
        owner |= {address[name]: name for name in step.writes}
    assert owner[address[program.output]] == program.output
    assert len(buffers.distinct()) < len(program.crossings)
    assert buffers.bytes == sum(storage.nbytes for storage in buffers.distinct())


def test_views_start_where_the_buffer_starts(tiny: Callable[..., Path]):
    program = program_of(tiny("llama", "modelopt"))
    buffers = Buffers(program, 32, torch.device("cpu"))
    for name in program.crossings:
        small, large = buffers.view(name, 3), buffers.view(name, 32)
        assert small.data_ptr() == large.data_ptr()
        assert small.is_contiguous()
        assert 3 in small.shape
