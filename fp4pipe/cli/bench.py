"""`fp4pipe bench`: what the kernels do on the GPU that is here."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4pipe import console
from fp4pipe.cli.outcome import Outcome
from fp4pipe.cli.stdout import command
from fp4pipe.errors import UsageError

bench = typer.Typer(help="Measure the kernels on the GPU that is here.", rich_markup_mode=None)


@bench.callback(invoke_without_command=True)
def _which(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@bench.command()
@command
def gemm(
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Values of M; may be repeated. Default: powers of two to 8192.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="w4a16, w4a4_emulated or fp8_prefill; may be repeated. Default: all."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NxK", help="Weight to time; may be repeated. Default: Llama-3.1-8B's four."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write gemm.json and gemm.svg there.")] = None,
) -> Outcome:
    """Time NVFP4 products beside cuBLAS in bf16 and FP8 and the least time the shape allows."""
    shapes = dict(map(_shape, shape)) if shape else None
    from fp4pipe.runtime.bench.gemm import MODES, TOKENS, bench_gemm
    from fp4pipe.runtime.bench.plot import plot

    unknown = set(mode or ()) - set(MODES)
    if unknown:
        raise UsageError(f"--mode {sorted(unknown)[0]} is unknown", fix="--mode " + "|".join(MODES))
    document = bench_gemm(
        shapes,
        tuple(tokens or TOKENS),
        tuple(mode or MODES),
        lambda row: console.say(f"{row['name']} M={row['M']} {row['mode']}: {row['us']:.1f} us"),
    )
    document["command"] = " ".join(["fp4pipe", *sys.argv[1:]])
    show(document)
    if out:
        _write(out, console.to_json(document), plot(document))
        console.say(f"written: {out / 'gemm.json'} {out / 'gemm.svg'}")
    return Outcome(document)


def show(document: dict[str, Any]) -> None:
    """Print the measured times, each with what it stands beside."""
    rows = [
        {
            "weight": f"{row['name']} {row['N']}x{row['K']}",
            "M": row["M"],
            "mode": row["mode"],
            "us": round(row["us"], 1),
            "floor": round(row["floor_us"], 1),
            "bf16": round(row["bf16_us"], 1),
            "fp8": None if row["fp8_us"] is None else round(row["fp8_us"], 1),
            "of bf16": round(row["us"] / row["bf16_us"], 2),
            "rel. error": row["rel_error"],
        }
        for row in document["rows"]
    ]
    console.table(rows, f"{document['device']}: microseconds, floors at an H200's bandwidth and rate")


def _shape(text: str) -> tuple[str, tuple[int, int]]:
    name, _, size = text.partition("=")
    rows, _, columns = size.partition("x")
    if not name or not rows.isdecimal() or not columns.isdecimal():
        raise UsageError(f"--shape {text!r} is not NAME=NxK", fix="--shape qkv=6144x4096")
    n, k = int(rows), int(columns)
    if n < 8 or n % 8 or k < 16 or k % 16:
        raise UsageError(f"--shape {text!r}", because="N must be a multiple of 8 and K of 16")
    return name, (n, k)


def _write(directory: Path, json: str, svg: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "gemm.json").write_text(json + "\n", encoding="utf-8")
        (directory / "gemm.svg").write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{directory} cannot be written", because=error.strerror) from None
