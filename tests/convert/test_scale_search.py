"""The block-scale search against an exhaustive one."""

import pytest
import torch

from fp4pipe import nvfp4
from fp4pipe.convert.scale_search import search_block_scales


def make_weight(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 128, generator=generator)
    if kind == "heavy-tailed":
        weight = weight / torch.rand(64, 128, generator=generator).clamp(min=0.02)
    if kind == "sparse":
        weight *= torch.rand(64, 128, generator=generator) < 0.1
    return weight.bfloat16()


def make_hessian() -> torch.Tensor:
    x = torch.randn(8, 16, 40, generator=torch.Generator().manual_seed(4))
    return x @ x.mT / 40


def block_error(weight: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, hessian=None) -> torch.Tensor:
    """[N, K/16] in float64, through the real quantizer."""
    q = nvfp4.quantize_weight(weight, global_scale, scale)
    d = (nvfp4.dequantize(*q).double() - weight.double()).unflatten(-1, (-1, 16))
    if hessian is None:
        return d.square().sum(-1)
    return torch.einsum("nbi,bij,nbj->nb", d, hessian.double(), d)


@pytest.mark.parametrize("kind", ["gaussian", "heavy-tailed", "sparse"])
@pytest.mark.parametrize("weighted", [False, True], ids=["mse", "local-hessian"])
def test_search_finds_the_minimum_over_all_scales(kind, weighted):
    weight, hessian = make_weight(kind), make_hessian() if weighted else None
    global_scale = nvfp4.global_scale_of(weight.abs().amax())
    found = search_block_scales(weight, global_scale, hessian=hessian, compiled=False)
    every = torch.stack(
        [
            block_error(weight, torch.full_like(found.float(), s).to(found.dtype), global_scale, hessian)
            for s in torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
        ]
    )
    ours = block_error(weight, found, global_scale, hessian)
    plain = block_error(weight, nvfp4.weight_block_scale(weight, global_scale), global_scale, hessian)
    assert (ours <= plain * (1 + 1e-5) + 1e-12).all(), "a search must never be worse than the plain scale"
    assert (ours <= every.amin(0) * (1 + 1e-4) + 1e-12).float().mean() > 0.999
    assert ours.sum() < 0.95 * plain.sum()


def test_compiled_and_eager_choose_the_same_scales():
    weight = make_weight("gaussian")
    global_scale = nvfp4.global_scale_of(weight.abs().amax())
    eager = search_block_scales(weight, global_scale, compiled=False, rows_at_once=1000)
    compiled = search_block_scales(weight, global_scale)
    assert torch.equal(eager.view(torch.uint8), compiled.view(torch.uint8))
