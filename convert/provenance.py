"""``provenance.json``: everything needed to know where a checkpoint came from and to make it again."""

import datetime
import platform
from importlib import metadata
from typing import Any

import fp4pipe
from fp4pipe.calib_data import CalibrationSet
from fp4pipe.convert.options import QuantizeOptions
from fp4pipe.convert.plan import Plan
from fp4pipe.convert.source import Source

_PACKAGES = ("torch", "transformers", "nvidia-modelopt", "tokenizers", "safetensors", "huggingface_hub", "gguf")


def provenance(
    source: Source, options: QuantizeOptions, plan: Plan, calibration: CalibrationSet | None
) -> dict[str, Any]:
    """The content of ``provenance.json``."""
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "source": {
            "spec": source.spec,
            "kind": source.kind,
            "revision": source.revision,
            "fingerprint": source.fingerprint,
        },
        "options": options.to_dict(),
        "result": {"quant_algo": plan.algo, "kv_cache": plan.kv_cache, "quantized_matrices": len(plan.quantized)},
        "calibration": None
        if calibration is None
        else {
            "name": calibration.name,
            "digest": calibration.digest,
            "samples": len(calibration.samples),
            "tokens": calibration.num_tokens,
            "seed": options.calibration.seed,
        },
        "versions": {
            "fp4pipe": fp4pipe.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
    }
