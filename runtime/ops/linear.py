"""The linear layer whose weight is NVFP4: what takes `nn.Linear`'s place in a Hugging Face model."""

import torch
from torch import Tensor, nn

from fp4pipe.errors import UsageError
from fp4pipe.nvfp4 import BLOCK
from fp4pipe.runtime.ops.choices import require_e4m3
from fp4pipe.runtime.ops.forms import PreparedWeight, prepare_weight
from fp4pipe.runtime.ops.fp8 import fold_weight


class NVFP4Linear(nn.Module):
    """``y = x @ dequantize(weight).T + bias``, with activations quantized too in mode ``w4a4``.

    Life of a layer: built on the meta device, filled by `load` (or by copying into its buffers), made ready by
    `prepare`, called.

    Args:
        in_features: K, a multiple of 16.
        out_features: N.
        bias: Whether there is one.
        mode: ``w4a4`` or ``w4a16``.
        alpha_rows: 1 when one global scale covers the matrix, N when fused shards carry their own.
        device: Where the empty buffers live; usually ``meta``.
        dtype: Of the bias.

    Attributes:
        weight: uint8 ``[N, K/2]`` as stored; after `prepare`, the backend's form.
        weight_scale: e4m3 ``[N, K/16]`` as stored; after `prepare`, the backend's form.
        alpha: float32 ``[alpha_rows]``: global scale, times input scale in ``w4a4``.
        input_scale: float32 ``[]`` in ``w4a4``, None in ``w4a16``.
        bias: ``[N]`` or None.
        fp8_weight: e4m3 ``[N, K]`` after ``prepare(fp8_prefill=True)``, else None.
        fp8_scale: float32 ``[N]`` beside it.
    """

    weight: Tensor
    weight_scale: Tensor
    alpha: Tensor
    input_scale: Tensor | None
    bias: Tensor | None
    fp8_weight: Tensor | None
    fp8_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        mode: str,
        *,
        alpha_rows: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("w4a4", "w4a16"):
            raise UsageError(f"NVFP4Linear has no mode {mode!r}", fix="w4a4 or w4a16")
        if in_features % BLOCK:
            raise UsageError(f"NVFP4Linear needs in_features to be a multiple of {BLOCK}, got {in_features}")
        self.in_features, self.out_features, self.mode = in_features, out_features, mode
        self.swizzled = False
        shapes = {
            "weight": ((out_features, in_features // 2), torch.uint8),
            "weight_scale": ((out_features, in_features // BLOCK), torch.float8_e4m3fn),
            "alpha": ((alpha_rows,), torch.float32),
            "input_scale": ((), torch.float32) if mode == "w4a4" else None,
            "bias": ((out_features,), dtype) if bias else None,
            "fp8_weight": None,
            "fp8_scale": None,
        }
        for name, spec in shapes.items():
            self.register_buffer(name, torch.empty(spec[0], dtype=spec[1], device=device) if spec else None)

    def load(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        global_scale: Tensor,
        input_scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Take a checkpoint's tensors as they are, without copying the large ones.

        Args:
            weight: uint8 ``[N, K/2]``.
            weight_scale: e4m3 ``[N, K/16]``.
            global_scale: float32, one element, or ``[N]``.
            input_scale: float32, one element; needed in ``w4a4``, ignored in ``w4a16``.
            bias: ``[N]`` when the layer has one.

        Raises:
            UsageError: ``w4a4`` without an input scale, or a shape that is not the layer's.
        """
        expected = (self.out_features, self.in_features // 2), (self.out_features, self.in_features // BLOCK)
        if (weight.shape, weight_scale.shape) != expected:
            raise UsageError(
                f"NVFP4Linear expects shapes {expected}, got {tuple(weight.shape)}, {tuple(weight_scale.shape)}"
            )
        if (bias is None) != (self.bias is None):
            raise UsageError(f"NVFP4Linear was built {'without' if self.bias is None else 'with'} a bias")
        self.weight, self.weight_scale, self.bias = weight, weight_scale, bias
        alpha = global_scale.float().reshape(-1)
        if self.mode == "w4a4":
            if input_scale is None:
                raise UsageError(
                    "w4a4 needs the layer's input_scale, which a weight-only checkpoint lacks", fix="--mode w4a16"
                )
            self.input_scale = input_scale.float().reshape(())
            alpha = alpha * self.input_scale
        self.alpha = alpha

    def prepared(self) -> PreparedWeight:
        """The weight as the operators take it."""
        return PreparedWeight(self.weight, self.weight_scale, self.alpha, self.out_features)

    @torch.no_grad()
    def prepare(self, device: torch.device | str, *, fp8_prefill: bool = False) -> None:
        """Move the layer to `device` and put its weight in the form that device's kernels read. Once.

        Args:
            device: Where the layer will run.
            fp8_prefill: Keep an E4M3 copy too, for products with many tokens. Approximate; only in ``w4a16``.

        Raises:
            UsageError: `fp8_prefill` in ``w4a4``.
            Unavailable: `fp8_prefill` on a GPU without E4M3.
        """
        if fp8_prefill:
            if self.mode != "w4a16":
                raise UsageError("--prefill fp8 is for unquantized activations", fix="--mode w4a16 or --prefill bf16")
            require_e4m3(device, "--prefill fp8")
            stored = self.weight.to(device), self.weight_scale.to(device), self.alpha.to(device)
            self.fp8_weight, self.fp8_scale = fold_weight(*stored)
        weight = prepare_weight(self.prepared(), device, self.mode)
        self.swizzled = weight.w_scales.dtype == torch.uint8 and weight.w_scales.numel() > 0
        self.weight, self.weight_scale, self.alpha = weight.w, weight.w_scales, weight.alpha
        if self.input_scale is not None:
            self.input_scale = self.input_scale.to(device)
        if self.bias is not None:
            self.bias = self.bias.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``, in `x`'s dtype."""
        rows = x.reshape(-1, self.in_features)
        if self.fp8_weight is not None:
            out = torch.ops.fp4pipe.fp8_prefill_gemm(
                rows,
                self.weight,
                self.weight_scale,
                self.alpha,
                self.fp8_weight,
                self.fp8_scale,
                self.out_features,
                self.bias,
            )
        elif self.mode == "w4a16":
            out = torch.ops.fp4pipe.fp4_gemm_w4a16(
                rows, self.weight, self.weight_scale, self.alpha, self.out_features, self.bias
            )
        else:
            codes, scales = torch.ops.fp4pipe.fp4_quantize(rows, self.input_scale, self.swizzled)
            out = torch.ops.fp4pipe.fp4_gemm(
                codes, scales, self.weight, self.weight_scale, self.alpha, self.out_features, x.dtype, self.bias
            )
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, mode={self.mode}"
