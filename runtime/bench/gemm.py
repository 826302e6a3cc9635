"""`fp4pipe bench gemm`: our products beside cuBLAS and the floor, by CUDA graph replay over rotating weights.

A graph holds one call a weight copy, with enough copies that none is still in L2 when its turn comes again; a row's
time is the median replay over the number of calls.
"""

import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4pipe.errors import Unavailable
from fp4pipe.nvfp4 import dequantize_blocks, quantize_weight
from fp4pipe.runtime.ops import PreparedWeight, prepare_weight
from fp4pipe.runtime.ops.fp8 import MIN_TOKENS, fold_weight
from fp4pipe.runtime.ops.timing import replay_us

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Rows and columns of Llama-3.1-8B's linear layers, fused as the runtime fuses them."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROTATE_BYTES = 256 << 20
MODES = ("w4a16", "w4a4_emulated", "fp8_prefill")
READ_BANDWIDTH = 4.46e12
"""Bytes a second an H200 reads, measured; floors of other devices are relative to this one."""
BF16_FLOPS = 780e12
"""Dense bf16 rate of an H200, measured."""


def floor_us(tokens: int, rows: int, columns: int) -> float:
    """Least time of a W4A16 product: bytes over read bandwidth, or operations over the bf16 rate."""
    moved = rows * columns * 0.5625 + 2 * tokens * (rows + columns)
    return max(moved / READ_BANDWIDTH, 2 * tokens * rows * columns / BF16_FLOPS) * 1e6


class Shape:
    """One layer's weight, as many copies as rotation needs, and the exact product to compare with."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        torch.manual_seed(rows + columns)
        quantized = quantize_weight(torch.randn(rows, columns, device="cuda") * 0.02)
        self.values = dequantize_blocks(quantized.codes, quantized.block_scale)
        self.global_scale = quantized.global_scale
        stored = PreparedWeight(quantized.codes, quantized.block_scale, quantized.global_scale.reshape(1), rows)
        self.stored, one = stored, prepare_weight(stored, "cuda")
        self.folded: list[tuple[Tensor, Tensor]] = []
        self.wide: dict[torch.dtype, list[Tensor]] = {}
        self.weights = [one._replace(w=one.w.clone()) for _ in range(self._copies(one.w.nbytes))]

    @staticmethod
    def _copies(size: int) -> int:
        return max(2, -(-ROTATE_BYTES // size))

    def relative_error(self, x: Tensor, out: Tensor) -> float:
        """Of up to 512 rows of `out`, against the product in float64."""
        keep = slice(None) if x.shape[0] <= 512 else torch.randperm(x.shape[0], device="cuda")[:512]
        exact = x[keep].double() @ self.values.double().T * self.global_scale.double()
        return float((out[keep].double() - exact).norm() / exact.norm())

    def w4a16(self, x: Tensor) -> tuple[float, float]:
        """Microseconds and relative error of ``fp4_gemm_w4a16``."""
        op = torch.ops.fp4pipe.fp4_gemm_w4a16
        return replay_us([partial(op, x, *w) for w in self.weights]), self.relative_error(x, op(x, *self.weights[0]))

    def w4a4_emulated(self, x: Tensor) -> tuple[float, float]:
        """Microseconds and relative error, against the exact product of quantized operands, of quantize and GEMM."""
        scale = x.float().abs().amax() / (6 * 448)
        quantize, gemm = torch.ops.fp4pipe.fp4_quantize, torch.ops.fp4pipe.fp4_gemm

        def both(w: PreparedWeight) -> Tensor:
            return gemm(*quantize(x, scale), *w, torch.bfloat16)

        us = replay_us([partial(both, w) for w in self.weights])
        return us, self.relative_error(dequantize_blocks(*quantize(x, scale)), both(self.weights[0]))

    def fp8_prefill(self, x: Tensor) -> tuple[float, float]:
        """Microseconds and relative error, against the exact product, of ``fp8_prefill_gemm``."""
        if not self.folded:
            w8, scale = fold_weight(*self.stored[:3])
            self.folded = [(w8.clone(), scale) for _ in range(self._copies(w8.nbytes))]
        op, w = torch.ops.fp4pipe.fp8_prefill_gemm, self.weights[0]
        calls = [partial(op, x, *w[:3], *folded, self.rows) for folded in self.folded]
        return replay_us(calls), self.relative_error(x, calls[0]())

    def cublas_us(self, x: Tensor, dtype: torch.dtype) -> float:
        """Microseconds of cuBLAS with a bf16 or e4m3 weight and `x` in the same dtype."""
        if dtype not in self.wide:
            base = (self.values * 0.02).to(dtype)
            self.wide[dtype] = [base.clone() for _ in range(self._copies(base.nbytes))]
        if dtype == torch.bfloat16:
            return replay_us([partial(torch.mm, x, w.T) for w in self.wide[dtype]])
        one, narrow = torch.ones((), device="cuda"), x.to(dtype)
        scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        keywords = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return replay_us([partial(scaled_mm, narrow, w.T, **keywords) for w in self.wide[dtype]])


def bench_gemm(
    shapes: dict[str, tuple[int, int]] | None = None,
    tokens: Iterable[int] = TOKENS,
    modes: Iterable[str] = MODES,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Time every mode at every shape and token count on the current GPU.

    Args:
        shapes: Name to (N, K); Llama-3.1-8B's by default.
        tokens: Values of M.
        modes: Of ``w4a16``, ``w4a4_emulated`` and ``fp8_prefill`` (from 256 tokens on, on SM89 and newer).
        report: Called with each row as it is measured.

    Returns:
        ``{device, versions, date, command, rows}``; a row is ``{name, N, K, M, mode, us, bf16_us, fp8_us, floor_us,
        rel_error}``.

    Raises:
        Unavailable: No CUDA device.
    """
    if not torch.cuda.is_available():
        raise Unavailable(
            "bench gemm needs a CUDA GPU",
            because="PyTorch sees none",
            fix="a machine with one; the figures of an H200 are in benchmarks/results",
        )
    tokens, modes, rows = tuple(tokens), tuple(modes), []
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    for name, (n, k) in (shapes or SHAPES).items():
        shape = Shape(n, k)
        for count in tokens:  # peers beside ours: a GPU that large products have just heated runs small ones slower
            x = torch.randn(count, k, device="cuda", dtype=torch.bfloat16)
            peers = {"bf16_us": shape.cublas_us(x, torch.bfloat16), "fp8_us": None}
            if has_fp8:
                peers["fp8_us"] = shape.cublas_us(x, torch.float8_e4m3fn)
            for mode in modes:
                if mode == "fp8_prefill" and not (has_fp8 and count >= MIN_TOKENS):
                    continue
                us, error = getattr(shape, mode)(x)
                row = {"name": name, "N": n, "K": k, "M": count, "mode": mode, "us": us, **peers}
                rows.append(row | {"floor_us": floor_us(count, n, k), "rel_error": error})
                report(rows[-1])
        del shape
        torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    return {
        "device": torch.cuda.get_device_name(),
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "rows": rows,
    }
