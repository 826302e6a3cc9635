"""How a Hopper GEMM is cut up for a shape: looked up in a table measured on an H200, else estimated.

All sizes are counted in units of 16 rows x 64 columns (576 bytes) and groups of 64 columns.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fp4pipe.nvfp4 import round_up

DECODE_TOKENS = 32
"""Most tokens the decode kernel takes."""
WORKSPACE_BYTES = 64 << 20
_SHARED_BYTES = 227 * 1024 - 256
_MEMORY_BYTES_PER_US = 32_000
"""What one of 132 multiprocessors gets of 4.3 TB/s."""
_L2_BYTES_PER_US = 60_000
_DECODE_SHAPES: dict[int, tuple[tuple[int, int, int], ...]] = {
    8: ((1, 1, 16), (1, 4, 16), (2, 1, 16), (2, 2, 16), (4, 1, 16)),
    16: ((1, 1, 16), (2, 1, 16), (2, 2, 16), (4, 1, 12)),
    32: ((1, 1, 12), (2, 1, 12), (4, 1, 8)),
}
"""For each padded token count, tiles of a warp, groups of a stage and warps the decode kernel is compiled for."""
_PREFILL_TILES = (
    *((64, 2, 1), (64, 4, 1), (128, 2, 1), (128, 2, 2)),
    *((128, 3, 1), (128, 3, 2), (256, 2, 1), (256, 2, 2)),
)
"""Tokens, warpgroups and cluster size of the tiles the wgmma kernel is compiled for."""
_TABLE = Path(__file__).with_name("plans_sm90.json")


class DecodePlan(NamedTuple):
    """Cut of a product with at most 32 tokens. `splits` CTAs, a cluster, share the columns."""

    tiles_per_warp: int
    groups_per_stage: int
    tiles_per_cta: int
    column_warps: int
    splits: int


class PrefillPlan(NamedTuple):
    """Cut of a product with more tokens: tiles of 64 * `warpgroups` rows, columns shared by `splits` CTAs.

    `cluster` CTAs make tiles of the same tokens and fetch x together.
    """

    tokens_per_tile: int
    warpgroups: int
    cluster: int
    splits: int


Plan = DecodePlan | PrefillPlan


def _decode_candidates(tokens: int, rows: int, columns: int, processors: int) -> dict[Plan, float]:
    """Every cut the decode kernel can run, and its estimated microseconds."""
    tiles, groups = -(-rows // 16), -(-columns // 64)
    padded = next(width for width in (8, 16, 32) if tokens <= width)
    found: dict[Plan, float] = {}
    for (per_warp, stage, most_warps), splits, waves in itertools.product(
        _DECODE_SHAPES[padded], (1, 2, 4, 8), (1, 2, 3, 4, 8)
    ):
        depth = -(-groups // splits)
        per_cta = round_up(max(1, -(-tiles * splits // (processors * waves))), per_warp)
        row_warps = per_cta // per_warp
        if splits > groups or row_warps > most_warps or (stage > 1 and (columns % (64 * stage) or depth % stage)):
            continue
        column_warps = min(most_warps // row_warps, depth // stage)
        sums = column_warps * padded * (per_cta * 16 + 4) * 4
        if per_cta > 4 * row_warps * column_warps or sums > _SHARED_BYTES:
            continue
        warps, ctas = row_warps * column_warps, -(-tiles // per_cta) * splits
        steps = -(-depth // (column_warps * stage)) * column_warps * stage  # idle warps of the last step count as work
        rate = min(1.0, warps * min(per_warp * stage, 4) / 48)  # of a multiprocessor's bandwidth
        time = per_cta * steps * 576 / (_MEMORY_BYTES_PER_US * rate) + tokens * depth * 64 / _L2_BYTES_PER_US
        found[DecodePlan(per_warp, stage, per_cta, column_warps, splits)] = -(-ctas // processors) * (
            1.0 + time
        ) + 0.7 * (splits > 1)
    return found


def _prefill_candidates(tokens: int, rows: int, columns: int, processors: int) -> dict[Plan, float]:
    """Every sensible cut for the wgmma kernel, and its estimated microseconds."""
    groups, found = -(-columns // 64), {}
    for (width, warpgroups, cluster), splits in itertools.product(_PREFILL_TILES, (1, 2, 3, 4, 6, 8)):
        tiles = round_up(-(-rows // (64 * warpgroups)), cluster) * -(-tokens // width)
        too_large = tiles * splits * width * warpgroups * 256 > WORKSPACE_BYTES
        if splits > groups or (splits > 1 and (too_large or tiles * splits > 2 * processors)):
            continue
        waves, depth = -(-tiles * splits // processors), -(-groups // splits)
        time = 1.5 + waves * (depth * max(width * warpgroups * 0.00125, 0.4) + 1.0) + 0.3 * (cluster == 1)
        found[PrefillPlan(width, warpgroups, cluster, splits)] = time + (2.0 + splits * width / 128) * (splits > 1)
    return found


def candidates(tokens: int, rows: int, columns: int, processors: int) -> list[Plan]:
    """Every cut worth trying for a product ``[tokens, columns] x [rows, columns]``, best estimate first."""
    found = _prefill_candidates(tokens, rows, columns, processors)
    if tokens <= DECODE_TOKENS:
        found |= _decode_candidates(tokens, rows, columns, processors)
    return sorted(found, key=lambda plan: found[plan])


@cache
def _table() -> dict[str, Plan]:
    return _read(json.loads(_TABLE.read_text()) if _TABLE.exists() else {})


_LEARNT: dict[str, Plan] = {}
"""Plans measured on this machine, for shapes that the table lacks."""


def _read(stored: Mapping[str, Sequence[str | int]]) -> dict[str, Plan]:
    kinds: dict[str, type[Plan]] = {"decode": DecodePlan, "prefill": PrefillPlan}
    return {shape: kinds[str(kind)](*map(int, cut)) for shape, (kind, *cut) in stored.items()}


def learn(stored: Mapping[str, Sequence[str | int]]) -> None:
    """Use these plans, as `entry` writes them, for the shapes that `key` names.

    Raises:
        KeyError, TypeError, ValueError: An entry is no plan.
    """
    _LEARNT.update(_read(stored))
    plan_for.cache_clear()


def known(tokens: int, rows: int, columns: int) -> bool:
    """Whether a plan was measured for this shape."""
    shape = key(tokens, rows, columns)
    return shape in _table() or shape in _LEARNT


def key(tokens: int, rows: int, columns: int) -> str:
    """Where the table keeps a shape's plan: token counts share one up to the next power of two."""
    return f"{rows}x{columns}x{1 << (tokens - 1).bit_length()}"


def entry(plan: Plan) -> list[str | int]:
    """A plan as the table stores it."""
    return ["decode" if isinstance(plan, DecodePlan) else "prefill", *plan]


@cache
def plan_for(tokens: int, rows: int, columns: int, processors: int) -> Plan:
    """The cut to run: the measured one where the table has it and it still fits, else the best estimate."""
    possible = candidates(tokens, rows, columns, processors)
    shape = key(tokens, rows, columns)
    measured = _table().get(shape) or _LEARNT.get(shape)
    return measured if measured is not None and measured in possible else possible[0]
