"""The figures of `bench gemm` as one self-contained SVG: time over tokens, a panel for each weight shape."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 30, 40
_LEGEND, _LEGEND_WIDTH = 64, 620
_STYLE = {
    "w4a16": ("#0b6e4f", "", "W4A16"),
    "w4a4_emulated": ("#c77d0a", "", "W4A4"),
    "fp8_prefill": ("#8a3ffc", "", "FP8 prefill"),
    "bf16_us": ("#444444", "6 3", "bf16 cuBLAS"),
    "fp8_us": ("#999999", "6 3", "FP8 cuBLAS"),
    "floor_us": ("#bb2222", "2 3", "floor"),
}
"""Series: colour, dashes, name. The first three are modes of rows, the others columns."""

Point = tuple[float, float]


def plot(document: Mapping[str, Any]) -> str:
    """SVG text of a `bench_gemm` document: microseconds over M, both logarithmic."""
    rows: list[Mapping[str, Any]] = document["rows"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    across = 2 if len(names) > 1 else 1
    width, height = max(across * _WIDTH, _LEGEND_WIDTH), _LEGEND + math.ceil(len(names) / across) * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">NVFP4 GEMM on {escape(str(document["device"]))}, µs over tokens</text>',
        *_legend({name for row in rows for name in (row["mode"], *_STYLE) if name == row["mode"] or row.get(name)}),
    ]
    for index, name in enumerate(names):
        x, y = index % across * _WIDTH, _LEGEND + index // across * _HEIGHT
        own = [row for row in rows if row["name"] == name]
        parts += [f'<g transform="translate({x} {y})">', *_panel(name, own), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for row in rows:
        found.setdefault(row["mode"], []).append((row["M"], row["us"]))
        for column in ("bf16_us", "fp8_us", "floor_us"):
            point = (row["M"], row[column])
            if row[column] and point not in found.setdefault(column, []):
                found[column].append(point)
    return {name: sorted(points) for name, points in found.items() if points}


def _panel(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    series = _series(rows)
    times = [us for points in series.values() for _, us in points]
    tokens = sorted({row["M"] for row in rows})
    low, high = _decades(min(times), max(times))
    first, last = math.log2(tokens[0]), max(math.log2(tokens[-1]), math.log2(tokens[0]) + 1)
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(m: float, us: float) -> Point:
        x = _LEFT + (math.log2(m) - first) / (last - first) * wide
        return x, _TOP + (high - math.log10(us)) / (high - low) * tall

    yield f'<text x="{_LEFT}" y="{_TOP - 10}" font-weight="bold">{escape(name)} {rows[0]["N"]}×{rows[0]["K"]}</text>'
    for decade in range(low, high + 1):
        _, y = at(tokens[0], 10.0**decade)
        yield f'<path d="M{_LEFT} {y:.1f}h{wide}" stroke="#dddddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>'
    for m in tokens:
        x, _ = at(m, 1.0)
        yield f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle" font-size="9">{m}</text>'
    for key in _STYLE:
        if key in series:
            colour, dashes, _ = _STYLE[key]
            points = [at(*point) for point in series[key]]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dash = f' stroke-dasharray="{dashes}"' if dashes else ""
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'
            if not dashes:
                yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in points)


def _decades(low: float, high: float) -> tuple[int, int]:
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return bottom, max(top, bottom + 1)


def _legend(present: set[str]) -> Iterable[str]:
    x = 12
    for key, (colour, dashes, name) in _STYLE.items():
        if key in present:
            dash = f' stroke-dasharray="{dashes}"' if dashes else ""
            yield f'<path d="M{x} 42h24" stroke="{colour}" stroke-width="2"{dash}/>'
            yield f'<text x="{x + 30}" y="46">{name}</text>'
            x += 44 + 7 * len(name)
