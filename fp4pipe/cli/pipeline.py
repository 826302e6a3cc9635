"""The steps of a recipe, in order, each kept when nothing it depends on has changed."""

import hashlib
import json
import resource
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4pipe import __version__, console
from fp4pipe.cli.ask import ask
from fp4pipe.cli.journal import Journal
from fp4pipe.cli.reports import write_report
from fp4pipe.cli.sources import first_reachable
from fp4pipe.cli.tables import show_audit, show_checks, show_plan
from fp4pipe.errors import Fp4pipeError

if TYPE_CHECKING:
    from fp4pipe.convert.options import QuantizeOptions
    from fp4pipe.convert.source import Source
    from fp4pipe.recipe import Recipe
    from fp4pipe.runtime.engine import Engine
    from fp4pipe.runtime.validate import ValidateOptions

SCHEMA_VERSION = 1
_VERSIONED = ("torch", "transformers", "nvidia-modelopt")
"""Packages a result depends on."""


class Pipeline:
    """One recipe and one output directory.

    Args:
        recipe: What to do.
        out: Gets `checkpoint/`, `run.json` (results of the steps), `report.json` and `report.html`.

    Raises:
        UsageError: The recipe asks for something that could not be carried out; nothing was started.
    """

    def __init__(self, recipe: "Recipe", out: Path) -> None:
        from fp4pipe.device import pick_device
        from fp4pipe.runtime.validate.gates import check_names

        self.recipe = recipe
        self.out = out
        self.checkpoint = out / "checkpoint"
        self.quantizing = _quantize_options(recipe)
        self.validating = _validate_options(recipe, out)
        self._loaded: Engine | None = None
        pick_device(recipe.load.device)
        if self.validating.steps:
            self.validating.require(reference=True, baseline=True)
        check_names(recipe.gates, ["audit", *self.validating.steps])

    def run(self) -> dict[str, Any]:
        """Carry out every step that is not done already.

        Returns:
            The run as one document, which is also `report.json`; its `failures` says which gates did not hold.

        Raises:
            Fp4pipeError: A step could not be carried out; the steps before it are kept.
        """
        journal = Journal(self.out / "run.json")
        versions = {"fp4pipe": __version__, **{name: metadata.version(name) for name in _VERSIONED}}
        source = self._source()
        quantized = journal.step(
            "quantize",
            {"source": source.fingerprint, "options": self.quantizing, "versions": versions},
            lambda: self._quantize(source, overwrite=journal.path.exists()),
            valid=_made_by(self.checkpoint, source, self.quantizing),
        )
        made = {"checkpoint": _digest(self.checkpoint / "provenance.json"), "versions": versions}
        validation = None
        if self.validating.steps:
            validation = journal.step("validate", {**made, "options": self.validating}, lambda: self._validate(source))
        answer = None
        if self.recipe.ask is not None:
            question = {"question": self.recipe.ask, "load": self.recipe.load.model_dump()}
            answer = journal.step("ask", {**made, **question}, self._ask)
        return self._finish(source, quantized, validation, answer, journal)

    def _source(self) -> "Source":
        console.say("== source")
        source = first_reachable(
            self.recipe.source, revision=self.recipe.revision, trust_remote_code=self.recipe.trust_remote_code
        )
        console.say(f"{source.spec} in {source.path}")
        return source

    def _quantize(self, source: "Source", *, overwrite: bool) -> dict[str, Any]:
        from fp4pipe.convert.quantize import quantize

        result = quantize(source, self.checkpoint, self.quantizing, overwrite=overwrite, announce=show_plan)
        show_audit(result.audit)
        return result.to_dict()

    def _validate(self, source: "Source") -> dict[str, Any]:
        from fp4pipe.convert.reference import ModelOptReference
        from fp4pipe.runtime.validate import validate

        engine = self._engine()
        reference = None
        if self.validating.parity_positions:
            trust = self.recipe.trust_remote_code
            reference = ModelOptReference(source.path, self.checkpoint, activations=False, trust_remote_code=trust)
        report = validate(
            self.checkpoint,
            self.validating,
            reference=reference,
            baseline_path=source.path,
            engines={engine.model.mode: engine},
        )
        show_checks(report)
        return report.to_dict()

    def _ask(self) -> dict[str, Any]:
        assert self.recipe.ask is not None
        engine = self._engine()
        answer = ask(engine, self.recipe.name, self.recipe.ask)
        return {**answer, "mode": engine.model.mode, "load": engine.model.load_report, "stats": engine.stats()}

    def _engine(self) -> "Engine":
        """The checkpoint as the recipe loads it: validated, then served."""
        from fp4pipe.runtime.validate import load_engine

        if self._loaded is None:
            console.say("load ...")
            self._loaded = load_engine(self.checkpoint, self.recipe.load.mode, self.validating)
        return self._loaded

    def _finish(
        self,
        source: "Source",
        quantized: dict[str, Any],
        validation: dict[str, Any] | None,
        answer: dict[str, Any] | None,
        journal: Journal,
    ) -> dict[str, Any]:
        from fp4pipe.cli.summary import summary_table
        from fp4pipe.runtime.validate import Check
        from fp4pipe.runtime.validate.gates import judge

        audit = quantized["audit"]
        figures: dict[str, float | int | str | None] = {
            key: value for key, value in audit.items() if isinstance(value, int | float | str)
        }
        checks = [Check("audit", audit["ok"], f"worst SQNR {audit['worst_sqnr_db']:.1f} dB", figures)]
        checks += [Check(**check) for check in (validation or {}).get("checks", [])]
        gates = judge(self.recipe.gates, checks)
        failures = [*(validation or {}).get("failures", []), *(f"gate {g.summary}" for g in gates if not g.ok)]
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "run",
            "ok": not failures,
            "failures": failures,
            "recipe": self.recipe.model_dump(mode="json", by_alias=True),
            "source": {"spec": source.spec, "kind": source.kind, "fingerprint": source.fingerprint},
            "checkpoint": str(self.checkpoint),
            "quantize": quantized,
            "validation": validation,
            "gates": [gate.to_dict() for gate in gates],
            "answer": answer,
            "seconds": journal.seconds,
            "kept": sorted(journal.kept),
            "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        document["table"] = summary_table(document)
        document["report"] = write_report(self.out, document)
        return document


def _quantize_options(recipe: "Recipe") -> "QuantizeOptions":
    from fp4pipe.convert.options import CalibrationOptions, QuantizeOptions

    asked = recipe.quantize.model_dump()
    calibration = CalibrationOptions(**asked.pop("calibration"))
    return QuantizeOptions(**asked, calibration=calibration, trust_remote_code=recipe.trust_remote_code)


def _validate_options(recipe: "Recipe", out: Path) -> "ValidateOptions":
    """The recipe's checks, without its gates: figures are kept, and gates are held against them each time."""
    from fp4pipe.runtime.validate import Gsm8kOptions, ValidateOptions

    asked, load = recipe.checks.model_dump(), recipe.load.model_dump()
    gsm8k = asked.pop("gsm8k")
    return ValidateOptions(
        **asked,
        gsm8k=Gsm8kOptions(**gsm8k, answers=out / "answers") if gsm8k else None,
        runner=load["graphs"],
        **{name: value for name, value in load.items() if name not in ("mode", "graphs")},
    )


def _made_by(checkpoint: Path, source: "Source", options: "QuantizeOptions") -> bool:
    """Whether `checkpoint` is a whole checkpoint that `options` made of `source`."""
    from fp4pipe.checkpoint import Checkpoint

    try:
        Checkpoint.open(checkpoint)
        recorded = json.loads((checkpoint / "provenance.json").read_text(encoding="utf-8"))
        same_source = recorded["source"]["fingerprint"] == source.fingerprint
        return same_source and recorded["options"] == json.loads(console.to_json(options))
    except (Fp4pipeError, OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
