"""How a Hopper GEMM is cut up for a shape: looked up in a table measured on an H200, else estimated.

All sizes are counted in units of 16 rows x 64 columns (576 bytes) and groups of 64 columns.
"""

import itertools
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fp4pipe.nvfp4 import round_up

DECODE_TOKENS = 64
"""Most tokens the decode kernel takes."""
WORKSPACE_BYTES = 64 << 20
_SHARED_BYTES = 227 * 1024 - 256
_MEMORY_BYTES_PER_US = 32_000
"""What one of 132 multiprocessors gets of 4.3 TB/s."""
_L2_BYTES_PER_US = 60_000
_SPLIT_US = 1.5
_TABLE = Path(__file__).with_name("plans_sm90.json")


class DecodePlan(NamedTuple):
    """Cut of a product with at most 64 tokens."""

    tiles_per_warp: int
    tiles_per_cta: int
    column_warps: int
    splits: int


class PrefillPlan(NamedTuple):
    """Cut of a product with more tokens."""

    tokens_per_tile: int
    splits: int


Plan = DecodePlan | PrefillPlan


def _decode_candidates(tokens: int, rows: int, columns: int, processors: int) -> dict[Plan, float]:
    """Every cut the decode kernel can run, and its estimated microseconds."""
    tiles, groups = -(-rows // 16), -(-columns // 64)
    padded = next(width for width in (8, 16, 32, 64) if tokens <= width)
    found: dict[Plan, float] = {}
    for per_warp, splits, most_waves in itertools.product((1, 2, 4), (1, 2, 3, 4, 6, 7, 8, 12, 16), (1, 2, 3, 4, 8)):
        most_warps = 8 if padded * per_warp >= 128 else 16
        depth = -(-groups // splits)
        per_cta = round_up(-(-tiles * splits // (processors * most_waves)), per_warp)
        row_warps = per_cta // per_warp
        if splits > groups or row_warps > most_warps:
            continue
        column_warps = min(most_warps // row_warps, depth)
        ctas = -(-tiles // per_cta) * -(-groups // depth)
        shared = max(padded * (depth * 128 + 16), column_warps * padded * (row_warps * per_warp * 16 + 4) * 4)
        if shared > _SHARED_BYTES or (splits > 1 and ctas * tokens * per_cta * 64 > WORKSPACE_BYTES):
            continue
        steps = -(-depth // column_warps) * column_warps  # idle warps of the last step count as work
        time = 1.0 + per_cta * steps * 576 / _MEMORY_BYTES_PER_US + 0.5 * tokens * depth * 128 / _L2_BYTES_PER_US
        time = -(-ctas // processors) * time + (_SPLIT_US + tokens * per_cta * 128 / _L2_BYTES_PER_US) * (splits > 1)
        found[DecodePlan(per_warp, per_cta, column_warps, splits)] = time
    return found


def _prefill_candidates(tokens: int, rows: int, columns: int, processors: int) -> dict[Plan, float]:
    """Every sensible cut for the wgmma kernel, and its estimated microseconds."""
    groups, found = -(-columns // 64), {}
    for width, splits in itertools.product((64, 128, 256), (1, 2, 3, 4, 6, 8)):
        tiles = -(-rows // 128) * -(-tokens // width)
        depth = -(-groups // splits)
        too_many = tiles * splits > 2 * processors or tiles * splits * width * 512 > WORKSPACE_BYTES
        if splits > groups or (splits > 1 and too_many):
            continue
        waves = -(-tiles * splits // processors)
        time = 1.5 + waves * (depth * max(width * 0.0027, 0.15) + 1.0)
        found[PrefillPlan(width, splits)] = time + (2.0 + splits * width / 128) * (splits > 1)
    return found


def candidates(tokens: int, rows: int, columns: int, processors: int) -> list[Plan]:
    """Every cut worth trying for a product ``[tokens, columns] x [rows, columns]``, best estimate first."""
    found = _prefill_candidates(tokens, rows, columns, processors)
    if tokens <= DECODE_TOKENS:
        found |= _decode_candidates(tokens, rows, columns, processors)
    return sorted(found, key=lambda plan: found[plan])


@cache
def _table() -> dict[str, list[int]]:
    return json.loads(_TABLE.read_text()) if _TABLE.exists() else {}


def key(tokens: int, rows: int, columns: int) -> str:
    """Where the table keeps a shape's plan: token counts share one up to the next power of two."""
    return f"{rows}x{columns}x{1 << (tokens - 1).bit_length()}"


@cache
def plan_for(tokens: int, rows: int, columns: int, processors: int) -> Plan:
    """The cut to run: the measured one where the table has it and it still fits, else the best estimate."""
    possible = candidates(tokens, rows, columns, processors)
    measured = _table().get(key(tokens, rows, columns))
    plan = (DecodePlan if measured and len(measured) == 4 else PrefillPlan)(*measured) if measured else None
    return plan if plan in possible else possible[0]
