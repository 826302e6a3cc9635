"""Which kernels a load is asked to use beyond what the device decides, and where each choice exists."""

from dataclasses import dataclass

import torch

from fp4pipe.errors import Unavailable, UsageError
from fp4pipe.runtime.ops.backend import capability, has_native_fp4

GEMM_BACKENDS = ("auto", "cutlass", "cudnn", "trtllm", "cute-dsl", "cutedsl_low_latency", "b12x")
"""Values of ``--fp4-gemm-backend``: `flashinfer.mm_fp4`'s own names."""
PREFILLS = ("bf16", "fp8")
"""Values of ``--prefill``: activations of products with many tokens."""
HEADS = ("bf16", "fp8", "nvfp4")
"""Values of ``--lm-head``; ``bf16`` leaves the head as the checkpoint has it."""


@dataclass(frozen=True, slots=True)
class KernelChoices:
    """What `Model.load` is asked for.

    Args:
        fp4_gemm_backend: One of `GEMM_BACKENDS`.
        prefill: One of `PREFILLS`. ``fp8`` is approximate.
        lm_head: One of `HEADS`. All but ``bf16`` are approximate.
    """

    fp4_gemm_backend: str = "auto"
    prefill: str = "bf16"
    lm_head: str = "bf16"

    def require(self, mode: str, device: torch.device, *, quantized: bool) -> None:
        """Check that `device` has what is asked for, before anything is loaded.

        Args:
            mode: ``w4a4`` or ``w4a16``.
            device: Where the model will run.
            quantized: Whether the checkpoint has NVFP4 layers.

        Raises:
            UsageError: A value that does not exist, or that does not go with `mode` or the checkpoint.
            Unavailable: Not on this device.
        """
        for flag, value, known in (
            ("--fp4-gemm-backend", self.fp4_gemm_backend, GEMM_BACKENDS),
            ("--prefill", self.prefill, PREFILLS),
            ("--lm-head", self.lm_head, HEADS),
        ):
            if value not in known:
                raise UsageError(f"{flag} {value} is unknown", fix=f"{flag} {'|'.join(known)}")
        if self.fp4_gemm_backend != "auto":
            self._require_native(mode, device)
        if self.prefill == "fp8":
            _require_fp8_prefill(mode, device, quantized)
        if self.lm_head == "fp8":
            require_e4m3(device, "--lm-head fp8")

    def _require_native(self, mode: str, device: torch.device) -> None:
        flag = f"--fp4-gemm-backend {self.fp4_gemm_backend}"
        if not has_native_fp4(device):
            raise Unavailable(
                f"{flag} is not possible on {_name(device)}",
                because="it chooses among FlashInfer's kernels, which need a GPU that multiplies NVFP4 (Blackwell)",
                fix="--fp4-gemm-backend auto",
            )
        if mode != "w4a4":
            raise UsageError(f"{flag} chooses the kernel of w4a4 products, and the mode is {mode}", fix="--mode w4a4")


def _require_fp8_prefill(mode: str, device: torch.device, quantized: bool) -> None:
    if not quantized:
        raise UsageError("--prefill fp8 is for NVFP4 layers", because="this checkpoint has none", fix="--prefill bf16")
    if mode != "w4a16":
        raise UsageError(
            f"--prefill fp8 is for unquantized activations, and the mode is {mode}",
            fix="--mode w4a16 or --prefill bf16",
        )
    if capability(device) != (9, 0):
        raise Unavailable(
            f"--prefill fp8 is not possible on {_name(device)}",
            because="it is for Hopper (SM90): Blackwell multiplies NVFP4 itself, others gain nothing or lack E4M3",
            fix="--prefill bf16",
        )


def require_e4m3(device: torch.device | str, flag: str) -> None:
    """Check that `device` can multiply E4M3; on a CPU it is computed in float32.

    Raises:
        Unavailable: A CUDA device older than SM89.
    """
    sm = capability(device)
    if sm is not None and sm < (8, 9):
        raise Unavailable(
            f"{flag} needs E4M3 matrix units",
            because=f"this GPU is SM{sm[0]}{sm[1]}",
            fix=f"{flag.split()[0]} bf16",
        )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
