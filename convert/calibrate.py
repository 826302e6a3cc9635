"""Running calibration text through the model under ModelOpt, and checking that every quantizer came out usable."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp4pipe import console
from fp4pipe.calib_data import CalibrationSet
from fp4pipe.convert.quiet import quiet
from fp4pipe.convert.scheme import Scheme
from fp4pipe.convert.source import Source
from fp4pipe.errors import SourceError
from fp4pipe.safetensors_file import read_tensor


def check_finite(source: Source) -> None:
    """Look at every number of the source.

    Raises:
        SourceError: A tensor holds NaN or infinity: named with its file.
    """
    total = sum(info.nbytes for info in source.tensors.values())
    with console.progress(total, "checking the source's numbers", bytes=True) as bar:
        for info in source.tensors.values():
            tensor = read_tensor(info)
            # One pass: the largest magnitude is NaN or infinite if any number is.
            if tensor.is_floating_point() and tensor.numel() and not torch.isfinite(tensor.abs().max()):
                bad = int((~torch.isfinite(tensor)).sum())
                raise SourceError(
                    f"{info.file}: tensor {info.name} holds {bad} numbers that are NaN or infinite",
                    fix="download the model again, or ask its author",
                )
            bar.update(info.nbytes)


def calibrate(model: nn.Module, scheme: Scheme, calibration: CalibrationSet | None, batch_size: int) -> None:
    """Insert ModelOpt's quantizers into `model` and let them see the calibration set.

    No padding enters a statistic: only samples of equal length share a batch. The KV cache is off: ModelOpt may replay
    layers, and a cache would carry state from one replay to the next.

    Args:
        model: In eval mode; quantizers are inserted in place.
        scheme: What to quantize.
        calibration: None where the scheme measures no activation.
        batch_size: Samples run together.

    Raises:
        SourceError: A quantizer got no usable statistic.
    """

    def forward_loop(model: nn.Module) -> None:
        assert calibration is not None
        extra = _without_logits(model)
        with console.progress(calibration.num_tokens, "calibrating", unit="tok") as bar, torch.no_grad():
            for batch in calibration.batches(batch_size):
                model(input_ids=batch.to(_device(model)), use_cache=False, **extra)
                bar.update(batch.numel())

    with quiet(stderr=False):
        import modelopt.torch.quantization as mtq

        mtq.quantize(model, scheme.config(), forward_loop if calibration is not None else None)
    check_effect(model)


def check_effect(model: nn.Module) -> None:
    """Every enabled quantizer must hold a finite largest magnitude, and those of activations one above zero.

    A weight may be all zero; that is mended after export.

    Raises:
        SourceError: Naming the module.
    """
    for name, quantizer in enabled_quantizers(model):
        if quantizer._use_constant_amax:
            continue
        module, _, kind = name.rpartition(".")
        amax: Tensor | None = quantizer.amax
        what = {"weight_quantizer": "weight", "input_quantizer": "input"}.get(kind, kind.removesuffix("_bmm_quantizer"))
        if amax is None:
            raise SourceError(f"{module}: calibration never saw its {what}", fix=_exclude(module))
        if not torch.isfinite(amax).all():
            raise SourceError(
                f"{module}: its {what} reached NaN or infinity during calibration",
                fix="a bf16 copy of the model if this one is fp16, or " + _exclude(module),
            )
        if kind != "weight_quantizer" and not (amax > 0).all():
            raise SourceError(
                f"{module}: its {what} was zero for every calibration token, so it has no scale", fix=_exclude(module)
            )


def enabled_quantizers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """ModelOpt's quantizers that are switched on, by name."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled:
            yield name, module


def _exclude(module: str) -> str:
    return f"exclude {module}"


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _without_logits(model: nn.Module) -> dict[str, Any]:
    """Ask for the last position's logits only, unless the head itself is calibrated: they are costly and not needed."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    calibrated = head is not None and any(True for _ in enabled_quantizers(head))
    can = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if can and not calibrated else {}
