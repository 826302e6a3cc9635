"""Small plots as inline SVG: bars, columns, intervals, dots. No script; colours are classes that the page defines.

Every plot is 360 units wide and scales to its column, which keeps its text readable on a phone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360.0
_ROW = 26.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 8.0, 10.0, 30.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar."""

    label: str
    value: float
    text: str
    """Written at the bar's end."""
    kind: str = "a"
    """Colour class: ``a`` to ``d``, or ``bad``."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One estimate with its interval."""

    label: str
    low: float
    middle: float
    high: float
    text: str
    kind: str = "a"


@dataclass(frozen=True, slots=True)
class Dot:
    """One point; `note` shows when it is pointed at."""

    x: float
    y: float
    note: str
    kind: str = "a"


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars from zero, label above, figure at the end."""
    top = max((row.value for row in rows if math.isfinite(row.value)), default=0.0) or 1.0
    room = WIDTH - 115
    parts = []
    for index, row in enumerate(rows):
        y = index * (_ROW + 8)
        width = room * min(max(row.value, 0.0) / top, 1.0) if math.isfinite(row.value) else room
        parts.append(_text(0, y + 11, row.label))
        parts.append(
            f'<rect class="{row.kind}" x="0" y="{y + 15:.1f}" width="{max(width, 1):.1f}" height="12" rx="2"/>'
        )
        parts.append(_text(max(width, 1) + 5, y + 25, row.text, "num"))
    return _figure(title, len(rows) * (_ROW + 8), parts)


def intervals(title: str, rows: Sequence[Interval], marks: Sequence[tuple[float, str]], unit: str) -> str:
    """Estimates with intervals on one horizontal axis; `marks` are vertical lines (value, name)."""
    ends = [end for row in rows for end in (row.low, row.high)] + [value for value, _ in marks]
    low, high = min(ends), max(ends)
    pad = (high - low or 1.0) * 0.08
    low, high = low - pad, high + pad
    height = len(rows) * (_ROW + 10) + 34

    def at(value: float) -> float:
        return (value - low) / (high - low) * WIDTH

    parts = []
    for value, name in marks:
        x = at(value)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 28:.1f}"/>')
        parts.append(_text(x, height - 16, name, "mid dim"))
    for index, row in enumerate(rows):
        y = index * (_ROW + 10) + 24
        parts.append(_text(0, y - 10, f"{row.label}: {row.text}"))
        parts.append(
            f'<line class="{row.kind} wide" x1="{at(row.low):.1f}" x2="{at(row.high):.1f}" y1="{y}" y2="{y}"/>'
        )
        parts.append(f'<circle class="{row.kind}" cx="{at(row.middle):.1f}" cy="{y}" r="5"/>')
    for tick in _ticks(low, high, 5):
        parts.append(_text(at(tick), height - 2, f"{tick:g}{unit}", "mid num dim"))
    return _figure(title, height, parts)


def columns(title: str, values: Sequence[tuple[str, float, str]], unit: str) -> str:
    """Thin vertical bars in order, from zero; each is (note, value, kind)."""
    top = max((value for _, value, _ in values if math.isfinite(value)), default=1.0)
    height, room = 150.0, WIDTH - _LEFT - _RIGHT
    inner = height - _TOP - _BOTTOM

    def y_of(value: float) -> float:
        return _TOP + inner * (1 - min(max(value, 0.0), top) / top)

    parts = _y_axis(0.0, top, y_of, unit)
    step = room / max(len(values), 1)
    for index, (note, value, kind) in enumerate(values):
        shown = value if math.isfinite(value) else top
        y = y_of(shown)
        parts.append(
            f'<rect class="{kind}" x="{_LEFT + index * step:.2f}" y="{y:.1f}" width="{max(step * 0.85, 0.4):.2f}"'
            f' height="{_TOP + inner - y:.1f}"><title>{escape(note)}</title></rect>'
        )
    return _figure(title, height - _BOTTOM + 6, parts)


def dots(title: str, points: Iterable[Dot], x_name: str, *, unit: str = "", bound: float | None = None) -> str:
    """Points on logarithmic axes; a zero lies on the bottom line. `bound` draws a horizontal line."""
    points = [point for point in points if point.x > 0 and math.isfinite(point.y)]
    positive = [y for y in (*(point.y for point in points), *([bound] if bound else [])) if y > 0]
    low = math.floor(math.log10(min(positive, default=0.1)) - 0.3)
    high = max(math.ceil(math.log10(max(positive, default=1.0))), low + 1)
    left, right = (
        math.log10(min((p.x for p in points), default=1.0)),
        math.log10(max((p.x for p in points), default=10.0)),
    )
    right = right if right > left else left + 1
    height = 170.0
    inner = height - _TOP - _BOTTOM

    def x_of(value: float) -> float:
        return _LEFT + 4 + (math.log10(value) - left) / (right - left) * (WIDTH - _LEFT - _RIGHT - 8)

    def y_of(value: float) -> float:
        exponent = math.log10(value) if value > 0 else low
        return _TOP + inner * (1 - (min(max(exponent, low), high) - low) / (high - low))

    stride = max(1, (high - low) // 4)
    parts = []
    for exponent in range(low, high + 1, stride):
        y = y_of(10.0**exponent)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 4, y + 4, f"{10.0**exponent:g}{unit}", "end num dim"))
    if bound:
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{WIDTH}" y1="{y_of(bound):.1f}" y2="{y_of(bound):.1f}"/>')
        parts.append(_text(WIDTH, y_of(bound) - 3, "bound", "end dim"))
    for point in points:
        parts.append(
            f'<circle class="{point.kind}" cx="{x_of(point.x):.1f}" cy="{y_of(point.y):.1f}" r="3.2">'
            f"<title>{escape(point.note)}</title></circle>"
        )
    for value in (10**left, 10 ** ((left + right) / 2), 10**right):
        parts.append(_text(x_of(value), height - 16, f"{value:.0f}", "mid num dim"))
    parts.append(_text(_LEFT + (WIDTH - _LEFT) / 2, height - 3, x_name, "mid dim"))
    return _figure(title, height, parts)


def _y_axis(low: float, high: float, y_of: Callable[[float], float], unit: str) -> list[str]:
    parts = []
    for tick in _ticks(low, high, 4):
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 4, y + 4, f"{tick:g}{unit}", "end num dim"))
    return parts


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _figure(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="-2 -2 {WIDTH + 4:.0f} {height + 4:.0f}"'
        f' role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )
