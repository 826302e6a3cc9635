"""The layout the Hopper kernels read, against its description in `csrc/nvfp4.cuh`, and the cuts of a product."""

import pytest
import torch
from torch import Tensor

from fp4pipe import nvfp4
from fp4pipe.runtime import ops
from fp4pipe.runtime.ops import plans
from fp4pipe.runtime.ops.tiled import pack_tiled, tiled_values


def random_weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes and scales with every bit pattern a checkpoint may hold."""
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (rows, columns // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes, scales


@pytest.mark.parametrize("shape", [(64, 64), (128, 192), (40, 80), (200, 576)], ids=str)
def test_values_survive(shape: tuple[int, int]) -> None:
    rows, columns = shape
    codes, scales = random_weight(rows, columns)
    tiled = pack_tiled(codes, scales)
    assert tiled.shape == (-(-rows // 64), -(-columns // 64), 576)
    values = tiled_values(tiled)
    assert torch.equal(values[:rows, :columns], nvfp4.dequantize_blocks(codes, scales))
    assert not values[rows:].any()
    assert not values[:, columns:].any()


def test_every_scale_is_kept() -> None:
    scales = torch.arange(0x7F, dtype=torch.uint8).repeat(64, 1).view(torch.float8_e4m3fn)[:, :124]
    codes = torch.full((64, 124 * 8), 0x22, dtype=torch.uint8)  # ones
    assert torch.equal(tiled_values(pack_tiled(codes, scales))[:, : 124 * 16 : 16], scales.float())


@pytest.mark.parametrize("bits", [0x7F, 0x80, 0xFF])
def test_bad_scales_are_refused(bits: int) -> None:
    codes, scales = random_weight(64, 64)
    scales.view(torch.uint8)[3, 2] = bits
    with pytest.raises(ValueError, match="finite and not negative"):
        pack_tiled(codes, scales)


def test_codes_and_scales_sit_where_the_layout_says() -> None:
    codes, scales = random_weight(128, 128)
    scales.view(torch.uint8).clamp_(min=1)  # no zero scale: its block's codes would be cleared
    tiled, nibbles = pack_tiled(codes, scales), nvfp4.unpack(codes)
    data = tiled.view(torch.uint8).view(2, 2, 2304)
    for row, column in torch.randint(0, 128, (200, 2)).tolist():
        block = data[row // 64, column // 64]
        unit, high_row, g = row % 64 // 16, row % 16 // 8, row % 8
        t, pair = column % 64 // 16, column % 16 // 2
        position = unit * 512 + (8 * t + g) * 16 + pair % 4 * 4
        word = int.from_bytes(bytes(block[position : position + 4].tolist()), "little")
        register = high_row + pair // 4 * 2
        rotated = [word, word << 10 | word >> 22, word << 13 | word >> 19, (word & 0x001B001B) * 0x4108][register]
        half = (rotated & 0x81C081C0) >> 16 * (column % 2) & 0xFFFF
        assert (half >> 12 & 8 | half >> 6 & 7) == nibbles[row, column]
        byte = int(block[2048 + ((8 * t + g) * 4 + unit) * 2 + high_row])
        exponent, mantissa = (byte & 15) << 1 | byte >> 7, byte >> 4 & 7
        assert (1 + mantissa / 8) * 2.0 ** (exponent - 9) == float(scales[row, column // 16])


def test_tiled_weights_stack() -> None:
    shards = []
    for rows in (64, 128):
        codes, scales = random_weight(rows, 192)
        w = pack_tiled(codes, scales)
        shards.append(ops.PreparedWeight(w, scales.new_empty(0), torch.tensor([float(rows)]), rows))
    fused = ops.fuse_rows(shards)
    assert fused is not None
    x = torch.randn(3, 192)
    parts = torch.cat([torch.ops.fp4pipe.fp4_gemm_w4a16(x, *shard) for shard in shards], 1)
    assert torch.allclose(torch.ops.fp4pipe.fp4_gemm_w4a16(x, *fused), parts, rtol=1e-5)
    assert ops.fuse_rows([shards[0]._replace(out_features=40), shards[1]]) is None


LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
SMALL = [(576, 576), (192, 576), (576, 1536), (40, 48), (8, 16), (1000, 1040), (128256, 4096)]


@pytest.mark.parametrize("shape", LLAMA + SMALL, ids=str)
def test_every_shape_has_a_plan(shape: tuple[int, int]) -> None:
    rows, columns = shape
    for tokens in (1, 2, 8, 9, 16, 17, 32, 33, 64, 100, 256, 1000, 8192):
        plan = plans.plan_for(tokens, rows, columns, 132)
        assert isinstance(plan, plans.PrefillPlan) or tokens <= plans.DECODE_TOKENS
        for candidate in plans.candidates(tokens, rows, columns, 132):
            if isinstance(candidate, plans.DecodePlan):
                per_warp, stage, per_cta, column_warps, splits = candidate
                assert per_cta % per_warp == 0
                assert per_cta // per_warp * column_warps <= 16
                assert per_cta * 8 <= per_cta // per_warp * column_warps * 32
                assert stage == 1 or (columns % (64 * stage) == 0 and -(-columns // 64) // splits % stage == 0)


@pytest.mark.parametrize("shape", LLAMA, ids=str)
def test_measured_plans_are_still_possible(shape: tuple[int, int]) -> None:
    for key, plan in plans._table().items():
        rows, columns, tokens = map(int, key.split("x"))
        if (rows, columns) == shape:
            assert plan in plans.candidates(tokens, rows, columns, 132)
            assert plans.plan_for(tokens, rows, columns, 132) == plan
