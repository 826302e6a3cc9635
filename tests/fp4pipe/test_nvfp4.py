"""The formulas of `fp4pipe.nvfp4` against hand-computed values, ModelOpt's exporter and FlashInfer's references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4pipe import nvfp4

TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


def test_ties_round_to_even_and_large_values_saturate():
    values = torch.tensor([*TIES, 7.0, float("inf")])
    expected = torch.tensor([*TIES.values(), 6.0, 6.0])
    assert torch.equal(nvfp4.decode_e2m1(nvfp4.encode_e2m1(values)), expected)
    assert torch.equal(nvfp4.decode_e2m1(nvfp4.encode_e2m1(-values)), -expected)


def test_every_code_survives_encode_and_pack():
    codes = torch.arange(16, dtype=torch.uint8)
    values = nvfp4.decode_e2m1(codes)
    # -0.0 is not below zero, so code 8 encodes to 0; every other code comes back.
    expected = torch.where(codes == 8, 0, codes)
    assert torch.equal(nvfp4.encode_e2m1(values), expected)
    packed = nvfp4.pack(codes)
    assert packed.tolist()[:2] == [0x10, 0x32], "low nibble is the even column"
    assert torch.equal(nvfp4.unpack(packed), codes)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_encode_picks_the_nearest_value(seed):
    x = torch.empty(256).uniform_(-8, 8, generator=torch.Generator().manual_seed(seed))
    table = nvfp4.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    nearest = (x.unsqueeze(-1) - table).abs().amin(-1)
    assert torch.equal((nvfp4.decode_e2m1(nvfp4.encode_e2m1(x)) - x).abs(), nearest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 3e3])
def test_weights_equal_modelopts_exporter(dtype, scale):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    weight = (torch.randn(48, 160, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    weight[3, 16:32] = 0  # a whole block of zeros
    weight[4, 32:48] *= 1e-6  # a block whose scale is floored at 2^-9
    theirs, block_scale, global_scale = qtensor.NVFP4QTensor.quantize(weight.clone(), 16)
    ours = nvfp4.quantize_weight(weight)
    assert torch.equal(ours.codes, theirs._quantized_data)
    assert torch.equal(ours.block_scale.view(torch.uint8), block_scale.view(torch.uint8))
    assert torch.equal(ours.global_scale, global_scale)
    back = theirs.dequantize(torch.float32, scale=block_scale, double_scale=global_scale, block_sizes={-1: 16})
    assert torch.equal(nvfp4.dequantize(*ours), back)


def test_all_zero_weight_has_finite_scales():
    q = nvfp4.quantize_weight(torch.zeros(4, 32))
    assert torch.isfinite(q.block_scale.float()).all()
    assert q.global_scale.item() == 1.0
    assert not nvfp4.dequantize(*q).any()


def test_width_not_a_multiple_of_16_is_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantize_weight(torch.zeros(4, 72))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("headroom", [1.0, 0.75, 16.0], ids=["exact", "saturating", "subnormal-scales"])
def test_activations_equal_flashinfers_reference(dtype, headroom):
    reference = pytest.importorskip(
        "flashinfer.trace.templates.quantize", reason="pip install --no-deps flashinfer-python"
    )
    x = torch.randn(33, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[5] *= 1e-3
    input_scale = nvfp4.global_scale_of(x.abs().amax() * headroom)
    codes, scales = nvfp4.quantize_activation(x, input_scale)
    inverse = 1.0 / input_scale
    their_codes, their_scales = reference._nvfp4_quantize_reference(x, inverse)
    # The reference casts without saturating, so it defines no value where the scale exceeds 448.
    defined = (nvfp4.block_amax(x) / 6 * inverse) <= 448
    assert torch.equal(scales.view(torch.uint8)[defined], their_scales.view(torch.uint8)[defined])
    assert (scales.float()[~defined] == 448).all()
    # It also takes the lower neighbour on a tie where the format says the even one: those elements are ours alone.
    divisor = torch.where(scales.float() == 0, 1.0, scales.float())
    scaled = (x.float().unflatten(-1, (-1, 16)) * inverse / divisor.unsqueeze(-1)).abs()
    tie = torch.isin(scaled, torch.tensor(list(TIES))) | ~defined.unsqueeze(-1)
    same = (nvfp4.unpack(codes) == nvfp4.unpack(their_codes)).unflatten(-1, (-1, 16))
    # Their sign bit of a value rounded to zero follows the same rule, so whole codes are compared.
    assert (same | tie).all()
    assert (~tie)[defined].float().mean() > 0.5 or not defined.any()


@given(rows=st.integers(1, 300), cols=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_swizzle_round_trip(rows, cols):
    scales = torch.randint(0, 255, (rows, cols), dtype=torch.uint8)
    swizzled = nvfp4.swizzle_scales(scales)
    assert swizzled.shape == (nvfp4.round_up(rows, 128), nvfp4.round_up(cols, 4))
    assert torch.equal(nvfp4.unswizzle_scales(swizzled, rows, cols), scales)


def test_swizzle_offsets_follow_the_published_layout():
    rows, cols = 256, 8
    scales = torch.arange(rows * cols, dtype=torch.int32).view(rows, cols)
    flat = nvfp4.swizzle_scales(scales).flatten()
    for r, c in [(0, 0), (1, 0), (32, 1), (127, 3), (128, 0), (200, 6)]:
        tile = (r // 128) * (cols // 4) + c // 4
        offset = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
        assert flat[offset] == scales[r, c]
