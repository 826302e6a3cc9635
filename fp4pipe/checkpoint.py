"""A checkpoint directory as one checked object: configuration, quantization, tensors.

`Checkpoint.open` reads JSON and headers only, so it is quick at any size, and raises on every structural error;
`survey` collects the same errors instead, for `fp4pipe inspect`. Values are read when asked for.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4pipe import nvfp4
from fp4pipe.errors import CheckpointError
from fp4pipe.quant_config import NVFP4_ALGOS, QuantConfig, read_json, read_quant_config
from fp4pipe.quantized_linear import QuantizedLinear, find_linears
from fp4pipe.safetensors_file import TensorInfo, map_file, view
from fp4pipe.shards import Problem, Shards, problem, read_shards

__all__ = ["INCOMPLETE", "Checkpoint", "QuantizedLinear", "survey"]

INCOMPLETE = "INCOMPLETE"
"""Name of the file that marks a directory still being written."""


@dataclass
class Checkpoint:
    """A Hugging Face model directory, quantized or not.

    Attributes:
        path: The directory.
        config: ``config.json``.
        quant: What the configs say about quantization; None for an ordinary model.
        shards: Files, metadata and index.
        linears: NVFP4 matrices by module name, in the names used on disk.
        kv_scales: By attention module: where the K scale and the V scale lie (either may be None).
    """

    path: Path
    config: dict[str, Any]
    quant: QuantConfig | None
    shards: Shards
    linears: dict[str, QuantizedLinear] = field(default_factory=dict)
    kv_scales: dict[str, tuple[TensorInfo | None, TensorInfo | None]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path, *, unfinished: bool = False) -> "Checkpoint":
        """Open the checkpoint in `path` and check everything that headers and configs can tell.

        Args:
            path: The directory.
            unfinished: Read it although it is marked as still being written; only its writer has reason to.

        Raises:
            CheckpointError: The first thing found wrong: no directory, an unfinished export, damaged or missing files,
                an index or configs that contradict the tensors, a quantized matrix without its scales.
        """
        checkpoint, problems = survey(path, unfinished=unfinished)
        if problems:
            raise problems[0].error
        assert checkpoint is not None  # only a problem leaves it None
        return checkpoint

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by name."""
        return self.shards.tensors

    @property
    def metadata(self) -> dict[Path, dict[str, str]]:
        """``__metadata__`` of each file."""
        return self.shards.metadata

    def info(self, name: str) -> TensorInfo:
        """Where the tensor `name` lies.

        Raises:
            CheckpointError: There is no such tensor.
        """
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor {name}") from None

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`: a copy-on-write view of its file where alignment allows.

        Raises:
            CheckpointError: There is no such tensor, or its file cannot be read.
        """
        return self._read(self.info(name))

    def linear(self, module: str) -> QuantizedLinear:
        """The NVFP4 matrix of `module`.

        Raises:
            CheckpointError: `module` is not an NVFP4 linear of this checkpoint.
        """
        try:
            return self.linears[module]
        except KeyError:
            raise CheckpointError(f"{self.path}: {module} is not an NVFP4 linear") from None

    def global_scale(self, module: str) -> Tensor:
        """Global scale of `module`'s weight, float32 scalar (compressed-tensors' reciprocal undone)."""
        linear = self.linear(module)
        return self._scalar(linear.global_scale, linear.reciprocal_scales)

    def input_scale(self, module: str) -> Tensor | None:
        """Input scale of `module`, float32 scalar; None for weight-only quantization."""
        linear = self.linear(module)
        return self._scalar(linear.input_scale, linear.reciprocal_scales) if linear.input_scale else None

    def kv_scale(self, attention: str) -> tuple[float, float]:
        """K and V scale of the `attention` module; 1.0 where the checkpoint holds none."""
        k, v = (
            float(self._read(info).float().reshape(())) if info else 1.0
            for info in self.kv_scales.get(attention, (None, None))
        )
        return k, v

    def dequantize(self, module: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix ``[out_features, in_features]`` that `module`'s codes and scales stand for."""
        linear = self.linear(module)
        codes, block_scale = self._read(linear.weight), self._read(linear.block_scale)
        return nvfp4.dequantize(codes, block_scale, self.global_scale(module), dtype)

    def _scalar(self, info: TensorInfo, reciprocal: bool) -> Tensor:
        value = self._read(info).reshape(())
        return value.reciprocal() if reciprocal else value

    def _read(self, info: TensorInfo) -> Tensor:
        return view(self._mapped(info.file), info)

    @functools.cached_property
    def _mappings(self) -> dict[Path, Tensor]:
        return {}

    def _mapped(self, file: Path) -> Tensor:
        if file not in self._mappings:
            self._mappings[file] = map_file(file)
        return self._mappings[file]


def survey(path: str | Path, *, unfinished: bool = False) -> tuple[Checkpoint | None, list[Problem]]:
    """Read as much of the checkpoint in `path` as can be read.

    Returns:
        The checkpoint, None when there is no configuration to make one from, and everything found wrong, worst first.
    """
    directory = Path(path)
    if not directory.is_dir():
        return None, [problem("directory-missing", directory, f"{directory}: no such directory")]
    if (directory / INCOMPLETE).exists() and not unfinished:
        fix = "run the command that wrote it again"
        return None, [problem("export-unfinished", directory, f"{directory}: an unfinished export", fix=fix)]
    try:
        config = read_json(directory / "config.json")
    except CheckpointError as error:
        return None, [Problem("config-invalid", "config.json", error)]
    shards, problems = read_shards(directory)
    quant, trustworthy = None, True
    try:
        quant = read_quant_config(directory, config)
    except CheckpointError as error:
        problems.append(Problem("quant-config-invalid", "quantization_config", error))
        trustworthy = False
    checkpoint = Checkpoint(directory, config, quant, shards, kv_scales=_kv_scales(shards))
    if quant and quant.algo in NVFP4_ALGOS and quant.group_size not in (None, nvfp4.BLOCK):
        what = f"{directory / quant.source}: group_size {quant.group_size}, and NVFP4 has {nvfp4.BLOCK}"
        problems.append(problem("group-size", directory / quant.source, what))
    if trustworthy:
        checkpoint.linears, wrong = find_linears(shards.tensors, quant)
        problems += wrong
        if quant and quant.algo in NVFP4_ALGOS and not checkpoint.linears and not problems:
            what = f"{directory / quant.source}: says {quant.algo}, but no tensor is NVFP4"
            problems.append(problem("nothing-quantized", directory / quant.source, what))
    return checkpoint, problems


def _kv_scales(shards: Shards) -> dict[str, tuple[TensorInfo | None, TensorInfo | None]]:
    """K and V scales by attention module.

    ModelOpt writes `attn.k_proj.k_scale`, or `attn.qkv_proj.k_scale` where the projections are fused, and
    compressed-tensors `attn.k_scale`.
    """
    found: dict[str, list[TensorInfo | None]] = {}
    for name, info in shards.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in ("k_scale", "v_scale") and info.numel == 1:
            attention = module.removesuffix(f".{leaf[0]}_proj").removesuffix(".qkv_proj")
            found.setdefault(attention, [None, None])[leaf == "v_scale"] = info
    return {attention: (k, v) for attention, (k, v) in found.items()}
