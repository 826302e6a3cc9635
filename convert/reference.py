"""ModelOpt's own fake-quantized model as the reference that the runtime's logits are held against."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.convert.calibrate import enabled_quantizers
from fp4pipe.convert.fakequant import HARDWARE_BACKEND, register_backend, round_weight
from fp4pipe.convert.model import load
from fp4pipe.convert.quiet import quiet
from fp4pipe.convert.scheme import NVFP4
from fp4pipe.convert.source import Source
from fp4pipe.errors import SourceError, UsageError
from fp4pipe.nvfp4 import E2M1_MAX, E4M3_MAX
from fp4pipe.safetensors_file import read_tensor


class ModelOptReference:
    """The source model with ModelOpt's quantizers, their ranges set from a checkpoint's scales.

    Independent of the runtime and of `fp4pipe.nvfp4`: weights are rounded from the source by ModelOpt's functions with
    the checkpoint's global scales, activations likewise with its input scales, and everything else is transformers.
    Block scales are not read: it stands for checkpoints where they follow from the blocks' largest magnitudes. The KV
    cache is not rounded.

    Args:
        source_dir: The bf16 model.
        checkpoint_dir: What `quantize` made of it.
        dtype: Of the computation; float64 for a close comparison in W4A4, float32 for half the memory.
        activations: W4A4 when true, weights only when false; may be changed later.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        SourceError: The two directories do not belong together.
        UsageError: `activations` is asked of a weight-only checkpoint.
    """

    def __init__(
        self,
        source_dir: str | Path,
        checkpoint_dir: str | Path,
        *,
        dtype: torch.dtype = torch.float64,
        activations: bool = True,
        trust_remote_code: bool = False,
    ) -> None:
        self.checkpoint = Checkpoint.open(checkpoint_dir)
        source = Source(str(source_dir), Path(source_dir), "directory")
        _require_same_model(source, self.checkpoint)
        self.model = load(source, device=torch.device("cpu"), trust_remote_code=trust_remote_code).to(dtype)
        self._quantize(source)
        self._inputs = [q for name, q in enabled_quantizers(self.model) if name.endswith("input_quantizer")]
        self.activations = activations

    @property
    def activations(self) -> bool:
        """Whether activations are rounded to NVFP4 too."""
        return self._activations

    @activations.setter
    def activations(self, value: bool) -> None:
        if value and not self._inputs:
            raise UsageError(
                f"{self.checkpoint.path} is quantized in its weights only, so it has no w4a4 reference",
                fix="compare it in w4a16 mode",
            )
        for quantizer in self._inputs:
            quantizer.enable() if value else quantizer.disable()
        self._activations = value

    @torch.no_grad()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits at every position of one sequence.

        Args:
            input_ids: int64 ``[1, T]``.

        Returns:
            float32 ``[T, V]``.
        """
        return self.model(input_ids=input_ids, use_cache=False).logits[0].float()

    def weight(self, module: str) -> Tensor:
        """The rounded weight of `module`, ``[N, K]`` in the reference's dtype."""
        linear: Any = self.model.get_submodule(module)
        return linear.weight.detach()

    def _quantize(self, source: Source) -> None:
        linears = self.checkpoint.linears
        rules: list[dict[str, Any]] = [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*weight_quantizer", "cfg": dict(NVFP4)},
        ]
        if any(linear.input_scale is not None for linear in linears.values()):
            rules.append(
                {"quantizer_name": "*input_quantizer", "cfg": NVFP4 | {"backend": register_backend(HARDWARE_BACKEND)}}
            )
        with quiet():
            import modelopt.torch.quantization as mtq

            mtq.quantize(self.model, {"quant_cfg": rules, "algorithm": None})
        for name, quantizer in enabled_quantizers(self.model):
            if name.endswith("weight_quantizer") or name.rpartition(".")[0] not in linears:
                quantizer.disable()  # weights are rounded once, below, and the rest is as the source has it
        for module in linears:
            linear: Any = self.model.get_submodule(module)
            original = read_tensor(source.tensors[f"{module}.weight"])
            linear.weight.data = round_weight(original, self.checkpoint.global_scale(module), linear.weight.dtype)
            if (scale := self.checkpoint.input_scale(module)) is not None:
                linear.input_quantizer.amax = amax_of(scale)


def amax_of(scale: Tensor) -> Tensor:
    """The float32 largest magnitude that ModelOpt's division by 6 * 448 turns into exactly `scale`.

    Multiplying back may miss it by a unit in the last place, so its neighbours are tried too.
    """
    guess = scale.float() * (E2M1_MAX * E4M3_MAX)
    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    for candidate in (guess, torch.nextafter(guess, up), torch.nextafter(guess, down)):
        if candidate / (E2M1_MAX * E4M3_MAX) == scale:
            return candidate
    return guess


def _require_same_model(source: Source, checkpoint: Checkpoint) -> None:
    for module, linear in checkpoint.linears.items():
        info = source.tensors.get(f"{module}.weight")
        if info is None or info.shape != (linear.out_features, linear.in_features):
            shape = "no such tensor" if info is None else f"{list(info.shape)}"
            raise SourceError(
                f"{checkpoint.path} was not made from {source.spec}",
                because=f"{module}.weight is [{linear.out_features}, {linear.in_features}] there and {shape} here",
            )
