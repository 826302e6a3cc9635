"""The operators on a GPU: against float64 and the CPU reference, at awkward shapes, repeated, in poisoned memory."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from fp4pipe import nvfp4
from fp4pipe.runtime import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]

SHAPES = [(6144, 4096), (576, 576), (192, 576), (1536, 576), (576, 1536), (896, 4864), (1000, 208), (40, 48), (8, 16)]
TOKENS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 129, 255, 256, 257, 300, 1000, 1025]


def make(rows: int, columns: int) -> tuple[nvfp4.NVFP4Tensor, Tensor]:
    """A weight with subnormal and zero block scales among others, and its exact values without the global scale."""
    torch.manual_seed(rows * columns)
    weight = torch.randn(rows, columns, device="cuda")
    weight[0] *= 2.0**-16
    weight[rows // 2, :16] = 0
    quantized = nvfp4.quantize_weight(weight)
    assert quantized.block_scale[0].float().max() < 2.0**-6
    return quantized, nvfp4.dequantize_blocks(quantized.codes, quantized.block_scale).double()


def poison(shape: tuple[int, ...]) -> None:
    """Leave NaN in the memory the next allocation of `shape` in bf16 is likely to get."""
    torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")


def check(out: Tensor, x: Tensor, values: Tensor, alpha: Tensor, bias: Tensor | None = None) -> None:
    """Every element within one bf16 rounding, and float32 accumulation, of the product in float64."""
    alpha = alpha.double()
    exact, size = x.double() @ values.T * alpha, x.double().abs() @ values.abs().T * alpha
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    excess = (out.double() - exact).abs() - 2.0**-8 * exact.abs() - 3e-6 * size
    assert torch.isfinite(out).all()
    assert float(excess.max()) <= 0, f"element {divmod(int(excess.argmax()), out.shape[1])} of {tuple(out.shape)}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["stored", "prepared"])
def test_w4a16(shape: tuple[int, int], form: str) -> None:
    rows, columns = shape
    quantized, values = make(rows, columns)
    alpha = torch.rand(rows, device="cuda") * 1e-3 + 1e-4
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    weight = ops.PreparedWeight(quantized.codes, quantized.block_scale, alpha, rows)
    if form == "prepared":
        weight = ops.prepare_weight(weight, "cuda")
    one = weight._replace(alpha=quantized.global_scale.reshape(1))
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        poison((tokens, rows))
        check(torch.ops.fp4pipe.fp4_gemm_w4a16(x, *one), x, values, one.alpha)
        poison((tokens, rows))
        out = torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight, bias)
        check(out, x, values, alpha, bias)
        for _ in range(3):
            assert torch.equal(out, torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight, bias)), (
                f"{tokens} tokens: not repeatable"
            )


@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 17, 32, 64, 65, 128, 200, 300])
def test_every_plan(tokens: int) -> None:
    from fp4pipe.runtime.ops import hopper, plans

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("SM90 kernels")
    for rows, columns in ((4096, 4096), (1000, 1040)):
        quantized, values = make(rows, columns)
        alpha = torch.rand(rows, device="cuda") + 0.5
        weight = ops.prepare_weight(ops.PreparedWeight(quantized.codes, quantized.block_scale, alpha, rows), "cuda")
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        count = hopper.processors(x.device)
        for plan in plans.candidates(tokens, rows, columns, count):
            poison((tokens, rows))
            out = hopper.gemm(x, weight.w, alpha, rows, None, plan)
            check(out, x, values, alpha)
            assert torch.equal(out, hopper.gemm(x, weight.w, alpha, rows, None, plan)), plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("swizzled", [False, True])
def test_quantize_is_bit_identical(dtype: torch.dtype, swizzled: bool) -> None:
    for rows, columns in ((1, 16), (5, 48), (37, 176), (130, 80), (257, 4096)):
        x = torch.randn(rows, columns) * torch.logspace(-8, 3, rows).unsqueeze(1)
        x[0, :16] = 0
        x[-1, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 0.5, 1, 1.5, 2, 3, 4, -0.25, -5])
        x = x.to(dtype)
        for scale in (1 / 448, float(x.abs().max()) / 2688, 1.0, 1e-3, 3e-5):
            scale = torch.tensor(scale)
            want = torch.ops.fp4pipe.fp4_quantize(x, scale, swizzled)
            got = torch.ops.fp4pipe.fp4_quantize(x.cuda(), scale.cuda(), swizzled)
            assert torch.equal(got[0].cpu(), want[0])
            assert got[1].dtype == want[1].dtype
            assert torch.equal(got[1].view(torch.uint8).cpu(), want[1].view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 17, 64, 130])
@pytest.mark.parametrize("swizzled", [False, True])
def test_emulated_w4a4(tokens: int, swizzled: bool) -> None:
    quantized, values = make(192, 576)
    x = torch.randn(tokens, 576, device="cuda", dtype=torch.bfloat16)
    scale = nvfp4.global_scale_of(x.abs().amax())
    alpha = (quantized.global_scale * scale).reshape(1)
    weight = ops.prepare_weight(ops.PreparedWeight(quantized.codes, quantized.block_scale, alpha, 192), "cuda")
    codes, scales = torch.ops.fp4pipe.fp4_quantize(x, scale, swizzled)
    out = torch.ops.fp4pipe.fp4_gemm(codes, scales, *weight, torch.bfloat16)
    check(out, nvfp4.dequantize_blocks(*nvfp4.quantize_activation(x, scale)), values, alpha)


def test_float32_activations_take_the_exact_path() -> None:
    quantized, values = make(192, 576)
    stored = ops.PreparedWeight(quantized.codes, quantized.block_scale, quantized.global_scale.reshape(1), 192)
    x = torch.randn(5, 576, device="cuda")
    for weight in (stored, ops.prepare_weight(stored, "cuda")):
        out = torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight)
        exact = x.double() @ values.T * quantized.global_scale.double()
        assert float((out.double() - exact).norm() / exact.norm()) < 1e-5


def test_opcheck() -> None:
    quantized, _ = make(192, 576)
    stored = ops.PreparedWeight(quantized.codes, quantized.block_scale, quantized.global_scale.reshape(1), 192)
    x = torch.randn(5, 576, device="cuda", dtype=torch.bfloat16)
    opcheck(torch.ops.fp4pipe.fp4_quantize.default, (x, torch.tensor(1e-3, device="cuda")))
    weight = ops.prepare_weight(stored, "cuda")
    # The schema test compares its inputs before and after, which PyTorch cannot do for e4m3: scales as raw bytes.
    weight = weight._replace(w_scales=weight.w_scales.view(torch.uint8))
    opcheck(torch.ops.fp4pipe.fp4_gemm_w4a16.default, (x, *weight))


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_graph_replay_equals_eager(tokens: int) -> None:
    quantized, _ = make(576, 1536)
    stored = ops.PreparedWeight(quantized.codes, quantized.block_scale, quantized.global_scale.reshape(1), 576)
    weight = ops.prepare_weight(stored, "cuda")
    x = torch.randn(tokens, 1536, device="cuda", dtype=torch.bfloat16)
    chain = [torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.fp4pipe.fp4_gemm_w4a16(x * 1, *weight)  # its input comes from the kernel before it
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(captured, torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight))
    assert torch.equal(*chain)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no E4M3")
@pytest.mark.parametrize("tokens", [17, 256, 300, 1024])
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_prefill(tokens: int, bias: bool) -> None:
    from fp4pipe.runtime.ops import fp8, triton_kernels

    quantized, values = make(192, 576)
    stored = ops.PreparedWeight(quantized.codes, quantized.block_scale, quantized.global_scale.reshape(1), 192)
    weight, folded = ops.prepare_weight(stored, "cuda"), fp8.fold_weight(*stored[:3])
    x = (
        torch.randn(tokens, 576, device="cuda", dtype=torch.bfloat16)
        * torch.logspace(-3, 3, tokens, device="cuda")[:, None]
    )
    x = x.to(torch.bfloat16)
    shift = torch.randn(192, device="cuda", dtype=torch.bfloat16) if bias else None
    out = torch.ops.fp4pipe.fp8_prefill_gemm(x, *weight[:3], *folded, 192, shift)
    if tokens < fp8.MIN_TOKENS:
        check(out, x, values, stored.alpha, shift)
        return
    codes, scales = triton_kernels.quantize_tokens(x)
    want_codes, want_scales = fp8.quantize_tokens(x)
    assert torch.allclose(scales, want_scales, rtol=1e-6)
    assert (codes.view(torch.uint8) != want_codes.view(torch.uint8)).float().mean() < 1e-3
    same = (codes.double() * scales.double()) @ (folded[0].double() * folded[1].double().unsqueeze(1)).T
    same = same if shift is None else same + shift.double()
    assert float((out.double() - same).norm() / same.norm()) < 4e-3
    exact = x.double() @ values.T * stored.alpha.double()
    exact = exact if shift is None else exact + shift.double()
    assert 5e-3 < float((out.double() - exact).norm() / exact.norm()) < 0.05


def test_an_unknown_shape_is_tuned_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fp4pipe.runtime.ops import build, plans, tuning

    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("SM90 kernels")
    quantized, values = make(1000, 1040)
    stored = ops.PreparedWeight(quantized.codes, quantized.block_scale, quantized.global_scale.reshape(1), 1000)
    weight = ops.prepare_weight(stored, "cuda")
    monkeypatch.setattr(plans, "_LEARNT", {})
    monkeypatch.setattr(build, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(build, "compile_library", lambda: Path("kernels.so"))
    with tuning.tuning(device):
        for tokens in (3, 40):
            x = torch.randn(tokens, 1040, device="cuda", dtype=torch.bfloat16)
            check(torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight), x, values, weight.alpha)
            assert plans.known(tokens, 1000, 1040)
            assert not tuning.wanted(tokens, 1000, 1040)
    assert len(json.loads(tuning.plans_file(device).read_text())) == 2
    plans.plan_for.cache_clear()


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_quantized_head(kind: str, tokens: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(576, 1003, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, 576, device="cuda", dtype=torch.bfloat16)
    got = ops.quantize_head(head, kind)(x)
    assert got.shape == (tokens, 1003)
    same = ops.quantize_head(head.cpu(), kind)(x.cpu())
    assert float((got.cpu().double() - same.double()).norm() / same.double().norm()) < 5e-3
