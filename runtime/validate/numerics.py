"""Products against float64: every shape and row count, one row against many, every loaded layer against its file.

Errors are measured against the size a product has for random signs: ``|y - y64| / (|x_m| |w_n| / sqrt(K))``. A wrong
element gives about 1, one wrong block of 16 about ``sqrt(16 / K)``, rounding a few units of the output's epsilon.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4pipe import console, nvfp4
from fp4pipe.checkpoint import Checkpoint
from fp4pipe.runtime.model import Model
from fp4pipe.runtime.ops import NVFP4Linear, PreparedWeight, prepare_weight
from fp4pipe.runtime.validate.check import Check

AWKWARD_ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 100, 129, 257)
"""Row counts on both sides of every tile size in use."""
_SYNTHETIC = ((48, 64), (272, 192))
"""(N, K) of weights made up when the checkpoint has no NVFP4 layer."""
_PRODUCTS = ("fp4_gemm", "fp4_gemm_w4a16")

Weight = tuple[str, PreparedWeight]
"""Name, and codes, scales and global scale as stored."""


def dtype_on(device: torch.device) -> torch.dtype:
    """What activations are on `device`."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def sample_weights(checkpoint: Checkpoint, generator: torch.Generator) -> list[Weight]:
    """One weight of each distinct shape of `checkpoint`, or made-up ones when it has none in NVFP4."""
    by_shape: dict[tuple[int, int], Weight] = {}
    for name, linear in checkpoint.linears.items():
        shape = (linear.out_features, linear.in_features)
        if shape not in by_shape:
            codes, scales = checkpoint.tensor(linear.weight.name), checkpoint.tensor(linear.block_scale.name)
            alpha = checkpoint.global_scale(name).reshape(1)
            by_shape[shape] = name, PreparedWeight(codes, scales, alpha, shape[0])
    return list(by_shape.values()) or [("made up", made_up(*shape, generator)) for shape in _SYNTHETIC]


def made_up(out_features: int, columns: int, generator: torch.Generator) -> PreparedWeight:
    """A random quantized weight ``[out_features, columns]``."""
    codes, scales, alpha = nvfp4.quantize_weight(torch.randn(out_features, columns, generator=generator))
    return PreparedWeight(codes, scales, alpha.reshape(1), out_features)


def activations(
    rows: int, columns: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Random ``[rows, columns]`` with a few outliers, a block of zeros and a block of tiny values."""
    x = torch.randn(rows, columns, generator=generator)
    x[:, :: columns // 4] *= 20
    x[0, :16] = 0
    x[-1, -16:] *= 1e-6
    return x.to(device, dtype)


def bound_of(dtype: torch.dtype) -> float:
    """Largest error that rounding explains: results up to six times the random-sign size, float32 sums."""
    return 3 * torch.finfo(dtype).eps + 2e-5


def check_values(
    weights: Sequence[Weight], device: torch.device, rows: Sequence[int], generator: torch.Generator
) -> Check:
    """Both products over every weight and row count against float64; the quantizer bit for bit against its formula."""
    worst: dict[str, dict[str, Any]] = {}
    with console.progress(len(weights), "operators against float64", "shape") as bar:
        for name, stored in weights:
            wide = _wide(stored)
            out_features, columns = wide.shape
            # A vector alpha, as fused shards have, must reach its own rows.
            vector = torch.linspace(0.5, 2.0, out_features) * stored.alpha
            errors = {"fp4_quantize": 0.0, "fp4_gemm": 0.0, "fp4_gemm_w4a16": 0.0}
            for alpha in (stored.alpha, vector):
                weight = prepare_weight(stored._replace(alpha=alpha), device)
                for count in rows:
                    x = activations(count, columns, device, dtype_on(device), generator)
                    for op, error in _errors(x, weight, wide, alpha).items():
                        errors[op] = max(errors[op], error)
            worst[f"{out_features}x{columns}"] = {"module": name, **errors}
            bar.update(1)
    bound = bound_of(dtype_on(device))
    bad = [
        f"{op} at {shape} ({entry['module']}): {entry[op]:.1e}"
        for shape, entry in worst.items()
        for op in ("fp4_quantize", "fp4_gemm", "fp4_gemm_w4a16")
        if not entry[op] <= (0 if op == "fp4_quantize" else bound)
    ]
    top = max(max(entry["fp4_gemm"], entry["fp4_gemm_w4a16"]) for entry in worst.values())
    what = f"{len(worst)} shapes, rows {min(rows)} to {max(rows)}"
    summary = f"{what}: worst error against float64 {top:.1e} (bound {bound:.0e}), quantizer bit for bit"
    if bad:
        summary = f"{what}: {'; '.join(bad)} (bound {bound:.0e})"
    return Check("ops.values", not bad, summary, {"worst_error": top, "shapes": len(worst)}, worst)


def _errors(x: Tensor, weight: PreparedWeight, wide: Tensor, alpha: Tensor) -> dict[str, float]:
    """Worst error of each operator for one input; NaN wherever a result is not finite."""
    input_scale = nvfp4.global_scale_of(x.abs().amax())
    codes, scales = torch.ops.fp4pipe.fp4_quantize(x, input_scale)
    expected = nvfp4.quantize_activation(x, input_scale)
    differing = (codes != expected[0]).sum() + (scales.view(torch.uint8) != expected[1].view(torch.uint8)).sum()
    swizzled = torch.ops.fp4pipe.fp4_quantize(x, input_scale, True)[1].view(torch.uint8)
    tiled = nvfp4.swizzle_scales(expected[1].view(torch.uint8))
    differing = differing + (swizzled != tiled).sum()
    quantized = nvfp4.dequantize_blocks(expected[0].cpu(), expected[1].cpu(), torch.float64)
    w4a4 = torch.ops.fp4pipe.fp4_gemm(codes, scales, *weight, x.dtype)
    w4a16 = torch.ops.fp4pipe.fp4_gemm_w4a16(x, *weight)
    return {
        "fp4_quantize": float(differing),
        "fp4_gemm": _error(w4a4, quantized, wide, alpha),
        "fp4_gemm_w4a16": _error(w4a16, x.double().cpu(), wide, alpha),
    }


def _error(got: Tensor, x64: Tensor, wide: Tensor, alpha: Tensor) -> float:
    """Largest error of ``got = x @ wide.T * alpha`` on the module's measure."""
    factor = alpha.double().cpu()
    expected = x64 @ wide.T * factor
    size = x64.norm(dim=1, keepdim=True) * (wide.norm(dim=1) * factor) / wide.shape[1] ** 0.5
    error = (got.double().cpu() - expected).abs() / size.clamp(min=torch.finfo(torch.float32).tiny)
    return float(error.amax())


def check_batch(name: str, stored: PreparedWeight, device: torch.device, generator: torch.Generator) -> Check:
    """A row gives the same result alone as among 64: the quantizer bit for bit, the products up to order of sums."""
    prepared, wide = prepare_weight(stored, device), _wide(stored)
    x = activations(64, wide.shape[1], device, dtype_on(device), generator)
    scale = nvfp4.global_scale_of(x.abs().amax())

    def quantize(rows: Tensor) -> tuple[Tensor, ...]:
        codes, scales = torch.ops.fp4pipe.fp4_quantize(rows, scale)
        return codes, scales.view(torch.uint8)

    def w4a4(rows: Tensor) -> tuple[Tensor, ...]:
        codes, scales = torch.ops.fp4pipe.fp4_quantize(rows, scale)
        return (torch.ops.fp4pipe.fp4_gemm(codes, scales, *prepared, rows.dtype),)

    def w4a16(rows: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.fp4pipe.fp4_gemm_w4a16(rows, *prepared),)

    size = (x.double().norm(dim=1, keepdim=True).cpu() * wide.norm(dim=1) * stored.alpha) / wide.shape[1] ** 0.5
    bound = bound_of(x.dtype)
    results: dict[str, dict[str, Any]] = {}
    operators: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
        "fp4_quantize": quantize,
        "fp4_gemm": w4a4,
        "fp4_gemm_w4a16": w4a16,
    }
    for op, call in operators.items():
        together = call(x)
        alone = [torch.cat(parts) for parts in zip(*(call(row) for row in x.split(1)), strict=True)]
        same = all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
        error = 0.0 if same else float(((together[0].double() - alone[0].double()).cpu().abs() / size).amax())
        results[op] = {"bitwise": same, "error": error}
    bad = [op for op, r in results.items() if not (r["bitwise"] or (op != "fp4_quantize" and r["error"] <= bound))]
    worst = max(r["error"] for r in results.values())
    bitwise = [op for op, r in results.items() if r["bitwise"]]
    summary = f"64 rows against each alone ({name}): worst error {worst:.1e} (bound {bound:.0e})"
    summary += f", bitwise: {', '.join(bitwise) or 'none'}" + (f"; wrong: {', '.join(bad)}" if bad else "")
    return Check("ops.batch", not bad, summary, {"worst_error": worst, "bitwise": len(bitwise)}, results)


def check_layers(model: Model, checkpoint: Checkpoint, limit: int, generator: torch.Generator) -> Check:
    """Each quantized layer, as loaded, on three random rows against float64 arithmetic on the checkpoint's tensors."""
    found = dict(loaded_layers(model, checkpoint))
    missing = len(checkpoint.linears) - len(found)
    names = list(found)
    names = names[:: max(1, -(-len(names) // limit))]
    errors: dict[str, float] = {}
    with console.progress(len(names), "layers against the files", "layer") as bar:
        for name in names:
            layer = found[name]
            x = activations(3, layer.in_features, model.device, model.dtype, generator)
            wide = checkpoint.dequantize(name, torch.float64)
            rows = x.double().cpu()
            if layer.mode == "w4a4":
                scale = checkpoint.input_scale(name)
                assert scale is not None  # a layer without one does not load in w4a4
                rows = nvfp4.dequantize(*nvfp4.quantize_activation(x.cpu(), scale), scale, torch.float64)
            got = layer(x)
            if layer.bias is not None:
                got = got.double() - layer.bias.double()
            errors[name] = _error(got, rows, wide, torch.ones(()))
            bar.update(1)
    # A bias may dwarf the product it is added to, and its rounding stays when it is taken off again.
    bound = 8 * bound_of(model.dtype)
    bad = {name: error for name, error in errors.items() if not error <= bound}
    worst = max(errors.values(), default=0.0)
    summary = f"{len(errors)} loaded layers against the files: worst error {worst:.1e} (bound {bound:.0e})"
    if missing:
        summary += f"; {missing} layers of the checkpoint are not in the model under their own names"
    if bad:
        summary += f"; wrong: {', '.join(list(bad)[:5])}" + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return Check("ops.layers", not bad, summary, {"worst_error": worst, "layers": len(errors)}, errors)


def loaded_layers(model: Model, checkpoint: Checkpoint) -> Iterator[tuple[str, NVFP4Linear]]:
    """Quantized layers of `model` under their names in the checkpoint, which may have a prefix that the model drops."""
    by_suffix = {name.partition(".")[2]: name for name in checkpoint.linears} | {
        name: name for name in checkpoint.linears
    }
    for name, module in model.decoder.named_modules():
        if isinstance(module, NVFP4Linear) and name in by_suffix:
            yield by_suffix[name], module


def _wide(weight: PreparedWeight) -> Tensor:
    """Code value x block scale of a stored weight, float64 ``[N, K]``."""
    return nvfp4.dequantize_blocks(weight.w.cpu(), weight.w_scales.cpu(), torch.float64)
