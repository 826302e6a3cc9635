"""The FlashInfer backend on a GPU that multiplies NVFP4. Ready to run there; nobody has yet."""

import pytest
import torch

from fp4pipe import nvfp4
from fp4pipe.runtime import ops

NATIVE = ((10, 0), (10, 3), (12, 0), (12, 1))
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() in NATIVE
pytestmark = [pytest.mark.blackwell, pytest.mark.skipif(not HERE, reason="no GPU that multiplies NVFP4")]

SHAPES = [(6144, 4096), (576, 576), (192, 576), (1000, 1040)]
TOKENS = [1, 7, 8, 16, 33, 128, 129, 300, 1024]


def make(rows: int, columns: int) -> nvfp4.NVFP4Tensor:
    torch.manual_seed(rows + columns)
    return nvfp4.quantize_weight(torch.randn(rows, columns, device="cuda"))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (37, 192), (130, 4096)], ids=str)
def test_quantize_against_the_reference(shape: tuple[int, int], swizzled: bool) -> None:
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    scale = nvfp4.global_scale_of(x.abs().amax())
    codes, scales = torch.ops.fp4pipe.fp4_quantize(x, scale, swizzled)
    want_codes, want_scales = torch.ops.fp4pipe.fp4_quantize(x.cpu(), scale.cpu(), swizzled)
    assert scales.dtype == want_scales.dtype
    # The hardware quantizer multiplies by approximate reciprocals, so a value close to a threshold may fall either way.
    rows, blocks = shape[0], shape[1] // 16
    got = scales.cpu().view(torch.uint8), want_scales.view(torch.uint8)
    got = tuple(nvfp4.unswizzle_scales(each, rows, blocks) if swizzled else each for each in got)
    assert (got[0] != got[1]).float().mean() < 1e-3
    assert (codes.cpu() != want_codes).float().mean() < 5e-3


@pytest.mark.parametrize("mode", ["w4a4", "w4a16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int], mode: str) -> None:
    rows, columns = shape
    weight = make(rows, columns)
    values = nvfp4.dequantize(*weight, dtype=torch.float64)
    layer = ops.NVFP4Linear(columns, rows, False, mode)
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        scale = nvfp4.global_scale_of(x.abs().amax())
        layer.load(*weight, input_scale=scale)
        layer.prepare("cuda")
        out = layer(x)
        activations = x if mode == "w4a16" else nvfp4.fake_quantize_activation(x.float(), scale)
        exact = activations.double() @ values.T
        assert float((out.double() - exact).norm() / exact.norm()) < (3e-3 if mode == "w4a16" else 1e-2)


@pytest.mark.parametrize("backend", ["auto", "cutlass", "cudnn", "trtllm", "cute-dsl", "b12x"])
def test_gemm_backends(backend: str) -> None:
    from fp4pipe.runtime.ops import blackwell

    weight = make(512, 1024)
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    scale = nvfp4.global_scale_of(x.abs().amax())
    exact = nvfp4.fake_quantize_activation(x.float(), scale).double() @ nvfp4.dequantize(*weight, dtype=torch.float64).T
    blackwell.select_gemm_backend(backend)
    try:
        layer = ops.NVFP4Linear(1024, 512, False, "w4a4")
        layer.load(*weight, input_scale=scale)
        layer.prepare("cuda")
        out = layer(x)
    except (ValueError, RuntimeError) as error:
        pytest.skip(f"{backend} does not run here: {error}")
    finally:
        blackwell.select_gemm_backend("auto")
    assert float((out.double() - exact).norm() / exact.norm()) < 1e-2


def test_graph_replay_equals_eager() -> None:
    weight = make(512, 1024)
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    layer = ops.NVFP4Linear(1024, 512, False, "w4a4")
    layer.load(*weight, input_scale=nvfp4.global_scale_of(x.abs().amax()))
    layer.prepare("cuda")
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(captured, layer(x))


@pytest.mark.parametrize("swizzled", [False, True])
def test_fused_quantizers_against_the_reference(swizzled: bool) -> None:
    """Rounded once where the reference rounds twice: a code may be its neighbour, a block scale off by its last bit."""
    x = torch.randn(37, 384, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(384, device="cuda").bfloat16() + 0.5
    scale = nvfp4.global_scale_of(torch.tensor(8.0, device="cuda"))
    silu, norm = torch.ops.fp4pipe.silu_mul_fp4_quantize, torch.ops.fp4pipe.rmsnorm_fp4_quantize
    for op, arguments, columns in ((silu, (x, scale), 192), (norm, (x, weight, 1e-6, scale), 384)):
        got = op(*arguments, swizzled)
        want = op(*(a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments), swizzled)
        assert (got[0].cpu() != want[0]).float().mean() < 0.05
        scales = [each[1].cpu().view(torch.uint8) for each in (got, want)]
        scales = [nvfp4.unswizzle_scales(each, 37, columns // 16) if swizzled else each for each in scales]
        assert (scales[0].int() - scales[1].int()).abs().max() <= 1
