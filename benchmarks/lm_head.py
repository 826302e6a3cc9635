"""What a quantized head costs: perplexity, and distance from the same checkpoint with its own head.

python benchmarks/lm_head.py CHECKPOINT OUT.json [--tokens N] [--device cpu] [--mode w4a16]
"""

import argparse
import json
import platform
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from fp4pipe.runtime.ops.choices import HEADS
from fp4pipe.runtime.validate import ValidateOptions, load_engine
from fp4pipe.runtime.validate.likelihood import agreement_figures, perplexity_figures, score
from fp4pipe.runtime.validate.text import BUNDLED, read_text, windows


def main() -> None:
    """Score the bundled text with every head; the checkpoint's own is the baseline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="w4a16")
    asked = parser.parse_args()
    options = ValidateOptions(device=asked.device, runner="off", progress=False)
    engines = {head: load_engine(asked.checkpoint, asked.mode, replace(options, lm_head=head)) for head in HEADS}
    baseline = engines.pop("bf16")
    pieces = windows(read_text(BUNDLED), baseline.tokenizer, tokens=asked.tokens, length=options.window)
    likelihoods, divergences = score(engines, pieces, baseline)
    rows = [{"lm_head": "bf16", **perplexity_figures(likelihoods["baseline"])}]
    rows += [
        {"lm_head": head, **perplexity_figures(likelihoods[head]), **agreement_figures(divergences[head])}
        for head in engines
    ]
    document = {
        "device": asked.device if asked.device == "cpu" else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/lm_head.py {asked.checkpoint.name} {asked.out.name} --tokens {asked.tokens}",
        "mode": baseline.model.mode,
        "dtype": str(baseline.model.dtype).removeprefix("torch."),
        "text": "bundled",
        "rows": rows,
    }
    asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
