"""The checkpoint on disk against the source, layer by layer, one tensor in memory at a time."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4pipe import console, nvfp4
from fp4pipe.checkpoint import Checkpoint
from fp4pipe.convert.plan import Plan
from fp4pipe.convert.source import Source
from fp4pipe.lint import lint
from fp4pipe.safetensors_file import read_tensor

MIN_SQNR_DB = 10.0
"""Rounding to NVFP4 leaves about 20 dB; a matrix below this was not rounded but damaged."""


@dataclass(frozen=True)
class AuditRow:
    """One NVFP4 matrix against the source's.

    Attributes:
        module: Its name.
        shape: ``[N, K]``.
        sqnr_db: Signal to quantization noise, ``10 log10(sum w^2 / sum (w - q)^2)``; infinite where nothing was lost.
        rel_error: ``|w - q| / |w|`` (Frobenius).
        clipped: Share of block scales at E4M3's largest number, 448.
        floored: Share of block scales at its smallest, 2^-9.
        plain: Codes and scales are those of plain rounding with these global scales, bit for bit.
    """

    module: str
    shape: tuple[int, int]
    sqnr_db: float
    rel_error: float
    clipped: float
    floored: float
    plain: bool


@dataclass(frozen=True)
class AuditFinding:
    """Something the audit has to say: severity ``error`` or ``warning``, the tensor or file, and a sentence."""

    severity: str
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.detail}"


@dataclass(frozen=True)
class Audit:
    """The outcome of `audit`.

    Attributes:
        rows: Every NVFP4 matrix.
        identical: Number of tensors that are the source's byte for byte.
        findings: What was noticed.
    """

    rows: tuple[AuditRow, ...]
    identical: int
    findings: tuple[AuditFinding, ...]

    @property
    def errors(self) -> tuple[AuditFinding, ...]:
        """The findings that make the checkpoint wrong."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    @property
    def worst(self) -> AuditRow | None:
        """The matrix with the lowest SQNR."""
        return min(self.rows, key=lambda row: row.sqnr_db, default=None)

    @property
    def mean_sqnr_db(self) -> float:
        """Mean over the matrices that lost anything."""
        finite = [row.sqnr_db for row in self.rows if math.isfinite(row.sqnr_db)]
        return sum(finite) / len(finite) if finite else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        worst = self.worst
        return {
            "ok": self.ok,
            "matrices": len(self.rows),
            "identical_tensors": self.identical,
            "worst_sqnr_db": worst.sqnr_db if worst else None,
            "worst_module": worst.module if worst else None,
            "mean_sqnr_db": self.mean_sqnr_db,
            "rows": [asdict(row) for row in self.rows],
            "findings": [asdict(finding) for finding in self.findings],
        }


def audit(checkpoint_dir: str | Path, source: Source, *, plan: Plan | None = None, unfinished: bool = False) -> Audit:
    """Read the checkpoint back from disk and hold it against `source`, `plan` and the rules of `fp4pipe.lint`.

    Args:
        checkpoint_dir: What was exported.
        source: What it was exported from.
        plan: What was meant to be quantized, where that is known.
        unfinished: The directory is still being written by the caller, so its marker is no reason to refuse it.

    Raises:
        CheckpointError: The directory is no checkpoint at all; lesser faults are findings.
    """
    checkpoint = Checkpoint.open(checkpoint_dir, unfinished=unfinished)
    rows: list[AuditRow] = []
    findings = [
        *_names(checkpoint, source, plan),
        *_plan(checkpoint, plan),
        *(
            AuditFinding(broken.rule.severity, broken.where, f"{broken.detail} ({broken.rule.id})")
            for broken in lint(checkpoint_dir, unfinished=unfinished)
            if broken.rule.severity != "info"
        ),
    ]
    identical = 0
    with console.progress(sum(i.nbytes for i in checkpoint.tensors.values()), "auditing", bytes=True) as bar:
        for module, linear in checkpoint.linears.items():
            original = source.tensors.get(f"{module}.weight")
            if original is not None and original.shape == (linear.out_features, linear.in_features):
                rows.append(_row(checkpoint, module, read_tensor(original)))
                findings += _row_findings(rows[-1])
            bar.update(linear.weight.nbytes + sum(info.nbytes for info in linear.scales))
        for name, info in checkpoint.tensors.items():
            module = name.rpartition(".")[0]
            original = source.tensors.get(name)
            if original is None or (module in checkpoint.linears and name == checkpoint.linears[module].weight.name):
                continue
            if original.dtype != info.dtype or original.shape != info.shape:
                detail = f"{info.dtype} {list(info.shape)}, the source has {original.dtype} {list(original.shape)}"
                findings.append(AuditFinding("error", name, detail))
            elif not torch.equal(_bytes(read_tensor(info)), _bytes(read_tensor(original))):
                findings.append(AuditFinding("error", name, "is not quantized, but its numbers are not the source's"))
            else:
                identical += 1
            bar.update(info.nbytes)
    return Audit(tuple(rows), identical, tuple(findings))


def _row(checkpoint: Checkpoint, module: str, original: Tensor) -> AuditRow:
    weight = original.float()
    linear = checkpoint.linears[module]
    codes, block_scale = checkpoint.tensor(linear.weight.name), checkpoint.tensor(linear.block_scale.name)
    error = float((weight - checkpoint.dequantize(module)).square().sum(dtype=torch.float64))
    signal = float(weight.square().sum(dtype=torch.float64))
    scales = block_scale.float()
    plain = nvfp4.quantize_weight(original, checkpoint.global_scale(module))
    return AuditRow(
        module=module,
        shape=(linear.out_features, linear.in_features),
        sqnr_db=10 * math.log10(signal / error) if error and signal else (math.inf if not error else -math.inf),
        rel_error=math.sqrt(error / signal) if signal else (0.0 if not error else math.inf),
        clipped=float((scales == nvfp4.E4M3_MAX).float().mean()),
        floored=float((scales == nvfp4.E4M3_TINY).float().mean()),
        plain=torch.equal(codes, plain.codes) and torch.equal(_bytes(block_scale), _bytes(plain.block_scale)),
    )


def _row_findings(row: AuditRow) -> Iterator[AuditFinding]:
    if not row.sqnr_db >= MIN_SQNR_DB:  # also when it is NaN
        yield AuditFinding("error", row.module, f"SQNR is {row.sqnr_db:.1f} dB; rounding alone leaves about 20")


def _names(checkpoint: Checkpoint, source: Source, plan: Plan | None) -> Iterator[AuditFinding]:
    """Tensors the source has and the checkpoint lacks, and the reverse."""
    used = {row.name for row in plan.rows} if plan else set()
    tied = bool(source.config.get("tie_word_embeddings")) or "lm_head.weight" not in source.tensors
    for name in source.tensors.keys() - checkpoint.tensors.keys():
        if name == "lm_head.weight" and tied:
            continue
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name.rpartition(".")[0] in used:
            yield AuditFinding("error", name, "is missing")
        else:
            yield AuditFinding("warning", name, "is in the source only: the model's class has no use for it")
    ours = {info.name for linear in checkpoint.linears.values() for info in (linear.weight, *linear.scales)}
    ours |= {info.name for pair in checkpoint.kv_scales.values() for info in pair if info is not None}
    for name in checkpoint.tensors.keys() - source.tensors.keys() - ours:
        yield AuditFinding("error", name, "is in the checkpoint only")


def _plan(checkpoint: Checkpoint, plan: Plan | None) -> Iterator[AuditFinding]:
    if plan is None:
        return
    planned = {row.name for row in plan.quantized}
    for module in sorted(planned - checkpoint.linears.keys()):
        yield AuditFinding("error", module, "was to be quantized and is not")
    for module in sorted(checkpoint.linears.keys() - planned):
        yield AuditFinding("error", module, "is quantized, and the plan keeps it")
    algo = checkpoint.quant.algo if checkpoint.quant else None
    if algo != plan.algo:
        yield AuditFinding("error", "config.json", f"says {algo}, the plan is {plan.algo}")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
