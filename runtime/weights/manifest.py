"""What a model needs from a checkpoint, held against what the checkpoint has: each tensor once, nothing left over.

The checks come in two parts. `Manifest.check` needs headers only and runs before a weight is read. `check_scales` looks
at values, but only those of scales, a sixteenth of the codes: a NaN, zero or negative scale gives no error later, only
wrong text.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4pipe.errors import CheckpointError
from fp4pipe.quantized_linear import QuantizedLinear
from fp4pipe.safetensors_file import TensorInfo

_E4M3_SMALLEST, _E4M3_LARGEST = 0x01, 0x7E
"""Bit patterns of the smallest and largest positive E4M3 numbers; 0x00 is zero, 0x7F NaN, from 0x80 on negative."""


@dataclass(frozen=True)
class Expected:
    """One tensor a model needs.

    Attributes:
        dtypes: Accepted dtypes in safetensors' spelling.
        shape: The shape; ``()`` also accepts ``[1]``, which loading reshapes.
        consumer: Who needs it, for messages: a module or parameter.
        scale: The values must be finite and positive.
    """

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    consumer: str
    scale: bool = False


def expected_of_linear(
    linear: QuantizedLinear, consumer: str | None = None, *, activations: bool
) -> dict[str, Expected]:
    """What an NVFP4 `linear` needs, by tensor name.

    Args:
        linear: The matrix.
        consumer: Defaults to the module's own name.
        activations: Whether an input scale is needed (W4A4); without, one that is there is read all the same.

    Raises:
        CheckpointError: An input scale is needed and the checkpoint has none.
    """
    who = consumer or linear.module
    rows, columns = linear.out_features, linear.in_features
    if activations and linear.input_scale is None:
        raise CheckpointError(
            f"{linear.weight.file}: {linear.module} has no input_scale, and W4A4 needs one",
            fix="run it in w4a16 mode, or quantize with activations",
        )
    expected = {
        linear.weight.name: Expected(("U8",), (rows, columns // 2), who),
        linear.block_scale.name: Expected(("F8_E4M3",), (rows, columns // 16), who, scale=True),
        linear.global_scale.name: Expected(("F32",), (), who, scale=True),
    }
    if linear.input_scale is not None:
        expected[linear.input_scale.name] = Expected(("F32",), (), who, scale=True)
    if linear.pre_quant_scale is not None:
        expected[linear.pre_quant_scale.name] = Expected(("BF16", "F16", "F32"), (columns,), who, scale=True)
    return expected


class Manifest:
    """The tensors a model needs, by the name they have on disk."""

    def __init__(self, expected: Mapping[str, Expected] | None = None) -> None:
        self.expected: dict[str, Expected] = dict(expected or {})

    def expect(
        self, name: str, dtypes: Sequence[str], shape: Sequence[int], consumer: str, *, scale: bool = False
    ) -> None:
        """Require the tensor `name`.

        Raises:
            CheckpointError: Another consumer already requires it.
        """
        if name in self.expected:
            raise CheckpointError(f"tensor {name} is wanted twice, by {self.expected[name].consumer} and {consumer}")
        self.expected[name] = Expected(tuple(dtypes), tuple(shape), consumer, scale)

    def check(self, tensors: Mapping[str, TensorInfo], *, ignore: Iterable[str] = ()) -> list[TensorInfo]:
        """Hold the expectations against the headers `tensors`.

        Args:
            tensors: What the checkpoint has.
            ignore: Regular expressions (searched) of names that may be left over.

        Returns:
            What to read, in the order it was expected.

        Raises:
            CheckpointError: A tensor is missing, left over, or of another dtype or shape; the message names the first
                and counts the rest.
        """
        problems = [what for name, want in self.expected.items() if (what := _mismatch(name, want, tensors.get(name)))]
        allowed = [re.compile(pattern) for pattern in ignore]
        for name, info in tensors.items():
            if name not in self.expected and not any(pattern.search(name) for pattern in allowed):
                problems.append(f"{info.file}: tensor {name} at offset {info.start} is left over: nothing uses it")
        if problems:
            more = f" (and {len(problems) - 1} more such)" if problems[1:] else ""
            raise CheckpointError(
                problems[0] + more, fix="a config.json and weights that belong together: copy or export them again"
            )
        return [tensors[name] for name in self.expected]


def _mismatch(name: str, want: Expected, info: TensorInfo | None) -> str | None:
    if info is None:
        return f"tensor {name} is missing" + (f": {want.consumer} needs it" if want.consumer != name else "")
    where = f"{info.file}: tensor {name} at offset {info.start}"
    if info.dtype not in want.dtypes:
        return f"{where} is {info.dtype}, {want.consumer} needs {' or '.join(want.dtypes)}"
    if info.shape != want.shape and (info.shape, want.shape) != ((1,), ()):
        return f"{where} has shape {list(info.shape)}, {want.consumer} needs {list(want.shape)}"
    return None


def check_scales(infos: Sequence[TensorInfo], tensors: Mapping[str, Tensor]) -> None:
    """Check that every element of the scales `infos` is finite and positive.

    Args:
        infos: Where the scales lie.
        tensors: Their values by name, on any one device; read once, with one small transfer for each kind.

    Raises:
        CheckpointError: Naming tensor, file, and the offset and value of the first bad element.
    """
    block = [info for info in infos if info.dtype == "F8_E4M3" and info.numel]
    scalar = [info for info in infos if info.dtype != "F8_E4M3" and info.numel == 1]
    vector = [info for info in infos if info.dtype != "F8_E4M3" and info.numel > 1]
    suspects: list[TensorInfo] = []
    if block:
        low, high = _extremes([tensors[info.name].view(torch.uint8) for info in block])
        suspects += itertools.compress(block, ((low < _E4M3_SMALLEST) | (high > _E4M3_LARGEST)).tolist())
    if scalar:  # thousands of them: one stack, not an extreme of each
        values = torch.stack([tensors[info.name].float().reshape(()) for info in scalar]).cpu()
        suspects += itertools.compress(scalar, (~_good(values, values)).tolist())
    if vector:
        suspects += itertools.compress(vector, (~_good(*_extremes([tensors[i.name].float() for i in vector]))).tolist())
    if suspects:
        raise bad_scale(suspects[0], tensors[suspects[0].name], others=len(suspects) - 1)


def _extremes(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of each of `tensors`, on the CPU, in one transfer."""
    low, high = torch.stack([torch.stack(tensor.aminmax()) for tensor in tensors]).cpu().unbind(1)
    return low, high


def _good(low: Tensor, high: Tensor) -> Tensor:
    # NaN propagates through aminmax, and fails both comparisons.
    return (low > 0) & (high < torch.inf)


def bad_scale(info: TensorInfo, tensor: Tensor, *, others: int = 0) -> CheckpointError:
    """The error that names the first element of the scale `info` that is not finite and positive."""
    values = tensor.float().flatten()
    wrong = ~(values.isfinite() & (values > 0))
    index, count = int(wrong.to(torch.uint8).argmax()), int(wrong.sum())
    value = float(values[index])
    return CheckpointError(
        f"{info.file}: tensor {info.name} holds the scale {value:g} at offset "
        f"{info.start + index * info.torch_dtype.itemsize} (element {index})",
        because=f"{count} of {info.numel} are not finite and positive"
        + (f", as in {others} more tensors" if others else ""),
        fix="export the checkpoint again",
    )
