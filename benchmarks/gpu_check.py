"""Everything that needs a GPU, in one call: tests, checks and timings, as JSON.

    python benchmarks/gpu_check.py OUT_DIRECTORY [--only NAME ...] [--tokens 1,8,16]

Each part runs in a process of its own under a time limit, so that one that fails or hangs costs only itself.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TUNE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def environment() -> dict[str, Any]:
    """What the figures depend on: device, driver, versions, and the ceilings measured here."""
    import torch

    from fp4pipe.runtime.ops.timing import replay_us

    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit",
        "--format=csv,noheader",
    ]
    source = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {
        "device": torch.cuda.get_device_name(),
        "smi": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__,
        "copy_tb_s": 2 * source.nbytes / replay_us([lambda: torch.neg(source, out=target)]) / 1e6,
        "bf16_tflops": 2 * 8192**3 / replay_us([lambda: torch.mm(a, a)]) / 1e6,
    }


def tests() -> dict[str, Any]:
    """`pytest -m gpu tests/gpu`."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--durations=5", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    return {"returncode": done.returncode, "summary": done.stdout.strip().splitlines()[-1:]}


def build() -> dict[str, Any]:
    """Seconds to compile the kernels."""
    from fp4pipe.runtime.ops import build as kernels

    start = time.perf_counter()
    kernels.load_library()
    return {"seconds": time.perf_counter() - start}


def tune(tokens: tuple[int, ...]) -> dict[str, Any]:
    """The fastest cut of every shape, measured, into `plans_sm90.json`: what `gemm` then runs."""
    import torch

    from fp4pipe.runtime.bench.gemm import SHAPES, Shape
    from fp4pipe.runtime.ops import hopper, plans
    from fp4pipe.runtime.ops.timing import replay_us

    best, tried = {}, []
    for name, (n, k) in SHAPES.items():
        shape = Shape(n, k)
        count = hopper.processors(shape.values.device)
        for m in tokens:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            times = []
            for rank, plan in enumerate(plans.candidates(m, n, k, count)[:48]):
                run = partial(hopper.gemm, x, out_features=n, bias=None, plan=plan)
                times.append((replay_us([partial(run, w=w.w, alpha=w.alpha) for w in shape.weights], 6), rank, plan))
            times.sort()
            best[plans.key(m, n, k)] = plans.entry(times[0][2])
            tried += [{"name": name, "M": m, "plan": list(plan), "rank": rank, "us": us} for us, rank, plan in times]
            line = ", ".join(f"{us:.1f} #{rank} {tuple(plan)}" for us, rank, plan in times[:4])
            print(f"{name} M={m}: {line}", flush=True)
        del shape
        torch.cuda.empty_cache()
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(plan)}" for key, plan in best.items())
    (ROOT / "runtime" / "ops" / "plans_sm90.json").write_text(f"{{\n{lines}\n}}\n")
    return {"plans": best, "tried": tried}


def gemm(tokens: tuple[int, ...] | None) -> dict[str, Any]:
    """The table of `fp4pipe bench gemm`."""
    from fp4pipe.runtime.bench.gemm import TOKENS, bench_gemm

    def show(row: dict[str, Any]) -> None:
        print(
            f"{row['name']:8} M={row['M']:<5} {row['mode']:14} {row['us']:8.1f} us  bf16 {row['bf16_us']:8.1f}  "
            f"fp8 {row['fp8_us'] or 0:8.1f}  floor {row['floor_us']:7.1f}  error {row['rel_error']:.1e}",
            flush=True,
        )

    return bench_gemm(tokens=tokens or TOKENS, report=show)


def quantize() -> dict[str, Any]:
    """Speed of the activation quantizer against a copy that moves as many bytes."""
    import torch

    from fp4pipe.runtime.ops import triton_kernels
    from fp4pipe.runtime.ops.timing import replay_us

    rows = []
    for m, k in ((256, 4096), (2048, 4096), (8192, 4096), (8192, 14336)):
        count = max(2, (256 << 20) // (m * k * 2))
        inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        scale = inputs[0].float().abs().amax() / 2688
        us = replay_us([partial(torch.ops.fp4pipe.fp4_quantize, x, scale) for x in inputs])
        quantized = torch.ops.fp4pipe.fp4_quantize(inputs[0], scale)
        restore = replay_us([partial(triton_kernels.dequantize, *quantized)])
        half = (m * k * 2 + m * k * 9 // 16) // 2
        sources = [x.view(torch.int32).flatten()[: half // 4] for x in inputs]
        target = torch.empty_like(sources[0])
        ways = (
            [partial(target.copy_, source) for source in sources],
            [partial(torch.neg, s, out=target) for s in sources],
        )
        copy = min(replay_us(way) for way in ways)  # a copy node, or a kernel that reads and writes as much
        rows.append({"M": m, "K": k, "us": us, "copy_us": copy, "share_of_copy": copy / us, "restore_us": restore})
        print(rows[-1], flush=True)
    return {"rows": rows}


LIMITS = {"build": 120, "environment": 60, "tests": 240, "quantize": 60, "tune": 240, "gemm": 240}


def main() -> int:
    """Run the parts asked for and write OUT/NAME.json for each, and OUT/gpu_check.json for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--tokens", help="comma-separated values of M for tune and gemm")
    parser.add_argument("--limit", type=float, help="seconds a part may take, in place of its own limit")
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tokens = tuple(int(m) for m in arguments.tokens.split(",")) if arguments.tokens else None
    if arguments.part:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "build": build,
            "environment": environment,
            "tests": tests,
            "quantize": quantize,
            "tune": lambda: tune(tokens or TUNE_TOKENS),
            "gemm": lambda: gemm(tokens),
        }
        result = parts[arguments.part]()
        (arguments.out / f"{arguments.part}.json").write_text(json.dumps(result, indent=1))
        return int(result.get("returncode", 0) != 0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    report: dict[str, Any] = {"command": " ".join(sys.argv), "parts": {}}
    for name in arguments.only:
        start = time.perf_counter()
        command = [sys.executable, __file__, str(arguments.out), "--part", name]
        command += ["--tokens", arguments.tokens] if arguments.tokens else []
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True)
        try:
            code = process.wait(arguments.limit or LIMITS[name])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        seconds = time.perf_counter() - start
        print(f"== {name}: {'ok' if code == 0 else f'FAILED ({code})'} in {seconds:.0f} s", flush=True)
        written = arguments.out / f"{name}.json"
        data = json.loads(written.read_text()) if written.exists() else None
        report["parts"][name] = {"ok": code == 0, "seconds": seconds, "data": data}
        (arguments.out / "gpu_check.json").write_text(json.dumps(report, indent=1))
    return 0 if all(part["ok"] for part in report["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
