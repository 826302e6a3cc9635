"""The checkpoint's README.md: what it is, how it was made, how to serve it."""

import re

import yaml

from fp4pipe import console
from fp4pipe.calib_data import CalibrationSet
from fp4pipe.convert.audit import Audit
from fp4pipe.convert.options import QuantizeOptions
from fp4pipe.convert.plan import Plan
from fp4pipe.convert.source import Source

_CARRIED = ("license", "license_name", "license_link", "language")
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)


def model_card(
    source: Source,
    name: str,
    options: QuantizeOptions,
    plan: Plan,
    calibration: CalibrationSet | None,
    audit: Audit,
) -> str:
    """Markdown with the hub's front matter; the licence is the source's, where its card states one."""
    base = source.spec if source.kind == "hub" else None
    front = {
        **({"base_model": base, "base_model_relation": "quantized"} if base else {}),
        **_carried(source),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["nvfp4", "modelopt", "fp4pipe"],
    }
    activations = "NVFP4 weights and activations" if plan.algo == "NVFP4" else "NVFP4 weights, activations as they were"
    kv = {"none": "as computed", "fp8": "FP8 with calibrated scales", "fp8_cast": "FP8 with scale 1"}[plan.kv_cache]
    kept = sorted({row.kind for row in plan.rows if row.decision == "kept"})
    text = (
        "no calibration text was needed"
        if calibration is None
        else f"{calibration.num_tokens} tokens of `{calibration.name}` (seed {options.calibration.seed})"
    )
    worst = audit.worst
    noise = f"mean SQNR {audit.mean_sqnr_db:.1f} dB" + (
        f", worst {worst.sqnr_db:.1f} dB (`{worst.module}`)" if worst else ""
    )
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()}
---

# {name}

`{source.spec}` in NVFP4, made with fp4pipe and NVIDIA ModelOpt.

| | |
|---|---|
| Scheme | `{plan.scheme}`: {activations} |
| Scales | `{options.algorithm}`, {text} |
| KV cache | {kv} |
| Quantized | {len(plan.quantized)} matrices |
| Not quantized | {", ".join(kept)}{"; by request: " + ", ".join(options.exclude) if options.exclude else ""} |
| Size | {console.format_bytes(plan.bytes_before)} before, {console.format_bytes(plan.bytes_after)} after |
| Weights against the source | {noise} |

Tensors that are not quantized are the source's byte for byte. `provenance.json` holds the source's fingerprint, the
options, the digest of the calibration tokens and the versions of everything involved.

## Serve

```
fp4pipe validate {name}
fp4pipe serve {name}
```

vLLM, SGLang and TensorRT-LLM read the same directory (`--quantization modelopt_fp4`); a Blackwell GPU is needed to
compute with NVFP4 activations.
"""


def _carried(source: Source) -> dict[str, object]:
    """Licence and languages from the source's own card."""
    path = source.path / "README.md"
    if not path.is_file():
        return {}
    match = _FRONT_MATTER.match(path.read_text(encoding="utf-8", errors="replace"))
    try:
        front = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return {key: front[key] for key in _CARRIED if key in front} if isinstance(front, dict) else {}
