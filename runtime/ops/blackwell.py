"""The operators through FlashInfer, on GPUs that multiply NVFP4 in hardware (SM100, SM103, SM120, SM121).

Written against flashinfer 0.7's signatures, which the tests check; not yet run on hardware. Imported only when a tensor
lives on such a GPU.
"""

# pyright: reportPrivateImportUsage=false, reportCallIssue=false
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import flashinfer
import torch
from torch import Tensor
from torch.nn.functional import pad

from fp4pipe.errors import UsageError
from fp4pipe.nvfp4 import BLOCK, round_up, swizzle_scales
from fp4pipe.runtime.ops.choices import GEMM_BACKENDS
from fp4pipe.runtime.ops.schema import scale_shape

_EPILOGUE_ROWS = 128
_ROWS, _COLUMNS = 32, 64
"""Multiples that every backend takes for N and K: 16-byte rows of codes and of the output, whole K tiles."""
_selected: list[Any] = ["auto"]


def select_gemm_backend(name: str) -> None:
    """Force the kernels of `fp4_gemm`. Before weights are prepared, because ``trtllm`` lays them out its own way.

    Raises:
        UsageError: `name` is not one FlashInfer has.
    """
    if name not in GEMM_BACKENDS:
        raise UsageError(f"--fp4-gemm-backend {name} does not exist", fix="one of " + ", ".join(GEMM_BACKENDS))
    _selected[0] = name


def autotune() -> AbstractContextManager[None]:
    """While entered, the first product of each shape times FlashInfer's kernels and keeps the fastest."""
    return flashinfer.autotune(True)


@cache
def _w4a16_backend(device: torch.device) -> Any:
    return "cute-dsl" if torch.cuda.get_device_capability(device) in ((10, 0), (10, 3), (12, 0), (12, 1)) else "cudnn"


def prepare(w: Tensor, w_scales: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Pad a stored weight and lay its scales out for `mode`'s kernels.

    Args:
        w: uint8 ``[N, K/2]``.
        w_scales: e4m3 ``[N, K/16]``.
        mode: ``w4a4`` or ``w4a16``.

    Returns:
        Codes ``[N', K'/2]`` and uint8 scales ``[round_up(N', 128), round_up(K'/16, 4)]`` in 128x4 tiles, N' and K'
        padded with zeros; for ``w4a16`` on SM120 and SM121, the int32 and uint8 matrices FlashInfer makes of them.
    """
    rows, columns = w.shape[0], w.shape[1] * 2
    more_rows, more_columns = round_up(rows, 2 * _ROWS) - rows, round_up(columns, _COLUMNS) - columns
    w = pad(w, (0, more_columns // 2, 0, more_rows)).contiguous()
    linear = pad(w_scales.view(torch.uint8), (0, more_columns // BLOCK, 0, more_rows)).contiguous()
    swizzled = swizzle_scales(linear)
    if mode == "w4a4" and _selected[0] == "trtllm":
        shuffled = flashinfer.shuffle_matrix_sf_a(linear, _EPILOGUE_ROWS).view(torch.uint8).reshape(swizzled.shape)
        return flashinfer.shuffle_matrix_a(w, _EPILOGUE_ROWS), shuffled
    if mode == "w4a16" and torch.cuda.get_device_capability(w.device)[0] == 12:
        w, swizzled, _ = flashinfer.prepare_bf16_fp4_weights(w, swizzled, None, backend=_w4a16_backend(w.device))
    return w, swizzled


def quantize(x: Tensor, input_scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """`fp4_quantize` of bf16 or f16 activations."""
    layout = flashinfer.SfLayout.layout_128x4 if swizzled else flashinfer.SfLayout.layout_linear
    codes, scales, *_ = flashinfer.nvfp4_quantize(
        x.contiguous(), (1.0 / input_scale).reshape(1), sfLayout=layout, do_shuffle=False, nvfp4_4over6=None
    )
    return _quantized(codes, scales, x.shape[1], swizzled)


def silu_mul_quantize(x: Tensor, input_scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """`silu_mul_fp4_quantize` of bf16 or f16 gate and up ``[M, 2K]``."""
    codes, scales = flashinfer.silu_and_mul_nvfp4_quantize(
        x.contiguous(), (1.0 / input_scale).reshape(1), is_sf_swizzled_layout=swizzled, nvfp4_4over6=None
    )
    return _quantized(codes, scales, x.shape[1] // 2, swizzled)


def rmsnorm_quantize(
    x: Tensor, weight: Tensor, eps: float, input_scale: Tensor, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """`rmsnorm_fp4_quantize` of bf16 or f16 rows. The kernel multiplies by its global scale, whatever its text says."""
    from flashinfer import cute_dsl

    codes, scales = cute_dsl.rmsnorm_fp4quant(
        x.contiguous(),
        weight,
        global_scale=(1.0 / input_scale).reshape(1),
        eps=eps,
        block_size=BLOCK,
        is_sf_swizzled_layout=swizzled,
    )
    return _quantized(codes, scales, x.shape[1], swizzled)


def _quantized(codes: Tensor, scales: Tensor, columns: int, swizzled: bool) -> tuple[Tensor, Tensor]:
    """FlashInfer's results in the operators' dtypes and shapes."""
    scales = scales.view(torch.uint8).reshape(scale_shape(codes.shape[0], columns, swizzled))
    return codes.view(torch.uint8), scales if swizzled else scales.view(torch.float8_e4m3fn)


def gemm(
    a: Tensor,
    a_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    alpha: Tensor,
    out_features: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """`fp4_gemm` of swizzled activations and a weight from `prepare`; `alpha` has one element."""
    if a.shape[1] != w.shape[1]:
        a = pad(a, (0, w.shape[1] - a.shape[1]))
    out = flashinfer.mm_fp4(a, w.T, a_scales, w_scales.T, alpha, out_dtype, backend=_selected[0])
    return _finish(out, out_features, bias)


def gemm_w4a16(x: Tensor, w: Tensor, w_scales: Tensor, alpha: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
    """`fp4_gemm_w4a16` of bf16 activations and a weight from `prepare`; `alpha` has one element."""
    backend = _w4a16_backend(x.device)
    columns = round_up(x.shape[1], _COLUMNS)
    if columns != x.shape[1]:
        x = pad(x, (0, columns - x.shape[1]))
    if w.dtype == torch.uint8:  # a view of the scales is all that is left to make
        w, w_scales, _ = flashinfer.prepare_bf16_fp4_weights(w, w_scales, None, backend=backend)
    out = flashinfer.mm_bf16_fp4(x.contiguous(), w, w_scales, alpha, backend=backend)
    return _finish(out, out_features, bias)


def _finish(out: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
    if out.shape[1] != out_features:
        out = out[:, :out_features].contiguous()
    return out if bias is None else out + bias
