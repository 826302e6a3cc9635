"""The NVFP4 matrices of a checkpoint, found by their tensors and named alike for every exporter.

====================  =========================  ==========================================
what                  ModelOpt                   compressed-tensors nvfp4-pack-quantized
====================  =========================  ==========================================
codes                 weight                     weight_packed
block scales          weight_scale               weight_scale
global scale          weight_scale_2             weight_global_scale = 1 / global scale
input scale           input_scale                input_global_scale = 1 / input scale
====================  =========================  ==========================================
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fp4pipe.errors import CheckpointError
from fp4pipe.nvfp4 import BLOCK
from fp4pipe.quant_config import NVFP4_ALGOS, NVFP4_INPUT_ALGOS, QuantConfig
from fp4pipe.safetensors_file import DTYPES, TensorInfo
from fp4pipe.shards import Problem, problem

FLOATING = frozenset({"BF16", "F16", "F32", "F64"})
_EMBEDDING_PARTS = ("embed", "wte", "wpe")


@dataclass(frozen=True)
class QuantizedLinear:
    """One NVFP4 matrix ``[out_features, in_features]`` on disk.

    Attributes:
        module: Name of the linear, without ``.weight``.
        weight: Codes, U8 ``[N, K/2]``.
        block_scale: F8_E4M3 ``[N, K/16]``.
        global_scale: F32 scalar (or one element).
        input_scale: F32 scalar (or one element); None for weight-only quantization.
        pre_quant_scale: AWQ's factors on the input ``[K]``; None for everything else.
        reciprocal_scales: `global_scale` and `input_scale` hold the reciprocals, as compressed-tensors stores them.
    """

    module: str
    out_features: int
    in_features: int
    weight: TensorInfo
    block_scale: TensorInfo
    global_scale: TensorInfo
    input_scale: TensorInfo | None
    pre_quant_scale: TensorInfo | None = None
    reciprocal_scales: bool = False

    @property
    def scales(self) -> tuple[TensorInfo, ...]:
        """Every scale tensor there is."""
        return tuple(s for s in (self.block_scale, self.global_scale, self.input_scale) if s is not None)


def find_linears(
    tensors: Mapping[str, TensorInfo], quant: QuantConfig | None
) -> tuple[dict[str, QuantizedLinear], list[Problem]]:
    """Collect the NVFP4 matrices among `tensors`, and hold every matrix against what `quant` says of it.

    Returns:
        The linears by module name, and what is wrong: a missing or misshapen scale, a module that the config calls
        NVFP4 and the file holds in another dtype, or the reverse.
    """
    linears: dict[str, QuantizedLinear] = {}
    problems: list[Problem] = []
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if not module or leaf not in ("weight", "weight_packed") or len(info.shape) != 2:
            continue
        try:
            algo = quant.algo_of(module) if quant else None
        except CheckpointError as error:
            problems.append(Problem("fused-partly-excluded", module, error))
            continue
        problems += _contradiction(info, module, algo, quant)
        if info.dtype == "U8" and (algo is None or algo in NVFP4_ALGOS):
            linear, wrong = _linear(module, info, tensors, needs_input_scale=algo in NVFP4_INPUT_ALGOS)
            problems += wrong
            if linear is not None:
                linears[module] = linear
    return linears, problems


def _contradiction(info: TensorInfo, module: str, algo: str | None, quant: QuantConfig | None) -> Iterator[Problem]:
    """What is wrong with the dtype of the matrix `info` when the config gives its module `algo`."""
    where = f"{info.file}: tensor {info.name} at offset {info.start} is {info.dtype}"
    if quant is None:
        if info.dtype == "U8":
            fix = "restore quantization_config in config.json, or hf_quant_config.json, from the exporter"
            yield problem("config-absent", info.name, f"{where}, but no config says how it is packed", fix=fix)
        return
    if info.dtype in _dtypes_of(algo) or (info.dtype in FLOATING and looks_like_embedding(module)):
        return
    if algo is None:
        what, fix = f"{where}, but {quant.source} excludes its module", "take the module off the exclude list"
        yield problem("excluded-but-quantized", info.name, what, fix=fix)
    else:
        what = f"{where}, but {quant.source} says {algo} and does not exclude its module"
        fix = "add the module to the exclude list, or export it quantized"
        yield problem("unquantized-not-excluded", info.name, what, fix=fix)


def _dtypes_of(algo: str | None) -> frozenset[str]:
    if algo is None:
        return FLOATING
    if algo in NVFP4_ALGOS:
        return frozenset({"U8"})
    return frozenset({"F8_E4M3"}) if "FP8" in algo else frozenset(DTYPES) - FLOATING


def looks_like_embedding(module: str) -> bool:
    """Whether `module` is an embedding table by its name: those are 2-D too, and configs do not list them reliably."""
    return any(part in name for name in module.split(".") for part in _EMBEDDING_PARTS)


def _linear(
    module: str, weight: TensorInfo, tensors: Mapping[str, TensorInfo], *, needs_input_scale: bool
) -> tuple[QuantizedLinear | None, list[Problem]]:
    """The matrix whose codes are `weight`, or None and what is wrong with it."""
    packed = weight.name.endswith(".weight_packed")
    rows, columns = weight.shape[0], weight.shape[1] * 2
    here = f"{weight.file}: tensor {weight.name} at offset {weight.start}"
    problems: list[Problem] = []
    if columns % BLOCK or not rows or not columns:
        what = f"{here} stands for {rows} x {columns}, and NVFP4 needs a multiple of {BLOCK} columns"
        return None, [problem("linear-shape", weight.name, what)]

    def companion(leaf: str, dtype: str, *shapes: tuple[int, ...], required: bool = True) -> TensorInfo | None:
        name = f"{module}.{leaf}"
        info = tensors.get(name)
        if info is None:
            if required:
                problems.append(problem("scale-missing", name, f"{weight.file}: tensor {name} is missing"))
        elif info.dtype != dtype or info.shape not in shapes:
            what = f"{info.file}: tensor {name} at offset {info.start} is {info.dtype} {list(info.shape)}"
            problems.append(problem("scale-shape", name, what, because=f"it must be {dtype} {list(shapes[0])}"))
        return info

    block_scale = companion("weight_scale", "F8_E4M3", (rows, columns // BLOCK))
    global_scale = companion("weight_global_scale" if packed else "weight_scale_2", "F32", (), (1,))
    input_scale = companion(
        "input_global_scale" if packed else "input_scale", "F32", (), (1,), required=needs_input_scale
    )
    if problems or block_scale is None or global_scale is None:
        return None, problems
    pre_quant_scale = tensors.get(f"{module}.pre_quant_scale")
    return (
        QuantizedLinear(module, rows, columns, weight, block_scale, global_scale, input_scale, pre_quant_scale, packed),
        [],
    )
