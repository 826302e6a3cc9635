"""The whole conversion: plan, calibrate, quantize, export, audit; a finished directory or none."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4pipe import console
from fp4pipe.calib_data import CalibrationSet, load_calibration
from fp4pipe.convert.audit import Audit, audit
from fp4pipe.convert.calibrate import calibrate, check_finite
from fp4pipe.convert.card import model_card
from fp4pipe.convert.export import export
from fp4pipe.convert.mend import write_json
from fp4pipe.convert.model import load
from fp4pipe.convert.options import QuantizeOptions
from fp4pipe.convert.plan import Plan, make_plan
from fp4pipe.convert.provenance import provenance
from fp4pipe.convert.scheme import resolve_scheme
from fp4pipe.convert.source import Source, resolve_source
from fp4pipe.convert.staging import check_keeps, check_output, staged
from fp4pipe.device import pick_device
from fp4pipe.errors import CheckpointError, SourceError, UsageError, first_line


@dataclass(frozen=True)
class QuantizeResult:
    """What `quantize` did.

    Attributes:
        out: The checkpoint.
        source: What it was made from.
        plan: The decisions.
        audit: The files on disk held against the source.
        seconds: Wall time of each step, in order.
        peak_rss_bytes: Largest resident memory of the process so far.
    """

    out: Path
    source: Source
    plan: Plan
    audit: Audit
    seconds: dict[str, float]
    peak_rss_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "out": str(self.out),
            "source": {"spec": self.source.spec, "kind": self.source.kind, "fingerprint": self.source.fingerprint},
            "plan": self.plan.to_dict(),
            "audit": self.audit.to_dict(),
            "seconds": self.seconds,
            "peak_rss_bytes": self.peak_rss_bytes,
        }


@dataclass
class _Stopwatch:
    """Wall time by step; says each step on stderr as it begins."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        console.say(f"{name} ...")
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)


def warn_of(plan: Plan) -> None:
    """Print the plan's warnings."""
    for warning in plan.warnings:
        console.warn(warning)


def quantize(
    source: str | Path | Source,
    out: str | Path,
    options: QuantizeOptions | None = None,
    *,
    overwrite: bool = False,
    announce: Callable[[Plan], None] = warn_of,
) -> QuantizeResult:
    """Turn a bf16 model into an NVFP4 checkpoint in `out`.

    Everything is written to a hidden directory beside `out`, audited there, and renamed at the end; see
    `fp4pipe.convert.staging`.

    Args:
        source: What `resolve_source` takes, or its result.
        out: Directory of the checkpoint.
        options: Scheme, calibration and output options.
        overwrite: Replace an existing checkpoint.
        announce: Shows the plan, before anything is loaded.

    Raises:
        UsageError: Unsupported options, an output that exists, or a plan with problems.
        SourceError: The model cannot be read, converted or calibrated.
        CheckpointError: The audit found what was written to be wrong; nothing is left in `out`.
        Unavailable: The device is not there.
    """
    options = options or QuantizeOptions()
    out = Path(out)
    check_output(out, overwrite=overwrite)
    device = pick_device(options.device)
    scheme = resolve_scheme(options)
    watch = _Stopwatch()
    with watch.step("plan"):
        if not isinstance(source, Source):
            source = resolve_source(source, trust_remote_code=options.trust_remote_code)
        for origin in (source.path, Path(source.spec)):
            if origin.exists():
                check_keeps(out, origin)
        plan = make_plan(source, options)
        refuse_problems(plan)
    announce(plan)
    with staged(out, overwrite=overwrite) as staging:
        with watch.step("check source"):
            check_finite(source)
        with watch.step("calibration set"):
            calibration = _calibration(source, options) if plan.calibration_tokens else None
        with watch.step("load"):
            model = load(source, device=device, trust_remote_code=options.trust_remote_code)
        with watch.step("calibrate"):
            calibrate(model, scheme, calibration, options.calibration.batch_size)
        with watch.step("export"):
            export(model, source, staging, max_shard_size=options.max_shard_size)
            del model
            write_json(staging / "provenance.json", provenance(source, options, plan, calibration))
        with watch.step("audit"):
            result = audit(staging, source, plan=plan, unfinished=True)
        if not result.ok:
            raise CheckpointError(
                f"{source.spec}: the exported checkpoint failed its audit and was discarded",
                because="; ".join(str(finding) for finding in result.errors[:3]),
            )
        (staging / "README.md").write_text(model_card(source, out.name, options, plan, calibration, result))
    return QuantizeResult(out, source, plan, result, watch.seconds, _peak_rss())


def refuse_problems(plan: Plan) -> None:
    """Stop before anything is loaded if the plan cannot be carried out.

    Raises:
        UsageError: With every problem of the plan.
    """
    if plan.problems:
        more = f" (and {len(plan.problems) - 5} more problems)" if len(plan.problems) > 5 else ""
        raise UsageError(f"{plan.source} cannot be quantized as asked", because="; ".join(plan.problems[:5]) + more)


def _calibration(source: Source, options: QuantizeOptions) -> CalibrationSet:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers raises many kinds for a missing or damaged tokenizer
        raise SourceError(
            f"{source.spec} has no usable tokenizer, and calibration text has to be encoded",
            because=first_line(error),
            fix="a copy of the model with its tokenizer files, or a weight-only scheme, which needs no calibration",
        ) from error
    ask = options.calibration
    return load_calibration(
        ask.dataset,
        tokenizer,
        samples=ask.samples,
        seq_len=ask.seq_len,
        seed=ask.seed,
        split=ask.split,
        text_column=ask.text_column,
        chat_template=ask.chat_template,
    )


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
