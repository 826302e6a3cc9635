"""One validation run: engines loaded once, the checks asked for, gates held against the figures."""

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fp4pipe import console
from fp4pipe.allocator import return_freed_memory
from fp4pipe.checkpoint import Checkpoint
from fp4pipe.errors import UsageError
from fp4pipe.runtime.engine import Engine, SamplingParams
from fp4pipe.runtime.validate.answering import Answer, answer
from fp4pipe.runtime.validate.check import Check
from fp4pipe.runtime.validate.exact import ExactScorer
from fp4pipe.runtime.validate.gates import judge
from fp4pipe.runtime.validate.graphs import check_graphs
from fp4pipe.runtime.validate.gsm8k import STOPS, Outcome, Prompt, grade, load_gsm8k, make_prompts, tally
from fp4pipe.runtime.validate.likelihood import agreement_figures, perplexity_figures, score
from fp4pipe.runtime.validate.ops import check_ops
from fp4pipe.runtime.validate.options import Gsm8kOptions, ValidateOptions
from fp4pipe.runtime.validate.parity import parity
from fp4pipe.runtime.validate.report import Report, describe_environment
from fp4pipe.runtime.validate.text import read_text, windows
from fp4pipe.runtime.validate.verdict import verdict

KV_TOKENS_PER_SEQUENCE = 2048
"""Room for each running sequence in an engine's cache; with several engines, none may take all that is free."""
UNQUANTIZED = "unquantized"
"""Stands where the mode would when the model validated has no NVFP4 layer."""


_AS_STORED = {"fp4_gemm_backend": "auto", "prefill": "bf16", "lm_head": "bf16"}
"""Kernels of the baseline: the exact ones, whatever the checkpoint is run with."""


class Reference(Protocol):
    """An independent implementation of the checkpoint, such as ModelOpt's fake-quantized model."""

    @property
    def activations(self) -> bool:
        """Quantize activations too (W4A4), or weights only."""
        ...

    @activations.setter
    def activations(self, value: bool) -> None: ...

    def logits(self, input_ids: Tensor) -> Tensor:
        """int64 ``[1, T]`` to float32 ``[T, V]``."""
        ...


def validate(
    path: str | Path,
    options: ValidateOptions,
    *,
    reference: Reference | None = None,
    baseline_path: str | Path | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> Report:
    """Validate the checkpoint in `path`.

    All engines that a text is scored with are resident at once: one for each mode, and the baseline's. Logits are
    compared window by window and never kept.

    Args:
        path: NVFP4 checkpoint, or any model the runtime loads.
        options: What to check.
        reference: For parity.
        baseline_path: The unquantized source, run in the same engine for perplexity, agreement and GSM8K.
        engines: Idle engines of the checkpoint that are loaded already (see `load_engine`), by mode; others are loaded.

    Raises:
        UsageError: The options cannot be carried out; nothing was loaded.
        Fp4pipeError: Loading or running failed; a check that fails is in the report instead.
    """
    path, baseline_path = Path(path), None if baseline_path is None else Path(baseline_path)
    options.require(reference=reference is not None, baseline=baseline_path is not None)
    run = _Run(path, baseline_path, options)
    run.load(engines or {})
    if options.ops:
        run.ops()
    if options.graphs:
        run.graphs()
    if reference is not None and options.parity_positions:
        run.parity(reference)
    if options.perplexity_tokens or options.agreement_tokens or options.gsm8k:
        run.load_baseline()
    if options.perplexity_tokens or options.agreement_tokens:
        run.text()
    if options.gsm8k is not None:
        run.gsm8k(options.gsm8k)
    run.report.gates = judge(options.gates, run.report.checks)
    return run.report


def load_engine(path: str | Path, mode: str, options: ValidateOptions) -> Engine:
    """The engine that `options` ask for, with room for the sequences a validation runs at a time."""
    running = options.gsm8k.in_flight if options.gsm8k else 8
    return Engine.load(
        path,
        mode=mode,
        device=options.device,
        dtype=options.dtype,
        graphs=options.runner,
        compiler=options.compiler,
        fp4_gemm_backend=options.fp4_gemm_backend,
        prefill=options.prefill,
        lm_head=options.lm_head,
        load_threads=options.load_threads,
        max_running=running,
        kv_tokens=options.kv_tokens or running * KV_TOKENS_PER_SEQUENCE,
        progress=options.progress,
    )


class _Run:
    def __init__(self, path: Path, baseline: Path | None, options: ValidateOptions) -> None:
        self.options = options
        self.checkpoint = Checkpoint.open(path)
        self.report = Report(path, baseline)
        self.engines: dict[str, Engine] = {}
        self.baseline: Engine | None = None

    def load(self, given: Mapping[str, Engine]) -> None:
        options, report = self.options, self.report
        for mode in options.modes:
            engine = given.get(mode)
            if engine is None:
                with self._timed(f"load {mode}"):
                    engine = load_engine(report.checkpoint, mode, options)
            name = engine.model.mode if self.checkpoint.linears else UNQUANTIZED
            self.engines[name] = engine
            report.modes[name] = str(engine.model.load_report.get("mode", ""))
        first = next(iter(self.engines.values()))
        report.environment = describe_environment(first.model.device)
        report.environment |= {"dtype": str(first.model.dtype).removeprefix("torch."), "graphs": first.runner.graphs}

    def load_baseline(self) -> None:
        """Load the source, once no reference for parity computes any more: both hold the whole model in wide types."""
        options, path = self.options, self.report.baseline
        if path is None:
            return
        # Tracing and compiling pay only when it generates: the forward passes over a text are few and long.
        plain = replace(options, runner=options.runner if options.gsm8k else "off", **_AS_STORED)
        with self._timed("load baseline"):
            self.baseline = load_engine(path, "auto", plain)

    def ops(self) -> None:
        for mode, engine in self.engines.items():
            first = engine is next(iter(self.engines.values()))
            with self._timed("ops"):
                checks = check_ops(self.checkpoint, engine.model, device=engine.model.device, seed=self.options.seed)
            # The operators are the same in every mode; the loaded layers are not.
            for check in checks if first else checks[-1:]:
                if check.name == "ops.layers":
                    check.name = f"ops.{mode}.layers"
                self.report.checks.append(check)

    def graphs(self) -> None:
        for mode, engine in self.engines.items():
            engine.flush_cache()
            with self._timed("graphs"):
                checks = check_graphs(engine.runner, buckets=self.options.buckets, seed=self.options.seed)
            for check in checks:
                check.name = check.name.replace("graphs.", f"graphs.{mode}.")
            self.report.checks += checks

    def parity(self, reference: Reference) -> None:
        for mode, engine in self.engines.items():
            reference.activations = mode == "w4a4"
            pieces = self._windows(engine, self.options.parity_positions)
            with self._timed("parity"):
                scorer = self._exact() if mode == "w4a4" else engine
                self.report.checks.append(parity(scorer, reference.logits, pieces, name=f"parity.{mode}"))

    def _exact(self) -> ExactScorer:
        """The checkpoint in w4a4 without float32's rounding; its pieces as traced and rewritten, but not compiled."""
        threads = self.options.load_threads
        return ExactScorer(self.checkpoint, self.options.runner, max_tokens=self.options.window, load_threads=threads)

    def text(self) -> None:
        options, checks = self.options, self.report.checks
        first = next(iter(self.engines.values()))
        pieces = self._windows(first, max(options.perplexity_tokens, options.agreement_tokens))
        with self._timed("text"):
            likelihoods, divergences = score(self.engines, pieces, self.baseline, compared=options.agreement_tokens)
        source = likelihoods.get("baseline")
        for mode in self.engines if options.perplexity_tokens else ():
            figures: dict[str, Any] = perplexity_figures(likelihoods[mode])
            summary = f"perplexity {figures['perplexity']:.4g} over {figures['tokens']} tokens"
            if source is not None:
                figures |= {"baseline": source.perplexity, "ratio": likelihoods[mode].perplexity / source.perplexity}
                summary += f", unquantized {source.perplexity:.4g}, ratio {figures['ratio']:.4f}"
            checks.append(Check(f"perplexity.{mode}", _finite(figures), summary, figures, {"text": str(options.text)}))
        for mode, divergence in divergences.items() if options.agreement_tokens else ():
            figures = agreement_figures(divergence)
            summary = (
                f"KL from the unquantized model {figures['kl']:.4g} nats (99th percentile {figures['kl_p99']:.4g}),"
                f" top-1 equal on {figures['top1']:.2%} of {figures['positions']} positions"
            )
            checks.append(Check(f"agreement.{mode}", _finite(figures), summary, figures, {"text": str(options.text)}))

    def gsm8k(self, asked: Gsm8kOptions) -> None:
        train, test = load_gsm8k(asked.data)
        prompts = make_prompts(
            train, test, style=asked.style, questions=asked.questions, shots=asked.shots, seed=asked.seed
        )
        outcomes: dict[str, list[Outcome]] = {}
        everyone = self.engines if self.baseline is None else {"baseline": self.baseline, **self.engines}
        for mode, engine in everyone.items():
            with self._timed(f"gsm8k {mode}"):
                answers = self._answers(mode, engine, prompts, asked)
            outcomes[mode] = [
                grade(asked.style, p.answer, answers[p.index].text, truncated=answers[p.index].truncated)
                for p in prompts
            ]
        for mode in self.engines:
            self.report.checks.append(_gsm8k_check(mode, outcomes, asked))

    def _answers(self, mode: str, engine: Engine, prompts: list[Prompt], asked: Gsm8kOptions) -> dict[int, Answer]:
        path = self.report.baseline if mode == "baseline" else self.report.checkpoint
        assert path is not None  # there is no baseline engine without one
        params = SamplingParams(max_tokens=asked.max_tokens, temperature=0.0, stop=STOPS[asked.style])
        return answer(
            engine,
            prompts,
            params,
            model_id=f"{_fingerprint(path)} {mode} {engine.model.dtype} {engine.model.device.type}{_kernels(engine)}",
            in_flight=asked.in_flight,
            store=None if asked.answers is None else Path(asked.answers) / f"gsm8k-{mode}.jsonl",
            desc=f"gsm8k {mode}",
        )

    def _windows(self, engine: Engine, tokens: int) -> list[list[int]]:
        length = min(self.options.window, engine.max_context)
        return windows(read_text(self.options.text), engine.tokenizer, tokens=tokens, length=length)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self.options.progress:
            console.say(f"{name} ...")
        started = time.perf_counter()
        yield
        seconds = self.report.seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
        return_freed_memory()


def _kernels(engine: Engine) -> str:
    """Approximate kernels `engine` runs, which answers depend on."""
    kernels = engine.model.load_report["kernels"]
    return "".join(f" {name}={kernels[name]}" for name in ("prefill", "lm_head") if kernels[name] != "bf16")


def _gsm8k_check(mode: str, outcomes: dict[str, list[Outcome]], asked: Gsm8kOptions) -> Check:
    figures: dict[str, Any] = tally(outcomes[mode])
    details: dict[str, Any] = {"style": asked.style, "shots": asked.shots, "seed": asked.seed}
    counts = f"{figures['invalid']} invalid, {figures['truncated']} truncated"
    if "baseline" not in outcomes:
        summary = f"accuracy {figures['accuracy']:.1%} over {figures['questions']} questions ({counts})"
        return Check(f"gsm8k.{mode}", None, summary, figures, details)
    right = {name: [outcome == "right" for outcome in results] for name, results in outcomes.items()}
    result = verdict(right["baseline"], right[mode], margin=asked.margin, seed=asked.seed)
    source = tally(outcomes["baseline"])
    figures |= {"verdict": result.outcome, "baseline": source["accuracy"], "difference": result.difference}
    figures |= {"low": result.low, "high": result.high, "p_value": result.p_value}
    details |= {"verdict": result.to_dict(), "baseline": source}
    ok = {"pass": True, "regress": False, "inconclusive": None}[result.outcome]
    return Check(f"gsm8k.{mode}", ok, f"{result.summary} ({counts})", figures, details)


def _finite(figures: dict[str, Any]) -> bool | None:
    """False when a model gave no finite figure; `None`, for the gates to judge, otherwise."""
    bad = [key for key, value in figures.items() if isinstance(value, float) and value - value != 0]
    return False if bad else None


def _fingerprint(path: Path) -> str:
    """Tells one state of a model directory from another: names, sizes and times of its files."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            status = file.stat()
            digest.update(f"{file.relative_to(path)} {status.st_size} {status.st_mtime_ns}\n".encode())
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory")
    return digest.hexdigest()[:32]
