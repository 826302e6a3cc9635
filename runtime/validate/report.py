"""What a validation run found, as one object: checks, gates, the environment they hold in, an exit code."""

import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fp4pipe.errors import GateFailed
from fp4pipe.runtime.validate.check import Check
from fp4pipe.runtime.validate.gates import GateResult

SCHEMA_VERSION = 1
_PACKAGES = ("fp4pipe", "torch", "transformers", "nvidia-modelopt", "flashinfer-python", "triton")


@dataclass(slots=True)
class Report:
    """The outcome of `validate`."""

    checkpoint: Path
    baseline: Path | None
    modes: dict[str, str] = field(default_factory=dict)
    """Numerics validated, each with the sentence that says why."""
    checks: list[Check] = field(default_factory=list)
    gates: list[GateResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """No check failed and every gate held."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        """One sentence for each check that failed and each gate that did not hold."""
        failed = [f"{check.name}: {check.summary}" for check in self.checks if check.ok is False]
        return failed + [f"gate {gate.summary}" for gate in self.gates if not gate.ok]

    @property
    def exit_code(self) -> int:
        """0, or `GateFailed`'s."""
        return 0 if self.ok else GateFailed.exit_code

    @property
    def figures(self) -> dict[str, float | int | str | None]:
        """Every figure by the name that gates use."""
        return {f"{check.name}.{key}": value for check in self.checks for key, value in check.figures.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "validation",
            "ok": self.ok,
            "failures": self.failures,
            "checkpoint": str(self.checkpoint),
            "baseline": None if self.baseline is None else str(self.baseline),
            "modes": dict(self.modes),
            "checks": [check.to_dict() for check in self.checks],
            "gates": [gate.to_dict() for gate in self.gates],
            "figures": self.figures,
            "seconds": dict(self.seconds),
            "environment": dict(self.environment),
        }


def describe_environment(device: torch.device) -> dict[str, Any]:
    """What figures depend on besides the model: device, library versions, threads."""
    found: dict[str, Any] = {"device": str(device), "device_name": platform.processor() or platform.machine()}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found |= {
            "device_name": torch.cuda.get_device_name(device),
            "sm": f"{major}{minor}",
            "cuda": torch.version.cuda,
        }
    found |= {"threads": torch.get_num_threads(), "python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
